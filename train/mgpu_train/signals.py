"""What may come between two steps, and how all ranks come to the same mind about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from mgpu_train.config import CheckpointTarget


class StopRequest:
    """Set by SIGTERM, read at step boundaries: a handler must not save or talk to other ranks itself."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, _signal: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.asked = True


@dataclass(frozen=True)
class Wishes:
    """What a rank says in each step, in the exchange of its losses; what any says holds for all."""

    stop: bool = False  # a signal has come
    save: bool = False  # a checkpoint is asked for ahead of time
    overdue: bool = False  # the minutes since the last one are over
    saving: bool = False  # a save is under way
    lost: bool = False  # no save can succeed any more


class SaveClock:
    """When the next checkpoint is due, by steps and by minutes; `now` is in seconds."""

    def __init__(self, target: CheckpointTarget | None, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._steps = target.every_steps if target else None
        self._seconds = target.every_minutes * 60 if target and target.every_minutes else math.inf
        self.restart()

    def restart(self) -> None:
        """Count the minutes from now."""
        self._since = self._now()

    def overdue(self) -> bool:
        """True when the minutes are over by this rank's clock; rank 0's answer is everybody's."""
        return self._now() - self._since >= self._seconds

    def due(self, step: int) -> bool:
        """True when a checkpoint is due after this step, by count."""
        return self._steps is not None and step % self._steps == 0
