"""`mgpu attach`: takes over a run whose supervisor is gone, or is stuck, and goes on from wherever it was.

What it goes by is the record, the machines as their provider describes them, and the commit log; never what the dead
one may have had in mind. All that it needs has an absolute path in the record: it can be called from any folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mgpu_train.agent.status import Fault
from mgpu_train.config import Secrets

from mgpu.errors import InputError, ProviderError
from mgpu.events import Note, Warned
from mgpu.iac.engine import Stack
from mgpu.iac.outputs import StackOutput
from mgpu.run.conduct import handle_of, watch_again
from mgpu.run.finish import Outcome, conclude, remembered
from mgpu.run.launch import attempts, conducted, provider_of, rented, supervision, used
from mgpu.run.lock import Holder
from mgpu.run.record import Folder, Record, State, load, supervisor_of
from mgpu.run.request import Request, resolve, secrets_of
from mgpu.run.session import Session
from mgpu.run.stacks import Context, bring_up, refuse_used, stack_of, standing
from mgpu.run.supervise import Ended
from mgpu.spec.load import loads
from mgpu.spec.model import RunSpec


def attach(record: Record, context: Context, *, force: bool = False) -> Outcome | None:
    """Takes over a run whose supervisor is gone; None: another one is alive. `force` takes it from that one, too.

    Raises:
        InputError: it cannot be gone on with from here (a secret is missing, the store does not answer); nothing of
            the run was touched.
    """
    before = supervisor_of(record.run_id)
    with supervision(record.run_id, context, lambda: load(record.run_id), force=force) as session:
        if session is None:
            return None
        if session.record.state.final:  # it may have ended a moment ago
            return Outcome(session.record)
        if before is not None and session.record.state in (State.PROVISIONING, State.REPAIRING, State.TEARDOWN):
            _let_go(before, session)
        return _Takeover(session, context).conclude()


def _let_go(before: Holder, session: Session) -> None:
    """Waits for a supervisor that was dispossessed: it undoes first what its engine has under way."""
    until = time.monotonic() + session.timeouts.destroy_s
    if before.pid != os.getpid() and before.lives:
        session.emit(Note(f"waiting for {before} to let go of the stack"))
        while before.lives and time.monotonic() < until and not session.interrupts.count:
            time.sleep(session.timeouts.poll_s)


class _Takeover:
    """One run, as it was left."""

    def __init__(self, session: Session, context: Context) -> None:
        self.session, self.record = session, session.record
        path = Folder(self.record.run_id).run_file
        self.spec: RunSpec = loads(
            path.read_text(), str(path)
        )  # as it was; what it names beside itself is on the nodes
        self.stack: Stack = stack_of(self.record, context)

    def conclude(self) -> Outcome:
        """Goes on with the run until it is over."""
        state, end = self.record.state, self.spec.teardown
        self.session.save()  # whose it is from here on
        if state is State.TEARDOWN:
            return conclude(self.session, self.stack, end, lambda: remembered(self.record))
        if state in (State.PROVISIONING, State.REPAIRING):
            return conclude(self.session, self.stack, end, self._undone if self._to_end else self._made())
        return conclude(self.session, self.stack, end, self._watched())

    @property
    def _to_end(self) -> bool:
        return self.session.asked_to_end

    def _undone(self) -> Ended:
        self._know_fleet()
        self.session.check()
        raise AssertionError("the end was asked for")

    def _know_fleet(self) -> StackOutput | None:
        """The fleet of the record; else that of the stack, remembered above all because it says whose it is."""
        if self.record.fleet is None:
            fleet = self.stack.outputs()
            self.record.fleet = fleet.model_dump(mode="json") if fleet else None
            self.session.save()
        return StackOutput.model_validate(self.record.fleet) if self.record.fleet else None

    # --- before the training, and between two attempts ----------------------------------------------------------

    def _made(self) -> Callable[[], Ended]:
        """The fleet made, or repaired, and the next attempt on it. Raises InputError for a secret that is missing."""
        request = self._request(StackOutput.model_validate(self.record.fleet) if self.record.fleet else None)
        secrets = secrets_of(self.spec, request.checkpoint, os.environ)
        if self.record.state is State.REPAIRING:
            return lambda: attempts(
                self.session, self.stack, request, secrets, lambda: self._repaired(request, secrets)
            )
        if self.record.own_stack:
            return lambda: rented(self.session, self.stack, request, secrets)
        return lambda: used(self.session, self.stack, request, secrets, self._standing())

    def _repaired(self, request: Request, secrets: Secrets) -> Ended:
        with self.session.phase("repairing"):
            fleet = bring_up(self.session, self.stack, self._lost())
        self.session.check()
        return conducted(self.session, request, fleet, secrets)

    def _standing(self) -> StackOutput:
        fleet = standing(self.stack, self.spec)
        refuse_used(fleet, but=self.record.run_id)
        return fleet

    def _lost(self) -> tuple[int, ...]:
        """Ranks that the dead supervisor was about to replace."""
        last = self.record.interruptions[-1:]
        return tuple(last[0].nodes) if last and last[0].repaired_at is None else ()

    # --- while it trains ----------------------------------------------------------------------------------------

    def _watched(self) -> Callable[[], Ended]:
        """The attempt watched on, or judged by the store where its machines have ended meanwhile."""
        fleet = self._know_fleet()
        if fleet is None:
            return lambda: Ended(False, "the machines that it trained on are not known", Fault.INFRASTRUCTURE)
        request, secrets = self._request(fleet), None
        try:
            secrets = secrets_of(self.spec, request.checkpoint, os.environ)
        except InputError as error:
            self.session.emit(Warned(f"{error.what}: this attempt is watched on, but no other can follow it"))
        self._claim(request)
        over = self._over(fleet, request)

        def watch() -> Ended:
            return over or watch_again(self.session, fleet, provider_of(fleet), request)

        if secrets is None:
            return lambda: _last(watch())
        return lambda: attempts(self.session, self.stack, request, secrets, watch)

    def _claim(self, request: Request) -> None:
        """In the store, too. One that does not answer is no reason to leave a run unwatched: it is said later."""
        if request.checkpoint is None:
            return
        from mgpu_train.checkpoint.commitlog import CommitLog
        from mgpu_train.store import StoreError, open_store

        try:
            self.session.claim(CommitLog(open_store(request.checkpoint.to), request.run_id))
        except StoreError as error:
            self.session.emit(Warned(f"the store does not answer, the takeover is written there later: {error}"))

    def _over(self, fleet: StackOutput, request: Request) -> Ended | None:
        """How the attempt ended when nobody watched, as the store says; None: its machines are there to be asked."""
        provider = provider_of(fleet)
        if provider is None:
            return None
        try:
            gone = provider.describe(handle_of(fleet)).lost
        except ProviderError as error:
            self.session.emit(Warned(f"the provider does not answer: {error.what}"))
            return None
        if not gone:
            return None
        found = self._of_the_store(request)
        if found is None and len(gone) == len(fleet.nodes):
            return self._cut_off(request, gone)
        return found

    def _of_the_store(self, request: Request) -> Ended | None:
        if request.checkpoint is None:
            return None
        from mgpu_train.checkpoint.commitlog import CommitLog
        from mgpu_train.checkpoint.fetch import newest_verified
        from mgpu_train.store import Damaged, StoreError, open_store

        run, attempt = request.run_id, self.record.attempt
        try:
            store = open_store(request.checkpoint.to)
            end = CommitLog(store, run).ended(attempt)
            newest = newest_verified(store, run, report=lambda text: self.session.emit(Warned(text)))
        except Damaged as error:
            return Ended(False, f"its machines are gone, and {error}", Fault.INFRASTRUCTURE)
        except StoreError as error:
            raise InputError(
                f"run {run} cannot be judged now: its machines are gone, and its store does not answer",
                str(error),
                f"Nothing is billed. Run `mgpu attach {run}` again once {request.checkpoint.to} answers.",
            ) from error
        if newest is not None:
            self.record.checkpoint_id, self.record.checkpoint_step = newest.manifest.checkpoint_id, newest.manifest.step
        done = newest is not None and newest.attempt == attempt
        steps = self.spec.train.steps if self.spec.train else None
        if done and ((end and end.succeeded) or (newest and steps and newest.manifest.step >= steps)):
            return Ended(True)
        if end is None or end.succeeded:
            return None
        return self._said(end.reason or "", end.fault)

    def _said(self, reason: str, fault: str | None) -> Ended | None:
        """An end that was no success, as node 0's agent wrote it down."""
        if fault == Fault.STOPPED:
            return Ended(False, reason, Fault.STOPPED, stopped_by="user") if self._to_end else None
        known = fault in list(Fault)
        return Ended(False, reason, Fault(fault) if known else None, lost=tuple(range(self.record.nodes)))

    def _cut_off(self, request: Request, gone: tuple[int, ...]) -> Ended:
        """All machines are gone, and the attempt was not over."""
        reason = "its machines ended when nobody supervised it"
        if self._to_end:
            return Ended(False, reason, Fault.STOPPED, stopped_by="user")
        if self.record.hard_cap_at and time.time() >= self.record.hard_cap_at:
            return Ended(False, reason, Fault.STOPPED, stopped_by="deadline")
        if request.checkpoint is None:  # it may have ended well: nobody knows, and it is not done twice
            return Ended(False, f"{reason}, and without checkpoints nobody knows how far it was")
        return Ended(False, reason, Fault.INFRASTRUCTURE, lost=gone)

    def _request(self, fleet: StackOutput | None) -> Request:
        record = self.record
        theirs = fleet.store if fleet and not record.own_stack else None
        store = theirs if record.state is State.PROVISIONING else record.store or theirs
        base = Path(record.project_base)
        return resolve(self.spec, record.run_id, base, store=store, timeouts=self.session.timeouts)


def _last(ended: Ended) -> Ended:
    """An attempt after which no other one can begin, because this process lacks a secret."""
    if ended.succeeded or ended.left or ended.stopped_by:
        return ended
    return replace(ended, reason=f"{ended.reason}; no other attempt: secrets are missing where it was supervised")
