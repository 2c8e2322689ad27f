"""The node's half of sync. This file's source is sent and run there: `python3 -I -c <source> <verb> <folder> ...`.

Standard library only, Python 3.8 or newer; it knows nothing of the operator. `have` prints what of the folder is as
sync left it; given a pattern of other folders, too, a new one first takes over what is untouched in the newest of them,
by `have-apart` as copies. `take` reads a header and file contents from standard input, writes them aside, checks them,
and only then puts them in place: a transfer that is cut anywhere before leaves the folder as it was, and silence for
too long is a cut.

Several operators may come at once. Each verb holds the folder's lock, and waits for it `wait_s` seconds at most; a
process that dies lets go of it. `take` does nothing unless it is sent exactly what is missing by now.

An identity is `f:<sha256>` for a file, `x:<sha256>` for an executable one, `l:<target>` for a symbolic link. The
manifest maps a path to its identity and its mark (mode, size, mtime): a file with another mark was touched on the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import select
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, Iterable, Iterator, List, Optional, Tuple  # noqa: UP035 - Python 3.8

MANIFEST = ".mgpu-sync.json"
ASIDE = ".mgpu-sync."
LOCK = ".mgpu-sync.lock"  # in it the process id of who holds it, or held it last
REFUSED, BUSY, CHANGED = 3, 4, 5  # exit statuses; Python's own is 1
_LOOK_S = 0.1  # between two tries of the lock

Put = Callable[[Path, Path], object]  # makes a file here that is there
Manifest = Dict[str, Tuple[str, Optional[str]]]  # noqa: UP006, UP045


class Refused(Exception):
    """Something here that must not be touched, or contents that are not what was announced."""

    status = REFUSED


class Busy(Refused):
    """Another process has held the lock for too long."""

    status = BUSY


class Changed(Refused):
    """The folder is not as `have` told it any more."""

    status = CHANGED


class Incoming(io.FileIO):
    """Standard input; Refused when nothing comes for so many seconds: its sender may be gone without a word."""

    def __init__(self, silence_s: float) -> None:
        super().__init__(sys.stdin.fileno(), closefd=False)
        self.silence_s = silence_s

    def readinto(self, buffer: Any, /) -> int:
        """As of any file."""
        if not select.select([self], [], [], self.silence_s)[0]:
            raise Refused(f"nothing came for {self.silence_s:g} s; nothing was changed here")
        return super().readinto(buffer)


@contextlib.contextmanager
def locked(wait_s: float) -> Iterator[None]:
    """Holds the folder's lock. Raises Busy."""
    until = time.monotonic() + wait_s
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
                    raise Busy(f"process {holder} of the node has not let go of it within {wait_s:g} s") from None
                time.sleep(_LOOK_S)
        with contextlib.suppress(OSError):  # a full disk: what needs no room goes on
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def have(others: List[Path], put: Put) -> None:  # noqa: UP006
    """Prints the identities of what is as sync left it, as JSON; `others`: folders that may have the same."""
    if others and not Path(MANIFEST).exists():
        other = max(others, key=synced_ns)
        if put is not copy or has_room(other):
            adopt(other, put)
    sys.stdout.write(json.dumps(untouched()))


def untouched() -> Dict[str, str]:  # noqa: UP006
    """The identities of what is as sync left it."""
    entries = load().items()
    return {path: identity for path, (identity, mark) in entries if mark and mark == mark_of(Path(path))}


def synced_ns(folder: Path) -> int:
    """When a folder was synced last; one that was removed since it was found: before all others."""
    try:
        return (folder / MANIFEST).stat().st_mtime_ns
    except OSError:
        return -1


def adopt(other: Path, put: Put) -> None:
    """Takes over what sync put into another folder and nobody has touched since.

    Hard links cost a twentieth of copies where files are slow to make: sync itself never writes into a file that is
    there, and what a program writes into one shows by its mark in both folders, and is mended in both before the next
    program runs in either. Where two run at once, it has to be copies.
    The other folder's lock is not asked for: what changes there meanwhile, or goes, is not taken over.
    """
    known = {path: entry for path, entry in load(other).items() if not os.path.lexists(path)}
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir="."))
    try:
        save({path: (identity, None) for path, (identity, _) in known.items()}, aside)  # as in put_in_place
        save(
            {
                path: (identity, taken_over(other / path, Path(path), identity, mark, put))
                for path, (identity, mark) in known.items()
            },
            aside,
        )
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def has_room(other: Path) -> bool:
    """Whether copies of another folder leave room here. They may be more than is wanted here, and who runs in the other
    one writes to the same disk."""
    sizes = 0
    for path in load(other):
        with contextlib.suppress(OSError):
            sizes += (other / path).lstat().st_size
    return shutil.disk_usage(".").free > 2 * sizes


def copy(there: Path, here: Path) -> None:
    """A file of its own."""
    with there.open("rb") as source, here.open("xb") as out:
        shutil.copyfileobj(source, out)
    shutil.copymode(there, here)


def taken_over(there: Path, here: Path, identity: str, mark: Optional[str], put: Put) -> Optional[str]:  # noqa: UP045
    """The mark of a file or link that was taken over; None: it was touched there, or cannot be had here."""
    if mark is None or mark != mark_of(there):
        return None
    try:
        make_folder(here.parent)
        if identity.startswith("l:"):
            here.symlink_to(identity[2:])
        else:
            put(there, here)
    except (Refused, OSError):  # a file system without links; something in the way, which `take` names if it has to
        return None
    return mark_of(here) if mark == mark_of(there) else None  # it may have been touched or replaced in between


def take(stream: BinaryIO) -> None:
    """Makes the folder what the header says; prints how many files were deleted. Raises Refused, Changed."""
    header = json.loads(stream.readline())
    entries, sent = header["entries"], header["send"]
    for path in entries:
        check(path)
    found = untouched()
    if {path for path, _ in sent} != {path for path, identity in entries.items() if found.get(path) != identity}:
        raise Changed("what is here has changed since it was looked at; nothing was changed now")
    for left in Path().iterdir():
        if left.name.startswith(ASIDE) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)  # of a transfer that was cut: one that lives has the lock
    if not entries:
        sys.stdout.write(str(take_away()))
        return
    aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir="."))
    try:
        for number, (path, size) in enumerate(sent):
            receive(stream, aside / str(number), entries[path], size)
        deleted = put_in_place(aside, entries, [path for path, _ in sent])
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sys.stdout.write(str(deleted))


def receive(stream: BinaryIO, name: Path, identity: str, size: int) -> None:
    """Writes one file or link aside, and checks what came."""
    kind, value = identity.split(":", 1)
    if kind == "l":
        name.symlink_to(value)
        return
    digest = hashlib.sha256()
    with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o777 if kind == "x" else 0o666), "wb") as out:
        for block in blocks(stream, size):
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != value:
        raise Refused("a file changed while it was sent; nothing was changed here")


def blocks(stream: BinaryIO, size: int) -> Iterable[bytes]:
    """Exactly `size` bytes, or Refused."""
    while size:
        block = stream.read(min(size, 1 << 20))
        if not block:
            raise Refused("the transfer was cut; nothing was changed here")
        size -= len(block)
        yield block


def put_in_place(aside: Path, entries: Dict[str, str], sent: List[str]) -> int:  # noqa: UP006
    """Deletes what is gone, moves what is new; returns how many were deleted."""
    before = load()
    after = {path: before[path] for path, identity in entries.items() if before.get(path, ("", None))[0] == identity}
    # first what may be here from now on, so that a crash between here and the end leaves nothing that no one knows
    save({**{path: (entries[path], None) for path in sent}, **before}, aside)
    gone = [path for path in before if path not in entries]
    for path in gone:
        delete(Path(path))
    for number, name in enumerate(sent):
        path = Path(name)
        make_folder(path.parent)
        if path.is_dir() and not path.is_symlink():
            raise Refused(f"{path} is a folder here, with files that are not from sync")
        (aside / str(number)).replace(path)
        after[name] = (entries[name], mark_of(path))
    save(after, aside)
    return len(gone)


def take_away() -> int:
    """Deletes what sync put here; returns how many. What was touched since stays: a program may have written its
    results into a file that came with its code. It needs no room: the disk may be full."""
    gone = [path for path, (_, mark) in load().items() if mark is None or mark_of(Path(path)) in (mark, None)]
    for path in gone:
        delete(Path(path))
    with contextlib.suppress(FileNotFoundError):
        Path(MANIFEST).unlink()  # there is nothing for another folder to begin with
    return len(gone)


def delete(path: Path) -> None:
    """Deletes a file that sync put here, and the folders that this leaves empty; never through a link."""
    if not is_real(path.parent):
        return
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
    with contextlib.suppress(OSError):  # not empty
        for folder in list(path.parents)[:-1]:
            folder.rmdir()


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it. Refuses to go through a link: it could lead out of here."""
    if is_real(folder):
        return
    make_folder(folder.parent)
    if os.path.lexists(folder):
        raise Refused(f"{folder} is in the way here, and is not from sync")
    folder.mkdir()


def is_real(folder: Path) -> bool:
    """True when the folder and those above it are folders and not links."""
    try:
        return all(stat.S_ISDIR(part.lstat().st_mode) for part in (folder, *folder.parents))
    except OSError:
        return False


def mark_of(path: Path) -> str | None:
    """What changes when somebody touches a file; None when it is absent."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return f"{found.st_mode:o} {found.st_size} {found.st_mtime_ns}"


def load(folder: Path = Path()) -> Manifest:
    """The manifest; what cannot be read or leads out of the folder counts as absent."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return {check(path): (str(identity), mark) for path, (identity, mark) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError, Refused):
        return {}


def save(manifest: Manifest, aside: Path) -> None:
    """Replaces the manifest."""
    fresh = aside / "manifest"
    fresh.write_text(json.dumps(manifest), encoding="utf-8")
    fresh.replace(MANIFEST)


def check(path: str) -> str:
    """Returns a path that is plainly inside the folder; Refused for any other."""
    parts = path.split("/")
    if "\0" in path or parts[0].startswith(ASIDE) or any(part in ("", ".", "..") for part in parts):
        raise Refused(f"not a path inside the folder: {path!r}")
    return path


def main(verb: str, folder: str, more: str, wait_s: str) -> int:
    """Returns the exit status. `more`: the pattern of others; of `take`, after how many seconds silence is a cut."""
    try:
        like = "" if verb == "take" else more
        Path(folder).mkdir(parents=True, exist_ok=True)
        others = [each.parent.resolve() for each in Path().glob(f"{like}/{MANIFEST}")] if like else []
        os.chdir(folder)
        with locked(float(wait_s)):
            if verb == "take":
                take(io.BufferedReader(Incoming(float(more)), 1 << 16))
            else:
                have(others, copy if verb == "have-apart" else os.link)
    except (Refused, OSError) as error:
        sys.stderr.write(f"{folder}: {error}\n")
        return getattr(error, "status", REFUSED)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
