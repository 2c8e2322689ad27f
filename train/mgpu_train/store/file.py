"""Objects as files of a folder, with S3's semantics: conditional creates, and no object that is half there."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mgpu_train.store import disk
from mgpu_train.store.base import ASIDE, Damaged, NotFound, Progress, Stat, Versioned, check_key
from mgpu_train.store.pace import Pace


class FileStore:
    """The store `file://<root>`. The folder is made by the first write; see `open_store` for `max_bytes_per_s`."""

    def __init__(self, root: Path, max_bytes_per_s: int | None = None) -> None:
        self.url = f"file://{root}"
        self._root = root
        self._pace = Pace(max_bytes_per_s)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        path = self._path(key)
        with disk.translated(f"cannot write {path}"):
            try:
                with disk.written(path, exclusive=True) as target:
                    disk.write_all(target, data)
            except FileExistsError:
                return False
        return True

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See Store."""
        path = self._path(key)
        with disk.translated(f"cannot write {path}"), disk.written(path) as target:
            disk.write_all(target, data)

    def replace(self, key: str, data: bytes, version: str) -> bool:
        """See Store. Nobody else may write this object but by `replace`."""
        path = self._path(key)
        with disk.translated(f"cannot write {path}"), self._one_at_a_time():
            try:
                if _version(path.stat()) != version:
                    return False
            except FileNotFoundError:
                return False
            with disk.written(path) as target:
                disk.write_all(target, data)
        return True

    def put_file(self, key: str, path: Path) -> Stat:
        """See Store."""
        to = self._path(key)
        with disk.translated(f"cannot copy {path} to {to}"):
            with disk.opened(path) as source, disk.written(to) as target:
                size, crc = disk.copy(source, target, self._through(None))
            return Stat(key, size, crc, to.stat().st_mtime)

    def get(self, key: str, limit: int) -> bytes:
        """See Store."""
        return self.read(key, limit).data

    def read(self, key: str, limit: int) -> Versioned:
        """See Store."""
        path = self._path(key)
        with disk.translated(f"cannot read {path}"), disk.opened(path) as source:
            found = os.fstat(source)
            if found.st_size > limit:
                raise Damaged(f"{path} has {found.st_size} bytes where at most {limit} make sense")
            with os.fdopen(source, "rb", closefd=False) as file:
                data = file.read(limit)
        now = time.time()
        return Versioned(data, _version(found), max(0.0, now - found.st_mtime), now)

    def get_file(self, key: str, path: Path, *, size: int, crc64nvme: str, progress: Progress | None = None) -> None:
        """See Store."""
        source_path = self._path(key)
        with (
            disk.translated(f"cannot copy {source_path} to {path}"),
            disk.opened(source_path) as source,
            disk.written(path, durable=False) as target,
        ):
            _check_size(source_path, os.fstat(source).st_size, size)
            found = disk.copy(source, target, self._through(progress))
            if found != (size, crc64nvme):
                raise Damaged(f"{source_path}: its checksum is {found[1]}, not {crc64nvme}")

    def forget(self, key: str) -> None:
        """See Store."""
        with suppress(OSError), disk.opened(self._path(key)) as source:
            os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)

    def checksum(self, key: str, size: int, progress: Progress | None = None) -> str:
        """See Store."""
        path = self._path(key)
        with disk.translated(f"cannot read {path}"), disk.opened(path) as source:
            found, crc = disk.copy(source, None, self._through(progress))
        _check_size(path, found, size)
        return crc

    def stat(self, key: str) -> Stat | None:
        """See Store."""
        path = self._path(key)
        try:
            with disk.translated(f"cannot read {path}"), disk.opened(path) as descriptor:
                found = os.fstat(descriptor)
        except NotFound:
            return None
        return Stat(key, found.st_size, None, found.st_mtime, _version(found))

    def list(self, prefix: str, after: str = "") -> Iterator[Stat]:
        """See Store."""
        for path, entry in self._files(prefix):
            if entry.name.startswith(ASIDE) or os.fsencode(path) <= os.fsencode(after):
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted meanwhile
                continue
            yield Stat(path, found.st_size, None, found.st_mtime, _version(found))

    def delete(self, key: str) -> None:
        """See Store."""
        path = self._path(key)
        with disk.translated(f"cannot remove {path}"):
            path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self._root:
                break
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone already
                break

    def may_delete(self, prefix: str) -> None:
        """See Store."""
        mine: dict[Path, bool] = {}  # by folder: whether only who owns a file may remove it
        for key, entry in self._files(prefix):
            path = self._root / key
            with disk.translated(f"cannot remove {path}"):
                if path.parent not in mine:
                    mine[path.parent] = _only_mine(path.parent)
                if mine[path.parent] and entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    raise PermissionError(errno.EPERM, "it is another user's, in a folder with the sticky bit")

    def sweep(self, prefix: str, dead: Callable[[str], bool]) -> int:
        """See Store."""
        unfinished = [key for key, entry in self._files(prefix) if entry.name.startswith(ASIDE) and dead(key)]
        for key in unfinished:
            path = self._root / key
            with disk.translated(f"cannot remove {path}"):
                path.unlink(missing_ok=True)
        return len(unfinished)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        disk.make_folder(self._root)
        with (self._root / f"{ASIDE}lock").open("a", encoding="utf-8") as handle:  # a name that is never listed
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _through(self, progress: Progress | None) -> Progress:
        """What a copy tells of its bytes, and where it waits when there were too many."""

        def told(count: int) -> None:
            self._pace.take(count)
            if progress:
                progress(count)

        return told

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _files(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """All files under a prefix, in the order of their keys' bytes, links left out."""
        folder = prefix.rpartition("/")[0]
        with disk.translated(f"cannot list {self._root / folder}"):
            yield from _walk(self._root, check_key(folder) if folder else "", prefix)


def _walk(root: Path, folder: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    try:
        with os.scandir(root / folder) as entries:
            found = [(entry.is_dir(follow_symlinks=False), entry) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return
    base = f"{folder}/" if folder else ""
    # `a-b` comes before what is in `a`: a folder sorts as the beginning of its keys, with the slash
    for is_folder, entry in sorted(found, key=lambda each: os.fsencode(each[1].name + "/" * each[0])):
        key = base + entry.name
        if is_folder and (f"{key}/".startswith(prefix) or prefix.startswith(f"{key}/")):
            yield from _walk(root, key, prefix)
        elif not is_folder and key.startswith(prefix) and entry.is_file(follow_symlinks=False):
            yield key, entry


def _only_mine(folder: Path) -> bool:
    """Whether of a folder's files each user may remove only his own. Raises OSError where this one may remove none."""
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, f"{folder} may not be changed")
    found, user = folder.stat(), os.geteuid()
    return bool(found.st_mode & stat.S_ISVTX) and user not in (0, found.st_uid)


def _version(found: os.stat_result) -> str:
    return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"


def _check_size(path: Path, found: int, wanted: int) -> None:
    if found != wanted:
        raise Damaged(f"{path} has {found} bytes, not {wanted}")
