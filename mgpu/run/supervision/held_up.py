"""How long this process was held up by what it tells: a terminal that is halted, or a pipe that nobody reads, keeps
whoever writes to it. That is no silence of a node's."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mgpu.events import Emit, Event

LONG_S = 1.0  # no event takes so long by itself


class HeldUp:
    """An `Emit` that passes everything on, from any thread, and knows when that took long."""

    def __init__(self, emit: Emit, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._emit, self._clock = emit, clock
        self._under_way: dict[int, float] = {}  # thread -> since when it tells something
        self._ended = float("-inf")

    def __call__(self, event: Event) -> None:
        """Passes it on; raises what that raises."""
        thread, began = threading.get_ident(), self._clock()
        self._under_way[thread] = began
        try:
            self._emit(event)
        finally:
            self._under_way.pop(thread, None)
            if self._clock() - began > LONG_S:
                self._ended = self._clock()

    @property
    def until(self) -> float:
        """When it was held up last, by the clock: now, while it is; -inf: never."""
        now = self._clock()
        return now if any(now - began > LONG_S for began in list(self._under_way.values())) else self._ended
