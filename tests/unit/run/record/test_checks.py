"""Whether a run is as its run file expects."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from mgpu.run.record import checks
from mgpu.run.record.record import Check, Record, Spent, State, of_json
from mgpu.spec.expect import Expectation

WEEK = [1.9, 1.87, 1.91, 1.88, 1.89, 1.9, 1.86]  # median 1.89
MEDIAN = {"median_of": 7, "tolerance_percent": 2}


def record(run_id: str = "night-1", **changes: object) -> Record:
    known = {"state": State.SUCCEEDED, "created_at": 1000.0, "ended_at": 4600.0}
    return Record(run_id, "night", "p", "/", "/mgpu.yaml", run_id, True, run_id, "local", 1, **(known | changes))


@pytest.mark.parametrize(
    ("wanted", "value", "before", "met", "said"),
    [
        ({"max": 1.9}, 1.87, [], True, "1.87 <= 1.9"),
        ({"max": 1.9}, 1.9, [], True, "1.9 <= 1.9"),
        ({"max": 1.9}, 2.01, [], False, "2.01 > 1.9"),
        ({"max": 1.9}, 1.900004, [], False, "1.900004 > 1.9"),  # as many digits as it takes
        ({"min": 9000}, 91234.5, [], True, "91234 >= 9000"),
        ({"min": 9000}, 8999.8, [], False, "8999.8 < 9000"),
        ({"min": 1, "max": 2}, 0.5, [], False, "0.5 < 1"),
        ({"min": 1, "max": 2}, 1.5, [], True, "1.5 <= 2; 1.5 >= 1"),
        (MEDIAN, 1.927, WEEK, True, "1.927 <= 1.928, the median of 7 runs + 2 %"),
        (MEDIAN, 2.01, WEEK, False, "2.01 > 1.928, the median of 7 runs + 2 %"),
        (MEDIAN | {"better": "higher"}, 2.01, WEEK, True, "2.01 >= 1.852, the median of 7 runs - 2 %"),
        (MEDIAN | {"better": "higher"}, 1.8, WEEK, False, "1.8 < 1.852, the median of 7 runs - 2 %"),
        (MEDIAN, 1.938, [1.9] * 7, True, "1.938 <= 1.938, the median of 7 runs + 2 %"),  # not a rounding error above
        (MEDIAN, -1.0, [-1.0] * 7, True, "-1 <= -0.98, the median of 7 runs + 2 %"),  # of below zero, too, upwards
        (MEDIAN, 2.01, [1.89] * 7 + [9.0] * 20, False, "2.01 > 1.928, the median of 7 runs + 2 %"),  # the newest seven
        (MEDIAN, 99.0, WEEK[:6], True, "99; not compared yet: 6 of 7 runs"),
        (MEDIAN | {"max": 2}, 99.0, [], False, "99 > 2; not compared yet: 0 of 7 runs"),
        ({"median_of": 1, "tolerance_percent": 0}, 3.0, [2.0], False, "3 > 2, the median of 1 run + 0 %"),
        ({"max": 1.9}, None, [], False, "was never reported (validation_loss was)"),
        (MEDIAN, None, [], False, "was never reported (validation_loss was)"),
    ],
)
def test_a_metric_is_judged(wanted, value, before, met, said):
    values = {"validation_loss": 1.0} if value is None else {"val_loss": value}
    found = checks.check("val_loss", Expectation(**wanted), values, before)
    assert (found.met, found.said, found.value) == (met, said, value)


def test_what_is_expected_of_a_run_itself_is_judged_by_its_record():
    spent = [Spent(1, 4.0, 1000.0, 2800.0)]
    wanted = {"cost_usd": {"max": 1.5}, "duration_s": {"max": 3600}, "recoveries": {"max": 1}, "first_loss": {"max": 1}}
    run = record(expect=wanted, spending=spent, recoveries=2, first_metrics={"loss": 3.0})
    found = {each.metric: (each.met, each.value) for each in checks.judged(run, 4600.0)}
    assert found == {
        "cost_usd": (False, 2.0),
        "duration_s": (True, 3600.0),
        "recoveries": (False, 2.0),
        "first_loss": (False, 3.0),
    }


def test_a_record_of_a_newer_mgpu_is_judged_by_what_is_known_here():
    (found,) = checks.judged(record(expect={"loss": {"max": 1, "of_the_moon": True}}, metrics={"loss": 2.0}), 1.0)
    assert not found.met


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1.9),
        ({"state": State.FAILED}, None),
        ({"state": State.RUNNING}, None),
        ({"checks": [Check("loss", True, "", 1.9)]}, 1.9),
        ({"checks": [Check("loss", False, "", 1.9), Check("lr", True, "")]}, None),  # what is bad is no measure
        ({"checks": [Check("lr", False, "", 0.1)]}, 1.9),
    ],
)
def test_what_later_runs_are_compared_with(changes, expected):
    assert checks.good(record(metrics={"loss": 1.9, "lr": 0.1}, **changes)).get("loss") == expected


def test_as_many_earlier_values_are_taken_as_are_wanted_and_no_more_is_asked_for():
    asked = list[int]()

    def runs():
        for number in range(10):
            asked.append(number)
            yield {"loss": float(number)} | ({"cost_usd": 1.0} if number % 2 else {})

    expect = {"loss": {"median_of": 3}, "cost_usd": {"median_of": 2}, "recoveries": {"max": 1}}
    assert checks.earlier(expect, runs()) == {"loss": [0.0, 1.0, 2.0], "cost_usd": [1.0, 1.0]}
    assert asked == [0, 1, 2, 3]
    assert checks.earlier({"recoveries": {"max": 1}}, iter(lambda: 1 / 0, 1)) == {}


def test_what_came_of_it_is_read_back():
    run = record(checks=[Check("loss", False, "2 > 1", 2.0, None, 0)], expect={"loss": {"max": 1.0}})
    assert of_json(asdict(run)) == run
