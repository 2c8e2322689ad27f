"""For providers whose API counts requests: they wait before they ask, and are not refused."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


class RateLimit:
    """A token bucket: so many calls a second, and up to `burst` at once after a while without any.

    Whatever thread shares it waits its turn. It knows nothing of other processes: an API still answers 429 at times,
    and a provider still says `RateLimited`. `clock` and `sleep`, in seconds, are for tests.
    """

    def __init__(
        self,
        per_s: float,
        burst: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._every_s, self._burst_s = 1 / per_s, (burst - 1) / per_s
        self._clock, self._sleep = clock, sleep
        self._due = -math.inf  # when the next call would come if all came evenly
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Comes back when one more call may be made."""
        with self._lock:
            now = self._clock()
            due = max(self._due, now - self._burst_s)
            self._due = due + self._every_s
        if due > now:
            self._sleep(due - now)
