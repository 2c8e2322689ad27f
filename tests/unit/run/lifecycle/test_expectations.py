"""A run that has succeeded is judged by what its run file expects: it stays a success, and its exit code is 6."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from mgpu_train.agent.status.status import Fault, Phase

from mgpu.cli import cli
from mgpu.context import Context
from mgpu.errors import NotAsExpected
from mgpu.events import RunEnded, RunRegressed
from mgpu.run.lifecycle import attach, down
from mgpu.run.lifecycle import launch as runs
from mgpu.run.record import record
from mgpu.run.record.record import State
from mgpu.spec.load import load

RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
expect:
  loss: {max: 2, median_of: 2, tolerance_percent: 2}
  recoveries: {max: 0}
"""


class Nights:
    """Runs of one run file, each with a loss of its own."""

    def __init__(self, world) -> None:
        self.world = world
        world.run_file.write_text(RUN_FILE)
        (world.folder / "train.py").touch()

    def launch(self, loss: float | None = None):
        """One run to its end."""
        world, metrics = self.world, {} if loss is None else {"loss": loss}

        def program(node, job) -> None:
            world.succeed(node, job)
            node.says(Phase.DONE, attempt=job.attempt, step=10, metrics=metrics)

        world.program = program
        context = Context(world.events.append, world.timeouts)
        return runs.launch(world.run_file, load(world.run_file), context)

    def told(self, kind: type):
        return [event for event in self.world.events if isinstance(event, kind)]


@pytest.fixture
def nights(world) -> Nights:
    return Nights(world)


def test_a_run_that_is_worse_than_those_before_succeeds_and_ends_with_exit_code_6(nights):
    assert [nights.launch(loss).exit_code for loss in (1.8, 1.8)] == [0, 0]
    assert record.load("last").checks[0].said == "1.8 <= 2; not compared yet: 1 of 2 runs"
    assert nights.told(RunRegressed) == []
    outcome = nights.launch(1.9)
    ended = record.load("last")
    assert (outcome.exit_code, ended.exit_code, ended.verdict, ended.state) == (6, 6, 0, State.SUCCEEDED)
    assert isinstance(outcome.error, NotAsExpected)
    words = "loss 1.9 > 1.836, the median of 2 runs + 2 %"
    assert outcome.error.what == f"run {ended.run_id} succeeded, but not as expected: {words}" == ended.reason
    assert (ended.teardown, ended.checkpoint_id, nights.world.cloud.billed) == ("confirmed", "a001-step-10", set())
    (regressed,) = nights.told(RunRegressed)
    assert (regressed.run_id, [each["said"] for each in regressed.checks]) == (
        ended.run_id,
        ["1.9 > 1.836, the median of 2 runs + 2 %"],
    )
    last = nights.told(RunEnded)[-1]
    assert (last.state, last.exit_code, nights.world.events.index(regressed)) == (
        "succeeded",
        6,
        nights.world.events.index(last) - 1,
    )
    assert nights.launch(1.81).exit_code == 0, "what was bad is not compared with"
    assert record.load("last").earlier == {"loss": [1.8, 1.8]}
    nights.world.run_file.write_text(RUN_FILE.replace("name: it", "name: other"))
    assert nights.launch(1.9).exit_code == 0, "runs of another name are no measure"


@pytest.mark.parametrize(("project", "compared"), [("", True), ("another", False)])
def test_runs_of_an_earlier_mgpu_are_compared_with_and_those_of_another_project_are_not(nights, project, compared):
    for _ in range(2):
        nights.launch(1.8)
        earlier = record.load("last")
        earlier.project_name, earlier.fleet_name = project, f"{project or 'mine'}-{earlier.stack}"
        record.save(earlier)
    nights.launch(1.8)
    assert record.load("last").earlier == {"loss": [1.8, 1.8] if compared else []}


def test_what_was_never_reported_is_not_as_expected(nights):
    outcome = nights.launch()
    assert (outcome.exit_code, "loss was never reported" in outcome.error.what) == (6, True)


def test_a_run_that_fails_is_not_judged(nights):
    nights.world.program = lambda node, job: node.says(Phase.FAILED, fault=Fault.USER, reason="exit code 3")
    outcome = runs.launch(
        nights.world.run_file, load(nights.world.run_file), Context(nights.world.events.append, nights.world.timeouts)
    )
    assert (outcome.exit_code, record.load("last").checks, nights.told(RunRegressed)) == (6, [], [])
    assert record.load("last").state is State.FAILED


@pytest.mark.parametrize("how", ["attach", "down"])
@pytest.mark.parametrize(("verdict", "exit_code"), [(0, 6), (8, 8)])
def test_who_ends_it_for_a_supervisor_that_died_judges_it(nights, how, verdict, exit_code):
    world = nights.world
    handle = world.cloud.rent("mine-run-1")
    world.stacks["run-1"] = world.output(handle)
    found = world.record(
        "run-1", state=State.TEARDOWN, teardown="asked", verdict=verdict, expect={"loss": {"max": 1.0}},
        metrics={"loss": 2.0}, attempt=1, fleet=world.stacks["run-1"].model_dump(mode="json"),
    )  # fmt: skip
    record.Folder("run-1").run_file.write_text(RUN_FILE)
    context = Context(world.events.append, world.timeouts)
    attach.attach(found, context) if how == "attach" else down.down(found, context)
    ended = record.load("run-1")
    assert (ended.exit_code, ended.state.final, len(nights.told(RunRegressed))) == (exit_code, True, exit_code == 6)
    down.down(ended, context, left=True)
    assert len(nights.told(RunRegressed)) == (exit_code == 6), "told once"


def test_status_and_ls_say_it(nights):
    nights.launch(2.5)

    def mgpu(*args: str) -> str:
        return CliRunner().invoke(cli, args, standalone_mode=False).stdout

    shown = " ".join(mgpu("status").split())
    assert "state succeeded, but not as expected expectations 1 of 2 met" in shown
    assert "loss NOT MET: 2.5 > 2; not compared yet: 0 of 2 runs recoveries 0 <= 0" in shown
    said = json.loads(mgpu("status", "--json"))
    assert (said["state"], said["exit_code"], said["as_expected"]) == ("succeeded", 6, False)
    assert [(each["metric"], each["met"], each["value"]) for each in said["checks"]] == [
        ("loss", False, 2.5),
        ("recoveries", True, 0.0),
    ]
    assert "succeeded, not as expected" in mgpu("ls")
