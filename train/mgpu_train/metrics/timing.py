"""How long steps take, on the host's clock and on the device's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Stopwatch:
    """Seconds spent in steps, without what is done between them; `now` is in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()

    def lap(self) -> float:
        """Since the last one."""
        before, self._since = self._since, self._now()
        return self._since - before

    def leave_out(self, seconds: float) -> None:
        """Takes seconds out of the lap."""
        self._since += seconds


class Span:
    """From when until when a device computes a step, on its own clock."""

    def __init__(self, device: torch.device) -> None:
        """It begins now: on a GPU once it is through with what it was given before."""
        self._gpu = device.type == "cuda"
        self._began, self._ended = self._now(), None

    def end(self) -> None:
        """It ends now, in the same sense."""
        self._ended = self._now()

    def after(self, before: Span) -> float:
        """Seconds from the end of another one, of which both are over, in which nothing was computed."""
        ended = before._ended
        if isinstance(self._began, float):
            return self._began - ended if isinstance(ended, float) else 0.0
        return 0.0 if ended is None else ended.elapsed_time(self._began) / 1000

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
