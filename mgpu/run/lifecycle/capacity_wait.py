"""Where there is no capacity now it is asked for again, until the run file's `recovery.wait_minutes` are over.

What waiting does not mend (a quota, credentials, a request that means nothing) is not asked again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mgpu.errors import BidTooLow, NoCapacity, ProviderError
from mgpu.events import Note
from mgpu.run.record.session import Session

T = TypeVar("T")

PAUSE_MOST = 8  # times `sold_out_s`
JITTER = (0.75, 1.25)  # many who wait for the same machines do not ask at the same moment
SOLD_OUT = (NoCapacity, BidTooLow)


@dataclass(frozen=True)
class CapacityWait:
    """How long to wait for capacity, whoever waits: the record says since when. `wall` is UNIX seconds, the clock and
    `sleep` are in seconds; `random` gives a number from 0 to 1."""

    session: Session
    minutes: float
    refusals: tuple[type[ProviderError], ...] = SOLD_OUT
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random
    wall: Callable[[], float] = time.time

    def granted(self, ask: Callable[[], T]) -> T:
        """What `ask` returns, as soon as it is not refused.

        Raises:
            ProviderError: the last refusal, when the time is over; any other error of `ask` at once.
            Interrupted, TakenOver: while it waited.
        """
        record, pause_s = self.session.record, self.session.timeouts.sold_out_s
        longest_s = PAUSE_MOST * pause_s
        waited_s = max(0.0, self.wall() - record.sold_out_since) if record.sold_out_since else 0.0
        until = self.clock() + self.minutes * 60 - waited_s
        while True:
            try:
                got = ask()
                self._remember(0.0)
                return got
            except self.refusals as refusal:
                self._remember(record.sold_out_since or self.wall())
                left_s = until - self.clock()
                if left_s <= 0 or self.session.asked_to_end:
                    raise
                wait_s = pause_s * (JITTER[0] + (JITTER[1] - JITTER[0]) * self.random())
                wait_s = min(left_s, max(wait_s, refusal.retry_after or 0.0))
                self.session.emit(Note(f"{refusal.what}; asking again in {_span(wait_s)}, for {_span(left_s)} at most"))
                paused(self.session, wait_s, self.clock, self.sleep)
                pause_s = min(2 * pause_s, longest_s)

    def _remember(self, since: float) -> None:
        if self.session.record.sold_out_since != since:
            self.session.record.sold_out_since = since
            self.session.save()


def paused(
    session: Session,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Waits, a second at a time: who asks for the end does not wait for it. False: nothing has ended the wait; what
    does is raised, as by `Session.check`."""
    until = clock() + seconds
    while (left_s := until - clock()) > 0:
        session.check()
        sleep(min(1.0, left_s))
    session.check()
    return False


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
