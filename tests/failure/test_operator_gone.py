"""F49: the operator dies while training and nobody ever comes back: no attach, no gc. The machines' own clocks are
enough for I1, and what was trained is safe. The stories are played at once; each test judges one.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

LEASE_S, CAP_S = 12, 40
I1_S = 60  # beyond the lease
POWER_OFF_S = 20  # beyond the hard cap: the script looks every 2 s, the node's programs are given a moment
TIMEOUTS = {"lease_s": LEASE_S, "lease_renew_s": 2}


@dataclass(frozen=True)
class Story:
    """What trains when the operator dies, and the deadlines that differ."""

    name: str
    command: tuple[str, ...]
    timeouts: dict[str, float]
    max_hours: float = 0.2
    checkpoint: object = "none"


SAVES = {"every_steps": 10}
ENDS = Story("ends", ("train.py", "40", "0.1"), {}, checkpoint=SAVES)
QUIET = Story("quiet", ("train.py", "2", "25"), {}, checkpoint=SAVES)  # a line, and for two leases none
STALLS = Story("stalls", ("hang.py",), {"stall_s": 6}, checkpoint=SAVES)
NEVER_ENDS = Story("never-ends", ("train.py", "100000", "0.1"), {}, CAP_S / 3600, SAVES)


STORIES = {story.name: story for story in (ENDS, QUIET, STALLS, NEVER_ENDS)}


@pytest.fixture(scope="module")
def told(worlds, programs, wanted_stories):
    def play(story):
        world = worlds(story.name, MGPU_TIMEOUTS=json.dumps(TIMEOUTS | story.timeouts))
        (world.project / "hang.py").write_text((programs / "hang.py").read_text())
        world.write(command=story.command, checkpoint=story.checkpoint, max_hours=story.max_hours)
        return world, abandon(world)

    pool = ThreadPoolExecutor(4)
    yield {name: pool.submit(play, STORIES[name]) for name in wanted_stories}
    pool.shutdown(cancel_futures=True)


def abandon(world):
    """SIGKILL to the operator once it trains; returns when that was, after the last process of the world has ended."""
    launch = world.start("mgpu", "launch", "--yes")
    world.wait(lambda: "training" in world.run().get("node_phases", ()), 90)
    assert world.alive() == 1
    launch.kill()
    launch.communicate()
    at = time.time()
    world.wait(lambda: not world.processes(), CAP_S + LEASE_S + 2 * I1_S, "a machine lives for ever")
    return at


def billed(world):
    """The one machine's turn on the bill, and why it ended."""
    (node,) = world.bill().nodes
    reason = json.loads((world.state / "local" / "instances" / node.start.instance / "stopped.json").read_text())
    assert not node.alive
    assert reason["reason"] == "its lease or its hard cap has ended"
    return node


@pytest.mark.story("ends")
def test_the_job_ends_is_committed_and_its_lease_runs_out(told):
    world, killed_at = told["ends"].result()
    node = billed(world)
    log = world.commits(world.run()["run_id"])
    assert world.steps(world.run()["run_id"]) == [10, 20, 30, 40]
    (end,) = [entry for entry in log if entry["kind"] == "end"]
    assert end["succeeded"]
    assert end["at"] > killed_at, "it went on without the operator"
    assert node.end_at <= end["at"] + LEASE_S + I1_S


@pytest.mark.story("quiet")
def test_a_healthy_program_may_be_quiet_for_longer_than_a_lease(told):
    world, _ = told["quiet"].result()
    node = billed(world)
    (end,) = [entry for entry in world.commits(world.run()["run_id"]) if entry["kind"] == "end"]
    assert (end["succeeded"], world.steps(world.run()["run_id"])) == (True, [2])
    assert node.end_at <= end["at"] + LEASE_S + I1_S


@pytest.mark.story("stalls")
def test_a_stalled_attempt_is_ended_and_says_so_before_its_machine_goes(told):
    world, killed_at = told["stalls"].result()
    (end,) = [entry for entry in world.commits(world.run()["run_id"]) if entry["kind"] == "end"]
    assert (end["succeeded"], end["fault"]) == (False, "user")
    assert "no sign of progress" in end["reason"]
    assert billed(world).end_at <= killed_at + 6 + LEASE_S + I1_S


@pytest.mark.story("never-ends")
def test_nothing_that_makes_progress_passes_the_hard_cap(told):
    world, killed_at = told["never-ends"].result()
    node = billed(world)
    lived = node.end_at - node.start.at
    assert node.end_at > killed_at + LEASE_S, "it was alive, and renewed its lease"
    assert CAP_S - 2 <= lived <= CAP_S + POWER_OFF_S
    steps = world.steps(world.run()["run_id"])
    assert steps == sorted(steps)
    assert steps[-1] >= 10, "what it had saved until then is safe"
