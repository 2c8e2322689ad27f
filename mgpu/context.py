"""What a command gives to every operation: where events go, the deadlines, and how to ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mgpu_train.timeouts import Timeouts

from mgpu.events import Emit


@dataclass(frozen=True)
class Context:
    """Where events go, the deadlines, and how to ask on a terminal."""

    emit: Emit
    timeouts: Timeouts
    ask_to_stop: Callable[[str], bool | None] | None = None  # told what becomes of the run's work
    watch_s: float | None = None  # leave then, once it trains and needs nothing; None: never; 0: as soon as that is so
    leave: bool = False  # a signal leaves the run as it is, and ends nothing
