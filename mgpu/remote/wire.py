"""A socket that ends itself when the peer falls silent.

TCP alone does not notice a peer that hangs: the kernel of a stopped SSH server still acknowledges every byte. So life
is what the server's process sends, and after `every_s` without any it is asked for an answer. paramiko's own keep-alive
only sends. No thread is needed: paramiko reads with a short timeout, and each one is a chance to look at the clock.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from typing import NoReturn, Protocol

SILENT = 4  # so many intervals without a byte end a connection


class Stream(Protocol):
    """What a socket and a paramiko channel have in common."""

    def recv(self, nbytes: int, /) -> bytes:
        """Up to `nbytes`; none at the end; TimeoutError when nothing comes in time."""
        ...

    def send(self, data: bytes, /) -> int:
        """Sends some of `data` and says how much; TimeoutError when there is no room in time."""
        ...

    def settimeout(self, timeout: float | None, /) -> None:
        """Seconds for each call."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Wire:
    """The socket under one SSH transport, with the interface that paramiko wants.

    Until `watch` is called the whole handshake has to be over by `deadline` (monotonic seconds).
    """

    def __init__(self, stream: Stream, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._deadline = deadline
        self._clock = clock
        self._every_s = 0.0
        self._probe: Callable[[], None] | None = None
        self._heard = self._asked = self._sent = clock()
        self._silent = 0  # intervals in a row without a byte from the peer
        self._closed = False  # paramiko looks at this name
        self._leaving = False
        self.fault = ""

    def watch(self, every_s: float, probe: Callable[[], None]) -> None:
        """From now on `probe` has to make the peer answer; it is called after every `every_s` seconds of silence."""
        self._heard = self._asked = self._sent = self._clock()
        self._every_s, self._probe = every_s, probe

    def leave(self) -> None:
        """From now on what cannot be sent at once is not sent."""
        self._leaving = True

    def recv(self, nbytes: int) -> bytes:
        """As a socket does; raises ConnectionAbortedError when the peer's time is over."""
        self._check_handshake()
        try:
            data = self._stream.recv(nbytes)
        except TimeoutError:
            self._ask()
            raise
        self._heard = self._clock()
        self._silent = 0
        return data

    def send(self, data: bytes) -> int:
        """As a socket does; a peer that takes nothing and says nothing is noticed here, too."""
        self._check_handshake()
        try:
            taken = self._stream.send(data)
        except TimeoutError:
            if self._leaving:
                self._end("The connection was closed.")
            # who writes holds paramiko's lock, so the reading thread cannot probe meanwhile
            if self._probe and self._clock() - max(self._heard, self._sent) > SILENT * self._every_s:
                self._end_silent()
            raise
        self._sent = self._clock()
        return taken

    def settimeout(self, timeout: float | None) -> None:
        """Seconds for each call; paramiko takes 0.1."""
        self._stream.settimeout(timeout)

    def close(self) -> None:
        """Ends the connection, and wakes who waits on it."""
        self._closed = True
        if isinstance(self._stream, socket.socket):
            with contextlib.suppress(OSError):  # the peer was first
                self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _check_handshake(self) -> None:
        if self._probe is None and self._clock() > self._deadline:
            self._end("The SSH handshake took too long.")

    def _ask(self) -> None:
        now = self._clock()
        if self._probe is None or now - max(self._heard, self._asked) < self._every_s:
            return
        self._asked = now
        self._silent += 1
        if self._silent >= SILENT:  # counted, not measured: time in which this process was stopped is not the peer's
            self._end_silent()
        self._probe()

    def _end_silent(self) -> None:
        self._end(f"The node has not answered keep-alives for {SILENT * self._every_s:.3g} s.")

    def _end(self, fault: str) -> NoReturn:
        self.fault = fault
        # not ETIMEDOUT: Python makes a TimeoutError of that, which paramiko takes for "try again"
        raise ConnectionAbortedError(errno.ECONNABORTED, fault)
