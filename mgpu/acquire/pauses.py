"""How long to wait before the same call is made again."""

from __future__ import annotations

import random
from collections.abc import Iterator

from mgpu.errors import ProviderError

_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 30.0


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

    def next(self, error: ProviderError) -> float:
        """Seconds to wait after this error."""
        pause = max(error.retry_after or 0.0, random.uniform(self._longest / 2, self._longest))
        self._longest = min(_BACKOFF_MAX_S, self._longest * 2)
        return pause
