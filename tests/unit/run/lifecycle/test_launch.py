"""I1, I7, I8: whatever happens to a run, its machines go, its record and its exit code tell the truth."""

from __future__ import annotations

import errno
import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import Denied, NoStore, StoreError, Unavailable, open_store
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu import paths
from mgpu.backend import location
from mgpu.cli.common import closing
from mgpu.console import Console
from mgpu.errors import (
    AuthError,
    BidTooLow,
    ConnectionFailed,
    HostKeyMismatch,
    InputError,
    Interrupted,
    NoCapacity,
    NoOffer,
    OverLimit,
    PermissionDenied,
    QuotaExceeded,
    RemoteError,
    StackError,
    Stopped,
    TeardownIncomplete,
    TrainingFailed,
    Transient,
)
from mgpu.events import Note, RunStateChanged, SpendChanged, Warned
from mgpu.iac.engine.project import project_name
from mgpu.iac.naming import fleet_name
from mgpu.providers.base import NodePhase
from mgpu.providers.local.provider import LocalProvider
from mgpu.run.budget import account
from mgpu.run.job.request import resolve
from mgpu.run.lifecycle import attach, attempt_start, gc, supervise
from mgpu.run.lifecycle import down as downs
from mgpu.run.lifecycle import launch as runs
from mgpu.run.lifecycle import outcome as outcomes
from mgpu.run.lifecycle.submit import submit
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Check, Spent, State
from mgpu.run.record.signals import Interrupts
from mgpu.spec.model import Data

ROOT = Path(__file__).parents[4]
RUN_FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
"""


# --- all goes well ----------------------------------------------------------------------------------------------------


def test_a_run_that_succeeds_gives_everything_back_and_says_so(project):
    outcome = project.launch(nodes=2)
    assert (outcome.exit_code, outcome.error) == (0, None)
    done = record.load("last")
    assert (done.state, done.exit_code, done.reason) == (State.SUCCEEDED, 0, "")
    assert (done.checkpoint_id, done.checkpoint_step, done.attempt) == ("a001-step-10", 10, 1)
    assert done.ended_at
    assert set(done.phase_seconds) >= {"provisioning", "connecting", "starting", "training", "verifying", "teardown"}
    project.nothing_is_left()


def test_the_undo_is_journalled_before_the_machines_are_asked_for(project):
    known = []
    project.world.hooks["up"] = lambda: known.extend(entry["kind"] for entry in project.journal())
    project.launch()
    assert "up" in known


# --- whatever fails, the machines go ----------------------------------------------------------------------------------


def fails_to_provision(world):
    world.hooks["up is done"] = NoCapacity("no capacity anywhere")  # some machines were made


def fails_before_machines(world):
    world.hooks["init"] = StackError("the engine is broken")


def exports_nothing(world):
    world.hooks["up is done"] = lambda: world.stacks.update(dict.fromkeys(world.stacks))


def cannot_connect(world):
    world.connect_error = ConnectionFailed("no answer in time")


def shows_another_key(world):
    world.connect_error = HostKeyMismatch("node 1 shows another key")


def cannot_send(world):
    world.nodes[0].faults["sync"] = [RemoteError("disk full")]


def cannot_start(world):
    world.nodes[-1].faults["start"] = [RemoteError("no python3")]


def program_fails(world):
    world.program = lambda node, job: node.says(Phase.FAILED, attempt=1, fault=Fault.USER, reason="exit code 3")


def machine_is_lost(world):
    def lose(node, job):
        world.train_on(node, job)
        world.cloud.phases[fleet_name("mine", node.world.run_id) + "-1"] = NodePhase.TERMINATED

    world.program = lose


AT_ONCE = "recovery: {wait_minutes: 0}\n"
FAILURES = [
    (fails_to_provision, 3, "no capacity"),
    (fails_before_machines, 4, "engine is broken"),
    (exports_nothing, 4, "no output `mgpu`"),
    (cannot_connect, 5, "no answer in time"),
    (shows_another_key, 5, "another key"),
    (cannot_send, 5, "disk full"),
    (cannot_start, 5, "no python3"),
    (program_fails, 6, "exit code 3"),
    (machine_is_lost, 6, "node 1 is gone"),
]


@pytest.mark.parametrize(("cause", "code", "why"), FAILURES, ids=[f[0].__name__ for f in FAILURES])
def test_after_every_kind_of_failure_nothing_is_left(project, cause, code, why, monkeypatch):
    monkeypatch.setattr("mgpu.run.supervision.fleet_monitor.DESCRIBE_EVERY_S", 0.0)
    project.spec(nodes=2)
    cause(project.world)
    outcome = project.launch(AT_ONCE, nodes=2)
    assert outcome.exit_code == code
    assert why in str(outcome.error)
    done = record.load("last")
    assert (done.state, done.exit_code) == (State.FAILED, code)
    assert why in done.reason
    project.nothing_is_left()


@pytest.mark.parametrize("cause", [f[0] for f in FAILURES])
def test_a_teardown_that_is_incomplete_beats_every_other_error(project, cause, monkeypatch):
    monkeypatch.setattr("mgpu.run.supervision.fleet_monitor.DESCRIBE_EVERY_S", 0.0)
    project.spec(nodes=2)
    cause(project.world)
    project.world.cloud.rent("elsewhere")
    project.world.hooks["destroy"] = StackError("the state is locked")
    outcome = project.launch(AT_ONCE, nodes=2)
    assert outcome.exit_code == 7
    assert record.load("last").exit_code == 7
    assert record.load("last").teardown == "asked"
    assert project.world.cloud.billed == {"elsewhere-0"}, "what is not of this run is not touched"


# --- no capacity ------------------------------------------------------------------------------------------------------


def refused(world, *refusals):
    """What the next `up`s come to."""
    left = list(refusals)

    def up():
        if left:
            raise left.pop(0)

    world.hooks["up"] = up


@pytest.mark.parametrize("refusal", [NoCapacity("none of the offers was granted"), BidTooLow("the bid is too low")])
def test_the_first_machines_are_waited_for_as_well(project, refusal):
    """F12"""
    project.world.timeouts = project.world.timeouts.model_copy(update={"sold_out_s": 0.0})
    refused(project.world, refusal, refusal)
    assert project.launch().exit_code == 0
    assert project.world.calls.count("up") == 3
    told = [note.text for note in project.world.of(Note) if "asking again" in note.text]
    assert len(told) == 2
    assert told[0].startswith(refusal.what)
    assert "10 min at most" in told[0]
    project.nothing_is_left()


def test_searches_that_have_ended_are_counted_on_disk_before_the_next_one_asks(project):
    """No two of them ask by the same tokens, from whichever machine: EC2 answers a known one as it did before."""
    world = project.world
    world.timeouts = world.timeouts.model_copy(update={"sold_out_s": 0.0})
    left, known = [NoCapacity("none"), BidTooLow("too low")], []

    def up():
        known.append(record.load("last").searches)
        if left:
            raise left.pop(0)

    world.hooks["up"] = up
    assert project.launch().exit_code == 0
    assert known == world.searches == [0, 1, 2]
    assert record.load("last").searches == 3


def test_a_run_that_is_resumed_goes_on_counting_its_searches(project):
    refused(project.world, NoOffer("no such GPU"))
    project.launch()
    assert project.launch(resume=record.load("last")).exit_code == 0
    assert project.world.searches == [0, 1]


@pytest.mark.parametrize("error", [StackError("killed"), Transient("no answer"), TeardownIncomplete("i-0 is there")])
def test_a_search_of_which_something_may_be_left_is_not_counted(project, error):
    """Whoever goes on asks by its tokens, and finds that."""
    refused(project.world, error)
    assert project.launch().exit_code != 0
    assert record.load("last").searches == 0


@pytest.mark.parametrize("refusal", [QuotaExceeded("L-1 is 0"), AuthError("expired"), NoOffer("no such GPU")])
def test_what_waiting_does_not_mend_ends_at_once(project, refusal):
    """F13"""
    refused(project.world, refusal)
    outcome = project.launch()
    assert (outcome.exit_code, outcome.error) == (3, refusal)
    assert project.world.calls.count("up") == 1
    project.nothing_is_left()


def test_who_stops_while_there_is_no_capacity_does_not_wait(project):
    refused(project.world, *[NoCapacity("none")] * 9)
    emit = project.world.events.append

    def stop(event):
        emit(event)
        if isinstance(event, Note) and "asking again" in event.text:
            Folder(record.load("last").run_id).stop.touch()

    project.world.events = type("Events", (list,), {"append": lambda _self, event: stop(event)})()
    began = time.monotonic()
    assert project.launch().exit_code == 130
    assert time.monotonic() - began < 60
    assert project.world.calls.count("up") == 1
    project.nothing_is_left()


def test_success_is_not_success_while_a_machine_may_be_billed(project):
    def stuck(node, job):
        project.world.cloud.stuck.update(project.world.cloud.phases)
        project.world.succeed(node, job)

    project.world.program = stuck
    outcome = project.launch()
    assert isinstance(outcome.error, TeardownIncomplete)
    done = record.load("last")
    assert (done.state, done.exit_code, done.teardown) == (State.FAILED, 7, "asked")
    assert f"{done.fleet_name}-0" in done.reason


def test_a_provider_that_cannot_be_asked_in_teardown_is_an_incomplete_teardown(project):
    """I7: "destroyed" only when the provider says terminated, and 7 beats all others."""
    project.world.hooks["destroy"] = lambda: project.world.cloud.refuses.update(list_owned=[Transient("503")])
    outcome = project.launch()
    assert outcome.exit_code == 7
    assert record.load("last").teardown == "asked"


def test_a_bug_before_the_training_is_undone_like_any_other_failure(project):
    """I1: what nobody foresaw must not leave a fleet to its lease."""
    project.world.connect_error = ZeroDivisionError("a bug of ours")
    with pytest.raises(ZeroDivisionError):  # the traceback is for whoever mends it
        project.launch()
    assert (record.load("last").state, record.load("last").exit_code) == (State.FAILED, 1)
    project.nothing_is_left()


@pytest.mark.parametrize("lacks", [OSError(28, "No space left on device"), RuntimeError("can't start new thread")])
def test_what_this_machine_lacks_before_the_training_is_undone_and_is_no_bug(project, lacks):
    project.world.connect_error = lacks
    outcome = project.launch()
    assert isinstance(outcome.error, InputError)
    assert str(lacks).removeprefix("[Errno 28] ") in str(outcome.error)
    assert (record.load("last").state, record.load("last").exit_code) == (State.FAILED, 2)
    project.nothing_is_left()


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (ZeroDivisionError("a bug of ours"), ZeroDivisionError, "a bug of mgpu"),
        (RuntimeError("can't start new thread"), InputError, "what this machine lacks"),
    ],
    ids=["ours", "no thread"],
)
def test_a_bug_while_it_trains_leaves_the_run_to_the_next_supervisor(project, monkeypatch, error, raised, words):
    def broken(*_args, **_named):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("mgpu.run.supervision.supervisor.decide", broken)
        with pytest.raises(raised):
            project.launch()
    left = record.load("last")
    assert not left.state.final
    (told,) = [each.text for each in project.world.of(Warned) if f"mgpu attach {left.run_id}" in each.text]
    assert told.startswith(f"{words} ends this supervisor")
    outcome = attach.attach(left, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    project.nothing_is_left()


# --- detached ---------------------------------------------------------------------------------------------------------


def test_a_detached_launch_leaves_once_the_agents_have_begun_and_attach_goes_on(project):
    project.watch_s = 0.0
    outcome = project.launch(nodes=2)
    assert (outcome.left, outcome.exit_code) == (True, 0)
    left = record.load("last")
    assert left.state is State.RUNNING
    assert all(any(argv[0] == "start" for argv in node.agent) for node in project.world.nodes)
    assert len(project.world.cloud.billed) == 2
    assert not record.supervised(left.run_id)
    outcome = attach.attach(left, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    project.nothing_is_left()


def test_a_detached_launch_that_fails_before_it_trains_fails_like_any_other(project):
    project.watch_s = 0.0
    project.world.hooks["up"] = StackError("the engine refuses")
    assert project.launch().exit_code == StackError.exit_code
    project.nothing_is_left()


# --- a budget ---------------------------------------------------------------------------------------------------------


def test_machines_are_paid_for_out_of_what_is_left_of_the_budget(project):
    project.world.program = lambda node, job: node.says(Phase.FAILED, attempt=job.attempt, fault=Fault.USER)
    project.launch("max_usd: 10\n")
    assert project.world.paid == [10.0]
    first = record.load("last")
    record.write(replace(first, spending=[Spent(1, 4.0, 0.0, 3600.0)]))
    project.launch("max_usd: 10\n", resume=record.load("last"))
    assert project.world.paid[1:] == [pytest.approx(6.0, abs=0.01)]
    record.write(replace(record.load("last"), spending=[Spent(1, 4.0, 0.0, 3 * 3600.0)]))
    outcome = project.launch("max_usd: 10\n", resume=record.load("last"))
    assert isinstance(outcome.error, Stopped)
    assert outcome.exit_code == 8
    assert "$12.00 of $10.00 (max_usd) are spent" in outcome.error.what
    assert len(project.world.paid) == 2, "nothing more was rented"
    project.nothing_is_left()


def test_a_run_that_has_come_to_its_budget_says_what_to_do(project):
    project.world.program = project.world.train_on
    outcome = project.launch("max_usd: 0.000001\n")
    assert isinstance(outcome.error, Stopped)
    assert outcome.exit_code == 8
    assert "stopped at its budget" in outcome.error.what
    assert record.load("last").stop_reason == "budget"
    project.nothing_is_left()


# --- what all runs may spend ------------------------------------------------------------------------------------------


@pytest.fixture
def others(project, monkeypatch):
    """Another run that trains, at 0.50 USD per hour, and a price list."""
    monkeypatch.setattr(project.world.cloud, "offers", LocalProvider().offers, raising=False)
    project.world.record("others", state=State.RUNNING, spending=[Spent(1, 0.5, time.time() - 3600, None, 0.0)])
    return project


@pytest.mark.parametrize("limits", [{"runs": 1}, {"usd_per_hour": 0.51}, {"usd_per_month": 0.5}])
@pytest.mark.parametrize("way", ["launch", "run", "resume"])
def test_a_run_over_a_limit_is_refused_before_anything_is_made(others, limits, way):
    world, before = others.world, None
    if way == "resume":
        before = world.record("before", state=State.FAILED, teardown="confirmed", created_at=2.0)
    if way == "run":
        others.stands()
    begin = others.run if way == "run" else lambda: others.launch(resume=before)
    known, billed = set(record.ids()), set(world.cloud.billed)
    account.change(**limits)
    with pytest.raises(OverLimit) as refused:
        begin()
    assert refused.value.exit_code == 2
    assert (set(record.ids()), world.cloud.billed, world.calls.count("up")) == (known, billed, 0)
    assert {path.name for path in Folder("x").root.parent.glob("*")} - {".opening"} == known
    account.change(**dict.fromkeys(limits, 99))
    assert begin().exit_code == 0
    assert account.in_use(time.time()).runs == ("others",)


def test_new_machines_live_no_longer_than_the_rest_of_the_month_pays_for_beside_the_others(others):
    account.change(usd_per_month=1.0)
    others.launch("max_usd: 10\n")
    (paid,) = others.world.paid
    assert 0 < paid < 0.5, "not 10: what is left of the month is shared with what runs"


def test_a_month_that_is_spent_ends_a_run_with_its_checkpoint_and_exit_code_8(others, monkeypatch):
    monkeypatch.setattr(account, "claim", lambda *_: False)  # it has begun before
    others.world.program = others.world.train_on
    account.change(usd_per_month=record.load("others").spent_usd(time.time()) + 0.001)
    outcome = others.launch()
    assert isinstance(outcome.error, Stopped)
    assert (outcome.exit_code, outcome.record.stop_reason) == (8, "month")
    assert "month's budget" in outcome.error.what
    assert "mgpu limits" in outcome.error.next_step
    told = [event for event in others.world.events if isinstance(event, SpendChanged)]
    assert [event.limit for event in told] == ["usd_per_month"]


def test_in_a_month_that_is_spent_no_machine_is_rented_for_a_run_that_has_begun(others, monkeypatch):
    monkeypatch.setattr(account, "claim", lambda *_: False)
    account.change(usd_per_month=0.1)
    outcome = others.launch()
    assert isinstance(outcome.error, Stopped)
    assert "of $0.10 (usd_per_month) are spent by all runs" in outcome.error.what
    assert others.world.paid == []


def test_limits_that_cannot_be_read_end_no_run_that_has_begun(others, monkeypatch):
    def away(*_):
        raise StackError("the backend does not answer")

    account.change(usd_per_month=99)
    monkeypatch.setattr(account, "of_month", away)
    assert others.launch().exit_code == 0
    assert any("limits are not known" in str(event) for event in others.world.events)


def test_a_queued_run_waits_until_there_is_room_and_says_for_what(others, queued, monkeypatch):
    account.change(runs=1)
    outcome = attach.attach(queued, others.context)
    assert (outcome.exit_code, outcome.left, others.world.calls) == (0, True, [])
    waits = record.load("run-1")
    assert (waits.state, waits.reason) == (State.QUEUED, "waits: runs at once: 1 run of 1 (others)")
    account.change(runs=2)
    with monkeypatch.context() as patch:
        patch.setattr(supervise, "secrets_of", lambda *_: (_ for _ in ()).throw(InputError("a secret is missing")))
        with pytest.raises(InputError, match="secret"):
            attach.attach(waits, others.context)
    assert account.in_use(time.time()).runs == ("others",), "it holds no place that it cannot take"
    outcome = attach.attach(waits, others.context)
    assert (outcome.exit_code, outcome.record.state, outcome.record.reason) == (0, State.SUCCEEDED, "")


@pytest.mark.parametrize(("signals", "asked"), [(2, True), (0, False)])
def test_a_launch_that_was_left_while_it_rents_is_to_end_whoever_takes_it_on(project, monkeypatch, signals, asked):
    """The first signal asked for the end, and the second did not wait for it; who only passes by asks for nothing."""
    interrupts = Interrupts()
    monkeypatch.setattr(supervise, "Interrupts", lambda **_: interrupts)

    def left():
        interrupts.count = signals
        raise KeyboardInterrupt

    project.world.hooks["up"] = left
    assert project.launch().left
    assert Folder(record.load("last").run_id).stop.exists() == asked


# --- submitted, and supervised later ----------------------------------------------------------------------------------


@pytest.fixture
def queued(project):
    """A run that was submitted, and that nobody supervises."""
    (project.world.folder / "train.py").write_text("as submitted")
    request = resolve(project.spec(), "run-1", project.world.folder, timeouts=project.world.timeouts)
    return submit(request, project.world.run_file)


def test_a_queued_run_rents_nothing_until_it_is_supervised(project, queued):
    assert record.load("run-1").state is State.QUEUED
    assert not project.world.calls
    assert not project.world.cloud.billed
    outcome = attach.attach(queued, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    states = [event.state for event in project.world.of(RunStateChanged)]
    assert states[:2] == ["provisioning", "running"]
    project.nothing_is_left()


def test_a_queued_run_needs_nothing_more_of_the_folder_that_it_comes_from(project, queued):
    (project.world.folder / "train.py").write_text("changed since")
    project.world.run_file.write_text("changed since")
    outcome = attach.attach(queued, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    assert (Folder("run-1").work / "train.py").read_text() == "as submitted", "what is sent"


@pytest.mark.parametrize(
    ("broken", "kind"), [(StoreError("503 Slow Down"), StackError), (KeyboardInterrupt(), Interrupted)]
)
def test_a_run_that_may_be_queued_though_its_submission_failed_is_named_and_kept(
    project, tmp_path, monkeypatch, broken, kind
):
    """Its record was written, and the answer is lost: whoever believed that nothing was done would pay for two."""
    store = open_store(f"file://{tmp_path}/bucket")
    request = resolve(project.spec(), "run-1", project.world.folder, timeouts=project.world.timeouts)
    with monkeypatch.context() as patched:
        patched.setattr(location.Backend, "shared", store)
        patched.setattr(type(store), "read", Mock(side_effect=broken))
        with pytest.raises(kind) as caught:
            submit(request, project.world.run_file)
    assert json.loads(store.get("records/run-1.json", 1 << 20))["state"] == "queued"
    assert "run run-1 may be queued" in caught.value.what
    assert "`mgpu queue rm run-1`" in caught.value.next_step
    assert Folder("run-1").run_file.exists()


def test_a_run_whose_resumption_never_came_into_the_bucket_is_what_it_was_before(project, tmp_path, monkeypatch):
    store = open_store(f"file://{tmp_path}/bucket")
    monkeypatch.setattr(location.Backend, "shared", store)
    project.world.hooks["up"] = StackError("the engine refuses")
    before = project.launch().record
    request = resolve(project.spec(), before.run_id, project.world.folder, timeouts=project.world.timeouts)
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "replace", Mock(side_effect=StoreError("no answer")))
        with pytest.raises(StackError, match="may be queued"):
            submit(request, project.world.run_file, resume=before)
    assert record.find(before.run_id).state is State.FAILED


@pytest.mark.parametrize("end", ["stop", "down"])
def test_a_queued_run_can_be_ended(project, queued, end):
    if end == "down":
        downs.down(queued, project.context)
    else:
        record.Folder("run-1").stop.touch()
        attach.attach(queued, project.context)
    assert record.load("run-1").state is State.STOPPED
    assert "up" not in project.world.calls


def test_code_that_cannot_be_kept_leaves_no_run_and_rents_nothing(project, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device", "train.py")

    monkeypatch.setattr("mgpu.remote.snapshot.os.fchmod", full)
    with pytest.raises(InputError, match="cannot be kept"):
        project.launch()
    assert not list((paths.state_dir() / "runs").glob("[!.]*")), "nor a folder that no command shows"
    assert not project.world.cloud.billed


def test_code_that_cannot_be_kept_leaves_the_run_that_was_to_be_resumed_as_it_was(project, monkeypatch):
    project.world.hooks["up"] = StackError("the engine refuses")
    before = project.launch().record
    folder = Folder(before.run_id)
    said = folder.run_file.read_text(), (folder.work / "train.py").read_text(), folder.record.read_text()
    (project.world.folder / "train.py").write_text("another")

    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device", "train.py")

    monkeypatch.setattr("mgpu.remote.snapshot.os.fchmod", full)
    with pytest.raises(InputError, match="cannot be kept"):
        project.launch("env: {A: b}\n", resume=before)
    assert (folder.run_file.read_text(), (folder.work / "train.py").read_text(), folder.record.read_text()) == said


def test_what_is_missing_after_a_run_was_submitted_ends_it_and_says_so(project, monkeypatch):
    def expired(*_args):
        raise AuthError("the credentials have expired")

    monkeypatch.setattr(supervise, "secrets_of", expired)
    assert project.launch().exit_code == AuthError.exit_code
    assert record.load("last").state is State.FAILED
    project.nothing_is_left()


def test_a_queued_run_that_lacks_a_secret_here_stays_queued(project, queued, monkeypatch):
    def expired(*_args):
        raise AuthError("the credentials have expired")

    monkeypatch.setattr(supervise, "secrets_of", expired)
    with pytest.raises(AuthError):
        attach.attach(queued, project.context)
    assert record.load("run-1").state is State.QUEUED


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("answer", [None, True, False], ids=["no terminal", "stop", "leave"])
def test_interrupted_while_provisioning_is_undone(project, number, answer):
    """DESIGN section 9: while provisioning a signal always undoes; nobody is asked."""
    project.ask = None if answer is None else lambda _first: answer
    project.world.hooks["up is done"] = lambda: signal.raise_signal(number)
    outcome = project.launch()
    assert isinstance(outcome.error, Interrupted)
    assert outcome.exit_code == 130
    assert record.load("last").state is State.STOPPED
    assert "interrupt" in project.world.calls, "the engine is told at once"
    assert "connect" not in project.world.calls
    project.nothing_is_left()


def test_the_engines_error_after_a_signal_is_an_interrupt(project):
    def cancelled():
        signal.raise_signal(signal.SIGINT)
        raise StackError("`pulumi up` was cancelled")

    project.world.hooks["up"] = cancelled
    assert project.launch().exit_code == 130
    project.nothing_is_left()


def test_mgpu_stop_while_provisioning_undoes_like_a_signal(project):
    def until_the_engine_is_told():
        Folder(record.ids()[-1]).stop.touch()
        until(lambda: "interrupt" in project.world.calls, why="nobody looked at the stop file")

    project.world.hooks["up"] = until_the_engine_is_told
    assert project.launch().exit_code == 130
    assert "connect" not in project.world.calls
    project.nothing_is_left()


def test_a_stop_while_training_stops_and_gives_back(project):
    def program(node, job):
        project.world.train_on(node, job)
        Folder(job.run_id).stop.touch()

    project.world.program = program
    outcome = project.launch()
    assert (outcome.exit_code, record.load("last").state) == (130, State.STOPPED)
    assert project.world.nodes[0].stops == 1
    project.nothing_is_left()


def test_left_running_is_left(project, monkeypatch):
    interrupts = Interrupts()
    monkeypatch.setattr(supervise, "Interrupts", lambda **_: interrupts)

    def program(node, job):
        project.world.train_on(node, job)
        interrupts.count = 1

    project.ask = lambda _first: False
    project.world.program = program
    outcome = project.launch()
    assert outcome.left
    assert outcome.exit_code == 130
    assert not record.load("last").state.final
    assert len(project.world.cloud.billed) == 1
    assert project.world.nodes[0].stops == 0


def test_the_hard_cap_stops_the_run_with_its_own_exit_code(project):
    project.world.hard_cap_at = time.time() + 0.2
    project.world.program = project.world.train_on
    outcome = project.launch()
    assert isinstance(outcome.error, Stopped)
    assert outcome.exit_code == 8
    assert record.load("last").state is State.STOPPED
    assert project.world.nodes[0].stops == 1
    project.nothing_is_left()


# --- judged by the store ----------------------------------------------------------------------------------------------


def test_success_without_a_checkpoint_of_this_attempt_is_a_failure(project):
    project.world.program = lambda node, job: node.says(Phase.DONE, attempt=job.attempt)
    outcome = project.launch()
    assert isinstance(outcome.error, TrainingFailed)
    assert "no checkpoint of this attempt" in outcome.error.what
    assert record.load("last").state is State.FAILED
    project.nothing_is_left()


def test_an_older_attempts_checkpoint_is_not_this_ones(project):
    project.launch()
    project.world.program = lambda node, job: node.says(Phase.DONE, attempt=job.attempt)
    outcome = project.launch("recovery: {attempts: 5}\n", resume=record.load("last"))
    assert outcome.exit_code == 6
    assert "went on from step 10 and ended without a newer checkpoint" in str(outcome.error)
    assert outcome.record.attempt == 2  # and is not tried again: it would have nothing to do once more
    # but it is there to go on from, and `mgpu status` says so
    assert outcome.record.checkpoint_id == "a001-step-10"


def test_a_run_that_is_resumed_with_another_store_forgets_the_checkpoints_of_the_first(project, tmp_path):
    project.launch()
    project.world.program = lambda node, job: node.says(Phase.DONE, attempt=job.attempt)
    again = project.launch(f"checkpoint: {{to: 'file://{tmp_path}/other'}}\n", resume=record.load("last")).record
    assert (again.store, again.checkpoint_id) == (f"file://{tmp_path}/other", None)


def test_one_submission_has_one_end_and_a_run_that_is_resumed_another(project):
    """Also where it ends as before, without another attempt: somebody is told of each."""
    project.world.hooks["up"] = StackError("the engine refuses")
    first = project.launch().record
    first.checks = [Check("loss", met=False, said="2 > 1")]
    again = replace(first, ended_at=(first.ended_at or 0) + 60, reason="found by another machine", attempt=1)
    regressed, over = identities(first)
    assert identities(again) == [regressed, over]
    resumed = project.launch(resume=first).record
    assert (resumed.created_at, resumed.attempt, resumed.state) == (first.created_at, 0, first.state)
    assert outcomes.ended(resumed).identity() != over
    assert identities(replace(resumed, checks=first.checks))[0] != regressed


def identities(ended):
    return [event.identity() for event in outcomes.endings(ended)]


def test_a_run_that_is_resumed_keeps_what_a_newer_mgpu_has_written(project):
    first = project.launch().record
    path = Folder(first.run_id).record
    path.write_text(path.read_text().replace("{", '{"of_tomorrow": {"a": 1},', 1))
    resumed = project.launch(resume=record.load("last")).record
    assert resumed.attempt == 2
    assert json.loads(path.read_text())["of_tomorrow"] == {"a": 1}


def test_a_run_says_its_id_before_anything_else(project):
    done = project.launch().record
    assert done.run_id in str(project.world.events[0])


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_damaged_final_checkpoint_is_a_failure(project, how):
    def program(node, job):
        project.world.succeed(node, job)
        (weights,) = Path(job.checkpoint.to.removeprefix("file://")).rglob("*.pack-0")
        weights.unlink() if how == "missing" else weights.write_bytes(b"w")

    project.world.program = program
    outcome = project.launch()
    assert outcome.exit_code == 6
    assert "damaged" in str(outcome.error)
    assert record.load("last").state is State.FAILED


@pytest.mark.parametrize("ours", [True, False])
def test_a_checkpoint_that_only_nodes_find_damaged_is_stepped_back_from(project, ours):
    """A wrong byte in an object of the right size: the store's word is all that is asked here. It costs no `recovery`;
    a later launch asks the nodes anew, for the object may have been restored."""
    world, started, bad = project.world, [], "its checksum is 1, not 2"

    def program(node, job):
        started.append(job.resume.checkpoint_id if job.resume else None)
        if job.resume is None:
            for step in (10, 20):
                world.commit(job.checkpoint.to, job.run_id, attempt=1, writer=job.writer, step=step)
            (weights,) = Path(job.checkpoint.to.removeprefix("file://")).rglob("a001-step-20/*.pack-0")
            weights.write_bytes(b"W" + weights.read_bytes()[1:])
            node.says(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="its disk")
        elif job.resume.checkpoint_id == "a001-step-20":
            fields = {"reason": f"resume: {bad}", "damaged": "a001-step-20"}
            node.says(Phase.FAILED, attempt=job.attempt, fault=Fault.INFRASTRUCTURE, **fields)
        else:
            world.succeed(node, job)

    world.program, world.ours = program, ours
    if not ours:
        project.stands()
    first = (project.launch if ours else project.run)().record
    assert (first.checkpoint_id, first.damaged) == ("a001-step-20", {})
    first.damaged = {"a001-step-20": "an earlier launch's word"}
    record.write(first)
    ups = world.calls.count("up")
    again = (
        project.launch(resume=first)
        if ours
        else runs.run(world.run_file, project.spec(), "dev", project.context, resume=first)
    )
    assert again.exit_code == 0
    assert started == [None, "a001-step-20", "a001-step-10"]
    done = record.load("last")
    assert (done.attempt, done.recoveries, done.checkpoint_id) == (3, 1, "a003-step-30")
    assert done.damaged == {"a001-step-20": f"node 0: resume: {bad}"}
    told = [each.text for each in world.of(Warned) if "a001-step-20 does not verify" in each.text]
    assert told == [f"a001-step-20 does not verify: node 0: resume: {bad}; looking at what was committed before"]
    assert world.calls.count("up") == (ups + 2 if ours else ups), "a stack of another program's is not touched"


def test_a_machine_that_calls_a_whole_checkpoint_damaged_is_replaced_and_nothing_is_given_up(project, monkeypatch):
    monkeypatch.setattr("mgpu.run.supervision.fleet_monitor.DESCRIBE_EVERY_S", 0.0)
    world, started, replaced = project.world, [], []
    bring_up = supervise.bring_up

    def program(node, job):
        started.append(job.resume.checkpoint_id if job.resume else None)
        if len(started) == 1:
            for step in (10, 20):
                world.commit(job.checkpoint.to, job.run_id, attempt=1, writer=job.writer, step=step)
            node.says(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="its disk")
        elif len(started) == 2:
            fields = {"reason": "resume: its checksum is 1, not 2", "damaged": "a001-step-20"}
            node.says(Phase.FAILED, attempt=job.attempt, fault=Fault.INFRASTRUCTURE, **fields)
        else:
            world.succeed(node, job)

    def repaired(session, stack, lost=()):
        replaced.append(lost)
        return bring_up(session, stack, lost)

    monkeypatch.setattr(supervise, "bring_up", repaired)
    world.program = program
    done = project.launch("recovery: {attempts: 3}\n").record
    assert (done.state, done.damaged) == (State.SUCCEEDED, {})
    assert started == [None, "a001-step-20", "a001-step-20"]
    assert replaced[-1] == (0,)


def test_without_checkpoints_the_programs_own_word_counts(project):
    outcome = project.launch("checkpoint: none\n")
    assert outcome.exit_code == 0
    assert record.load("last").checkpoint_id is None
    assert not (paths.data_dir() / "checkpoints").exists()


def test_all_nodes_resume_from_the_same_checkpoint_of_the_same_run(project):
    jobs = []

    def program(node, job):
        jobs.append(job)
        project.world.succeed(node, job)

    project.world.program = program
    first = project.launch(nodes=2).record
    assert project.launch(nodes=2, resume=record.load("last")).exit_code == 0
    again = record.load("last")
    assert (again.run_id, again.attempt) == (first.run_id, 2)
    assert again.stack == f"{first.run_id}-r2", "two fleets never share a name"
    assert again.fleet_name != first.fleet_name
    assert again.created_at == first.created_at
    assert [job.resume.checkpoint_id for job in jobs if job.attempt == 2] == ["a001-step-10"] * 2
    assert [job.resume for job in jobs if job.attempt == 1] == [None, None]
    assert again.checkpoint_id == "a002-step-20"


def test_a_store_that_cannot_be_used_trains_nothing(project):
    (project.world.folder / "store").write_text("a file, not a folder")
    outcome = project.launch(f"checkpoint: {{to: 'file://{project.world.folder}/store'}}\n")
    assert outcome.exit_code == 6
    assert "cannot be used" in str(outcome.error)
    assert not any("start" in call for node in project.world.nodes for call in node.agent)
    project.nothing_is_left()


# --- teardown: keep, and stacks of others -----------------------------------------------------------------------------


def test_a_kept_fleet_stays_with_its_price_and_its_end(project, capsys):
    before = time.time()
    outcome = project.launch("teardown: keep\nlease_minutes: 30\n")
    assert outcome.exit_code == 0
    kept = record.load("last")
    assert kept.teardown == "kept"
    assert kept.lease_until == pytest.approx(before + 1800, abs=30)
    assert len(project.world.cloud.billed) == 1
    lease = project.world.nodes[0].files[".mgpu/lease"]
    assert int(lease) == 1000 + 1800, "the node itself knows the new end"
    closing.finish(Console(), outcome)
    out, err = capsys.readouterr()
    assert "$0.50 per hour" in out
    assert time.strftime("%H:%M", time.localtime(kept.lease_until)) in out
    assert f"mgpu down --stack {kept.stack}" in err


def test_a_run_that_failed_on_a_kept_fleet_says_what_goes_on_with_it_there(project):
    def program(node, job):
        project.world.commit(job.checkpoint.to, job.run_id, attempt=1, writer=job.writer, step=10)
        node.says(Phase.FAILED, attempt=1, fault=Fault.USER, reason="exit code 3")

    project.world.program = program
    outcome = project.launch("teardown: keep\n")
    stack, run_id = outcome.record.stack, outcome.record.run_id
    assert f" --stack {stack} --resume {run_id}`" in outcome.error.next_step
    with pytest.raises(InputError, match="has machines already"):
        project.launch("teardown: keep\n", resume=record.load("last"))


def test_a_kept_fleet_that_has_lost_a_machine_is_given_back_before_the_run_goes_on(project):
    def lose(node, job):
        project.world.train_on(node, job)
        if node is project.world.nodes[0]:
            project.world.commit(job.checkpoint.to, job.run_id, attempt=1, writer=job.writer, step=10)
        project.world.cloud.phases[fleet_name("mine", job.run_id) + "-1"] = NodePhase.TERMINATED

    project.world.program = lose
    lost = project.launch("teardown: keep\n", nodes=2)
    run_id = lost.record.run_id
    assert f"`mgpu down {run_id}`, then `mgpu launch" in lost.error.next_step
    downs.down(lost.record, project.context)
    project.world.program = project.world.succeed
    assert project.launch("teardown: keep\n", nodes=2, resume=record.load("last")).exit_code == 0


def test_a_kept_fleets_end_is_never_told_past_its_hard_cap(project):
    project.world.hard_cap_at = time.time() + 600
    project.launch("teardown: keep\n")
    assert record.load("last").lease_until == project.world.hard_cap_at


def test_a_lease_that_cannot_be_renewed_is_told(project):
    def after_start(node, job):
        node.faults["write"] = [RemoteError("no answer")]
        project.world.succeed(node, job)

    project.world.program = after_start
    assert project.launch("teardown: keep\n").exit_code == 0
    assert any("lease" in event.text for event in project.world.of(Warned))


@pytest.mark.parametrize("cause", [fails_to_provision, fails_before_machines, exports_nothing])
def test_a_fleet_that_never_came_up_is_never_kept(project, cause):
    project.spec()
    cause(project.world)
    assert project.launch(AT_ONCE + "teardown: keep\n").exit_code != 0
    project.nothing_is_left()


def test_run_gives_the_fleet_back_and_leaves_the_users_empty_stack(project):
    project.stands()
    outcome = project.run()
    assert outcome.exit_code == 0
    assert project.world.cloud.billed == set()
    assert project.world.stacks == {"dev": None}
    assert "up" not in project.world.calls


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_stack_of_another_program_is_left_alone(project, succeeds):
    project.world.ours = False
    project.stands()
    if not succeeds:
        program_fails(project.world)
    outcome = project.run()
    assert outcome.exit_code == (0 if succeeds else 6)
    assert record.load("last").teardown == "not ours"
    assert project.world.cloud.billed == {"mine-dev-0"}
    assert not any(call.startswith("destroy") for call in project.world.calls)


def test_whose_fleet_it_is_is_on_disk_before_the_first_connection(project):
    """A supervisor that is killed while it connects leaves a record; `mgpu down` on it must know whose machines."""
    project.world.ours = False
    project.stands()
    known = []
    real = project.world.connect

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mgpu.remote.nodeset.NodeSet.connect",
            lambda *args: known.append(record.load("last").fleet) or real(*args),
        )
        project.run()
    assert known[0] is not None
    assert known[0]["owner"] == ""


def test_down_on_a_run_leaves_another_programs_stack_alone(project):
    project.world.ours = False
    handle = project.stands()
    fleet = project.world.output(handle).model_dump(mode="json")
    lost = project.world.record("run-1", stack="dev", own_stack=False, fleet=fleet, state=State.RUNNING)
    try:
        downs.down(lost, project.context)
    except InputError:
        pass  # saying so is as good as doing nothing
    assert project.world.cloud.billed == {"mine-dev-0"}
    assert not any(call.startswith("destroy") for call in project.world.calls)


def test_stack_down_refuses_another_programs_stack(project):
    project.world.ours = False
    project.stands()
    with pytest.raises(InputError, match="not made by mgpu"):
        downs.stack_down(project.world.folder, "dev", project.context)
    assert project.world.cloud.billed == {"mine-dev-0"}


# --- nothing is spent and nothing remembered before the preflight is passed -------------------------------------------


def nothing_happened(world):
    assert record.ids() == []
    assert world.calls == []
    assert world.cloud.billed == set()


def test_a_folder_without_a_program_has_that_of_mgpu(project):
    (project.world.folder / "Pulumi.yaml").unlink()
    found = runs.preflight(project.world.run_file, project.spec(), project.context.emit)
    assert found == paths.state_dir() / "program"
    assert (found / "infra" / "__main__.py").read_text() == (ROOT / "infra" / "__main__.py").read_text()
    assert project_name(found) == "mgpu-runs"
    nothing_happened(project.world)


def test_preflight_wants_files_that_can_be_sent(project):
    """This was found when machines were there."""
    spec = project.spec().model_copy(update={"train": None, "command": ("x.py",)})
    (project.world.folder / "x.py").touch()
    (project.world.folder / "elsewhere").symlink_to("/etc/hosts")
    with pytest.raises(InputError, match="1 of its files cannot be sent") as refused:
        runs.preflight(project.world.run_file, spec, project.context.emit)
    assert "elsewhere" in refused.value.why
    nothing_happened(project.world)
    (project.world.folder / "elsewhere").unlink()
    assert runs.preflight(project.world.run_file, spec, project.context.emit)


def test_preflight_wants_a_commit_for_a_status_of_one(project):
    spec = project.spec("sinks: {github: {token: T}}\n")
    with pytest.raises(InputError, match=r"sinks\.github cannot be used: it tells of a commit"):
        runs.preflight(project.world.run_file, spec, project.context.emit)
    nothing_happened(project.world)
    assert runs.preflight(project.world.run_file, spec, project.context.emit, "git+https://host/you/llm@main")


def test_preflight_wants_every_secret(project, monkeypatch):
    monkeypatch.delenv("ONE", raising=False)
    monkeypatch.setenv("TWO", "x")
    with pytest.raises(InputError, match="ONE"):
        runs.preflight(project.world.run_file, project.spec("secrets: [ONE, TWO]\n"), project.context.emit)
    nothing_happened(project.world)


def test_preflight_wants_every_secret_of_the_image(project, monkeypatch):
    monkeypatch.delenv("ONE", raising=False)
    with pytest.raises(InputError, match=r"image\.secrets: ONE not set"):
        runs.preflight(
            project.world.run_file, project.spec("image: {repository: r/a, secrets: [ONE]}\n"), project.context.emit
        )
    nothing_happened(project.world)


def test_preflight_looks_for_the_data_and_names_all_that_is_not_there(project, tmp_path):
    for name in ("full/deep", "empty"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "full" / "deep" / "x").touch()
    spec = project.spec()
    items = [Data.model_validate({"from": f"file://{tmp_path / name}", "to": "d"}) for name in ("full", "empty", "no")]
    with pytest.raises(InputError, match="data is not there") as refused:
        runs.preflight(project.world.run_file, spec.model_copy(update={"data": tuple(items)}), project.context.emit)
    assert "data[0]" not in refused.value.why
    assert [line.partition(":")[0] for line in refused.value.why.splitlines()] == ["data[1].from", "data[2].from"]
    nothing_happened(project.world)
    runs.preflight(project.world.run_file, spec.model_copy(update={"data": (items[0],)}), project.context.emit)


def test_data_that_only_the_nodes_may_read_is_told_and_rented_for(project, monkeypatch):
    def refused(_store, _prefix, _after=""):
        raise Denied("not yours")

    monkeypatch.setattr("mgpu_train.store.file.FileStore.list", refused)
    item = Data.model_validate({"from": "file:///somewhere", "to": "d"})
    spec = project.spec().model_copy(update={"data": (item,)})
    attempt_start.require_data(resolve(spec, "a", project.world.folder, timeouts=Timeouts()), project.context.emit)
    assert any("could not be looked at from here: not yours" in event.text for event in project.world.of(Warned))


def test_preflight_asks_the_provider(project):
    project.world.cloud.refuses["check"] = [AuthError("the key has expired")]
    with pytest.raises(AuthError):
        runs.preflight(project.world.run_file, project.spec(), project.context.emit)
    nothing_happened(project.world)


@pytest.mark.parametrize("error", [NoStore("there is no bucket"), Denied("not yours"), Unavailable("no answer")])
def test_preflight_looks_into_the_store(project, monkeypatch, error):
    def read(log: CommitLog) -> list[object]:
        raise error

    monkeypatch.setattr(CommitLog, "read", read)
    with pytest.raises(InputError, match=r"checkpoint\.to: .* cannot be used") as caught:
        runs.preflight(project.world.run_file, project.spec(), project.context.emit)
    assert (caught.value.why, "nothing was rented" in caught.value.next_step) == (str(error), True)
    nothing_happened(project.world)


DATA = "data: [{from: 's3://theirs/tokens', to: d}]\n"


def test_what_nodes_may_do_in_the_store_ends_with_the_run(project):
    cloud = project.world.cloud
    assert project.launch(DATA).exit_code == 0
    done = record.load("last")
    assert {(run, tuple(reads)) for run, reads, _ in cloud.granted} == {(done.run_id, ("s3://theirs/tokens",))}
    assert cloud.revoked == [done.run_id]
    assert not done.store_granted


def test_who_was_given_no_rights_has_none_taken_away(project):
    assert project.launch().exit_code == 0
    assert project.world.cloud.granted == project.world.cloud.revoked == []


@pytest.mark.parametrize("how", ["down", "gc"])
def test_rights_that_could_not_be_taken_away_change_no_end_and_are_taken_later(project, how):
    cloud = project.world.cloud
    cloud.refuses["revoke"] = [Transient("503")]
    assert project.launch(DATA).exit_code == 0
    done = record.load("last")
    assert (done.state, done.teardown, done.store_granted, cloud.revoked) == (State.SUCCEEDED, "confirmed", True, [])
    assert f"mgpu down {done.run_id}" in project.world.of(Warned)[-1].text
    del cloud.refuses["revoke"]
    take_away = {"down": lambda: downs.down(done, project.context), "gc": lambda: gc.take_rights_away(project.context)}
    take_away[how]()
    assert cloud.revoked == [done.run_id]
    assert not record.load("last").store_granted


def test_where_nodes_can_be_given_no_rights_in_the_store_nothing_is_rented(project):
    project.world.cloud.refuses["store"] = [PermissionDenied("nodes may not use the bucket")]
    with pytest.raises(PermissionDenied, match="nodes may not use"):
        project.launch("checkpoint: {to: 's3://bucket/runs'}\n")
    nothing_happened(project.world)
    assert project.world.cloud.granted == []


@pytest.mark.parametrize("nodes", [0, 2], ids=["no fleet", "another size"])
def test_run_on_a_stack_that_does_not_fit_leaves_no_record(project, nodes):
    """A record would be the newest run: `mgpu stop` or `down` on it would take the user's stack."""
    if nodes:
        project.world.has_nodes(nodes)
        project.stands()
        project.world.has_nodes(1)
    with pytest.raises((InputError, StackError)):
        project.run()
    assert record.ids() == []
    assert len(project.world.cloud.billed) == nodes


def test_a_run_that_is_supervised_is_not_resumed_and_nothing_of_it_is_changed(project):
    project.spec()
    alive = project.world.record("run-1", state=State.RUNNING, step=7)
    Folder("run-1").stop.touch()
    before = Folder("run-1").record.read_bytes()
    with record.supervising("run-1") as mine:
        assert mine
        with pytest.raises(InputError, match="supervisor"):
            project.launch(resume=alive)
    assert Folder("run-1").record.read_bytes() == before
    assert Folder("run-1").stop.exists()
    assert project.world.calls == []


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_reaches_the_agents_standard_input_and_no_file(project, monkeypatch):
    monkeypatch.setenv("TOKEN", "canary-81fa")
    outcome = project.launch("secrets: [TOKEN]\n", nodes=2)
    assert outcome.exit_code == 0
    for node in project.world.nodes:
        assert b"canary-81fa" in node.secrets
        assert not any(b"canary-81fa" in data for data in node.files.values())
        assert "canary-81fa" not in str(node.agent), "arguments can be read by every user of the node"
    files = [path for path in project.world.folder.parent.rglob("*") if path.is_file()]
    assert any(path.name == "record.json" for path in files)
    assert any(path.parent.name == "journal" for path in files)
    assert [path for path in files if b"canary-81fa" in path.read_bytes()] == []
    assert "canary-81fa" not in repr(project.world.events)


# --- attach -----------------------------------------------------------------------------------------------------------


def abandoned(project, state=State.RUNNING, **more):
    """A run whose supervisor was killed."""
    project.spec("checkpoint: none\n" + more.pop("spec", ""))
    handle = project.world.cloud.rent("mine-run-1", len(project.world.nodes))
    project.world.stacks["run-1"] = output = project.world.output(handle)
    fleet = output.model_dump(mode="json")
    found = project.world.record("run-1", **{"state": state, "attempt": 1, "fleet": fleet} | more)
    Folder("run-1").run_file.write_text(project.world.run_file.read_text())
    for node in project.world.nodes:
        node.says(Phase.TRAINING)
    return found


def test_attach_takes_over_and_ends_as_the_first_one_would_have(project):
    found = abandoned(project)
    project.world.nodes[0].says(Phase.DONE)
    outcome = attach.attach(found, project.context)
    assert outcome is not None
    assert outcome.exit_code == 0
    assert record.load("run-1").state is State.SUCCEEDED
    project.nothing_is_left()


def test_attach_does_not_take_a_run_from_a_living_supervisor(project):
    found = abandoned(project)
    with record.supervising("run-1"):
        assert attach.attach(found, project.context) is None
    assert project.world.calls == []


@pytest.mark.parametrize("stopped", [True, False])
def test_attach_to_a_teardown_that_was_cut_off_ends_it(project, stopped):
    found = abandoned(project, State.TEARDOWN, teardown="asked")
    project.world.nodes[0].says(Phase.DONE)
    if stopped:
        Folder("run-1").stop.touch()
    assert attach.attach(found, project.context) is not None
    project.nothing_is_left()
