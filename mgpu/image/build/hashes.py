"""SHA-256 of files, remembered from one scan to the next by what the file system says of each.

What was changed less than two seconds before a scan began is hashed anew the next time, as git does: a later change
within one tick of the file system's clock would not show.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import time
from pathlib import Path

from mgpu import paths

_MAGIC = b"mgpu file hashes 1\n"
_KEY = struct.Struct("<QQQqq")  # device, inode, size, time of contents, time of inode
_RECORD = struct.Struct(f"{_KEY.size}s32s")
_RACY_NS = 2_000_000_000
_UNUSED_S = 30 * 24 * 3600.0
_BLOCK = 1 << 20


class Hashes:
    """The hashes of one folder's files. `kept`: where they are remembered; None: nowhere. `now_ns`: since the epoch."""

    def __init__(self, kept: Path | None = None, now_ns: int | None = None) -> None:
        self._kept = kept
        self._safe_ns = (time.time_ns() if now_ns is None else now_ns) - _RACY_NS
        self._known = _load(kept) if kept else {}
        self._used: dict[bytes, bytes] = {}
        self._new = False

    @classmethod
    def of_folder(cls, folder: Path) -> Hashes:
        """Remembered in this user's cache, for this folder alone: nothing grows but by what is in use."""
        name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        return cls(paths.cache_dir() / "image" / name)

    def of(self, path: str, seen: os.stat_result) -> bytes:
        """The hash of a regular file that `lstat` has just described as `seen`.

        Raises:
            OSError: it cannot be read, is not the one that was seen, or is being written to.
        """
        key = _key(seen)
        digest = self._known.get(key)
        if digest is None:
            digest = _digest(path, key)
            if max(seen.st_mtime_ns, seen.st_ctime_ns) >= self._safe_ns:
                return digest
            self._new = True
        self._used[key] = digest
        return digest

    def save(self) -> None:
        """Remembers what was used since the start, and nothing else. Where that cannot be written, it is not."""
        if self._kept is None or not (self._new or len(self._used) < len(self._known)):
            return
        try:
            _store(self._kept, self._used)
        except OSError:
            pass  # it only saves time


def _key(seen: os.stat_result) -> bytes:
    return _KEY.pack(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)


def _digest(path: str, key: bytes) -> bytes:
    # a file that was replaced meanwhile, by a link or a pipe too, is not followed and not waited for
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        digest = hashlib.sha256()
        while block := os.read(file, _BLOCK):
            digest.update(block)
        if _key(os.fstat(file)) != key:
            raise OSError("it changed while it was read")
        return digest.digest()
    finally:
        os.close(file)


def _load(kept: Path) -> dict[bytes, bytes]:
    """What was remembered; nothing, where that is torn, of another version, or cannot be read."""
    try:
        raw = kept.read_bytes()
    except OSError:
        return {}
    seal, records = raw[len(_MAGIC) : len(_MAGIC) + 32], raw[len(_MAGIC) + 32 :]
    whole = raw.startswith(_MAGIC) and len(records) % _RECORD.size == 0 and hashlib.sha256(records).digest() == seal
    return dict(_RECORD.iter_unpack(records)) if whole else {}


def _store(kept: Path, used: dict[bytes, bytes]) -> None:
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(kept.parent)
    records = b"".join(map(b"".join, used.items()))
    file, aside = tempfile.mkstemp(dir=kept.parent)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(_MAGIC + hashlib.sha256(records).digest() + records)
        Path(aside).replace(kept)  # of two processes at once the last one is remembered, whole
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise


def _sweep(folder: Path) -> None:
    """Forgets folders that nobody has scanned with a change for a month, and what a crash left aside."""
    for each in folder.iterdir():
        if each.stat().st_mtime < time.time() - _UNUSED_S:
            each.unlink(missing_ok=True)
