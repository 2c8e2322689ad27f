"""Signals to a supervising process: counted, and passed on at once to what has to know."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mgpu.errors import Interrupted

ECHO_S = 0.2  # `timeout`, a shell and a process group pass one signal on twice within this


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP. The handler calls what has to know at once (the engine's cancel).

    `told` is set when one of them came from somebody who cannot be asked: SIGTERM; `hung_up` when the terminal is gone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, leave: bool = False) -> None:
        """`leave`: the first signal raises KeyboardInterrupt already, and means no end to anything."""
        self.count = 0
        self._leave = leave
        self._clock, self._last = clock, float("-inf")
        self.told = self.hung_up = False
        self._leaving = False
        self.cancelled = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Takes the process's handlers over while the block runs."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` means it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls `callback` on every signal while the block runs."""
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """While the block runs, which may take long, a second signal raises KeyboardInterrupt."""
        before, self._leaving = self._leaving, True
        try:
            yield
        finally:
            self._leaving = before

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._leave:
            raise KeyboardInterrupt
        self.told |= number == signal.SIGTERM
        self.hung_up |= number == signal.SIGHUP
        before, self._last = self._last, self._clock()
        if self.count and self._last - before < ECHO_S:
            return
        self.count += 1
        self.cancelled.set()
        for callback in self._callbacks:
            callback()
        if self._leaving and self.count > 1 and number != signal.SIGHUP:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises `Interrupted` when a signal came."""
        if self.count:
            raise Interrupted("interrupted", "A signal asked for the end before the training began.")
