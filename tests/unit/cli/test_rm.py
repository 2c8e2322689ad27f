"""`mgpu rm`: which records may go, by name and by rule, and what stays."""

from __future__ import annotations

import time

import pytest

from mgpu.errors import InputError
from mgpu.run.budget import costs
from mgpu.run.lifecycle import removal
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State

DAY = 86400.0


@pytest.fixture
def over(world):
    """Makes a run that ended so many days ago, and is given back."""

    def make(run_id, days=0.0, **more):
        known = {"state": State.SUCCEEDED, "teardown": "confirmed", "ended_at": time.time() - days * DAY}
        made = world.record(run_id, **(known | more))
        Folder(run_id).log(0, "i-1").write_text("a log")
        return made

    return make


def test_records_that_are_named_go_and_others_stay(mgpu, over):
    for run_id in ("run-1", "run-2", "run-3"):
        over(run_id)
    done = mgpu("rm", "run-1", "run-3", "--yes")
    assert (done.code, record.ids()) == (0, ["run-2"])
    assert "2 records removed" in done.err
    assert not list(Folder("run-1").root.parent.glob(".removed*"))
    assert Folder("run-2").log(0, "i-1").read_text() == "a log"


ALIVE = [
    ({"state": State.RUNNING}, "it is not over: running"),
    ({"teardown": "asked"}, "its machines may be billed"),
    ({"teardown": "kept", "fleet": {"version": 1}}, "its machines may be billed"),
    ({"teardown": "none", "fleet": {"version": 1}}, "its machines may be billed"),
]


@pytest.mark.parametrize(("more", "why"), ALIVE)
def test_what_may_be_billed_is_never_removed(mgpu, over, more, why):
    over("run-1", days=90)
    over("run-2", days=90, **more)
    refused = mgpu("rm", "run-1", "run-2", "--yes")
    assert refused.code == 2
    assert f"run-2: {why}" in refused.err
    assert "mgpu stop run-2" in refused.err
    assert record.ids() == ["run-1", "run-2"], "all or nothing"
    assert mgpu("rm", "--older-than-days", "30", "--yes").code == 0
    assert record.ids() == ["run-2"]


def test_a_run_that_is_supervised_stays(mgpu, over):
    over("run-1", days=90)
    with record.supervising("run-1"):
        assert "it is being supervised" in mgpu("rm", "run-1", "--yes").err
        assert "no run to remove" in mgpu("rm", "--keep-last", "0", "--yes").err
    assert record.ids() == ["run-1"]


def test_a_run_that_was_resumed_while_somebody_was_asked_stays(over):
    chosen = [over("run-1"), over("run-2")]
    over("run-2", state=State.RUNNING, teardown="none", fleet={"version": 1})
    with pytest.raises(InputError, match="run-2: not removed\nrun-2: it is not over: running"):
        removal.remove(chosen)
    assert record.ids() == ["run-2"]


def test_what_a_run_has_spent_since_it_was_chosen_stays_known(over):
    chosen = [over("run-1", price_usd_per_hour=1.0)]
    over("run-1", price_usd_per_hour=2.0)
    removal.remove(chosen)
    assert [each.price_usd_per_hour for each in costs.all_records()] == [2.0]


def test_a_run_that_never_had_machines_may_go(mgpu, over):
    over("run-1", state=State.FAILED, teardown="none")
    assert mgpu("rm", "run-1", "--yes").code == 0
    assert record.ids() == []


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        (("--older-than-days", "30"), ["day-5", "day-1"]),
        (("--keep-last", "3"), ["day-60", "day-5", "day-1"]),
        (("--keep-last", "0"), []),
        (("--older-than-days", "30", "--keep-last", "3"), ["day-60", "day-5", "day-1"]),
        (("--older-than-days", "3", "--keep-last", "1"), ["day-1"]),
        (("--older-than-days", "365"), ["day-90", "day-60", "day-5", "day-1"]),
    ],
)
def test_rules_choose_by_the_end_and_both_have_to_agree(mgpu, over, rules, left):
    for day in (5, 90, 1, 60):
        over(f"day-{day}", days=day)
    dry = mgpu("rm", *rules, "--dry-run")
    assert len(record.ids()) == 4
    assert mgpu("rm", *rules, "--yes").code == 0
    assert sorted(record.ids()) == sorted(left)
    assert all((run_id in dry.out) == (run_id not in left) for run_id in ("day-90", "day-60", "day-5", "day-1"))


@pytest.mark.parametrize("args", [(), ("run-1", "--keep-last", "1")])
def test_either_runs_or_rules(mgpu, over, args):
    over("run-1")
    refused = mgpu("rm", *args, "--yes")
    assert refused.code == 2
    assert "mgpu rm --older-than-days 30 --keep-last 20" in refused.err
    assert record.ids() == ["run-1"]


def test_nothing_goes_unless_somebody_agrees(mgpu, over):
    over("run-1")
    refused = mgpu("rm", "run-1")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert record.ids() == ["run-1"]


def test_it_says_where_the_checkpoints_stay(mgpu, over):
    over("run-1", store="s3://b/p", checkpoint_id="c", checkpoint_step=40)
    assert "step 40 in s3://b/p/run-1" in mgpu("rm", "run-1", "--yes").out
