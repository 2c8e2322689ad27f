"""Files that are whole or absent, whatever is killed meanwhile, and the operating system's errors in our words."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from awscrt.checksums import crc64nvme

from mgpu_train.store.base import ASIDE, PIECE, Denied, NoRoom, NotFound, Progress, StoreError, Unavailable
from mgpu_train.store.crc import to_hex

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# what a file server that restarts or moves answers, a network that is away, and a system that is short of something
_PASSING = frozenset({
    errno.ESTALE, errno.EIO, errno.ENOLCK, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.EHOSTDOWN,
    errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ENOTCONN, errno.ESHUTDOWN,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOBUFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
})  # fmt: skip


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turns an OSError of the block into the StoreError that it means; `what` begins its message."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{what}: there is no such file") from error
    except OSError as error:
        raise meaning(what, error) from error


def meaning(what: str, error: OSError) -> StoreError:
    """What an error of the operating system means; `what` begins its message."""
    reason = f"{what}: {error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return Denied(f"{reason}. Give this user access to the folder, or use another one.")
    if error.errno == errno.EROFS:
        return Denied(f"{reason}. Use a folder that can be written.")
    if error.errno in _FULL:
        return NoRoom(f"{reason}. Free some space, or use another folder.")
    if error.errno in _PASSING:
        return Unavailable(f"{reason}. Look whether the folder's file system answers, and try again later.")
    if error.errno == errno.ELOOP:
        return StoreError(f"{what}: it is a symbolic link, and those are not followed")
    return StoreError(reason)


@contextmanager
def written(path: Path, *, exclusive: bool = False, durable: bool = True) -> Iterator[int]:
    """A descriptor to write to; once the block ends, all of it is on disk, and only then the file has its name.

    Without `durable` it has its name as late, but nobody has waited for the disk.

    Raises FileExistsError when `exclusive` and the name is taken. An error in the block leaves nothing behind.
    """
    with _aside(path) as (descriptor, aside):
        yield descriptor
        if durable:
            os.fsync(descriptor)
        if exclusive:
            os.link(aside, path)  # unlike a rename it fails where the name is taken
        else:
            aside.replace(path)
        if durable:
            sync_folder(path.parent)


@contextmanager
def filled(path: Path, size: int) -> Iterator[Path]:
    """A file of `size` bytes for others to write into; it has the name `path` once the block ends, on disk or not."""
    with _aside(path) as (descriptor, aside):
        os.ftruncate(descriptor, size)
        yield aside
        aside.replace(path)


@contextmanager
def _aside(path: Path) -> Iterator[tuple[int, Path]]:
    descriptor, aside = _open_aside(path)
    try:
        yield descriptor, aside
    finally:
        os.close(descriptor)
        with suppress(OSError):  # renamed, or as good as swept
            aside.unlink(missing_ok=True)


def _open_aside(path: Path) -> tuple[int, Path]:
    aside = path.with_name(f"{ASIDE}{os.urandom(6).hex()}-{path.name}")
    for _ in range(5):
        make_folder(path.parent)
        try:
            return os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), aside
        except FileNotFoundError:  # a delete took the folder away between the two lines
            continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, durably."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)


def flush(path: Path) -> None:
    """Wait until all bytes of a file are on disk. Raises OSError."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor that reads a regular file; a link or a pipe is refused with OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def copy(source: int, target: int | None, progress: Progress | None = None) -> tuple[int, str]:
    """Copy what is left of one descriptor to another (None: only read); returns bytes and checksum of what was read."""
    size = value = 0
    while piece := os.read(source, PIECE):
        value = crc64nvme(piece, value)
        size += len(piece)
        if target is not None:
            write_all(target, piece)
        if progress:
            progress(len(piece))
    return size, to_hex(value)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; a single write may stop early."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def checksum(path: Path) -> tuple[int, str]:
    """Bytes and CRC64NVME of a file. Raises OSError."""
    with opened(path) as source:
        return copy(source, None)
