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
    detach: bool = False  # leave once the first attempt has begun
