"""How long to wait before the same call is made again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mgpu.errors import MgpuError, ProviderError, RateLimited, Transient
from mgpu.events import Emit, Note

ANSWER_S = 30.0  # for what there is, of a provider that is busy, or silent for a moment
_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 30.0
_T = TypeVar("_T")


def pauses(longest_s: float) -> Iterator[float]:
    """Seconds between two looks: short at first, because the nearest machines are quick."""
    pause = longest_s / 8
    while True:
        yield pause
        pause = min(longest_s, pause * 2)


class Backoff:
    """Growing, jittered pauses between calls that fail; a provider's own `retry_after` is the least."""

    def __init__(self) -> None:
        self._longest = _BACKOFF_S

    def next(self, error: Exception) -> float:
        """Seconds to wait after this error."""
        least = error.retry_after if isinstance(error, ProviderError) else None
        pause = max(least or 0.0, random.uniform(self._longest / 2, self._longest))
        self._longest = min(_BACKOFF_MAX_S, self._longest * 2)
        return pause


def patiently(
    ask: Callable[[], _T],
    limit_s: float,
    cancelled: Callable[[float], bool],
    emit: Emit,
    passing: tuple[type[Exception], ...] = (RateLimited, Transient),
) -> _T:
    """The answer; asked for again while the provider is busy or does not answer (`passing`: while the errors are of
    these kinds), for so long at most, which is told once. Raises what `ask` raises; `cancelled` waits for so many
    seconds, and is true where the patience is to end."""
    until, trouble, told = time.monotonic() + limit_s, Backoff(), False
    while True:
        try:
            return ask()
        except passing as error:
            pause = trouble.next(error)
            if time.monotonic() + pause > until:
                raise
            if not told:
                what = error.what if isinstance(error, MgpuError) else str(error)
                emit(Note(f"{what}: it is asked again, for up to {limit_s:.0f} s"))
                told = True
            if cancelled(pause):
                raise
