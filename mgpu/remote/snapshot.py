"""A folder of the operator as it is now: which files sync sends, what is in them, and why some cannot be sent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mgpu.errors import InputError, MgpuError
from mgpu.remote.ignored import IGNORE_FILE, Ignored
from mgpu.remote.targets import check_path

RESERVED = "/.mgpu-sync.*"  # the receiver's own names
DEFAULT_EXCLUDE = (".git", "__pycache__", "*.pyc", ".venv", ".mgpu", "mgpu-runs")
_BLOCK = 256 << 10
# small files are kept as they were hashed, so that a fleet's nodes get them without N reads: bytes of one, of all
_SMALL, _KEEP = 64 << 10, 64 << 20


@dataclass(frozen=True)
class Entry:
    """One file or link: its identity as `receiver` defines it, and how many bytes of contents follow in the stream."""

    identity: str
    size: int


@dataclass(frozen=True)
class Snapshot:
    """The files and links of `folder` by relative path. One may be sent to many nodes at once."""

    folder: Path
    entries: dict[str, Entry]
    kept: dict[str, bytes] = field(default_factory=dict, repr=False)
    left_out: list[str] = field(default_factory=list)  # by its owner's ignore files; of a folder only its own name

    @property
    def size(self) -> int:
        """Bytes of contents."""
        return sum(entry.size for entry in self.entries.values())

    def stream(self, paths: Sequence[str]) -> Iterator[bytes]:
        """What `receiver take` reads. Raises InputError when a file changes meanwhile."""
        identities = {path: entry.identity for path, entry in self.entries.items()}
        send = [(path, self.entries[path].size) for path in paths]
        yield json.dumps({"entries": identities, "send": send}).encode() + b"\n"
        yield from _joined(block for path in paths for block in self._contents(path))

    def write_to(self, folder: Path) -> None:
        """Copies all of it to an empty folder: real copies, which nothing that is done to the originals changes.

        Raises:
            InputError: a file changes meanwhile.
            OSError: the folder cannot be written.
        """
        for path, entry in self.entries.items():
            kind, value = entry.identity.split(":", 1)
            copy = folder / path
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if kind == "l":
                copy.symlink_to(value)
                continue
            with os.fdopen(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                os.fchmod(out.fileno(), 0o700 if kind == "x" else 0o600)
                out.writelines(self._contents(path))

    def _contents(self, path: str) -> Iterator[bytes]:
        entry = self.entries[path]
        if path in self.kept or not entry.size:
            yield self.kept.get(path, b"")
            return
        left = entry.size
        for block in _read(self.folder, path):
            left -= len(block)
            if left >= 0:
                yield block
        if left:
            raise InputError(f"{self.folder / path} changed while it was sent", "", "Run the command again.")


def scan(folder: Path, exclude: Sequence[str] = DEFAULT_EXCLUDE, *, ignore_files: bool = True) -> Snapshot:
    """Reads the folder. `exclude` holds patterns as .gitignore does; `ignore_files`: what the owner's own ones and
    `.mgpuignore` name is left out, too.

    Empty folders, sockets, pipes and devices are left out.

    Raises:
        InputError: no such folder; files that cannot be read or named; links that leave the folder. All at once.
    """
    if not folder.is_dir():
        raise InputError(f"no folder {folder}", "There is nothing to send to the nodes.")
    snapshot, problems = Snapshot(folder.resolve(), {}), list[str]()
    ignored = Ignored(snapshot.folder, [*exclude, RESERVED], files=ignore_files)
    for path in _walk(snapshot, ignored, problems):
        try:
            _add(snapshot, check_path(path))
        except (MgpuError, OSError) as error:
            if os.path.lexists(snapshot.folder / path):  # else it has gone since it was seen: an editor's own files do
                problems.append(error.what if isinstance(error, MgpuError) else f"{path} cannot be read: {error}")
    if problems:
        raise InputError(
            f"{folder}: {len(problems)} of its files cannot be sent",
            "\n".join(problems),
            f"Mend them, or name them in {folder / IGNORE_FILE} (patterns as in .gitignore).",
        )
    return snapshot


def _walk(snapshot: Snapshot, ignored: Ignored, problems: list[str], below: str = "") -> Iterator[str]:
    root = snapshot.folder
    try:
        entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
    except FileNotFoundError:  # it has gone since it was seen
        return
    except OSError as error:
        problems.append(f"{below or '.'} cannot be read: {error.strerror}")
        return
    ignored.enter(below)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        path = below + entry.name + ("/" if is_folder else "")
        why = ignored.left_out(path)
        if why is not None:
            if why:
                snapshot.left_out.append(path)
        elif is_folder:
            yield from _walk(snapshot, ignored, problems, path)
        elif entry.is_symlink() or entry.is_file(follow_symlinks=False):
            yield path


def _add(snapshot: Snapshot, path: str) -> None:
    full = snapshot.folder / path
    if full.is_symlink():
        snapshot.entries[path] = Entry(f"l:{_link(snapshot.folder, full)}", 0)
        return
    digest, size, blocks = hashlib.sha256(), 0, list[bytes]()
    for block in _read(snapshot.folder, path):
        digest.update(block)
        size += len(block)
        if size <= _SMALL:
            blocks.append(block)
    kind = "x" if full.stat().st_mode & stat.S_IXUSR else "f"
    snapshot.entries[path] = Entry(f"{kind}:{digest.hexdigest()}", size)
    if size <= _SMALL and len(snapshot.kept) < _KEEP // _SMALL:
        snapshot.kept[path] = b"".join(blocks)


def _link(root: Path, link: Path) -> str:
    """The target of a link, relative, such that it means the same on every machine."""
    target = str(link.readlink())
    real = Path(os.path.realpath(link.parent / target))
    if not real.is_relative_to(root):
        raise InputError(f"{link.relative_to(root)} is a link that leaves the folder: {target!r}")
    if target.startswith("/") or _climbs_out(link.parent.relative_to(root), target):
        return os.path.relpath(real, link.parent)
    return target


def _climbs_out(start: Path, target: str) -> bool:
    # out and in again by the folder's own name, which is another one on the node
    depth = len(start.parts)
    for part in target.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return True
    return False


def _read(root: Path, path: str) -> Iterator[bytes]:
    try:
        # a file that was replaced by a link after it was looked at is not followed
        with os.fdopen(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        why = "it became a link" if error.errno == errno.ELOOP else error.strerror
        raise InputError(f"{path} cannot be read: {why}") from error


def _joined(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks that are worth a packet."""
    held, size = list[bytes](), 0
    for block in blocks:
        held.append(block)
        size += len(block)
        if size >= _BLOCK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)
