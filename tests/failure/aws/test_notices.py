"""EC2 takes a machine, or only seems to: notices of the metadata service at every time before it, and none (F20), hints
and nonsense (F21), a service that fails (F22). Judged by the bill, the commit log and EC2's own record."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from fakes.aws.operator import Operator, left_behind
from waiting import until

G_SPOT, VCPUS = "L-3819A6DF", 4  # the quota that the machines count against, and what one of them takes of it
EVERY = 10  # steps between two saves of count.py


@dataclass(frozen=True)
class Told:
    """What a run came to."""

    run: dict[str, Any]
    before: list[str]  # the machines of its first attempt, by rank
    saved: dict[int, list[int]]  # the committed steps, by attempt
    resumed_from: list[int]  # the step that each attempt's program went on from
    machines: int  # that were ever billed
    left: dict[str, list[str]]
    output: str
    old: str = ""  # EC2's state of the machine that was taken, when its replacement had trained and saved


def judged(user: Operator, launch: Any, before: list[str]) -> Told:
    """Waits for the end of a run, which has to be good."""
    out, err = launch.communicate(timeout=600)
    assert launch.returncode == 0, err
    run = user.run()
    assert (run["state"], run["teardown"]) == ("succeeded", "confirmed"), out
    saved: dict[int, list[int]] = {}
    for entry in user.commits():
        if entry["kind"] == "checkpoint":
            saved.setdefault(entry["attempt"], []).append(entry["manifest"]["step"])
    log = user.mgpu("logs", run["run_id"], "--node", "0").stdout
    froms = [int(step) for step in re.findall(r"rank 0 of 2 from (\d+)", log)]
    return Told(run, before, saved, froms, len(user.aws.bill()), left_behind(user.aws), err)


def interrupted(
    user: Operator, *, notice_s: float | None, rank: int, every: int = EVERY, dead_s: float | None = None
) -> Told:
    """One of two machines is taken so many seconds after the notice, None: without; once there is a checkpoint, or, of
    a program that saves nothing by itself, while it trains. `dead_s`: the quota has room for two machines, and the dead
    one counts so many seconds longer."""
    user.write(command=["count.py", "45", "0.25", "0", str(every)], recovery={"attempts": 3, "wait_minutes": 2})
    launch = user.start("launch", "--yes")
    try:
        until(lambda: user.run().get("checkpoint_step", -1) >= EVERY if every == EVERY else user.trains(), 150)
        before = user.ids
        if dead_s is not None:
            user.aws.quota(G_SPOT, 2 * VCPUS)
            user.aws.pace(dead_count_s=dead_s)
        if notice_s is None:
            user.aws.kill(before[rank])
        else:
            user.aws.interrupt(before[rank], notice_s)
        return judged(user, launch, before)
    finally:
        launch.kill()


def slowly_ended(user: Operator) -> Told:
    """EC2 takes a machine, and it is `shutting-down` for minutes of the wall's clock."""
    user.aws.pace(ending_s=400)
    user.write(command=["count.py", "45", "0.25", "0", str(EVERY)], recovery={"attempts": 3, "wait_minutes": 2})
    launch = user.start("launch", "--yes")
    try:
        until(lambda: user.run().get("checkpoint_step", -1) >= EVERY, 150)
        before = user.ids
        user.aws.kill(before[1])
        until(lambda: any(entry.get("attempt") == 2 for entry in user.commits()), 150)
        (found,) = user.aws.client("ec2").describe_instances(InstanceIds=[before[1]])["Reservations"]
        user.aws.pace(ending_s=1)
        user.aws.age(400)  # the run ends only when both have ended
        return replace(judged(user, launch, before), old=found["Instances"][0]["State"]["Name"])
    finally:
        launch.kill()


def rumours(user: Operator) -> Told:
    """Nothing is taken, whatever the metadata service says or does."""
    user.write(command=["count.py", "100", "0.25"])
    launch = user.start("launch", "--yes")
    try:
        until(lambda: user.run().get("checkpoint_step", -1) >= EVERY, 150)  # rights of the store last for an hour
        first, second = before = user.ids
        user.aws.metadata(second, "hang")
        user.aws.rebalance(first)
        for fault in ("malformed", "refused", "500", None, "malformed", None):
            user.aws.metadata(first, fault)
            step = user.run()["checkpoint_step"]
            until(lambda step=step: user.run()["checkpoint_step"] > step or user.run()["state"] != "running", 60)
        user.aws.metadata(second, None)
        return judged(user, launch, before)
    finally:
        launch.kill()


STORIES = {
    "120 s": partial(interrupted, notice_s=120, rank=0, every=1000),
    "2 s": partial(interrupted, notice_s=2, rank=1),
    "0 s": partial(interrupted, notice_s=0, rank=1),
    "none": partial(interrupted, notice_s=None, rank=0),
    "quota": partial(interrupted, notice_s=None, rank=1, dead_s=25),
    "slow end": slowly_ended,
    "rumours": rumours,
}


@pytest.mark.drawn("whole runs on the fake AWS", "tests/failure/aws/conftest.py")
@pytest.mark.parametrize("story", ["120 s", "2 s", "0 s", "none", "quota", "slow end"])
def test_a_taken_machine_is_replaced_alone_and_the_run_goes_on_from_its_newest_checkpoint(told, story):
    was = told(story)
    rank = 0 if story in ("120 s", "none") else 1
    after = [node["id"] for node in was.run["fleet"]["nodes"]]
    assert (after[rank] != was.before[rank], after[1 - rank]) == (True, was.before[1 - rank])
    assert was.machines == 3, "one more than asked for, and that one in the place of another"
    assert not any(was.left.values()), was.left
    (interruption,) = was.run["interruptions"]
    assert (interruption["fault"], interruption["nodes"]) == ("provider", [rank])
    assert was.resumed_from == [0, was.saved[1][-1]]
    assert was.resumed_from[1] >= 1
    steps = [step for attempt in sorted(was.saved) for step in was.saved[attempt]]
    assert steps == sorted(steps)
    assert steps[-1] == 45


@pytest.mark.story("120 s")
def test_where_there_is_time_what_was_done_since_the_last_save_is_saved_first(told):
    was = told("120 s")
    (step,) = was.saved[1]
    assert 0 < step < 45, "a save that no interval asked for"
    (interruption,) = was.run["interruptions"]
    assert interruption["repaired_at"] - interruption["noticed_at"] < 100, "nobody waited for the machine to be taken"


@pytest.mark.story("quota")
def test_a_quota_that_a_dead_machine_still_counts_against_is_waited_for(told):
    was = told("quota")
    assert f"quota {G_SPOT}" in was.output
    assert "asking again" in was.output


@pytest.mark.story("slow end")
def test_a_replacement_trains_while_the_machine_that_was_lost_is_still_ending(told):
    assert told("slow end").old == "shutting-down"


@pytest.mark.story("rumours")
def test_hints_nonsense_and_a_metadata_service_that_fails_interrupt_nothing(told):
    was = told("rumours")
    assert was.run["interruptions"] == []
    assert was.saved == {1: list(range(EVERY, 101, EVERY))}, "no step was saved for another reason than its interval"
    assert was.machines == 2
    assert not any(was.left.values()), was.left
