"""How tests wait for something that has to happen: until it has, with a deadline, and for little of the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_PAUSE_S, _LONGEST_S = 0.02, 0.5
_SHARE = 16  # pauses are so many times as long as a look: some read all of /proc, and what is waited for needs the CPU


def until(what: Callable[[], T], seconds: float = 60, why: Callable[[], object] | str = "") -> T:
    """What `what` answers as soon as that is anything. Raises AssertionError, with `why`."""
    end = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if found := what():
            return found
        now = time.monotonic()
        if now > end:
            raise AssertionError(f"not within {seconds:g} s: {why() if callable(why) else why}")
        time.sleep(min(max(_PAUSE_S, _SHARE * (now - asked)), _LONGEST_S))
