"""How an attempt ended that nobody watched, and whose machines are gone: what its store says, and what follows."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mgpu_train.agent.status.status import Fault

from mgpu.errors import InputError, ProviderError
from mgpu.events import Warned
from mgpu.iac.outputs import StackOutput
from mgpu.providers.base import Provider
from mgpu.run.job import operator_store
from mgpu.run.job.request import Request
from mgpu.run.job.stack_output import handle_of
from mgpu.run.record.record import Record
from mgpu.run.record.session import Session
from mgpu.run.supervision.limits import StopReason, cap_reason
from mgpu.run.supervision.supervisor import Ended

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.store import Store


# An attempt that nobody reaches is taken for stalled after so long without a commit, and so many times as long as it
# ever took from one to the next; of fewer commits nothing is known.
_STALLED_S, _STALLED_TIMES, _STALLED_FROM = 900.0, 4, 3


def over(session: Session, fleet: StackOutput, provider: Provider | None, request: Request) -> Ended | None:
    """How the record's attempt ended; None: there are machines to be asked, so it has to be watched.

    Raises:
        InputError: all machines are gone, and the store does not answer.
    """
    if provider is None:
        return None
    try:
        gone = provider.describe(handle_of(fleet)).lost
    except ProviderError as error:
        session.emit(Warned(f"the provider does not answer: {error.what}"))
        return None
    if not gone:
        return None
    all_of_them = len(gone) == len(fleet.nodes)
    said = of_the_store(session, request, needed=all_of_them)
    return said or (_cut_off(session, request, gone) if all_of_them else None)


def of_the_store(session: Session, request: Request, *, needed: bool) -> Ended | None:
    """What the commit log says of the attempt; `needed`: nothing else can say it any more."""
    if request.checkpoint is None:
        return None
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.newest import newest_verified
    from mgpu_train.store import Damaged, StoreError

    record, run = session.record, request.run_id
    try:
        store = operator_store.for_spec(request.checkpoint.to, request.spec)
        log = CommitLog(store, run)
        end, lost = log.ended(record.attempt), forgotten(record, log)
        newest = newest_verified(store, run, damaged=record.damaged, report=lambda text: session.emit(Warned(text)))
        done = end is not None and end.succeeded
        ended = vouched(record, store) if done and not lost else None
    except Damaged as error:
        return Ended(False, f"its machines are gone, and {error}", Fault.INFRASTRUCTURE) if needed else None
    except StoreError as error:
        if not needed:
            return None
        raise InputError(
            f"run {run} cannot be judged now: its machines are gone, and its store does not answer",
            str(error),
            f"Nothing is billed. Run `mgpu attach {run}` again once {request.checkpoint.to} answers.",
        ) from error
    if lost:
        session.emit(Warned(lost))
    if newest is not None:
        if not lost:
            record.checkpoint_id, record.checkpoint_step = newest.checkpoint_id, newest.step
        steps = request.spec.train.steps if request.spec.train else None
        if steps and newest.step >= steps and _of_this_launch(record, newest):
            return Ended(True)
    if ended is not None:
        return ended if ended.succeeded else replace(ended, lost=tuple(range(record.nodes)))
    return None if end is None or done else _said(session, end.reason or "", end.fault)


def vouched(record: Record, store: Store) -> Ended:
    """What the store makes of an end that all agents call a success: the newest checkpoint has to verify.

    Raises StoreError.
    """
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.newest import newest_verified, problems_of
    from mgpu_train.store import Damaged

    log = CommitLog(store, record.run_id)
    for newest in log.checkpoints()[:1]:
        known = record.damaged.get(newest.checkpoint_id)
        problems = (known,) if known else problems_of(store, log, newest, deep=False)
        # a machine may be lost after the last step was saved: the attempt that follows has nothing left to save
        if not problems and _of_this_launch(record, newest):
            record.checkpoint_id, record.checkpoint_step = newest.checkpoint_id, newest.step
            return Ended(True)
        if problems and newest.attempt == record.attempt:
            whole = None
            with suppress(Damaged):  # not one is whole
                whole = newest_verified(store, record.run_id, damaged=record.damaged, report=lambda _: None)
            record.checkpoint_id, record.checkpoint_step = (whole.checkpoint_id, whole.step) if whole else (None, -1)
            why = f"the final checkpoint, {newest.checkpoint_id}, is damaged: {problems[0]}"
            return Ended(False, why, Fault.INFRASTRUCTURE)
        # the agents vouch for what was saved: it was nothing, and would be nothing again
        told = list[str]()  # already, when the attempt began
        began = newest_verified(store, record.run_id, damaged=record.damaged, report=told.append)
        went_on = f"the program went on from step {began.step} and ended" if began else "the program ended"
        why = f"{went_on} without a newer checkpoint: nothing was left to do, or it did not save it"
        return Ended(False, why, Fault.USER)
    return Ended(False, "no checkpoint of this attempt is in the commit log", Fault.INFRASTRUCTURE)


def _of_this_launch(record: Record, commit: Commit) -> bool:
    return record.attempt - commit.attempt <= record.recoveries


def forgotten(record: Record, log: CommitLog) -> str | None:
    """What a log that can be read lacks of what this record saw committed; None: nothing.

    An entry that is gone from the end of the log leaves no gap, so only the record knows of it. Raises StoreError.
    """
    from mgpu_train.checkpoint.log.lines import Commit, damaged

    lines = log.read()
    seen = any(isinstance(line, Commit) and line.checkpoint_id == record.checkpoint_id for line in lines)
    if record.checkpoint_id is None or seen or damaged(lines):
        return None
    return (
        f"{record.checkpoint_id} was committed, and is not in the commit log of run {record.run_id} any more: "
        f"objects are gone from {record.store}/{record.run_id}/commits/"
    )


def stalled(session: Session, request: Request) -> bool:
    """True where the store shows that an attempt trains no more, though its machines are there and nobody reaches them:
    nothing was committed for much longer than between any two checkpoints. False: it may train."""
    if request.checkpoint is None:
        return False
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.store import StoreError

    attempt = session.record.attempt
    try:
        log = CommitLog(operator_store.for_spec(request.checkpoint.to, request.spec), request.run_id)
        commits = [line for line in log.read() if isinstance(line, Commit) and line.attempt == attempt]
        if len(commits) < _STALLED_FROM or log.ended(attempt) is not None:
            return False
        longest_s = max(after.at - before.at for before, after in pairwise(commits))
        age_s = log.age_s(commits[-1])
    except StoreError as error:
        session.emit(Warned(f"the commit log could not be read: {error}"))
        return False
    return age_s > max(_STALLED_S, _STALLED_TIMES * longest_s)


def _said(session: Session, reason: str, fault: str | None) -> Ended | None:
    """An end that was no success, as node 0's agent wrote it down; None: one that does not end the run."""
    if fault == Fault.STOPPED:
        return Ended(False, reason, Fault.STOPPED, stopped_by=StopReason.USER) if session.asked_to_end else None
    return Ended(False, reason, Fault(fault) if fault in list(Fault) else None, lost=tuple(range(session.record.nodes)))


def _cut_off(session: Session, request: Request, gone: tuple[int, ...]) -> Ended:
    """All machines are gone, and the attempt was not over."""
    record, reason = session.record, "its machines ended when nobody supervised it"
    if session.asked_to_end:
        return Ended(False, reason, Fault.STOPPED, stopped_by=StopReason.USER)
    if record.hard_cap_at and time.time() >= record.hard_cap_at:
        return Ended(False, reason, Fault.STOPPED, stopped_by=cap_reason(record))
    if request.checkpoint is None:  # it may have ended well: nobody knows, and it is not done twice
        return Ended(False, f"{reason}, and without checkpoints nobody knows how far it was")
    return Ended(False, reason, Fault.INFRASTRUCTURE, lost=gone)
