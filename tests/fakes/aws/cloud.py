"""What the fake knows beyond moto: one lock, one clock of timers, the calls that came, and its rules."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakes.aws.protocol import Call


class Timers:
    """Runs functions at their time, one thread, under the lock that requests are answered under."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._wake = threading.Condition()
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        threading.Thread(target=self._run, name="timers", daemon=True).start()

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Runs `run` once, `seconds` from now; at once, in the caller's thread, where that is not in the future."""
        if seconds <= 0:
            with self._lock:
                run()
            return
        with self._wake:
            heapq.heappush(self._due, (time.time() + seconds, next(self._order), run))
            self._wake.notify()

    def clear(self) -> None:
        """Forgets all."""
        with self._wake:
            self._due.clear()

    def age(self, seconds: float) -> None:
        """Makes everything due that much earlier; what is overdue then is run before this returns."""
        with self._wake:
            self._due = [(when - seconds, order, run) for when, order, run in self._due]
            self._wake.notify()
        while run := self._overdue():
            with self._lock:
                run()

    def _overdue(self) -> Callable[[], None] | None:
        with self._wake:
            return heapq.heappop(self._due)[2] if self._due and self._due[0][0] <= time.time() else None

    def _run(self) -> None:
        while True:
            with self._lock:  # taken first: what is due and what a request sees never overlap
                if run := self._overdue():
                    run()
                    continue
            with self._wake:
                wait = self._due[0][0] - time.time() if self._due else None
                if wait is None or wait > 0:
                    self._wake.wait(wait)


@dataclass
class Cloud:
    """The fake's own state; moto's is in moto."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    calls: list[tuple[float, Call]] = field(default_factory=list)
    extras: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timers = Timers(self.lock)

    def clear(self) -> None:
        """As new."""
        self.timers.clear()
        self.calls.clear()
        self.extras.clear()
