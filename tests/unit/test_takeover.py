"""I1, I2, I7: who takes a run or a fleet over finds it as it is, and one fleet serves one run at a time."""

from __future__ import annotations

import gzip
import json
import time

import pytest
from mgpu_train.agent.status import Phase

from mgpu.errors import InputError, StackError, TeardownIncomplete
from mgpu.iac.environment import backend_dir
from mgpu.run import down as downs
from mgpu.run import fleets, record, stacks, takeover
from mgpu.run import launch as runs
from mgpu.run.record import Folder, State
from mgpu.spec.load import load

RUN_FILE = """
name: it
provider: local
nodes: 1
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
checkpoint: none
"""


@pytest.fixture
def project(world):
    (world.folder / "train.py").write_text("pass\n")
    return Project(world)


class Project:
    """The world with a run file, and stacks that stand in it."""

    def __init__(self, world):
        self.world = world

    @property
    def context(self):
        return stacks.Context(self.world.events.append, self.world.timeouts)

    def spec(self, more=""):
        self.world.run_file.write_text(RUN_FILE + more)
        return load(self.world.run_file)

    def stands(self, stack="dev"):
        handle = self.world.cloud.rent(f"mine-{stack}")
        self.world.stacks[stack] = self.world.output(handle)
        return self.world.stacks[stack].model_dump(mode="json")

    def left_behind(self, run_id="run-1", **more):
        """A run whose supervisor was killed; its program still trains."""
        self.spec()
        found = self.world.record(run_id, **{"state": State.RUNNING, "attempt": 1} | more)
        Folder(run_id).run_file.write_text(self.world.run_file.read_text())
        self.world.nodes[0].says(Phase.TRAINING)
        return found


def test_a_run_that_ended_meanwhile_is_not_taken_over(project):
    """`mgpu stop` reads the record, then the supervisor closes it: the truth must not be written over."""
    seen = project.left_behind(fleet=project.stands("run-1"))
    ended = record.load("run-1")
    ended.to(State.SUCCEEDED)
    ended.exit_code = 0
    record.save(ended)
    outcome = takeover.attach(seen, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    assert record.load("run-1").state is State.SUCCEEDED
    assert project.world.calls == []


@pytest.mark.parametrize(
    ("verdict", "state"), [(0, State.SUCCEEDED), (6, State.FAILED), (8, State.STOPPED), (130, State.STOPPED)]
)
def test_a_teardown_that_was_cut_off_ends_with_the_verdict_it_began_with(project, verdict, state):
    fleet = project.stands("run-1")
    found = project.left_behind(state=State.TEARDOWN, teardown="asked", fleet=fleet, verdict=verdict, reason="why")
    project.world.connect_error = AssertionError("its machines may be gone: nobody connects")
    outcome = takeover.attach(found, project.context)
    assert outcome is not None
    assert outcome.exit_code == verdict
    assert (record.load("run-1").state, record.load("run-1").teardown) == (state, "confirmed")
    assert project.world.cloud.billed == set()


def test_the_verdict_is_on_disk_before_the_teardown_begins(project):
    spec, seen = project.spec(), []
    project.world.hooks["destroy"] = lambda: seen.append(record.load("last"))
    runs.launch(project.world.run_file, spec, project.context)
    assert [(r.state, r.verdict, r.exit_code) for r in seen] == [(State.TEARDOWN, 0, None)]


def test_down_ends_a_run_that_nobody_supervises(project):
    found = project.left_behind(fleet=project.stands("run-1"))
    downs.down(found, project.context)
    ended = record.load("run-1")
    assert (ended.state, ended.teardown, ended.exit_code) == (State.STOPPED, "confirmed", 130)
    assert project.world.cloud.billed == set()


def test_down_that_is_incomplete_is_not_the_end(project):
    found = project.left_behind(fleet=project.stands("run-1"))
    project.world.cloud.stuck.add("mine-run-1-0")
    with pytest.raises(Exception, match="may still be billed"):
        downs.down(found, project.context)
    assert (record.load("run-1").state, record.load("run-1").teardown) == (State.TEARDOWN, "asked")
    project.world.cloud.stuck.clear()
    downs.down(found, project.context)
    assert record.load("run-1").state is State.STOPPED


def test_a_fleet_serves_one_run_at_a_time(project):
    fleet = project.stands()
    project.left_behind(stack="dev", own_stack=False, fleet=fleet)
    with pytest.raises(InputError, match="used by run run-1"):
        runs.run(project.world.run_file, project.spec(), "dev", project.context)
    with pytest.raises(InputError, match="used by run run-1"):
        downs.stack_down(project.world.folder, "dev", project.context)
    kept = project.world.record(
        "run-0", stack="dev", own_stack=False, fleet=fleet, state=State.SUCCEEDED, teardown="kept"
    )
    with pytest.raises(InputError, match="used by run run-1"):
        downs.down(kept, project.context)
    assert record.ids() == ["run-0", "run-1"]
    assert project.world.cloud.billed == {"mine-dev-0"}


def test_a_kept_fleet_that_is_given_back_is_not_remembered_as_kept(project):
    project.stands()
    for _ in range(2):
        runs.run(project.world.run_file, project.spec("teardown: keep\n"), "dev", project.context)
    assert [each.teardown for each in record.every()] == ["kept", "kept"]
    downs.stack_down(project.world.folder, "dev", project.context)
    assert [each.teardown for each in record.every()] == ["confirmed", "confirmed"]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"state": State.RUNNING}, "is not over"),
        ({"state": State.STOPPED, "teardown": "kept"}, "has machines"),
        ({"state": State.FAILED, "teardown": "asked"}, "has machines"),
    ],
)
def test_a_run_that_may_have_machines_is_not_resumed_on_others(project, known, why):
    found = project.left_behind(fleet=project.stands("run-1"), **known)
    before = Folder("run-1").record.read_bytes()
    with pytest.raises(InputError, match=why):
        runs.launch(project.world.run_file, project.spec(), project.context, resume=found)
    assert Folder("run-1").record.read_bytes() == before
    assert project.world.calls == []


def test_a_stack_that_is_not_there_is_not_said_to_be_given_back(project, monkeypatch):
    project.spec()
    open_stack = stacks.open_stack

    def opened(*args):
        stack = open_stack(*args)
        monkeypatch.setattr(stack, "exists", lambda: False, raising=False)
        return stack

    monkeypatch.setattr(downs, "open_stack", opened)
    with pytest.raises(InputError, match="no stack typo"):
        downs.stack_down(project.world.folder, "typo", project.context)


def test_stop_while_machines_are_made_undoes_it(project):
    def asked():
        Folder(record.ids()[-1]).stop.touch()
        while "interrupt" not in project.world.calls:
            time.sleep(0.01)
        raise StackError("`pulumi up` was cancelled")

    project.world.hooks["up"] = asked
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert outcome.exit_code == 130
    assert record.load("last").state is State.STOPPED
    assert "connect" not in project.world.calls


def test_an_end_that_was_asked_for_before_makes_no_machines(project, monkeypatch):
    real = stacks.stack_of

    def stop_first(found, context):
        Folder(found.run_id).stop.touch()
        return real(found, context)

    monkeypatch.setattr(runs, "stack_of", stop_first)
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert outcome.exit_code == 130
    assert "up" not in project.world.calls


# --- a program of the user's may give its fleets names of its own -----------------------------------------------------


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_fleet_of_another_name_than_its_stack_is_used_all_the_same(world, packed):
    for name in ("theirs", "half-made", "lost"):
        world.cloud.rent(name)
    resources = [
        {"type": "pulumi:pulumi:Stack"},
        {"type": "mgpu:index:Fleet", "inputs": {"name": "theirs"}},
        {"type": "mgpu:index:FleetGuard", "inputs": {"fleet": "half-made"}},
    ]
    state = backend_dir() / ".pulumi" / "stacks" / "mine" / f"dev.json{packed}"
    state.parent.mkdir(parents=True)
    data = json.dumps({"version": 3, "checkpoint": {"latest": {"resources": resources}}}).encode()
    state.write_bytes(gzip.compress(data) if packed else data)
    (state.parent / "other.json").write_bytes(data[:50])
    found = {fleet.name: fleet.used_by for fleet in fleets.alive()}
    assert found == {"theirs": "stack dev", "half-made": "stack dev", "lost": ""}


def test_what_the_provider_lists_under_the_outputs_own_name_counts(project):
    """Pulumi fails: without the output's name the machines would be said to be gone."""
    handle = project.world.cloud.rent("theirs")
    project.world.stacks["dev"] = project.world.output(handle)
    project.world.hooks["destroy"] = StackError("the state is locked")
    project.world.cloud.stuck.add("theirs-0")
    project.spec()
    with pytest.raises(TeardownIncomplete, match="theirs-0"):
        downs.stack_down(project.world.folder, "dev", project.context)
    assert "theirs" in project.world.cloud.ended
