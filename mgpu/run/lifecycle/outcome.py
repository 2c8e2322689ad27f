"""How every run ends: the fleet is given back or kept, the record is closed, and the outcome says the exit code.

A bug while nothing trains yet is undone like any other failure; the verdict is on disk before the teardown begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from mgpu_train.agent.status.status import Fault

from mgpu.context import Context
from mgpu.errors import (
    ConnectionFailed,
    InputError,
    Interrupted,
    MgpuError,
    NotAsExpected,
    ProviderError,
    RemoteError,
    StackError,
    Stopped,
    TakenOver,
    TeardownIncomplete,
    TrainingFailed,
    of_this_machine,
)
from mgpu.events import Emit, Note, RunEnded, RunEvent, RunRegressed, Warned
from mgpu.fields import plain
from mgpu.iac.engine.stack import Stack
from mgpu.providers import registry
from mgpu.providers.base import StoreRole
from mgpu.run.fleet.stack import InUse, give_back_fleet, sellers_of
from mgpu.run.lifecycle.removal import tidy_store
from mgpu.run.record import checks, shared
from mgpu.run.record.record import Record, State, known
from mgpu.run.record.session import Session
from mgpu.run.supervision.limits import StopReason
from mgpu.run.supervision.supervisor import Ended
from mgpu.run.view import lasts, resumes


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `error` is None for success; `left`: it goes on without this supervisor, because the user wants
    that, or (`error`) because another one has it."""

    record: Record
    error: MgpuError | None = None
    left: bool = False
    detached: bool = False  # `left`, as was asked for from the beginning

    @property
    def exit_code(self) -> int:
        """The process's exit code."""
        if self.left:
            return 0 if self.detached else Interrupted.exit_code
        return self.error.exit_code if self.error else self.record.exit_code or 0


Result = Ended | MgpuError | None  # None: remembered as a success


def conclude(session: Session, stack: Stack, teardown: str, body: Callable[[], Result]) -> Outcome:
    """Runs `body`, and ends the run as its result says; `teardown` is the run file's.

    A supervisor whose run another one has taken over writes and ends nothing more.

    Raises:
        Exception: a bug, after what it had made was undone.
    """
    try:
        return _concluded(session, stack, teardown, body)
    except TakenOver as error:
        return Outcome(session.record, error, left=True)


def _concluded(session: Session, stack: Stack, teardown: str, body: Callable[[], Result]) -> Outcome:
    try:
        return _finish(session, stack, teardown, _guarded(session, body))
    except KeyboardInterrupt:  # a second signal: the engine goes on by itself
        session.log("left", state=str(session.record.state))
        if session.interrupts.count and session.record.state is not State.RUNNING:
            with suppress(
                OSError, StackError
            ):  # the first one has asked for the end: whoever takes over goes on with it
                shared.ask_to_stop(session.record.run_id)
        session.save()
        return Outcome(session.record, left=True)


def _guarded(session: Session, body: Callable[[], Result]) -> Result:
    try:
        return body()
    except TakenOver:  # it is left as it is, though the backend may answer by now
        raise
    except MgpuError as error:
        session.log("error", what=error.what)
        if session.asked_to_end:
            return Interrupted("interrupted", error.what, "`mgpu ls` shows what is billed now.")
        return error
    except Exception as bug:
        run_id, short = session.record.run_id, of_this_machine(bug)
        session.log("bug" if short is None else "error", what=type(bug).__name__ if short is None else short.what)
        if session.record.state is State.PROVISIONING:  # nothing trains yet: undone like any other failure
            return short or _Bug(bug)
        go_on = f"`mgpu attach {run_id}` takes it over, `mgpu stop {run_id}` ends it"
        why = "a bug of mgpu" if short is None else "what this machine lacks"
        session.emit(Warned(f"{why} ends this supervisor; the run goes on without one: {go_on}"))
        if short is None:
            raise
        raise short from bug


def _finish(session: Session, stack: Stack, teardown: str, result: Result) -> Outcome:
    record = session.record
    if isinstance(result, Ended) and result.left:
        if record.state is State.QUEUED:  # again: nothing of it has begun
            return Outcome(record, left=True, detached=True)
        session.emit(Note("left running"))
        session.save()
        return Outcome(record, left=True, detached=session.may_leave and not session.asked_to_end)
    if isinstance(result, Ended):
        record.fault = str(result.fault) if result.fault else None
        record.stop_reason = str(result.stopped_by) if result.stopped_by else None
    return _close(session, stack, teardown, _error(record, result, stays=_stays(record, teardown)))


def _close(session: Session, stack: Stack, teardown: str, error: MgpuError | None) -> Outcome:
    """The fleet goes or stays, then the record is closed; a supervisor that dies in between has left its verdict."""
    record = session.record
    record.verdict = error.exit_code if error else 0
    record.reason = error.what if error else ""
    try:
        # the machines are the other run's as long as it trains on them
        _teardown(session, stack, "keep" if isinstance(error, InUse) else teardown)
    except TakenOver:
        raise
    except TeardownIncomplete as incomplete:
        error = incomplete
    except (MgpuError, OSError) as failure:
        error = _incomplete(record, failure)
    revoke_store(record, session.emit)
    error = error or judged(record)
    record.exit_code = error.exit_code if error else 0
    record.reason = error.what if error else ""
    session.to(final_state(error))
    for event in endings(record):
        session.emit(event)
    with suppress(KeyboardInterrupt), session.interrupts.leaving():
        tidy_store(record, session.emit)
    session.journal.close()
    if isinstance(error, _Bug):
        raise error.bug
    return Outcome(record, error)


def judged(record: Record) -> NotAsExpected | None:
    """Whether a run that is about to succeed is as its run file expects; after its teardown, for that costs, too. It
    succeeds in any case: what it has made is whole, and is kept."""
    record.checks = checks.judged(record, time.time())
    if not record.unmet:
        return None
    run, others = f"run {record.run_id}", len(record.checks) - len(record.unmet)
    also = f" Of {len(record.checks)} expectations {others} are met." if others else ""
    return NotAsExpected(
        f"{run} succeeded, but not as expected: {'; '.join(f'{each.metric} {each.said}' for each in record.unmet)}",
        f"Its checkpoints and outputs are kept.{also}",
        f"See `mgpu status {record.run_id}`, and `expect` in its run file.",
    )


def revoke_store(record: Record, emit: Emit) -> None:
    """Takes away what the run's machines may do in its store, where they were given rights. What stays is told, and
    ends nothing: such rights open that run's place alone, to machines that know its secret."""
    if not record.store_granted:
        return
    failed = list[str]()
    known = record.sellers
    for name in record.granted_by or known:
        try:
            provider = registry.get(name, known.get(name, record.candidates.get(name)))
            if isinstance(provider, StoreRole):
                provider.revoke_store(record.run_id)
        except MgpuError as error:
            failed.append(name)
            again = f"`mgpu down {record.run_id}` tries again"
            emit(Warned(f"the rights of run {record.run_id} in its store stay: {error.what}; {again}"))
    record.store_granted, record.granted_by = bool(failed), failed


class _Bug(MgpuError):
    """Carries what nobody foresaw past the teardown, to be raised as it was after that."""

    def __init__(self, bug: Exception) -> None:
        super().__init__(f"{type(bug).__name__}: {bug}")
        self.bug = bug


def endings(record: Record) -> Iterator[RunEvent]:
    """What is told of a run that is over, for the first time."""
    at = record.ended_at or time.time()
    if record.unmet:
        unmet = tuple(plain(each) for each in record.unmet)
        yield RunRegressed(
            record.run_id,
            record.attempt,
            at,
            schedule=record.schedule,
            code=record.code,
            checks=unmet,
            submitted_at=record.submitted_at or record.created_at,
        )
    yield ended(record)


def ended(record: Record) -> RunEnded:
    """How a run has ended."""
    return RunEnded(
        record.run_id,
        record.attempt,
        record.ended_at or time.time(),
        state=str(record.state),
        reason=record.reason,
        fault=record.fault,
        stop_reason=record.stop_reason,
        exit_code=record.exit_code or 0,
        teardown=record.teardown,
        spent_usd=round(record.spent_usd(record.ended_at or time.time()), 4),
        step=known(record.step),
        checkpoint_step=known(record.checkpoint_step),
        submitted_at=record.submitted_at or record.created_at,
    )


def final_state(error: MgpuError | None) -> State:
    """The state that a run ends in."""
    if error is None or isinstance(error, NotAsExpected):
        return State.SUCCEEDED
    return State.STOPPED if isinstance(error, Interrupted | Stopped) else State.FAILED


_VERDICTS = {cls.exit_code: cls for cls in (Interrupted, Stopped, ProviderError, StackError, RemoteError, InputError)}


def remembered(record: Record) -> MgpuError | None:
    """How the run ended, by the record of a supervisor that died while it gave the machines back."""
    if record.verdict == 0:
        return None
    what = record.reason or f"run {record.run_id} failed: its supervisor ended while it gave the machines back"
    return _VERDICTS.get(record.verdict or 0, TrainingFailed)(what, "", f"See `mgpu logs {record.run_id}`.")


def _incomplete(record: Record, failure: Exception) -> TeardownIncomplete:
    gone = record.teardown == "confirmed"
    return TeardownIncomplete(
        f"run {record.run_id}: " + ("the machines are gone, but not all of the rest" if gone else "not given back"),
        str(failure),
        f"Run `mgpu down {record.run_id}` once the cause is mended; `mgpu ls` shows what is billed.",
    )


_BLAME = {
    Fault.USER: "The cause is the program, or what it needs; the machines are not.",
    Fault.INFRASTRUCTURE: "The machines or the store are at fault, the program is not.",
    Fault.PROVIDER: "The provider took the machine; the program is not at fault.",
}
_CURE = {
    Fault.USER: "once it is mended, go on from there",
    Fault.INFRASTRUCTURE: "go on from there",
    Fault.PROVIDER: "go on from there, later or with another market, GPU or region in the run file",
}


def _error(record: Record, result: Result, *, stays: bool = False) -> MgpuError | None:
    """`stays`: its machines are kept."""
    run, safe, command = f"run {record.run_id}", _safe(record), _command(record, result, stays=stays)
    again = f"Go on from it with {command}." if record.checkpoint_id else ""
    if isinstance(result, MgpuError):
        if record.recoveries and not isinstance(result, Interrupted):  # a repair that could not be made
            result.why = "\n".join(filter(None, (result.why, _tries(record), safe)))
            result.next_step = "\n".join(filter(None, (result.next_step, again)))
        return result
    if result is None or result.succeeded:  # it may have ended by itself while it was asked to stop
        return None
    if result.stopped_by is StopReason.USER:
        return Interrupted(f"{run} was stopped", safe, again)
    if result.stopped_by is StopReason.BUDGET:
        spent = f"${record.spent_usd(time.time()):.2f} of ${record.max_usd:.2f}"
        more = f"Raise `max_usd` to go on from it: {command}." if record.checkpoint_id else ""
        return Stopped(f"{run} stopped at its budget: {spent} (max_usd)", safe, more)
    if result.stopped_by is StopReason.MONTH:
        more = f" to go on from it: {command}" if record.checkpoint_id else ""
        cure = f"`mgpu limits show` has it. Raise it (`mgpu limits set --usd-per-month`), or wait for the next{more}."
        return Stopped(f"{run} stopped at the month's budget, which all runs spend (usd_per_month)", safe, cure)
    if result.stopped_by is not None:
        of_machines = result.stopped_by is StopReason.HARD_CAP
        # machines may end before: those of a reservation, or of a fleet that stood already
        whose = (
            "" if of_machines and record.hard_cap_at < record.created_at + record.max_hours * 3600 else " (max_hours)"
        )
        return Stopped(f"{run} stopped at its {'hard cap' if of_machines else 'deadline'}{whose}", safe, again)
    blame = _BLAME.get(result.fault, "") if result.fault else ""
    cure = _CURE.get(result.fault, "") if result.fault and record.checkpoint_id else ""
    steps = f"; {cure}: {command}" if cure else ""
    if result.fault in (Fault.INFRASTRUCTURE, Fault.PROVIDER) and result.lost and not record.recoveries:
        steps += "; with `recovery: {attempts: 5}` in the run file it goes on by itself"
    return TrainingFailed(
        f"{run} failed: {result.reason}",
        " ".join(filter(None, (blame, _tries(record), safe))),
        f"See `mgpu logs {record.run_id}`{steps}.",
    )


def _tries(record: Record) -> str:
    """How often it was tried; empty for a run that was never interrupted."""
    if not record.recoveries:
        return ""
    idle = f", the last {record.idle} without a new checkpoint" if record.idle > 1 else ""
    return f"{record.recoveries + 1} attempts were made{idle}."


def _safe(record: Record) -> str:
    return f"Safe: step {record.checkpoint_step}, the newest committed checkpoint." if record.checkpoint_id else ""


def _command(record: Record, result: Result, *, stays: bool) -> str:
    """What goes on with it: on the machines that it keeps, where all of them last."""
    lost = isinstance(result, ConnectionFailed) or (isinstance(result, Ended) and bool(result.lost))
    on_them = stays and not lost and lasts(record)
    command = f"`{resumes(record, kept=on_them)}`"
    return f"`mgpu down {record.run_id}`, then {command}" if stays and not on_them else command


def _stays(record: Record, teardown: str) -> bool:
    # a fleet that never came up is never kept: nobody could use it
    return teardown == "keep" and record.fleet is not None and bool(record.fleet_output().owner)


def _teardown(session: Session, stack: Stack, teardown: str) -> None:
    record = session.record
    fleet = record.fleet_output() if record.fleet else None
    if fleet is not None and not fleet.owner:
        record.teardown = "not ours"
        record.costs_no_more(time.time())
        session.emit(Warned(f"stack {stack.name} is not made by mgpu: its machines are left as they are"))
        return
    if _stays(record, teardown):
        record.teardown = "kept"
        record.costs_no_more(time.time())
        return
    session.to(State.TEARDOWN)
    record.teardown = "asked"
    context = Context(session.emit, session.timeouts)
    with session.interrupts.leaving(), session.phase("teardown"):
        give_back_fleet(stack, sellers_of(record), fleet, context, remove=record.own_stack, name=record.fleet_name)
    record.teardown = "confirmed"
    record.costs_no_more(time.time())
