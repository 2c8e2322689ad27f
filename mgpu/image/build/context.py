"""A folder as an image is built from it: which of its files count, what is in them, and the archive of exactly these.

The builder is sent this archive, not the folder, so what was hashed is what is built. As in git, a file is executable
or not, and belongs to nobody: an image does not depend on who checked the folder out, or with which umask.
"""

from __future__ import annotations

import gc
import hashlib
import io
import os
import posixpath
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import IO, Literal, NamedTuple

from e2b_dockerfile_utils import PatternMatcher

from mgpu.errors import InputError
from mgpu.image.build.hashes import Hashes
from mgpu.image.build.shipped import own, trainer_context
from mgpu.spec.image import ImageSpec

IGNORE_FILE = ".dockerignore"
_SHOWN = 20
_WRITTEN_AT = 315_532_800  # 1980, the oldest that all archives can hold; a layer is the same whenever it is built
_MODES = {"d": 0o755, "f": 0o644, "x": 0o755, "l": 0o777, "p": 0o644}
_TYPES = {"d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "p": tarfile.FIFOTYPE}

Kind = Literal["d", "f", "x", "l", "p"]  # folder, file, executable file, link, pipe


class Entry(NamedTuple):
    """One thing in a context. `value`: SHA-256 of a file's contents, a link's target; names need not be UTF-8."""

    path: str
    kind: Kind
    value: bytes = b""
    size: int = 0


@dataclass(frozen=True)
class BuildContext:
    """What counts in the folder `root`, in the order of paths, and the Dockerfile: its path in there, its text."""

    root: Path
    dockerfile: str
    recipe: bytes
    entries: tuple[Entry, ...]

    def write_tar(self, stream: IO[bytes]) -> None:
        """Writes the archive that a builder takes for a context.

        Raises:
            InputError: a file is not what it was when it was hashed.
            OSError: the stream takes no more.
        """
        with tarfile.open(
            fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            for entry in self.entries:
                self._add(archive, entry)

    def _add(self, archive: tarfile.TarFile, entry: Entry) -> None:
        header = tarfile.TarInfo(entry.path)
        header.mode, header.mtime = _MODES[entry.kind], _WRITTEN_AT
        header.type = _TYPES.get(entry.kind, tarfile.REGTYPE)
        if entry.kind == "l":
            header.linkname = os.fsdecode(entry.value)
        if header.type != tarfile.REGTYPE:
            archive.addfile(header)
            return
        header.size = entry.size
        path = self.root / entry.path
        try:
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        except OSError as error:
            raise _changed(path) from error
        with file:
            source = _Hashed(file, path)
            archive.addfile(header, source)
        if source.digest.digest() != entry.value:
            raise _changed(path)


class _Hashed(io.RawIOBase):
    """A file that hashes what is read of it, as often as it is asked for bytes that it had. Raises InputError."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.file, self.path, self.digest = file, path, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            block = self.file.read(size)
        except OSError as error:  # here, so that it is not taken for one of the archive
            raise _changed(self.path) from error
        if len(block) < size:
            raise _changed(self.path)
        self.digest.update(block)
        return block


def folder_of(spec: ImageSpec, base: Path) -> Path:
    """The folder that an image is built from. `base`: the run file's folder, where the user's copy of the trainer may
    be. Raises OSError: see trainer_context."""
    if spec.context is not None:
        return base / spec.context
    return trainer_context(own(base))


def scan(folder: Path, dockerfile: str = "Dockerfile", hashes: Hashes | None = None) -> BuildContext:
    """Reads a folder by the rules of its `<dockerfile>.dockerignore`, or else its `.dockerignore`.

    The Dockerfile and the file of rules always count. Sockets are left out. `hashes`: what is known of the files
    (default: what this user's cache knows).

    Raises:
        InputError: no such folder; no Dockerfile in it; a rule that is none; files that cannot be read, all at once.
    """
    if not folder.is_dir():
        raise InputError(f"no folder {folder}", "An image is built from it.")
    root = folder.resolve()
    dockerfile, recipe = _recipe(root, posixpath.normpath(dockerfile))
    ignore_file = next((name for name in (f"{dockerfile}.dockerignore", IGNORE_FILE) if (root / name).is_file()), None)
    hashes = hashes or Hashes.of_folder(root)
    found = _Scan(root, _rules(root, ignore_file), {dockerfile, ignore_file or IGNORE_FILE}, hashes)
    with _no_collections():
        found.folder("")
    if found.problems:
        raise _unusable(root, found.problems, ignore_file or IGNORE_FILE)
    hashes.save()
    return BuildContext(root, dockerfile, recipe, tuple(sorted(found.entries, key=itemgetter(0))))


class _Scan:
    def __init__(self, root: Path, rules: PatternMatcher, always: set[str], hashes: Hashes) -> None:
        self.root, self.rules, self.always, self.hashes = root, rules, always, hashes
        # folders on the way to them are looked into, whatever the rules say
        self.towards = {path[:at] for path in always for at, letter in enumerate(path) if letter == "/"}
        self.entries: list[Entry] = []
        self.problems: list[str] = []

    def folder(self, below: str) -> bool:
        """Adds what counts in a folder; whether anything does. `below`: its path and `/`, or empty."""
        before = len(self.entries)
        for each in self._listed(below):
            path = below + each.name
            left_out = self.rules.matches(path)
            if each.is_dir(follow_symlinks=False):
                deeper = not left_out or path in self.towards or self.rules.may_match_under(path)
                if (deeper and self.folder(path + "/")) or not left_out:
                    self.entries.append(Entry(path, "d"))
            elif not left_out or path in self.always:
                self._add(path, each)
        return len(self.entries) > before

    def _listed(self, below: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(os.path.join(self.root, below)) as entries:  # noqa: PTH118 - 20 times as fast as pathlib
                return list(entries)
        except OSError as error:
            self.problems.append(f"{_shown(below)} cannot be read: {error.strerror}")
            return []

    def _add(self, path: str, each: os.DirEntry[str]) -> None:
        try:
            seen = each.stat(follow_symlinks=False)
            if stat.S_ISREG(seen.st_mode):
                kind = "x" if seen.st_mode & stat.S_IXUSR else "f"
                self.entries.append(Entry(path, kind, self.hashes.of(each.path, seen), seen.st_size))
            elif not stat.S_ISSOCK(seen.st_mode):
                self.entries.append(_special(path, each.path, seen.st_mode))
        except OSError as error:
            self.problems.append(f"{_shown(path)} cannot be read: {error.strerror or error}")


@contextmanager
def _no_collections() -> Iterator[None]:
    # while very many objects are made that all stay, Python would look through all of them several times, for nothing
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _special(path: str, full: str, mode: int) -> Entry:
    if stat.S_ISLNK(mode):
        return Entry(path, "l", os.fsencode(os.readlink(full)))  # noqa: PTH115 - a path tidies it up
    if stat.S_ISFIFO(mode):
        return Entry(path, "p")
    raise OSError("it is a device")


def _recipe(root: Path, dockerfile: str) -> tuple[str, bytes]:
    """A Dockerfile's path in the folder, without links on the way to it: so it is in the archive; and its text."""
    path = root / dockerfile
    try:
        inside = path.parent.resolve(strict=True) / path.name
        if not (inside.is_relative_to(root) and path.resolve(strict=True).is_relative_to(root)):
            raise InputError(f"{path} leads out of the folder", "The builder is sent nothing but the folder.")
        return inside.relative_to(root).as_posix(), path.read_bytes()
    except OSError as error:
        raise InputError(
            f"no Dockerfile {path}", f"{error.strerror}.", "Name it in `image.dockerfile`, relative to `image.context`."
        ) from error


def rules(text: bytes) -> PatternMatcher:
    """What a .dockerignore leaves out: Docker's own rules, which are not those of .gitignore. Raises ValueError."""
    text = text.removeprefix(b"\xef\xbb\xbf")
    return PatternMatcher(text.decode("utf-8", "surrogateescape").split("\n"))  # names need not be UTF-8


def _rules(root: Path, ignore_file: str | None) -> PatternMatcher:
    try:
        return rules((root / ignore_file).read_bytes() if ignore_file else b"")
    except (OSError, ValueError) as error:
        why = f"{error}." if isinstance(error, ValueError) else f"{error.strerror}."
        raise InputError(
            f"{root / (ignore_file or IGNORE_FILE)} cannot be used", why, "Patterns are Docker's."
        ) from error


def _unusable(root: Path, problems: list[str], ignore_file: str) -> InputError:
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return InputError(
        f"{root}: {len(problems)} of its files cannot be built from",
        "\n".join([*sorted(problems)[:_SHOWN], *more]),
        f"Mend them, or leave them out by {root / ignore_file}.",
    )


def _changed(path: Path) -> InputError:
    return InputError(f"{path} changed while the image was built", "", "Run the command again.")


def _shown(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") or "the folder"
