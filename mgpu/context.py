"""What a command gives to every operation: where events go, the deadlines, and how to ask."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from mgpu_train.timeouts import VARIABLE, Timeouts
from pydantic import ValidationError

from mgpu.errors import InputError
from mgpu.events import Emit


@dataclass(frozen=True)
class Context:
    """Where events go, the deadlines, and how to ask on a terminal."""

    emit: Emit
    timeouts: Timeouts
    ask_to_stop: Callable[[str], bool | None] | None = None  # told what becomes of the run's work
    watch_s: float | None = None  # leave then, once it trains and needs nothing; None: never; 0: as soon as that is so
    leave: bool = False  # a signal leaves the run as it is, and ends nothing


def timeouts() -> Timeouts:
    """All deadlines, as this process's environment may change them.

    Raises:
        InputError: MGPU_TIMEOUTS holds something else.
    """
    try:
        return Timeouts.of_environment(os.environ)
    except ValidationError as error:
        wrong = "\n".join(f"{'.'.join(map(str, e['loc'])) or 'the value'}: {e['msg']}" for e in error.errors())
        raise InputError(
            f"{VARIABLE} in the environment cannot be used", wrong, 'It is a JSON object: {"silence_s": 300}.'
        ) from error
