"""What every step of a run shares: signals are counted and never lost, a phase is closed whatever happens in it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from mgpu.errors import Interrupted
from mgpu.events import PhaseFinished, PhaseStarted, Progress
from mgpu.run import record
from mgpu.run.record import Folder, State
from mgpu.run.session import Interrupts, Session


@pytest.fixture
def session(world):
    return Session(world.record("run-1"), world.events.append, world.timeouts)


def journal():
    return [json.loads(line) for path in Folder("run-1").journal.iterdir() for line in path.read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_counted_and_the_handlers_are_given_back(number, session):
    before = signal.getsignal(number)
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
    with Interrupts().installed() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with interrupts.calling(lambda: heard.append("engine")):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert heard == ["engine"]
    assert interrupts.count == 3


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


def test_a_state_is_on_disk_and_in_the_journal_before_the_call_returns(session):
    session.to(State.RUNNING)
    assert record.load("run-1").state is State.RUNNING
    assert (journal()[-1]["kind"], journal()[-1]["state"]) == ("state", "running")
    session.to(State.STOPPED)
    with pytest.raises(ValueError, match="cannot go"):
        session.to(State.RUNNING)
    assert record.load("run-1").state is State.STOPPED


def test_numbers_of_a_progress_event_are_kept_and_a_zero_is_no_number(session, world):
    session.note(Progress(5, 10, 2.5, 100.0))
    assert (session.record.step, session.record.steps, session.record.loss) == (5, 10, 2.5)
    session.note(Progress(6, 0, 0.0, 0.0))
    assert (session.record.step, session.record.steps, session.record.loss) == (6, None, None)
    assert len(world.of(Progress)) == 2


def test_the_supervisor_is_named_and_every_one_has_a_journal_for_this_user_alone(session, world):
    assert session.record.supervisor_pid == os.getpid()
    session.journal.append("first")
    Session(record.load("run-1"), world.events.append, world.timeouts).journal.append("second")
    assert [entry["kind"] for entry in sorted(journal(), key=lambda entry: entry["at"])] == ["first", "second"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in Folder("run-1").journal.iterdir())
