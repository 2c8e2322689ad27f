"""What all runs of a backend may spend together: who is let in, who is not, and who has to end."""

from __future__ import annotations

import math
import threading
import time
from calendar import timegm
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from mgpu.backend import objects
from mgpu.errors import OverLimit, StackError
from mgpu.run.budget import account
from mgpu.run.budget.account import Limits, Month, Usage
from mgpu.run.record import record as records
from mgpu.run.record.record import Record, Spent, State
from mgpu.run.supervision import limits as limits_module
from mgpu.run.supervision.limits import MonthBudget, StopReason, cap_reason

HOUR = 3600.0
NOW = float(timegm((2026, 11, 10, 0, 0, 0)))
ENDS = float(timegm((2026, 12, 1, 0, 0, 0)))


def run(run_id: str, usd_per_hour: float | None = 10.0, since: float = NOW - HOUR, **known: Any) -> Record:
    said = {"state": State.RUNNING, "created_at": since, "spending": [Spent(1, usd_per_hour, since, None, 0.0)]}
    return Record(run_id, "a", "/p", "/p", "f", "s", True, "f", "local", 1, **(said | known))


@pytest.fixture(autouse=True)
def at(xdg: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still until it is set."""

    def at(now: float) -> None:
        monkeypatch.setattr(time, "time", lambda: now)

    at(NOW)
    return at


@pytest.mark.parametrize(
    ("wanted", "used", "price", "said"),
    [
        (Limits(), Usage(NOW, 1e9, ("a",), {"a": 1e9}), 1e9, []),
        (Limits(runs=2), Usage(NOW, 0, ("a",)), None, []),
        (Limits(runs=2), Usage(NOW, 0, ("a", "b")), None, ["2 runs of 2 (a, b)"]),
        (Limits(runs=1), Usage(NOW, 0, ("a",), {"a": None}), None, ["1 run of 1 (a)"]),
        (Limits(usd_per_hour=60), Usage(NOW, 0, ("a",), {"a": 28.0}), 32.0, []),
        (
            *(Limits(usd_per_hour=60), Usage(NOW, 0, ("a",), {"a": 40.0}), 32.0),
            ["$40.00 are in use, and up to $32.00 would come, of $60.00: $12.00 too much"],
        ),
        (Limits(usd_per_hour=60), Usage(NOW, 0, ("a",), {"a": None}), 60.0, []),
        (Limits(usd_per_hour=60), Usage(NOW, 0, ("a",), {"a": None}), 61.0, ["$1.00 too much", "not known: a"]),
        (Limits(usd_per_month=2000), Usage(NOW, 1999.0), 11.9, []),
        (
            Limits(usd_per_month=2000),
            Usage(NOW, 1999.0, ("a",), {"a": 12.0}),
            12.0,
            ["$1,999.00 of $2,000.00 are spent"],
        ),
        (
            Limits(usd_per_month=2000),
            Usage(NOW, 2003.0),
            None,
            ["2026-11: $2,003.00 of $2,000.00 are spent: $3.00 too"],
        ),
        (Limits(2000, 10, 1), Usage(NOW, 2000.0, ("a",), {"a": 9.0}), 2.0, ["runs at once", "per hour", "in 2026-11"]),
    ],
)
def test_what_one_more_run_would_be_over_and_by_how_much(wanted: Limits, used: Usage, price: float, said: list[str]):
    found = account.over(wanted, used, price)
    assert len(found) == len(said)
    assert all(each in line for each, line in zip(said, found, strict=True)), found


@pytest.mark.parametrize(
    ("limits", "let_in"), [({"runs": 1}, 1), ({"usd_per_hour": 35.0}, 3), ({"usd_per_month": 1}, 1)]
)
def test_of_twenty_at_once_no_more_are_let_in_than_there_is_room_for(limits: dict[str, float], let_in: int):
    """On a real folder, each as a process of its own would: none has a record yet."""
    account.change(**limits)
    gate, turned_away = threading.Barrier(20, timeout=60), list[OverLimit]()

    def begin(number: int) -> bool:
        gate.wait()
        try:
            return account.claim(f"run-{number}", lambda: 10.0)
        except OverLimit as error:
            turned_away.append(error)
            return False

    with ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(begin, range(20))) == let_in
    assert len(turned_away) == 20 - let_in
    assert all(error.exit_code == 2 and "Nothing was rented." in error.why for error in turned_away)
    assert len(account.in_use(NOW).runs) == let_in


@pytest.mark.parametrize(
    ("there", "later_s", "counts"),
    [
        (None, 599.0, True),
        (None, 601.0, False),  # nothing came of it
        ({"state": State.QUEUED, "spending": []}, 1e6, True),
        ({}, 1e6, True),
        ({"hard_cap_at": NOW + 60}, 59.0, True),
        ({"hard_cap_at": NOW + 60}, 60.0, False),  # nobody has closed it, and its machines are gone
        ({"state": State.SUCCEEDED, "ended_at": NOW + 5}, 6.0, False),
        ({"state": State.SUCCEEDED, "ended_at": NOW - 5}, 6.0, True),  # it is resumed
        ({"state": State.SUCCEEDED, "ended_at": NOW - 5}, 601.0, False),
    ],
)
def test_a_claim_lapses_with_its_run(at, there: dict[str, Any] | None, later_s: float, counts: bool):
    account.change(runs=1)
    account.claim("run-1", lambda: 3.0)
    if there is not None:
        records.save(run("run-1", **there))
    at(NOW + later_s)
    assert bool(account.in_use(NOW + later_s).runs) is counts
    if counts:
        with pytest.raises(OverLimit):
            account.claim("run-2", lambda: 3.0)
        assert account.claim("run-1", lambda: 3.0), "its own place is none too many"
    else:
        assert account.claim("run-2", lambda: 3.0)


def test_runs_that_were_begun_without_limits_count_and_what_is_over_does_not():
    """But for what may still be billed."""
    assert not account.claim("run-0", lambda: 1.0)
    over = {"state": State.SUCCEEDED, "ended_at": NOW}
    for each in (
        run("trains", 5.0),
        run("theirs", None),
        run("begins", spending=[], state=State.PROVISIONING),
        run("forgotten", 2.0, NOW - 2 * HOUR, hard_cap_at=NOW - HOUR),
        run("queued", spending=[], state=State.QUEUED),
        run("over", 7.0, **over | {"spending": [Spent(1, 7.0, NOW - 2 * HOUR, NOW - HOUR, 0.0)]}),
        run("stuck", 3.0, teardown="asked", **over),
    ):
        records.save(each)
    used = account.in_use(NOW)
    assert (used.runs, used.usd_per_hour) == (("begins", "theirs", "trains"), 8.0)
    assert (used.unpriced, used.month_usd) == (["begins", "theirs"], 5.0 + 2.0 + 7.0 + 3.0)


def test_where_runs_alone_are_limited_nobody_is_asked_for_a_price():
    """A provider that does not answer would keep the run from beginning, or the run from its machines."""
    asked = list[str]()
    account.change(runs=1)
    assert account.claim("run-1", lambda: asked.append("price") or 1.0)
    assert (asked, account.in_use(time.time()).runs) == ([], ("run-1",))
    account.change(usd_per_month=10.0)
    assert account.claim("run-1", lambda: asked.append("price") or 1.0)
    assert (asked, account.claimed_usd_per_hour("run-1")) == (["price"], 1.0)


def test_a_place_is_let_go_at_the_end_whatever_ends_it():
    account.change(runs=1, usd_per_hour=9.0)
    with suppress(StackError), account.place("run-1", lambda: 1.0):
        assert account.claimed_usd_per_hour("run-1") == 1.0
        raise StackError("the engine")
    with account.place("run-2", lambda: 1.0):
        pass
    assert account.in_use(NOW).runs == ()


def test_limits_of_a_newer_mgpu_and_what_it_has_claimed_are_carried_through():
    """It is the newer one that holds them; they are not gone because an older one was asked for something."""
    newer = {"version": 1, "usd_per_day": 7.0}
    objects.change("limits.json", lambda _: newer)
    account.change(runs=2)
    assert objects.read("limits.json") == newer | asdict(Limits(runs=2))


def test_a_limit_of_nan_that_was_once_set_is_none():
    objects.change("limits.json", lambda _: {"usd_per_month": float("nan"), "runs": 2})
    assert account.limits() == Limits(runs=2)
    objects.change("claims.json", lambda _: {"version": 1, "claims": {}, "of_tomorrow": [1]})
    with account.place("run-1", lambda: 1.0):
        pass
    assert objects.read("claims.json") == {"version": 1, "claims": {}, "of_tomorrow": [1]}


def test_what_a_resumed_run_has_spent_in_the_month_counts_for_its_place_and_once_for_its_budget():
    spent = [Spent(1, 100.0, NOW - 20 * HOUR, NOW - HOUR, 0.0)]
    mine = run("run-1", spending=spent, state=State.FAILED, ended_at=NOW - HOUR)
    records.save(mine)
    account.change(usd_per_month=1900)
    with pytest.raises(OverLimit, match="one more run"):
        account.claim("run-1", lambda: 1.0)
    account.change(usd_per_month=2000)
    assert account.claim("run-1", lambda: 1.0)
    month = account.of_month("run-1", NOW)
    assert month is not None
    assert (month.spent_usd(mine, NOW), month.left_usd(mine, None, NOW)) == (1900.0, 100.0)


@pytest.mark.parametrize(
    ("others", "mine", "left"),
    [
        ({}, 10.0, 100.0),
        ({"a": 30.0}, 10.0, 25.0),  # all of it lasts 2.5 hours
        ({}, 0.1, math.inf),  # until the next month
        ({"a": 30.0}, None, 100.0),
    ],
)
def test_new_machines_get_what_is_left_if_all_go_on_as_they_do(others: dict[str, float], mine: float, left: float):
    month = Month(2000.0, Usage(NOW, 1900.0, tuple(others), others))
    fresh = run("run-1", spending=[])
    assert month.left_usd(fresh, mine, NOW) == left
    assert Month(1900.0, month.others).left_usd(fresh, mine, NOW) == 0


class Looks:
    """What the others spend, as it is looked up; counts how often."""

    def __init__(self, most: float = 1000.0) -> None:
        self.most, self.count, self.away = most, 0, False

    def __call__(self, run_id: str, now: float) -> Month | None:
        self.count += 1
        if self.away:
            raise StackError("no answer")
        return Month(self.most, Usage(now, 900.0 + 60.0 * (now - NOW) / HOUR, ("a",), {"a": 60.0}))


def test_a_month_that_is_spent_ends_a_run_with_room_for_its_last_save_and_is_looked_up_now_and_then():
    looks, mine = Looks(), run("run-1", 60.0, NOW)
    budget = MonthBudget(90.0, looks)
    ticks = [NOW + second for second in range(0, 3000, 2)]
    reached = next(now for now in ticks if budget.check(now, mine))
    assert reached == NOW + 100 / 120 * HOUR - 90
    assert looks.count <= 3000 / 240 + 1
    assert budget.check(reached, mine) is StopReason.MONTH


def test_a_backend_that_is_away_ends_no_run_and_the_next_month_begins_anew():
    looks, mine = Looks(most=900.0), run("run-1", 60.0, NOW)
    budget = MonthBudget(90.0, looks)
    assert budget.check(NOW, mine) is StopReason.MONTH
    looks.away = True
    assert (budget.check(NOW + 300, mine), budget.spent(NOW + 300, mine)) == (None, None)
    assert looks.count == 2
    looks.away, looks.most = False, 1000.0
    budget = MonthBudget(90.0, lambda _run, now: Month(1000.0, Usage(now, 999.0 if now < ENDS else 0.0, (), {})))
    assert budget.check(ENDS - 10, replace(mine, spending=[Spent(1, 36.0, ENDS - 20, None, 0.0)])) is None
    assert budget.check(ENDS + 1, run("run-1", 60.0, ENDS - HOUR)) is None


class Slow(Looks):
    """Answers the first look, and later ones only once it is `free`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = threading.Event(), threading.Event()

    def __call__(self, run_id: str, now: float) -> Month | None:
        if now > NOW:
            self.asked.set()
            self.free.wait()
        return super().__call__(run_id, now)


def known(looks: Slow, mine: Record, monkeypatch: pytest.MonkeyPatch) -> MonthBudget:
    """A budget that has looked once, and waits for no look."""
    monkeypatch.setattr(limits_module, "_ANSWER_S", 0.0)
    budget = MonthBudget(90.0, looks)
    until(lambda: budget.spent(NOW, mine))
    return budget


def test_a_backend_that_says_nothing_holds_up_no_supervisor(monkeypatch: pytest.MonkeyPatch):
    mine, slow = run("run-1", 60.0, NOW), Slow()
    budget = known(slow, mine, monkeypatch)
    after = next(now for now in range(int(NOW), int(NOW) + 3000) if budget.check(now, mine))
    assert slow.asked.wait(60)
    assert after == int(NOW + 100 / 120 * HOUR - 90), "by what was known before"
    assert budget.check(ENDS + 1, mine) is None, "of another month nothing is known"
    slow.free.set()
    until(lambda: budget.check(ENDS - 10, mine))


def test_a_look_that_fails_while_what_was_known_is_read_ends_no_supervisor(monkeypatch: pytest.MonkeyPatch):
    mine, slow = run("run-1", 60.0, NOW), Slow()
    budget = known(slow, mine, monkeypatch)
    slow.away = True
    assert budget.spent(NOW + 300, mine)
    assert slow.asked.wait(60)
    month_of = limits_module.month_of

    def just_then(now: float) -> str:
        slow.free.set()
        until(lambda: budget._known is None)
        return month_of(now)

    monkeypatch.setattr(limits_module, "month_of", just_then)
    assert budget.check(NOW + 301, mine) is None


def test_parts_of_a_month_are_told_once_each_month():
    mine, told = run("run-1", 0.0, NOW), list[float]()
    for now, spent in ((NOW, 490), (NOW, 500), (NOW, 600), (NOW, 1000), (NOW, 1001), (ENDS + 1, 850), (ENDS + 2, 860)):
        month = Month(1000.0, Usage(now, float(spent)))
        found = MonthBudget(90.0, lambda *_, month=month: month).spent(now, mine)
        assert found is not None
        if found.news(mine):
            told.append(found.spent_usd)
    assert told == [500.0, 1000.0, 850.0]


@pytest.mark.parametrize(
    ("month_usd", "reason"), [(10.0, StopReason.MONTH), (0.0, StopReason.HARD_CAP), (99.0, "hard_cap")]
)
def test_a_hard_cap_that_the_month_has_set_is_called_so(month_usd: float, reason: str):
    assert cap_reason(run("run-1", 10.0, NOW, hard_cap_at=NOW + HOUR, month_usd=month_usd)) == reason
