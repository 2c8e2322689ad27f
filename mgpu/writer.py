"""Standard error that may keep whoever writes to it: a terminal (Ctrl-S), a pipe that nobody reads (a pager), a socket.

A thread writes to it, and whoever prints goes on: above all the supervisor of machines that cost money.
"""

from __future__ import annotations

import atexit
import os
import select
import stat
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO
from weakref import WeakKeyDictionary

from mgpu.words import count

MOST = 2 << 20  # bytes that wait; what comes then is left out
PIECE = 4096  # bytes at a time: a slow reader is seen to read
CLOSE_S = 3.0  # for what waits when the command is done, since some of it was taken last
_REDRAWN = b"\r\x1b[2K"  # begins another state of a live line


@dataclass
class _Gap:
    """In its place lines are left out."""

    lines: int = 0


class Writer:
    """What rich takes for a file. What it is given reaches `fd` in that order; after an error there nothing does."""

    def __init__(self, fd: int, encoding: str, *, most: int = MOST) -> None:
        self.encoding = encoding
        self._fd, self._most = fd, most
        self._changed = threading.Condition()  # reentrant: the handler of a signal prints, too
        self._waiting: deque[bytes | _Gap] = deque()
        self._left = 0  # bytes of all that is not written
        self._taken_at = 0.0  # when the newest bytes were written, or the oldest that wait were given
        self._over = False
        threading.Thread(target=self._run, name="mgpu-writer", daemon=True).start()
        atexit.register(self._end)

    def write(self, text: str) -> int:
        """Returns at once. Of a live line only the newest state waits."""
        data = text.encode(self.encoding, "backslashreplace")
        with self._changed:
            newest = self._waiting[-1] if self._waiting else b""
            if isinstance(newest, bytes) and _redraws(newest) and _redraws(data):
                self._waiting.pop()
                self._left -= len(newest)
            elif self._left > (self._most // 2 if isinstance(newest, _Gap) else self._most):
                self.leave_out(text.count("\n"))
                return len(text)
            self._give(data, len(data))
        return len(text)

    def leave_out(self, lines: int) -> None:
        """So many lines are not written, which is said in their place."""
        if not lines:  # a state of a bar
            return
        with self._changed:
            newest = self._waiting[-1] if self._waiting else None
            if isinstance(newest, _Gap):
                newest.lines += lines
            else:
                self._give(_Gap(lines), 0)

    def wait(self, within_s: float) -> bool:
        """Whether there is room again, at the latest `within_s` after some of what waits was taken."""
        with self._changed:
            left_s = self._taken_at + within_s - time.monotonic()
            return self._changed.wait_for(lambda: self._left <= self._most // 2, left_s)

    def drain(self, within_s: float | None = None) -> None:
        """Waits until all is written, or nothing more of it was within `within_s`; None: for ever."""
        asked_at = time.monotonic()
        with self._changed:
            while self._left or self._waiting:
                left_s = None
                if within_s is not None:
                    left_s = max(asked_at, self._taken_at) + within_s - time.monotonic()
                    if left_s <= 0:
                        return
                self._changed.wait(left_s)

    def flush(self) -> None:
        """It is on its way."""

    def fileno(self) -> int:
        """Where it goes."""
        return self._fd

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return os.isatty(self._fd)

    def _end(self) -> None:
        with suppress(KeyboardInterrupt):
            self.drain(CLOSE_S)

    def _give(self, given: bytes | _Gap, size: int) -> None:
        if self._over:
            return
        if not self._left:
            self._taken_at = time.monotonic()
        self._waiting.append(given)
        self._left += size
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while True:
                data = memoryview(self._next())
                while data:
                    data = data[self._written(data[:PIECE]) :]
        except OSError:  # who reads a pipe has left, the terminal was closed
            with self._changed:
                self._over, self._left = True, 0
                self._waiting.clear()
                self._changed.notify_all()

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            given = self._waiting.popleft()
            if isinstance(given, _Gap):
                given = self._said(given.lines)
                self._left += len(given)
            return given

    def _said(self, lines: int) -> bytes:
        what = f"  {count(lines, 'line')} left out here: nobody took them (`mgpu logs` has what nodes print)\n"
        return (_REDRAWN if self.isatty() else b"") + what.encode()

    def _written(self, data: memoryview) -> int:
        """Raises OSError."""
        try:
            size = os.write(self._fd, data)
        except BlockingIOError:  # another process has made it so: it is the terminal's, not this process's
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll()
            return 0
        with self._changed:
            self._left -= size
            self._taken_at = time.monotonic()
            self._changed.notify_all()
        return size


def _redraws(data: bytes) -> bool:
    return data.startswith(_REDRAWN) and b"\n" not in data


_known: WeakKeyDictionary[TextIO, Writer] = WeakKeyDictionary()
_first = threading.RLock()  # threads that print first at the same time; reentrant as above


def of(stream: TextIO) -> Writer | None:
    """The one that writes to `stream`; None: a file, or nothing at all, which takes what it is given. Or no thread is
    left for one, and whoever prints waits."""
    with _first:
        if stream not in _known:
            try:
                fd = stream.fileno()
                mode = os.fstat(fd).st_mode
            except (OSError, ValueError):
                return None
            if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
                return None
            with suppress(RuntimeError):
                _known[stream] = Writer(fd, stream.encoding)
        return _known.get(stream)


def settle(stream: TextIO) -> None:
    """Before something else is written to `stream`: waits for what was given before and goes to the same place."""
    for writer in list(_known.values()):
        with suppress(OSError, ValueError):
            if os.path.sameopenfile(writer.fileno(), stream.fileno()):
                writer.drain()
