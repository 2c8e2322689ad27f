"""What runs have spent: by what belongs together, split by time, with what nobody knows said as such."""

from __future__ import annotations

import json
import subprocess
import sys
from calendar import timegm
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu.run.budget.costs import all_records, month_began, month_ends, remember, stretches, sums, total
from mgpu.run.lifecycle import removal
from mgpu.run.record import record as records
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, Spent, State

HOUR = 3600.0
NOVEMBER, DECEMBER = float(timegm((2026, 11, 1, 0, 0, 0))), float(timegm((2026, 12, 1, 0, 0, 0)))
NOW = DECEMBER + 10 * HOUR


def run(run_id: str, *spending: Spent, folder: str = "/home/you/llm", **known: object) -> Record:
    said = {"created_by": "you@laptop", "state": State.RUNNING, "created_at": spending[0].since if spending else 1.0}
    said["spending"] = list(spending)
    program = known.pop("program", folder)
    return Record(run_id, "a", str(program), folder, "f", "s", True, "f", "aws", 2, **(said | known))  # type: ignore[arg-type]


# 4 hours before the month ends and 2 after it, then a repaired fleet that it still has
NIGHT = run(
    "night",
    Spent(1, 10.0, DECEMBER - 4 * HOUR, DECEMBER + 2 * HOUR, 1.0),
    Spent(2, 20.0, DECEMBER + 2 * HOUR, None, None),
    hard_cap_at=DECEMBER + 4 * HOUR,
)
SMALL = run("small", Spent(1, 5.0, NOVEMBER, NOVEMBER + HOUR, 0.0), folder="/ci/vision/runs", program="/ci/vision")
THEIRS = run("theirs", Spent(1, None, DECEMBER, DECEMBER + HOUR), created_by="ci@runner", program="/state/program")
OLD = run("old", price_usd_per_hour=3.0, created_at=NOVEMBER + 5)
ALL = (NIGHT, SMALL, THEIRS, OLD, run("queued"))


@pytest.mark.parametrize(
    ("by", "found"),
    [
        ("project", {"llm": 106.0, "vision": 5.0}),
        ("run", {"small": 5.0, "old": 0.0, "night": 106.0, "theirs": 0.0}),
        ("provider", {"aws": 111.0}),
        ("owner", {"you": 111.0, "ci": 0.0}),
        ("month", {"2026-11": 49.0, "2026-12": 62.0}),
    ],
)
def test_what_runs_have_spent_by_what_belongs_together(by: str, found: dict[str, float]):
    """A run that nobody closed has had its machines until their hard cap; what has no price is no dollar of 0."""
    there = [*stretches(ALL, NOW)]
    rows = sums(there, by)
    assert [(each.key, each.usd) for each in rows] == list(found.items())
    whole = total(there)
    assert (whole.usd, whole.machines_usd, whole.other_usd) == (111.0, 105.0, 6.0)
    assert (whole.unpriced, whole.other_unpriced) == ({"theirs", "old"}, {"night"})
    assert whole.hours == pytest.approx(10)
    assert set().union(*(each.unpriced for each in rows)) == whole.unpriced


def test_from_a_day_on_only_what_was_spent_since_counts():
    (row,) = sums(stretches(ALL, NOW, DECEMBER), "provider")
    assert (row.usd, row.runs) == (62.0, {"night", "theirs"})
    assert total(stretches([NIGHT], DECEMBER + 3 * HOUR)).usd == 86.0, "and until now"


@pytest.mark.parametrize("at", [NOVEMBER, NOVEMBER + 1, DECEMBER - 0.001])
def test_a_month_is_one_of_utc(at: float):
    assert (month_began(at), month_ends(at)) == (NOVEMBER, DECEMBER)


def test_what_a_removed_run_has_spent_stays_known_and_counts_once(xdg: Path):
    for each in ALL:
        records.save(each)
    records.save(over := replace(SMALL, state=State.SUCCEEDED, teardown="confirmed"))
    remember([NIGHT, OLD, run("queued")])
    removal.remove([over])  # as `mgpu rm` does
    assert total(stretches(all_records(), NOW)).usd == 111.0
    for each in (NIGHT, OLD):
        Folder(each.run_id).record.unlink()
    found = total(stretches(all_records(), NOW))
    assert (found.usd, found.unpriced) == (111.0, {"theirs", "old"})


def test_the_table_has_a_total_and_says_what_is_not_known(mgpu, monkeypatch: pytest.MonkeyPatch):
    assert "nothing was spent yet" in mgpu("costs").out
    for each in (*ALL, replace(SMALL, run_id="dear", spending=[Spent(1, 5000.0, NOVEMBER, NOVEMBER + HOUR, 0.5)])):
        records.save(each)
    monkeypatch.setattr("time.time", lambda: NOW)
    assert mgpu("costs").out.splitlines() == [
        "project   runs   hours     machines   beside        total",
        "─────────────────────────────────────────────────────────",
        "vision       2     2.0    $5,005.00    $0.50    $5,005.50",
        "llm          3     9.0     >$100.00   >$6.00     >$106.00",
        "total        5    11.0   >$5,105.00   >$6.50   >$5,111.50",
        "not counted, for the price of the machines is not known: 2 runs: old, theirs",
        "without disks and addresses, whose price is not known: 1 run: night",
    ]


def test_costs_imports_nothing_heavy(xdg: Path):
    code = "import sys; from mgpu.cli import main\ntry: main(['costs'])\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    said, modules = done.stdout.strip().rsplit("\n", 1)
    assert said == "nothing was spent yet"
    heavy = {"torch", "boto3", "botocore", "pulumi", "grpc", "paramiko", "awscrt", "pydantic"}
    assert not heavy & set(json.loads(modules.replace("'", '"')))
