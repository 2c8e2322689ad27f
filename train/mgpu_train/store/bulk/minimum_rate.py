"""The least that has to move: slower is as good as not at all, and said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LEAST = 4 << 20  # bytes


class MinimumRate:
    """While something is under way, `least` bytes have to move in every `window_s`.

    What is counted may fall, too: bytes that have to go again. A server that takes bytes and never answers moves
    nothing in the end.
    """

    def __init__(
        self, window_s: float, bytes_per_s: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.window_s = window_s
        self.least = LEAST if bytes_per_s is None else min(LEAST, bytes_per_s * window_s / 2)
        self._clock = clock
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Something begins where nothing was under way."""
        with self._lock:
            self._since, self._base, self._now = self._clock(), 0, 0

    def saw(self, moved: int) -> None:
        """So much has moved since the process began."""
        with self._lock:
            self._now = moved
            if moved - self._base >= self.least:
                self._since, self._base = self._clock(), moved

    def restarted(self) -> None:
        """Another process counts from zero; the time runs on."""
        with self._lock:
            self._base = self._now = 0

    def broken(self) -> str | None:
        """How little moved; None: enough, or there is still time."""
        with self._lock:
            if self._clock() - self._since < self.window_s:
                return None
            return f"{max(0, self._now - self._base) >> 10} KiB in {self.window_s:.0f} s"
