"""I1, I2, I7: who takes a run or a fleet over finds it as it is, and one fleet serves one run at a time."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.checkpoint.log.commit_log import CommitLog, Fenced
from mgpu_train.store import Unavailable, open_store
from waiting import until

from mgpu.backend import location
from mgpu.cli import cli
from mgpu.cli.common import closing
from mgpu.console import Console
from mgpu.context import Context
from mgpu.errors import AuthError, InputError, NoCapacity, StackError, TakenOver, TeardownIncomplete
from mgpu.events import Note, Warned
from mgpu.providers.base import NodePhase
from mgpu.run.fleet import inventory
from mgpu.run.fleet import stack as stacks
from mgpu.run.lifecycle import attach, supervise
from mgpu.run.lifecycle import down as downs
from mgpu.run.lifecycle import launch as runs
from mgpu.run.record import record, shared, supervisor_lock
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Interruption, State
from mgpu.run.record.session import Session
from mgpu.run.view import RunView

RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
checkpoint: none
"""


def test_a_run_that_ended_meanwhile_is_not_taken_over(project):
    """`mgpu stop` reads the record, then the supervisor closes it: the truth must not be written over."""
    seen = project.left_behind(fleet=project.fleet("run-1"))
    ended = record.load("run-1")
    ended.to(State.SUCCEEDED)
    ended.exit_code = 0
    record.save(ended)
    outcome = attach.attach(seen, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    assert record.load("run-1").state is State.SUCCEEDED
    assert project.world.calls == []


@pytest.mark.parametrize(
    ("verdict", "state"), [(0, State.SUCCEEDED), (6, State.FAILED), (8, State.STOPPED), (130, State.STOPPED)]
)
def test_a_teardown_that_was_cut_off_ends_with_the_verdict_it_began_with(project, verdict, state, monkeypatch):
    def gone_with_the_stack(*_):
        raise StackError("stack run-1 has no SSH key in its state")

    monkeypatch.setattr(supervise.key, "bring", gone_with_the_stack)
    fleet = project.fleet("run-1")
    found = project.left_behind(state=State.TEARDOWN, teardown="asked", fleet=fleet, verdict=verdict, reason="why")
    project.world.connect_error = AssertionError("its machines may be gone: nobody connects")
    outcome = attach.attach(found, project.context)
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
    found = project.left_behind(fleet=project.fleet("run-1"))
    downs.down(found, project.context)
    ended = record.load("run-1")
    assert (ended.state, ended.teardown, ended.exit_code) == (State.STOPPED, "confirmed", 130)
    assert project.world.cloud.billed == set()


def test_down_that_is_incomplete_is_not_the_end(project):
    found = project.left_behind(fleet=project.fleet("run-1"))
    project.world.cloud.stuck.add("mine-run-1-0")
    with pytest.raises(Exception, match="may still be billed"):
        downs.down(found, project.context)
    assert (record.load("run-1").state, record.load("run-1").teardown) == (State.TEARDOWN, "asked")
    project.world.cloud.stuck.clear()
    downs.down(found, project.context)
    assert record.load("run-1").state is State.STOPPED


def test_a_fleet_serves_one_run_at_a_time(project):
    fleet = project.fleet()
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
    found = project.left_behind(fleet=project.fleet("run-1"), **known)
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
        until(lambda: "interrupt" in project.world.calls)
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

    monkeypatch.setattr(supervise, "stack_of", stop_first)
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert outcome.exit_code == 130
    assert "up" not in project.world.calls


# --- attach goes on from wherever the run was -------------------------------------------------------------------------


@pytest.fixture
def dead(project):
    """A run of `mgpu launch` whose supervisor was killed: `dead(state, ...)` is its record."""

    def left(state, *, spec="", stands=True, **more):
        project.spec(spec)
        fleet = project.fleet("run-1") if stands else None
        found = project.world.record("run-1", **{"state": state, "attempt": 1, "fleet": fleet} | more)
        Folder("run-1").run_file.write_text(project.world.run_file.read_text())
        return found

    return left


@pytest.fixture
def kept(project, tmp_path):
    """A store for the checkpoints of `run-1`, of which attempt 1 has begun."""
    url = f"file://{tmp_path}/store"
    CommitLog(open_store(url), "run-1").begin_attempt(1, "writer-1")
    return Store(project.world, url)


class Store:
    """What attempt 1 of run-1 has left there."""

    def __init__(self, world, url):
        self.world, self.url = world, url
        self.log = CommitLog(open_store(url), "run-1")
        self.spec = f"checkpoint: {{to: '{url}'}}\n"

    def saved(self, step, attempt=1):
        self.world.commit(self.url, "run-1", attempt=attempt, writer=f"writer-{attempt}", step=step)

    def ended(self, **how):
        self.log.end(1, "writer-1", **how)


RECOVERS = "recovery: {attempts: 3, wait_minutes: 0}\n"


def taken_over(project, found, **more):
    outcome = attach.attach(found, project.context, **more)
    assert outcome is not None
    return outcome


def all_is_given_back(project):
    assert project.world.cloud.billed == set()
    assert record.load("run-1").teardown == "confirmed"


@pytest.mark.parametrize("made", [True, False], ids=["machines stand", "nothing stands"])
def test_a_run_that_had_no_machines_yet_gets_them_and_trains(project, dead, made):
    """Killed between `up` and its result: the user asked for a run, and gets it."""
    found = dead(State.PROVISIONING, attempt=0, stands=made)
    found.fleet = None
    record.save(found)
    outcome = taken_over(project, found)
    assert outcome.exit_code == 0
    assert project.world.calls.count("up") == 1, "it adopts what stands"
    assert (record.load("run-1").attempt, record.load("run-1").recoveries) == (1, 0)
    all_is_given_back(project)


def test_a_run_that_an_earlier_version_took_goes_on_though_a_rule_is_stricter_now(project, dead):
    found = dead(State.PROVISIONING, attempt=0)
    kept = Folder("run-1").run_file
    kept.write_text(kept.read_text(encoding="utf-8") + "env: {RANK: '1'}\n", encoding="utf-8")  # reserved
    assert taken_over(project, found).exit_code == 0
    all_is_given_back(project)


def test_a_run_on_a_stack_that_stands_goes_on_there(project, dead):
    found = dead(State.PROVISIONING, attempt=0, own_stack=False)
    assert taken_over(project, found).exit_code == 0
    assert "up" not in project.world.calls
    assert project.world.stacks == {"run-1": None}


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING])
@pytest.mark.parametrize("known", [True, False], ids=["in the record", "in the stack alone"])
def test_with_the_end_asked_for_it_is_undone(project, dead, state, known):
    found = dead(state)
    if not known:
        found.fleet = None
        record.save(found)
    Folder("run-1").stop.touch()
    assert taken_over(project, found).exit_code == 130
    assert "up" not in project.world.calls
    assert record.load("run-1").state is State.STOPPED
    all_is_given_back(project)


def test_an_end_that_was_asked_for_needs_no_secret(project, dead, monkeypatch):
    monkeypatch.delenv("TOKEN", raising=False)
    found = dead(State.PROVISIONING, spec="secrets: [TOKEN]\n")
    Folder("run-1").stop.touch()
    assert taken_over(project, found).exit_code == 130
    all_is_given_back(project)


def test_another_programs_machines_are_known_before_anything_is_undone(project, dead):
    project.world.ours = False
    found = dead(State.PROVISIONING, own_stack=False)
    found.fleet = None
    record.save(found)
    Folder("run-1").stop.touch()
    assert taken_over(project, found).exit_code == 130
    assert record.load("run-1").teardown == "not ours"
    assert project.world.cloud.billed == {"mine-run-1-0"}


def broken(**more):
    return Interruption(
        **{"attempt": 1, "reason": "node 0 is gone", "fault": "provider", "nodes": [0], "step": 12, "heard_at": 1.0,
           "noticed_at": 2.0, "ended_at": 3.0} | more
    )  # fmt: skip


def test_a_repair_that_was_cut_off_is_done_and_not_counted_twice(project, dead):
    found = dead(State.REPAIRING, spec=RECOVERS, recoveries=1, interruptions=[broken()])
    seen = []
    project.world.hooks["up"] = lambda: seen.append(set(project.world.cloud.billed))
    assert taken_over(project, found).exit_code == 0
    assert seen == [set()], "the lost machine is confirmed gone before another one is asked for"
    ended = record.load("run-1")
    assert (ended.recoveries, ended.attempt) == (1, 2)
    assert ended.interruptions[0].repaired_at is not None
    all_is_given_back(project)


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING])
def test_agents_that_were_started_already_end_before_the_next_attempt_begins(project, dead, monkeypatch, state):
    """Killed between the agents' start and its own word of it: an agent refuses to be started beside another one."""
    found = dead(state, spec=RECOVERS, writer="writer-1")
    node, asked = project.world.nodes[0], []
    node.says(Phase.TRAINING)

    def stop(_stdin):
        asked.append(len(asked))
        node.agent_lives = len(asked) < 3  # it takes its time
        return {}

    def start(_node, job):
        assert not node.agent_lives
        project.world.succeed(node, job)

    monkeypatch.setattr(node, "_stop", stop)
    project.world.program = start
    assert taken_over(project, found).exit_code == 0
    assert asked == [0, 1, 2]
    assert record.load("run-1").attempt == 2


def test_a_repair_waits_for_capacity_also_where_another_one_began_it(project, dead):
    found = dead(State.REPAIRING, spec=RECOVERS.replace("0}", "1}"), recoveries=1, interruptions=[broken()])
    refusals = [NoCapacity("none today"), None]

    def up():
        refusal = refusals.pop(0)
        if refusal is not None:
            raise refusal

    project.world.timeouts = project.world.timeouts.model_copy(update={"sold_out_s": 0.0})
    project.world.hooks["up"] = up
    assert taken_over(project, found).exit_code == 0
    assert refusals == []


def test_the_new_machine_of_a_repair_that_was_done_is_not_ended(project, dead):
    found = dead(State.REPAIRING, spec=RECOVERS, recoveries=1, interruptions=[broken(repaired_at=4.0)])
    seen = []
    project.world.hooks["up"] = lambda: seen.append(set(project.world.cloud.billed))
    assert taken_over(project, found).exit_code == 0
    assert seen == [{"mine-run-1-0"}]


def test_a_repair_is_remembered_with_the_fleet_that_it_made(project, dead):
    """Killed right after it: whoever takes over must not end the new machine as if it were the lost one."""
    session = Session(dead(State.REPAIRING, interruptions=[broken()]), project.context.emit, project.context.timeouts)
    stacks.bring_up(session, stacks.stack_of(session.record, project.context), (0,))
    assert record.load("run-1").under_repair is None


@pytest.mark.parametrize(("lost", "fails"), [((0,), False), ((0,), True), ((), False)])
def test_a_gang_that_was_given_back_costs_nothing_while_the_next_one_waits(project, dead, monkeypatch, lost, fails):
    """In a cluster's queue: perhaps for a day, and perhaps for nothing."""
    cloud, now = project.world.cloud, [1000.0]
    cloud.capabilities = cloud.capabilities.model_copy(update={"repairs_single_nodes": False})
    session = Session(dead(State.REPAIRING, interruptions=[broken()]), project.context.emit, project.context.timeouts)
    session.record.costs(9, 1.0, since=500.0)
    monkeypatch.setattr(time, "time", lambda: now[0])

    def up():
        now[0] += 24 * 3600
        if fails:
            raise NoCapacity("waited in the queue for 1440 min")

    project.world.hooks["up"] = up
    with pytest.raises(NoCapacity) if fails else nullcontext():
        stacks.bring_up(session, stacks.stack_of(session.record, project.context), lost)
    spent = [(each.since, each.until) for each in record.load("run-1").spending]
    assert spent == [(500.0, 1000.0), *([] if fails else [(now[0], None)])]


@pytest.mark.parametrize("fails", [False, True])
def test_what_machines_are_waited_for_is_in_the_record_as_long_as_they_are(project, dead, fails):
    """`mgpu status` of another process reads it."""
    seen = list[tuple[str, str]]()

    def up():
        project.world.heard(Note("in the queue (Priority); waiting for 60 min at most"))
        project.world.heard(Warned("no note"))
        seen.append((RunView.of(record.load("run-1")).reason, record.load("run-1").state))
        if fails:
            raise NoCapacity("none is left")

    project.world.hooks["up"] = up
    session = Session(dead(State.PROVISIONING), project.context.emit, project.context.timeouts)
    with pytest.raises(NoCapacity) if fails else nullcontext():
        stacks.bring_up(session, stacks.stack_of(session.record, project.context))
    assert seen == [("in the queue (Priority); waiting for 60 min at most", "provisioning")]
    session.save()
    assert record.load("run-1").reason == ""


def test_no_replacement_is_asked_for_while_the_lost_machine_may_live(project, dead):
    """I2."""
    found = dead(State.REPAIRING, spec=RECOVERS, recoveries=1, interruptions=[broken()])
    project.world.cloud.stuck.add("mine-run-1-0")
    outcome = taken_over(project, found)
    assert "up" not in project.world.calls
    assert outcome.exit_code == 7, "and it is still there at the end"
    project.world.cloud.stuck.clear()
    downs.down(record.load("run-1"), project.context)
    all_is_given_back(project)


# --- machines that ended while nobody was there -----------------------------------------------------------------------


def gone(project, found):
    project.world.cloud.phases["mine-run-1-0"] = NodePhase.TERMINATED
    project.world.hooks["up"] = StackError("a machine was rented for a run that is over")
    return taken_over(project, found)


def test_a_run_that_said_that_it_succeeded_did(project, dead, kept):
    kept.saved(10)
    kept.ended(succeeded=True)
    assert gone(project, dead(State.RUNNING, spec=kept.spec, store=kept.url)).exit_code == 0
    ended = record.load("run-1")
    assert (ended.state, ended.checkpoint_step) == (State.SUCCEEDED, 10), "the last commit, which nobody saw"
    all_is_given_back(project)


def test_a_success_whose_final_checkpoint_is_gone_is_not_that_of_the_one_before(project, dead, kept):
    kept.saved(10)
    kept.saved(20)
    kept.ended(succeeded=True)
    root = Path(kept.url.removeprefix("file://"))
    assert [path.unlink() for path in root.rglob("*") if path.is_file() and "a001-step-20" in str(path)]
    assert gone(project, dead(State.RUNNING, spec=kept.spec, store=kept.url)).exit_code == 6
    ended = record.load("run-1")
    assert "a001-step-20" in ended.reason
    assert (ended.state, ended.fault, ended.checkpoint_step) == (State.FAILED, "infrastructure", 10)


def finished(node):
    node.says(Phase.DONE)
    node.agent_lives = False


@pytest.mark.parametrize(
    ("how", "code"), [({"succeeded": True}, 0), ({"succeeded": False, "fault": "user", "reason": "exit code 3"}, 6)]
)
def test_an_attempt_that_its_supervisor_never_saw_begin_may_be_over(project, dead, kept, how, code):
    """Killed between the agents' start and its own word of it; the agents went on to their end."""
    kept.saved(10)
    kept.ended(**how)
    found = dead(State.PROVISIONING, spec=kept.spec + RECOVERS, store=kept.url, writer="writer-1")
    finished(project.world.nodes[0])
    assert gone(project, found).exit_code == code
    assert record.load("run-1").attempt == 1
    all_is_given_back(project)


def test_the_attempt_after_one_that_was_never_seen_to_begin_may_have_nothing_left_to_save(project, dead, kept):
    kept.saved(10)
    found = dead(State.PROVISIONING, spec=kept.spec, store=kept.url, writer="writer-1")
    finished(project.world.nodes[0])
    project.world.program = lambda node, job: node.says(Phase.DONE, attempt=job.attempt)
    assert taken_over(project, found).exit_code == 0
    ended = record.load("run-1")
    assert (ended.attempt, ended.recoveries, ended.checkpoint_step) == (2, 1, 10)


def test_success_without_a_checkpoint_of_this_attempt_is_not_believed(project, dead, kept):
    kept.ended(succeeded=True)
    assert gone(project, dead(State.RUNNING, spec=kept.spec, store=kept.url)).exit_code != 0


def test_the_checkpoint_of_an_earlier_launch_is_no_success_of_this_one(project, dead, kept):
    kept.saved(10)
    kept.log.begin_attempt(2, "writer-2")
    kept.log.end(2, "writer-2", succeeded=True)
    assert gone(project, dead(State.RUNNING, spec=kept.spec, store=kept.url, attempt=2)).exit_code == 6


@pytest.mark.parametrize(("step", "code"), [(20, 0), (19, 4)])
def test_the_bundled_trainer_is_done_with_its_last_step(project, dead, kept, step, code):
    """4: the repair, which this test's stack refuses."""
    kept.saved(step)
    found = dead(State.RUNNING, store=kept.url)
    trains = kept.spec + RECOVERS + "train: {steps: 20}\n"
    Folder("run-1").run_file.write_text(RUN_FILE.replace("command: [train.py]\ncheckpoint: none\n", "") + trains)
    assert gone(project, found).exit_code == code


def test_a_log_that_lost_its_end_does_not_make_the_record_forget_it(project, dead, kept):
    kept.saved(5)
    found = dead(State.RUNNING, spec=kept.spec, store=kept.url, checkpoint_id="a001-step-10", checkpoint_step=10)
    gone(project, found)
    assert record.load("run-1").checkpoint_id == "a001-step-10"
    assert any("a001-step-10 was committed" in each.text for each in project.world.of(Warned))


def test_a_program_that_failed_by_itself_is_not_begun_again(project, dead, kept):
    kept.saved(5)
    kept.ended(succeeded=False, fault="user", reason="node 0: exit code 3")
    outcome = gone(project, dead(State.RUNNING, spec=kept.spec + RECOVERS, store=kept.url))
    assert outcome.exit_code == 6
    assert "exit code 3" in outcome.error.what
    assert "step 5" in outcome.error.why
    all_is_given_back(project)


@pytest.mark.parametrize("said", [True, False], ids=["said so", "said nothing"])
def test_an_attempt_that_was_cut_off_is_followed_by_another(project, dead, kept, said):
    kept.saved(5)
    if said:
        kept.ended(succeeded=False, fault="infrastructure", reason="node 1 was lost")
    found = dead(State.RUNNING, spec=kept.spec + RECOVERS, store=kept.url)
    project.world.cloud.phases["mine-run-1-0"] = NodePhase.TERMINATED
    assert taken_over(project, found).exit_code == 0
    ended = record.load("run-1")
    assert (ended.attempt, ended.recoveries, ended.checkpoint_step) == (2, 1, 20)
    all_is_given_back(project)


@pytest.mark.parametrize("more", [{"spec": "recovery: {attempts: 1}\n"}, {"spec": RECOVERS, "recoveries": 2}])
def test_recoveries_are_counted_across_supervisors(project, dead, kept, more):
    more["spec"] += kept.spec
    outcome = gone(project, dead(State.RUNNING, store=kept.url, **more))
    assert outcome.exit_code == 6
    assert "nobody supervised" in outcome.error.what


@pytest.mark.parametrize("recovery", [RECOVERS, "recovery: {attempts: 1}\n"], ids=["recovers", "does not"])
def test_past_the_hard_cap_no_machine_is_rented_and_that_is_the_cause(project, dead, kept, recovery):
    found = dead(State.RUNNING, spec=kept.spec + recovery, store=kept.url, hard_cap_at=1000.0)
    assert gone(project, found).exit_code == 8


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING, State.RUNNING])
def test_the_hard_cap_is_the_runs_whatever_becomes_of_its_machines(project, dead, kept, state):
    """A fleet of which nothing is left is made again; it ends when the first one would have."""
    cap = time.time() + 1000
    found = dead(state, spec=kept.spec + RECOVERS, store=kept.url, hard_cap_at=cap)
    project.world.cloud.phases |= dict.fromkeys(project.world.cloud.billed, NodePhase.TERMINATED)
    taken_over(project, found)
    assert project.world.capped == [cap]


def test_a_repair_brings_the_stack_up_with_the_image_that_the_run_has(project, dead, kept):
    """The stack builds none of what was changed since."""
    image = f"registry.example/a@sha256:{'a' * 64}"
    found = dead(State.REPAIRING, spec=kept.spec + RECOVERS, store=kept.url, image=image)
    project.world.cloud.phases |= dict.fromkeys(project.world.cloud.billed, NodePhase.TERMINATED)
    project.world.hooks["up is done"] = StackError("the test has seen enough")
    assert taken_over(project, found).exit_code == StackError.exit_code
    assert project.world.brought_up_with == [image]


@pytest.mark.parametrize("near", [{"hard_cap_at": 30.0}, {"begun_at": 30.0 - 3600.0}], ids=["cap", "deadline"])
@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING, State.RUNNING])
def test_so_near_to_the_hard_cap_that_it_is_not_worth_it_no_machine_is_rented(project, dead, kept, state, near):
    """Nor so near to the run's own end, which on machines that live longer is the sooner one."""
    ends = {name: time.time() + at for name, at in near.items()}
    found = dead(state, spec=kept.spec + RECOVERS, store=kept.url, **ends)
    project.world.cloud.phases |= dict.fromkeys(project.world.cloud.billed, NodePhase.TERMINATED)
    outcome = taken_over(project, found)
    assert "up" not in project.world.calls
    assert (outcome.exit_code, outcome.record.state) == (8, State.STOPPED)
    assert "hard cap" in outcome.record.reason
    all_is_given_back(project)


@pytest.mark.parametrize("said", [True, False], ids=["said so", "said nothing"])
def test_a_stop_that_was_asked_for_is_a_stop(project, dead, kept, said):
    if said:
        kept.ended(succeeded=False, fault="stopped", reason="this node was asked to stop")
    found = dead(State.STOPPING, spec=kept.spec + RECOVERS, store=kept.url)
    Folder("run-1").stop.touch()
    assert gone(project, found).exit_code == 130


def test_without_checkpoints_nothing_is_done_twice(project, dead):
    outcome = gone(project, dead(State.RUNNING, spec=RECOVERS))
    assert outcome.exit_code == 6
    assert "nobody knows" in outcome.error.what


def test_a_store_that_does_not_answer_judges_nothing_and_nothing_is_changed(project, dead, kept, monkeypatch):
    kept.saved(10)
    kept.ended(succeeded=True)
    found = dead(State.RUNNING, spec=kept.spec, store=kept.url)
    with monkeypatch.context() as patch:
        patch.setattr(CommitLog, "ended", unavailable)
        with pytest.raises(InputError, match="cannot be judged now"):
            gone(project, found)
    assert record.load("run-1").state is State.RUNNING
    assert not record.supervised("run-1")
    assert gone(project, found).exit_code == 0


def unavailable(*_args, **_named):
    raise Unavailable("503")


# --- who supervises, in the store -------------------------------------------------------------------------------------


def test_a_takeover_stands_in_the_store_and_fences_the_old_one(project, dead, kept):
    kept.log.take_over("the-dead-one", host="laptop", pid=7)
    found = dead(State.RUNNING, spec=kept.spec, store=kept.url)
    kept.saved(10)
    project.world.nodes[0].says(Phase.DONE)
    assert taken_over(project, found).exit_code == 0
    assert kept.log.supervisor().writer == record.load("run-1").supervisor != ""
    with pytest.raises(Fenced):
        kept.log.begin_attempt(2, "writer-2", supervisor="the-dead-one")


def test_a_store_that_is_down_leaves_no_run_unwatched(project, dead, kept, monkeypatch):
    found = dead(State.RUNNING, spec=kept.spec, store=kept.url)
    kept.saved(10)
    project.world.nodes[0].says(Phase.DONE)
    monkeypatch.setattr(CommitLog, "take_over", unavailable)
    assert taken_over(project, found).exit_code == 0
    assert any("store does not answer" in event.text for event in project.world.of(Warned))


def test_a_launch_says_in_the_store_who_supervises(project, tmp_path):
    url = f"file://{tmp_path}/store"
    done = runs.launch(project.world.run_file, project.spec(f"checkpoint: {{to: '{url}'}}\n"), project.context).record
    assert CommitLog(open_store(url), done.run_id).supervisor().writer == done.supervisor != ""


# --- a secret that this process lacks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING])
def test_where_an_attempt_would_have_to_begin_it_is_refused_and_nothing_is_touched(project, dead, monkeypatch, state):
    monkeypatch.delenv("TOKEN", raising=False)
    found = dead(state, spec="secrets: [TOKEN]\n" + RECOVERS)
    with pytest.raises(InputError, match="TOKEN"):
        attach.attach(found, project.context)
    assert record.load("run-1").state is state
    assert project.world.calls == []
    assert project.world.cloud.billed == {"mine-run-1-0"}
    monkeypatch.setenv("TOKEN", "canary-71ab")
    assert taken_over(project, found).exit_code == 0
    assert b"canary-71ab" in project.world.nodes[0].secrets


def test_a_run_is_watched_without_its_secrets_and_no_other_attempt_begins(project, dead, monkeypatch):
    monkeypatch.delenv("TOKEN", raising=False)
    found = dead(State.RUNNING, spec="secrets: [TOKEN]\n" + RECOVERS)
    project.world.nodes[0].says(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="disk full")
    outcome = taken_over(project, found)
    assert any("TOKEN" in event.text for event in project.world.of(Warned)), "at once, and what is missing"
    assert outcome.exit_code == 6
    assert "secrets are missing" in outcome.error.what
    assert "up" not in project.world.calls


def test_a_run_is_watched_although_the_providers_credentials_have_expired(project, dead, monkeypatch):
    def expired(*_args):
        raise AuthError("the credentials have expired")

    monkeypatch.setattr(supervise, "secrets_of", expired)
    found = dead(State.RUNNING, spec=RECOVERS)
    project.world.nodes[0].says(Phase.DONE)
    assert taken_over(project, found).exit_code == 0
    assert any("expired" in event.text for event in project.world.of(Warned))


# --- --take-over ------------------------------------------------------------------------------------------------------


def test_a_living_supervisor_is_followed_without_force_and_dispossessed_with_it(project, dead):
    found = dead(State.RUNNING)
    project.world.nodes[0].says(Phase.DONE)
    with record.supervising("run-1") as old:
        assert attach.attach(found, project.context) is None
        assert taken_over(project, found, force=True).exit_code == 0
        assert supervisor_lock.taken_from(Folder("run-1").lock, old)
    all_is_given_back(project)


@pytest.mark.timeout(30)
def test_who_was_dispossessed_leaves_at_once_and_touches_nothing(project):
    """It watches; another process takes the run; its word on disk and the machines stay as they are."""
    held = []

    def program(node, job):
        project.world.train_on(node, job)
        other = record.supervising(job.run_id, force=True)
        held.append((other, other.__enter__()))

    project.world.program = program
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert (outcome.left, outcome.exit_code) == (True, 130)
    assert isinstance(outcome.error, TakenOver)
    assert project.world.nodes[0].stops == 0
    assert len(project.world.cloud.billed) == 1
    assert not any(call.startswith("destroy") for call in project.world.calls)
    held[0][0].__exit__(None, None, None)


@pytest.mark.parametrize("by", [attach.attach, downs.down])
def test_a_supervisor_of_another_machine_whose_number_this_process_has_loses_its_engine(project, dead, by):
    """In containers programs have the same number time and again."""
    found = dead(State.PROVISIONING)
    theirs = supervisor_lock.Holder("theirs", os.getpid(), 1, "another boot", "another-host")
    supervisor_lock.replace_holder(Folder("run-1").lock, theirs)
    by(found, project.context)
    assert project.world.ousted == [theirs.process]


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING, State.TEARDOWN])
def test_a_suspended_supervisor_is_not_waited_for_and_loses_its_engine(project, dead, suspended, state):
    found = dead(state, spec=RECOVERS, verdict=0)
    project.world.timeouts = project.world.timeouts.model_copy(update={"destroy_s": 3600.0})
    old = suspended("run-1")
    assert taken_over(project, found, force=True).exit_code == 0
    assert [process.pid for process in project.world.ousted] == [old.pid]
    all_is_given_back(project)


@pytest.mark.timeout(30)
def test_a_supervisor_that_is_suspended_meanwhile_is_not_waited_for_any_more(project, dead, suspended):
    found = dead(State.REPAIRING, spec=RECOVERS)
    old = suspended("run-1")
    old.send_signal(signal.SIGCONT)

    def emit(event):
        if isinstance(event, Note) and "waiting for" in event.text:
            old.send_signal(signal.SIGSTOP)

    times = project.world.timeouts.model_copy(update={"destroy_s": 3600.0})
    outcome = attach.attach(found, Context(emit, times), force=True)
    assert outcome is not None
    assert outcome.exit_code == 0
    all_is_given_back(project)


@pytest.mark.parametrize("call", ["up", "up is done", "destroy"])
def test_a_takeover_while_the_engine_works_ends_nothing(project, call):
    held = []

    def seized():
        other = record.supervising(record.ids()[-1], force=True)
        held.append((other, other.__enter__()))
        if call == "up":
            raise StackError("`pulumi up` was cancelled")
        assert call != "destroy" or project.world.cloud.billed

    project.world.hooks[call] = seized
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert isinstance(outcome.error, TakenOver)
    assert str(os.getpid()) in outcome.error.what, "it says who"
    assert not record.load("last").state.final
    assert "remove" not in "".join(project.world.calls) or call == "destroy"
    if call != "destroy":
        assert not any(each.startswith("destroy") for each in project.world.calls)


def test_a_run_that_was_left_is_left_also_where_the_backend_answers_again(project, monkeypatch):
    """Its engine was abandoned as the lock grew too old; a moment later it was renewed, and nobody had taken it."""
    away, left = threading.Event(), threading.Event()
    monkeypatch.setattr(shared, "unsure_s", lambda _run: float(away.is_set()))

    def emit(event):
        if isinstance(event, Note) and "left to whoever" in event.text:
            left.set()

    def cut_off():
        away.set()
        assert left.wait(60)
        away.clear()
        raise StackError("`pulumi up` was killed")

    project.world.hooks["up"] = cut_off
    context = Context(emit, project.world.timeouts)
    outcome = runs.launch(project.world.run_file, project.spec(), context)
    assert (outcome.left, outcome.exit_code) == (True, 130)
    assert record.load("last").state is State.PROVISIONING
    assert not any(each.startswith(("destroy", "remove")) for each in project.world.calls)


def test_the_message_of_who_was_dispossessed_is_all_that_is_said(project, capsys):
    held = []

    def program(node, job):
        project.world.train_on(node, job)
        other = record.supervising(job.run_id, force=True)
        held.append((other, other.__enter__()))

    project.world.program = program
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert closing.finish(Console(), outcome) == 130
    told = capsys.readouterr().err
    assert "was taken over by process" in told
    assert "left running" not in told


# --- from anywhere ----------------------------------------------------------------------------------------------------


def test_attach_works_from_a_folder_that_was_deleted(project, dead, tmp_path, monkeypatch):
    found = dead(State.PROVISIONING, attempt=0)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rmdir()
    outcome = taken_over(project, found)
    assert closing.finish(Console(), outcome) == 0
    all_is_given_back(project)


@pytest.mark.parametrize("how", ["attach", "down"])
def test_machines_go_although_the_projects_folder_is_gone(project, dead, how):
    found = dead(State.TEARDOWN, teardown="asked", verdict=0)
    shutil.rmtree(project.world.folder)
    if how == "attach":
        assert taken_over(project, found).exit_code == 7, "the engine's own state could not be emptied"
    else:
        with pytest.raises(TeardownIncomplete, match="machines are gone"):
            downs.down(found, project.context)
    assert project.world.cloud.billed == set()


# --- a full disk here -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("since", [State.RUNNING, State.TEARDOWN])
def test_a_full_disk_of_this_machine_keeps_no_machine_alive(project, monkeypatch, since):
    """I1. What is remembered is old then, and it is said."""
    real = record._keep

    def full(run_id, text):
        state = State(json.loads(text)["state"])
        if state in (since, State.TEARDOWN) or state.final:
            raise OSError(28, "No space left on device")
        real(run_id, text)

    monkeypatch.setattr(record, "_keep", full)
    project.world.hooks["destroy"] = lambda: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    outcome = runs.launch(project.world.run_file, project.spec(), project.context)
    assert project.world.cloud.billed == set()
    assert outcome.exit_code == 7, "Pulumi could not do its part, and this is told"
    assert sum("cannot be written" in event.text for event in project.world.of(Warned)) == 1


# --- the same by `stop` and `down`, and a new launch ------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.PROVISIONING, State.REPAIRING, State.RUNNING, State.STOPPING, State.TEARDOWN])
@pytest.mark.parametrize("how", ["stop", "down", "gc"])
def test_whatever_a_dead_supervisor_was_at_its_run_comes_to_an_end(project, dead, state, how):
    """F1: rerunning converges."""
    dead(state, verdict=6 if state is State.TEARDOWN else None)
    project.world.nodes[0].says(Phase.TRAINING)
    args = {"stop": ["stop"], "down": ["down"], "gc": ["gc", "--yes"]}[how]
    done = CliRunner().invoke(cli, args, standalone_mode=False)
    if how == "gc" and state in (State.RUNNING, State.STOPPING):
        assert project.world.cloud.billed, "it trains"
        return
    assert done.exception is None, done.exception
    all_is_given_back(project)
    assert record.load("run-1").state.final
    again = runs.launch(project.world.run_file, project.spec(), project.context)
    assert (again.exit_code, again.record.run_id != "run-1") == (0, True)
    assert project.world.cloud.billed == set()


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
    state = location.current().folder / ".pulumi" / "stacks" / "mine" / f"dev.json{packed}"
    state.parent.mkdir(parents=True)
    data = json.dumps({"version": 3, "checkpoint": {"latest": {"resources": resources}}}).encode()
    state.write_bytes(gzip.compress(data) if packed else data)
    (state.parent / "other.json").write_bytes(data[:50])
    found = {fleet.name: fleet.used_by for fleet in inventory.survey().fleets}
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
