"""A program that carries SSH: started for one connection, which is its standard input and output.

It ends when its input does, as when this process dies, and whatever is left of it a moment later is killed. It has no
terminal, so that Ctrl-C is not for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence

_GREETING = re.compile(rb"^SSH-", re.MULTILINE)
_BEFORE_BYTES = 65_536  # of what is written before the greeting
_TOLD_BYTES = 2000  # of what the program says of its own failure
_END_S = 1.0  # from the end of its input to SIGKILL
# Many nodes are connected to at once: a program may take most of a processor as it starts, and where it is ssh, the
# login node before all of them drops who comes while ten others log in (MaxStartups of its sshd)
_starting = threading.BoundedSemaphore(8)


class ProxyStream:
    """The connection that a program makes, as a socket; the server has greeted already."""

    def __init__(self, argv: Sequence[str], seconds: float) -> None:
        """Starts the program and waits for the greeting, `seconds` at most, and as long for its turn to start. Raises
        OSError: none came; with what the program says of it."""
        if not _starting.acquire(timeout=seconds):
            raise ConnectionError("Too many other connections are being made.")
        try:
            self._start(argv)
            try:
                self._ahead = self._greeting(time.monotonic() + seconds)
            except BaseException:
                self.close()
                raise
        finally:
            _starting.release()

    def recv(self, nbytes: int, /) -> bytes:
        """As a socket's."""
        if self._ahead:
            data, self._ahead = self._ahead[:nbytes], self._ahead[nbytes:]
            return data
        return self._socket.recv(nbytes)

    def send(self, data: bytes, /) -> int:
        """As a socket's."""
        return self._socket.send(data)

    def settimeout(self, timeout: float | None, /) -> None:
        """As a socket's."""
        self._socket.settimeout(timeout)

    def close(self) -> None:
        """Ends the program, and wakes who waits on it; returns when the program is gone."""
        with contextlib.suppress(OSError):  # it was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # the thread that reads closes it, too, and was first
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()

    def _start(self, argv: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the program
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=self._errors, start_new_session=True
                )
        except BaseException:
            self._socket.close()
            self._errors.close()
            raise

    def _greeting(self, deadline: float) -> bytes:
        """What has come from the server's greeting on; what was written before it is dropped."""
        before = b""
        while len(before) < _BEFORE_BYTES:
            try:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._socket.recv(_BEFORE_BYTES)
            except TimeoutError:
                raise ConnectionError(self._told("No answer in time.", before)) from None
            except ConnectionResetError:  # it ended without reading all
                data = b""
            if not data:
                raise ConnectionError(self._told("The proxy command has ended.", before))
            before += data
            if found := _GREETING.search(before):
                return before[found.start() :]
        raise ConnectionError(self._told("No SSH server answers.", before))

    def _told(self, what: str, before: bytes) -> str:
        """With the last words of the program, errors first."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _TOLD_BYTES))
        for words in (self._errors.read(), before[-_TOLD_BYTES:]):
            if text := words.decode("utf-8", "replace").strip():
                return f"{what} {text}"
        return what
