"""Time in the hands of a test."""

from __future__ import annotations


class Clock:
    """Passes only where somebody sleeps, or by `step` at each look. It is the function that is asked for the time, and
    stands for the module `time`, too."""

    def __init__(self, now: float = 0.0, *, step: float = 0.0) -> None:
        self.now, self.step = now, step
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
