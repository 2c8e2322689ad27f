"""Calls wait their turn; the clock moves when somebody sleeps."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.clock import Clock

from mgpu.providers.rate_limit import RateLimit


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def test_calls_are_made_no_faster_than_the_api_allows(clock: Clock):
    limit, at = RateLimit(2, clock=clock, sleep=clock.sleep), list[float]()
    for _ in range(5):
        limit.wait()
        at.append(clock.now)
    assert at == [100.0, 100.5, 101.0, 101.5, 102.0]


def test_who_asks_seldom_never_waits(clock: Clock):
    limit = RateLimit(2, clock=clock, sleep=clock.sleep)
    for _ in range(5):
        limit.wait()
        clock.now += 0.5
    assert clock.sleeps == []


def test_a_burst_is_had_at_once_and_again_when_it_has_been_saved_up(clock: Clock):
    limit = RateLimit(1, 3, clock=clock, sleep=clock.sleep)
    for _ in range(4):
        limit.wait()
    assert clock.sleeps == [1.0], "three at once"
    clock.now += 1000
    for _ in range(5):
        limit.wait()
    assert clock.sleeps == [1.0, 1.0, 1.0], "no more than three, however long nobody has asked"


def test_threads_share_it():
    slept, lock = list[float](), threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            slept.append(seconds)

    limit = RateLimit(1, clock=lambda: 0.0, sleep=sleep)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: limit.wait(), range(8)))
    assert sorted(slept) == [1, 2, 3, 4, 5, 6, 7], "one each second"
