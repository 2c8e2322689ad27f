"""A bound on bytes per second that all threads of a store share, and its transfer process with them."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

_BURST_S = 0.25  # of silence that may be made up for
_FREE = struct.Struct("d")


class Pace:
    """`take` waits until so many bytes fit under `bytes_per_s` (None: never).

    The time at which the line is free again stands in a file without a name; a process that inherits its descriptor
    `shared` and opens a Pace with it goes under the same bound.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        *,
        shared: int | None = None,
        clock: Callable[[], float] = time.monotonic,  # the same in all processes of a machine
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.shared: int | None = None
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        if bytes_per_s is not None:
            self._file = os.fdopen(_unnamed() if shared is None else shared, "r+b")  # closed with this Pace
            self._file.truncate(_FREE.size)
            self.shared = self._file.fileno()
            self._page = mmap.mmap(self.shared, _FREE.size)

    def take(self, count: int) -> None:
        """Wait for room for `count` bytes; they may be moved, or have been."""
        if self.bytes_per_s is None or self.shared is None:
            return
        with self._lock:  # between threads; the other one only knows processes, and forgets those that die
            fcntl.lockf(self.shared, fcntl.LOCK_EX)
            try:
                now = self._clock()
                begin = max(_FREE.unpack(self._page[:])[0], now - _BURST_S)
                self._page[:] = _FREE.pack(begin + count / self.bytes_per_s)
            finally:
                fcntl.lockf(self.shared, fcntl.LOCK_UN)
        if begin > now:
            self._sleep(begin - now)


def _unnamed() -> int:
    descriptor, path = tempfile.mkstemp(prefix="mgpu-pace-")
    Path(path).unlink()
    return descriptor
