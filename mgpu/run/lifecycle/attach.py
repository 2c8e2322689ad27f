"""`mgpu attach`: takes over a run whose supervisor is gone, or is stuck, and goes on from wherever it was."""

from __future__ import annotations

import os
import time

from mgpu.context import Context
from mgpu.events import Note
from mgpu.run.lifecycle.outcome import Outcome
from mgpu.run.lifecycle.supervise import supervise, supervision
from mgpu.run.record.record import Record, State, load, supervisor_of
from mgpu.run.record.session import Session
from mgpu.run.record.supervisor_lock import Holder


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
        return supervise(session, context, before)


def _let_go(before: Holder, session: Session) -> None:
    """Waits for a supervisor that was dispossessed: it undoes first what its engine has under way. What one that does
    not move has there is ended later, by who needs the stack."""
    until = time.monotonic() + session.timeouts.destroy_s
    if before.pid != os.getpid() and before.lives and not before.suspended:
        session.emit(Note(f"waiting for {before} to let go of the stack"))
        while before.lives and not before.suspended and time.monotonic() < until and not session.interrupts.count:
            time.sleep(session.timeouts.poll_s)
