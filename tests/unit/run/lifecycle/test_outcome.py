"""What a run that failed says: whose fault it was, how often it was tried, what is safe, and what to type (I7)."""

from __future__ import annotations

import pytest
from mgpu_train.agent.status.status import Fault

from mgpu.errors import ConnectionFailed, InputError, Interrupted, NoCapacity, Stopped, TrainingFailed
from mgpu.run.lifecycle.outcome import _error
from mgpu.run.record.record import Interruption
from mgpu.run.supervision.limits import StopReason
from mgpu.run.supervision.supervisor import Ended


@pytest.fixture
def record(world):
    world.run_file.write_text("name: a\n")
    return world.record("run-1", recoveries=3, idle=3, checkpoint_id="a001-step-50", checkpoint_step=50)


@pytest.mark.parametrize(
    ("fault", "whose", "cure"),
    [
        (Fault.USER, "The cause is the program", "once it is mended"),
        (Fault.INFRASTRUCTURE, "The machines or the store are at fault", "go on from there"),
        (Fault.PROVIDER, "The provider took the machine", "another market, GPU or region"),
    ],
)
def test_a_run_that_stops_after_recoveries_says_whose_fault_it_was(record, fault, whose, cure):
    error = _error(record, Ended(False, "node 1 is gone", fault))
    assert isinstance(error, TrainingFailed)
    assert "node 1 is gone" in error.what
    assert error.why.startswith(whose)
    assert "4 attempts were made, the last 3 without a new checkpoint." in error.why
    assert "Safe: step 50" in error.why
    assert cure in error.next_step
    assert "mgpu logs run-1" in error.next_step
    assert "--resume run-1" in error.next_step


def test_a_run_that_was_never_interrupted_says_nothing_of_attempts(record):
    record.recoveries = record.idle = 0
    record.checkpoint_id = None
    error = _error(record, Ended(False, "node 0: exit code 3", Fault.USER))
    assert error is not None
    assert "attempt" not in str(error)
    assert "Safe" not in str(error)
    assert "--resume" not in str(error), "there is nothing to go on from"


@pytest.mark.parametrize(("cap_s", "said"), [(3700, "hard cap (max_hours)"), (1800, "hard cap")])
def test_a_hard_cap_that_comes_before_max_hours_is_not_called_so(record, cap_s, said):
    record.max_hours, record.hard_cap_at = 1, record.created_at + cap_s
    error = _error(record, Ended(False, "the hard cap is reached", None, stopped_by=StopReason.HARD_CAP))
    assert error is not None
    assert error.what == f"run run-1 stopped at its {said}"


def test_one_attempt_without_progress_is_no_row_of_them(record):
    record.recoveries, record.idle = 1, 1
    error = _error(record, Ended(False, "node 1 is gone", Fault.PROVIDER))
    assert "2 attempts were made." in error.why


def test_a_repair_that_could_not_be_made_keeps_its_cause_and_says_what_is_safe(record):
    refused = NoCapacity("no capacity for 2 nodes", "us-east-1a: none\nus-east-1b: none", "Allow other regions.")
    error = _error(record, refused)
    assert error is refused
    assert error.why.startswith("us-east-1a: none")
    assert "4 attempts were made" in error.why
    assert "Safe: step 50" in error.why
    assert error.next_step.startswith("Allow other regions.")
    assert "--resume run-1" in error.next_step


@pytest.mark.parametrize("recoveries", [0, 3])
def test_an_interrupt_is_told_as_one(record, recoveries):
    record.recoveries = recoveries
    error = _error(record, Interrupted("interrupted", "why", "next"))
    assert str(error) == "interrupted\nwhy\nnext"


@pytest.mark.parametrize(("by", "kind"), [("user", Interrupted), ("deadline", Stopped), ("hard_cap", Stopped)])
def test_who_stopped_it_is_the_kind_of_its_end(record, by, kind):
    error = _error(record, Ended(False, "x", Fault.STOPPED, stopped_by=StopReason(by) if by else None))
    assert type(error) is kind
    assert "Safe: step 50" in error.why
    assert "--resume run-1" in error.next_step


ON_THEM, ON_OTHERS = "mgpu run --stack run-1 --resume run-1", "mgpu down run-1`, then `mgpu launch --resume run-1"


@pytest.mark.parametrize(
    ("by", "fault", "lost", "command"),
    [
        ("", Fault.USER, (), ON_THEM),
        ("", Fault.INFRASTRUCTURE, (), ON_THEM),  # the store's
        ("", Fault.INFRASTRUCTURE, (1,), ON_OTHERS),
        ("", Fault.PROVIDER, (1,), ON_OTHERS),
        ("user", Fault.STOPPED, (), ON_THEM),
        ("deadline", Fault.STOPPED, (), ON_THEM),
        ("hard_cap", Fault.STOPPED, (), ON_OTHERS),  # the machines end, too
        ("budget", Fault.STOPPED, (), ON_OTHERS),
        ("month", Fault.STOPPED, (), ON_OTHERS),
    ],
)
def test_a_run_whose_machines_are_kept_goes_on_there_if_they_last(record, monkeypatch, by, fault, lost, command):
    monkeypatch.chdir(record.project_base)
    record.stack, record.max_usd, record.fault, record.stop_reason = "run-1", 5.0, str(fault), by or None
    stopped = Ended(False, "x", fault, stopped_by=StopReason(by) if by else None, lost=lost)
    assert f"`{command}`" in _error(record, stopped, stays=True).next_step
    assert "`mgpu launch --resume run-1`" in _error(record, stopped).next_step


@pytest.mark.parametrize("by", ["budget", "month"])
def test_a_budget_does_not_end_machines_that_stood_before_the_run(record, monkeypatch, by):
    monkeypatch.chdir(record.project_base)
    record.stack, record.own_stack, record.max_usd, record.stop_reason = "dev", False, 5.0, by
    stopped = Ended(False, "x", Fault.STOPPED, stopped_by=StopReason(by))
    assert "`mgpu run --stack dev --resume run-1`" in _error(record, stopped, stays=True).next_step


def test_kept_machines_of_which_one_could_not_be_replaced_are_given_back_first(record, monkeypatch):
    monkeypatch.chdir(record.project_base)
    record.stack = "run-1"
    record.interruptions = [Interruption(3, "node 1 is gone", "provider", [1], 50, 0.0, 0.0)]
    assert f"`{ON_OTHERS}`" in _error(record, NoCapacity("none left"), stays=True).next_step


def test_kept_machines_that_are_whole_again_stay_where_the_attempt_cannot_begin(record, monkeypatch):
    monkeypatch.chdir(record.project_base)
    record.stack = "run-1"
    record.interruptions = [Interruption(3, "node 1 is gone", "provider", [1], 50, 0.0, 0.0, repaired_at=1.0)]
    assert f"`{ON_THEM}`" in _error(record, InputError("the run's data is not there"), stays=True).next_step
    assert f"`{ON_OTHERS}`" in _error(record, ConnectionFailed("node 1: no connection"), stays=True).next_step


@pytest.mark.parametrize("by", ["", "user", "deadline"])
def test_a_success_is_one_whatever_was_asked_for(record, by):
    assert _error(record, Ended(True, stopped_by=StopReason(by) if by else None)) is None
    assert _error(record, None) is None
