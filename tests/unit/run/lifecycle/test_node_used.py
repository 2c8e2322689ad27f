"""A node that another run has: the run that came second ends with the user's error, and is not tried again."""

from __future__ import annotations

import json

import pytest
from mgpu_train.agent.host.python_env import PROBLEM

from mgpu.context import Context
from mgpu.errors import CommandFailed
from mgpu.remote.targets import Result
from mgpu.run.fleet import stack
from mgpu.run.lifecycle import launch as runs
from mgpu.run.nodes import agent_client
from mgpu.run.record import record
from mgpu.spec.load import load

RUN_FILE = """
name: it
provider: local
nodes: 2
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
recovery: {attempts: 5}
"""
ANSWER = json.dumps({"problem": "used", "why": "Run theirs (owner you, from there) trains there.", "run": "theirs"})


@pytest.fixture
def second(world):
    """Runs on a stack that stands."""
    world.has_nodes(2)
    (world.folder / "train.py").write_text("pass\n")
    world.run_file.write_text(RUN_FILE)
    world.stacks["dev"] = world.output(world.cloud.rent("mine-dev", 2))
    context = Context(world.events.append, world.timeouts)
    return lambda: runs.run(world.run_file, load(world.run_file), "dev", context)


def is_told(outcome) -> None:
    assert isinstance(outcome.error, stack.InUse)
    assert outcome.exit_code == 2
    assert "is used by run theirs" in outcome.error.what
    assert "owner you, from there" in outcome.error.why
    assert "`mgpu stop theirs`" in outcome.error.next_step
    done = record.load("last")
    assert (done.recoveries, done.reason) == (0, outcome.error.what)


def test_it_is_the_users_error_and_nothing_is_tried_again(world, second):
    world.nodes[1].equipped = Result(PROBLEM, ANSWER.encode(), b"")
    asked = world.cloud.described
    is_told(second())
    assert world.cloud.described == asked + 1, "before it begins; the error makes nobody ask again"
    assert not any(argv[0] == "start" for node in world.nodes for argv in node.agent)


def test_where_the_other_came_before_the_agents_started_those_that_did_are_ended(world, second):
    world.nodes[1].faults["start"] = [CommandFailed("agent", status=PROBLEM, stderr=f"a warning\n{ANSWER}\n")]
    is_told(second())
    assert world.nodes[0].stops == 1


def test_the_machines_stay_with_the_run_that_has_them(world, second):
    """Though the run file says that they go when the run ends."""
    world.nodes[1].equipped = Result(PROBLEM, ANSWER.encode(), b"")
    is_told(second())
    assert (world.cloud.ended, record.load("last").teardown) == ([], "kept")
    assert world.cloud.billed


def test_another_failure_of_the_start_is_what_it_was(world, second):
    world.nodes[1].faults["start"] = [CommandFailed("no agent", status=1, stderr="why")]
    assert second().error.what == "no agent"


def test_a_run_of_an_owner_says_who_it_is(world):
    fleet = world.output(world.cloud.rent("mine-dev", 1))
    said = agent_client.claim("r", fleet)
    assert (said["run"], said["owner"]) == ("r", fleet.owner)
    assert said["host"]
    assert agent_client.claim("r", fleet.model_copy(update={"owner": ""}))["owner"] == fleet.fleet
