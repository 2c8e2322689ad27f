"""What may end a run from outside: each limit by itself, and which of them a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, Spent
from mgpu.run.supervision.limits import Asked, Budget, Deadline, HardCap, MonthBudget, StopReason, cap_reason, limits

NOW = 1_000_000.0
TIMES = Timeouts(stop_grace_s=60)  # type: ignore[call-arg]


def record(**known: Any) -> Record:
    return Record("run-1", "a", "p", "/p", "/p/mgpu.yaml", "s", True, "f", "local", 1, **known)


def reached(run: Record, now: float, begun_at: float = NOW) -> set[StopReason]:
    run.begun_at = begun_at
    return {said for limit in limits(run, TIMES) if (said := limit.check(now, run)) is not None}


def test_a_run_is_asked_to_stop_by_a_file_that_any_terminal_may_write(xdg: Path):
    assert reached(record(max_hours=1), NOW) == set()
    Folder("run-1").make()
    Folder("run-1").stop.touch()
    assert reached(record(max_hours=1), NOW) == {StopReason.USER}


def test_the_end_leaves_room_for_a_last_save_and_its_upload(xdg: Path):
    run = record(max_hours=10, hard_cap_at=NOW + 3600)
    assert reached(run, NOW + 3600 - 90) == set()
    assert reached(run, NOW + 3600 - 89) == {StopReason.HARD_CAP}


def test_a_save_that_takes_longer_than_usual_has_its_room_before_the_end(xdg: Path):
    run = record(max_hours=10, hard_cap_at=NOW + 3600, saves={"save_s": 600.0})
    assert reached(run, NOW + 3600 - 900) == {StopReason.HARD_CAP}, "half as much again as it took, and its upload"
    assert reached(run, NOW + 3600 - 1000) == set()
    quick = record(max_hours=10, hard_cap_at=NOW + 3600, saves={"save_s": 6.0})
    assert reached(quick, NOW + 3600 - 90) == set()
    endless = record(max_hours=1, hard_cap_at=NOW + 3600, saves={"save_s": 3600.0})
    assert reached(endless, NOW + 1700) == set(), "a run is not all room"


def test_of_a_short_run_a_tenth_is_room(xdg: Path):
    shortest = record(max_hours=0.01, hard_cap_at=NOW + 36)
    assert reached(shortest, NOW + 30) == set()
    run = record(max_hours=0.1, hard_cap_at=NOW + 360)
    assert reached(run, NOW + 360 - 36) == set()
    assert StopReason.HARD_CAP in reached(run, NOW + 360 - 35)


@pytest.mark.parametrize("hard_cap_at", [0.0, NOW + 10 * 3600])
def test_on_machines_that_live_longer_a_run_has_a_deadline_of_its_own(xdg: Path, hard_cap_at: float):
    run = record(max_hours=1, hard_cap_at=hard_cap_at)
    assert reached(run, NOW + 3600 - 90) == set()
    assert reached(run, NOW + 3600 - 89) == {StopReason.DEADLINE}


def test_the_list_is_whole(xdg: Path):
    found = [type(limit) for limit in limits(record(max_hours=1), TIMES)]
    assert found == [Asked, Budget, MonthBudget, HardCap, Deadline]


@pytest.mark.parametrize("reason", list(StopReason))
def test_each_says_why(reason: StopReason):
    assert reason.words


def test_a_budget_ends_a_run_with_room_for_its_last_save(xdg: Path):
    """Also on machines that live longer, and with what earlier fleets of it have cost."""
    spending = [Spent(1, 6.0, NOW - 7200, NOW - 3600), Spent(2, 36.0, NOW)]
    run = record(max_hours=10, max_usd=10.0, spending=spending)
    assert reached(run, NOW + 400 - 91) == set()
    assert reached(run, NOW + 400 - 89) == {StopReason.BUDGET}
    assert reached(record(max_hours=10, spending=spending), NOW + 9000) == set(), "without one, none"


def test_disks_and_addresses_are_spent_too_and_what_is_not_known_is_not(xdg: Path):
    run = record(spending=[Spent(1, None, NOW - 7200, NOW - 3600)])
    assert not run.priced
    run.costs(2, 30.0, NOW, 6.0)
    run.costs(2, 99.0, NOW + 9)  # the same machines
    run.costs(3, 72.0, NOW + 3600, None)
    assert run.priced
    assert run.spent_usd(NOW + 5400) == 36.0 + 36.0
    run.costs_no_more(NOW + 5400)
    assert run.spent_usd(NOW + 9000) == 72.0


@pytest.mark.parametrize(
    ("max_usd", "reason"), [(36.0, "budget"), (36.5, "budget"), (40.0, "hard_cap"), (0.0, "hard_cap")]
)
def test_a_hard_cap_that_the_budget_has_set_is_called_so(xdg: Path, max_usd: float, reason: str):
    run = record(max_hours=10, max_usd=max_usd, hard_cap_at=NOW + 3600, spending=[Spent(1, 36.0, NOW)])
    assert cap_reason(run) == reason
