"""How the nights of a schedule are drawn, on terminals of any width and with any number of nights."""

from __future__ import annotations

import pytest

from mgpu.cli import nights
from mgpu.run.record.record import Check
from mgpu.schedule.model import DueTime, Outcome, Schedule

DAY, NOW = 86400.0, 1_800_000_000.0
EXPECT = {"validation_loss": {"max": 2.0}, "cost_usd": {"max": 12}}


def schedule(losses: list[float | None], *, expect: dict | None = None) -> Schedule:
    """A night for each loss, which is bad above 2; None: a night that failed."""
    history = list[DueTime]()
    for number, loss in enumerate(losses):
        checks = (
            [Check("validation_loss", loss <= 2, f"{loss} > 2", loss), Check("cost_usd", True, "", 9.0)] if loss else []
        )
        outcome = Outcome.SUCCEEDED if loss else Outcome.FAILED
        history.append(DueTime(NOW + number * DAY, outcome, NOW, f"it-{number}", checks=checks))
    history.append(DueTime(NOW - DAY, Outcome.MISSED, NOW, reason="nobody looked"))
    history.append(DueTime(NOW + 999 * DAY, Outcome.RUNNING, NOW, "it-now"))
    run = {"name": "it", "expect": EXPECT if expect is None else expect}
    return Schedule("nightly", "u", "0 2 * * *", "UTC", run, NOW, "me@here", NOW, history=history)


def test_each_metric_has_a_line_and_what_is_bad_is_marked_with_its_reason():
    assert nights._lines(schedule([1.0, None, 2.5, 1.0]), 100, blocks=True) == [
        "",
        "validation_loss   ▁·█▁   1 .. 2.5, newest 1",
        "                    !    ! Sun 01-17 08:00: 2.5 > 2",
        "cost_usd          ▁·▁▁   9 .. 9, newest 9",
    ]
    assert nights._lines(schedule([1.0, 2.5]), 100, blocks=False)[1] == "validation_loss   18   1 .. 2.5, newest 2.5"


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_of_many_nights_the_newest_are_drawn_as_far_as_there_is_room(width):
    lines = nights._lines(schedule([1.0 + n % 3 / 10 for n in range(399)] + [2.5]), width, blocks=True)
    assert max(map(len, lines)) <= width
    drawn = [line[18:].partition("   ")[0] for line in lines if line.startswith(("validation_loss", "cost_usd"))]
    assert len({*map(len, drawn)}) == 1, "nights stand above each other"
    assert len(drawn[0]) == width - 18 - len("   1 .. 2.5, newest 2.5")
    assert (drawn[0][-1], lines[2].strip()[0], lines[2].index("!")) == ("█", "!", 17 + len(drawn[0]))


@pytest.mark.parametrize(("losses", "expect"), [([], None), ([1.0], {})])
def test_where_nothing_is_expected_or_there_was_no_night_nothing_is_drawn(losses, expect):
    assert nights._lines(schedule(losses, expect=expect), 100, blocks=True) == []


@pytest.mark.parametrize(
    ("said", "blocks"),
    [
        ({"LANG": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),  # what Python says itself where LANG is C
        ({}, False),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C", "LC_CTYPE": "de_DE.utf8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "C", "LC_ALL": "C.UTF-8"}, True),
    ],
)
def test_blocks_are_for_those_who_see_them(said, blocks, monkeypatch):
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert nights._has_blocks() is blocks
