"""What every step of a run shares: signals are counted and never lost, a phase is closed whatever happens in it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fakes.clock import Clock
from mgpu_train.store import Unavailable

from mgpu.errors import Interrupted, StackError, TakenOver
from mgpu.events import Note, PhaseFinished, PhaseStarted, RunStateChanged, Warned
from mgpu.run.record import record, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.run.record.session import Session
from mgpu.run.record.signals import ECHO_S, Interrupts
from mgpu.run.record.supervisor_lock import Holder, replace_holder


@pytest.fixture
def session(world):
    return Session(world.record("run-1"), world.events.append, world.timeouts)


def journal():
    return [json.loads(line) for path in Folder("run-1").journal.iterdir() for line in path.read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_counted_and_the_handlers_are_given_back(number, session):
    before = signal.getsignal(number)
    session.interrupts = Interrupts(clock=Clock(step=1))
    with session.interrupts.installed() as interrupts:
        session.check()
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert interrupts.count == 2
        with pytest.raises(Interrupted):
            session.check()
    assert signal.getsignal(number) is before


def test_the_handlers_are_given_back_after_an_error_too():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interrupts().installed():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_callback_hears_of_signals_only_while_its_block_runs():
    heard = []
    with Interrupts(clock=Clock(step=1)).installed() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with interrupts.calling(lambda: heard.append("engine")):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["engine"]
    assert interrupts.count == 3


@pytest.mark.parametrize(("apart", "count"), [(ECHO_S / 2, 1), (ECHO_S * 1.01, 3)])
def test_one_signal_that_a_wrapper_passes_on_twice_is_one(apart, count):
    """`timeout` signals its child and then its whole group: that is no second Ctrl-C."""
    heard = []
    with (
        Interrupts(clock=Clock(step=apart)).installed() as interrupts,
        interrupts.calling(lambda: heard.append("engine")),
    ):
        with interrupts.leaving():
            try:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                assert count > 1
        assert interrupts.told, "an echo from somebody who cannot be asked counts as such"
        if count > 1:
            signal.raise_signal(signal.SIGINT)
    assert (interrupts.count, len(heard)) == (count, count)


def test_the_end_that_was_asked_for_by_mgpu_stop_is_seen_between_two_steps(session):
    session.check()
    session.folder.stop.touch()
    assert session.asked_to_end
    with pytest.raises(Interrupted):
        session.check()


def test_a_phase_is_announced_journalled_and_its_seconds_add_up(session, world):
    for _ in range(2):
        with session.phase("connecting", "2 nodes"):
            assert world.events[-1] == PhaseStarted("connecting", "2 nodes")
    assert [event.phase for event in world.of(PhaseFinished)] == ["connecting"] * 2
    assert [entry["name"] for entry in journal()] == ["connecting"] * 2
    spent = record.load("run-1").phase_seconds["connecting"]
    assert spent == pytest.approx(sum(event.seconds for event in world.of(PhaseFinished)), abs=0.002)


def test_a_phase_that_fails_is_closed_and_on_disk(session, world):
    with pytest.raises(Interrupted), session.phase("provisioning"):
        raise Interrupted("now")
    assert [event.phase for event in world.of(PhaseFinished)] == ["provisioning"]
    assert "provisioning" in record.load("run-1").phase_seconds


def test_a_state_is_on_disk_and_in_the_journal_before_the_call_returns(session, world):
    session.to(State.RUNNING)
    assert record.load("run-1").state is State.RUNNING
    assert (journal()[-1]["kind"], journal()[-1]["state"]) == ("state", "running")
    session.to(State.STOPPED)
    with pytest.raises(ValueError, match="cannot go"):
        session.to(State.RUNNING)
    told = [(event.run_id, event.before, event.state) for event in world.of(RunStateChanged)]
    assert told == [("run-1", "provisioning", "running"), ("run-1", "running", "stopped")]
    assert record.load("run-1").state is State.STOPPED


def test_the_supervisor_is_named_and_every_one_has_a_journal_for_this_user_alone(session, world):
    assert session.record.supervisor_pid == os.getpid()
    others = [Session(record.load("run-1"), world.events.append, world.timeouts) for _ in range(50)]
    for number, each in enumerate([session, *others]):
        each.journal.append(f"of {number}")
    assert sorted(entry["kind"] for entry in journal()) == sorted(f"of {number}" for number in range(51))
    assert len(list(Folder("run-1").journal.iterdir())) == 51
    assert all(path.stat().st_mode & 0o077 == 0 for path in Folder("run-1").journal.iterdir())


# --- whose run it is --------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(session):
    """The session of a process that holds the lock, in the file as its own."""
    with record.supervising("run-1") as token:
        session.record.supervisor = token
        session.save()
        yield session


def test_a_session_is_of_its_process_until_another_one_takes_the_run(mine):
    assert mine.still_mine()
    mine.check()
    with record.supervising("run-1", force=True):
        assert not mine.still_mine()
        for act in (mine.require_mine, mine.check, mine.save, lambda: mine.to(State.RUNNING)):
            with pytest.raises(TakenOver, match="taken over by process"):
                act()
        with pytest.raises(TakenOver), mine.phase("teardown"):
            pass
    assert record.load("run-1").state is State.PROVISIONING
    assert mine.record.state is State.PROVISIONING, "nothing was decided on either"


def test_a_takeover_undoes_what_the_engine_has_under_way(mine, world):
    undone = threading.Event()
    with pytest.raises(TakenOver), mine.undoing(undone.set, pytest.fail), record.supervising("run-1", force=True):
        assert undone.wait(10)
    assert any("taken over" in event.text for event in world.of(Note))


class Log:
    """What the commit log was told."""

    def __init__(self, *answers):
        self.answers, self.told = list(answers), []

    def take_over(self, writer, *, host, pid):
        self.told.append((writer, pid))
        if self.answers:
            raise self.answers.pop(0)


def test_the_store_is_told_once_who_supervises(mine):
    """Twice would take it back from whoever took it over in between."""
    log = Log(Unavailable("down"))
    with pytest.raises(Unavailable):
        mine.claim(log)
    for _ in range(3):
        mine.claim(log)
    assert log.told == [(mine.record.supervisor, os.getpid())] * 2


# --- a full disk here -------------------------------------------------------------------------------------------------


def test_a_full_disk_here_is_told_once_and_ends_nothing(session, world, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record, "write", full)
    monkeypatch.setattr(session.journal, "append", full)
    session.to(State.RUNNING)
    with session.phase("training"):
        session.save()
    session.to(State.TEARDOWN)
    assert session.record.state is State.TEARDOWN
    assert [("No space left" in event.text) for event in world.of(Warned)] == [True]
    with pytest.raises(OSError, match="No space"):
        session.journal.append("up")  # an intent that is not on disk is none


# --- real signals -----------------------------------------------------------------------------------------------------

WAITS = """
import time
from mgpu.run.record.signals import Interrupts
with Interrupts().installed() as interrupts:
    print("ready", flush=True)
    while not interrupts.count:
        time.sleep(0.01)
    time.sleep(1.0)
    print(interrupts.count, interrupts.told, interrupts.hung_up, flush=True)
"""


@pytest.mark.parametrize(
    ("signals", "count", "told", "hung_up"),
    [
        ([(0, signal.SIGINT)], 1, False, False),
        ([(0, signal.SIGINT), (0.02, signal.SIGINT)], 1, False, False),
        ([(0, signal.SIGTERM), (0.02, signal.SIGTERM)], 1, True, False),
        ([(0, signal.SIGINT), (0.4, signal.SIGINT)], 2, False, False),
        ([(0, signal.SIGHUP)], 1, False, True),
    ],
)
def test_signals_of_a_process_group_as_wrappers_send_them(signals, count, told, hung_up):
    child = subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout.readline() == "ready\n"
    for pause, number in signals:
        time.sleep(pause)
        os.killpg(child.pid, number)
    out, _ = child.communicate(timeout=20)
    assert out.split() == [str(count), str(told), str(hung_up)]


# --- a lock in the backend that may have become somebody else's


@pytest.fixture
def answers(session, monkeypatch):
    """What is known of the lock, each time that the session looks; the last one holds."""
    said: list[float] = []
    monkeypatch.setattr(shared, "unsure_s", lambda _run: said.pop(0) if len(said) > 1 else said[0])
    return said


def test_a_backend_that_does_not_answer_is_waited_for_before_anything_is_touched(session, world, answers):
    answers += [1.0, 2.0, 3.0, 0.0]
    session.to(State.PROVISIONING)
    assert answers == [0.0]
    assert session.record.state is State.PROVISIONING
    (told,) = [event.text for event in world.events if isinstance(event, Warned)]
    assert "nothing is begun or ended until it answers" in told


def test_it_is_not_waited_for_longer_than_machines_last_without_anybody(session, answers):
    answers += [1.0]
    session.timeouts = session.timeouts.model_copy(update={"lease_s": 0.0})
    with pytest.raises(TakenOver, match="run-1 is left to whoever reaches the backend"):
        session.require_mine()


def test_a_signal_ends_the_wait_and_touches_nothing(session, answers, monkeypatch):
    answers += [1.0]

    def looked(_run: str) -> float:
        session.interrupts.count += 1
        return 1.0

    monkeypatch.setattr(shared, "unsure_s", looked)
    with pytest.raises(TakenOver, match="left to whoever"):
        session.require_mine()


def test_what_is_being_made_is_abandoned_where_the_lock_is_too_old(session, answers):
    answers += [0.0, 1.0, 0.0]
    abandoned = threading.Event()
    with session.undoing(pytest.fail, abandoned.set):
        assert abandoned.wait(60)


def test_what_was_abandoned_has_not_failed(session, answers):
    """The lock was renewed late, but in time: whoever goes on with the run finds what was made."""
    answers += [0.0, 1.0, 0.0]
    abandoned = threading.Event()

    def killed() -> None:
        with session.undoing(pytest.fail, abandoned.set):
            assert abandoned.wait(60)
            raise StackError("`pulumi up` was killed", "", "")

    with pytest.raises(TakenOver, match="left to whoever"):
        killed()


@pytest.mark.parametrize("host", ["another-host", os.uname().nodename])
def test_what_is_being_made_is_abandoned_where_another_machine_has_the_run(session, host):
    """Which may have the same name, as containers do."""
    abandoned = threading.Event()
    session.record.supervisor = "mine"
    theirs = Holder("theirs", 1, 2, "boot", host)

    def taken() -> None:
        with session.undoing(pytest.fail, abandoned.set):
            replace_holder(session.folder.lock, theirs)
            assert abandoned.wait(60)

    with pytest.raises(TakenOver):
        taken()
