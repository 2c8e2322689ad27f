"""Gives a fleet back without a run that does it: `mgpu down`."""

from __future__ import annotations

import time
from pathlib import Path

from mgpu_train.agent.machine import procs

from mgpu.context import Context
from mgpu.errors import (
    InputError,
    Interrupted,
)
from mgpu.events import RunStateChanged, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.providers import registry
from mgpu.providers.base import Provider
from mgpu.run.fleet.stack import give_back_fleet, maker, open_stack, refuse_used, require_ours, sellers_of, stack_of
from mgpu.run.job.stack_output import provider_for
from mgpu.run.lifecycle.outcome import ended, endings, final_state, judged, remembered, revoke_store
from mgpu.run.lifecycle.removal import tidy_store
from mgpu.run.record import files, shared
from mgpu.run.record.record import Record, State, busy, load, save, supervising, supervisor_of
from mgpu.run.record.supervisor_lock import Holder
from mgpu.spec.load import first


def down(record: Record, context: Context, *, left: bool = False) -> Record:
    """Gives a run's fleet back, in the place of a supervisor; a run that was not over is stopped by that.

    `left`: only of a run that does not train, but though it was said before that its machines are gone.

    Raises:
        InputError: the run is supervised, another run uses its fleet, or the machines are not mgpu's.
    """
    before = supervisor_of(record.run_id)
    with supervising(record.run_id) as token:
        if not token:
            raise busy(record.run_id)
        files.bring(record.run_id)
        record = load(record.run_id)
        record.supervisor = token
        if left and record.state in (State.RUNNING, State.STOPPING):
            raise InputError(f"run {record.run_id} trains", "", f"End it with `mgpu stop {record.run_id}`.")
        fleet = record.fleet_output() if record.fleet else None
        if fleet is not None:
            require_ours(record.stack, fleet)
            refuse_used(fleet, but=record.run_id)
        if record.teardown != "confirmed" or left or record.store_granted:
            _give_back(record, fleet, before, context)
        return record


def _give_back(record: Record, fleet: StackOutput | None, before: Holder | None, context: Context) -> None:
    record.teardown = "asked"
    if not record.state.final and record.verdict is None:
        record.reason, record.verdict = "its machines were given back by hand", Interrupted.exit_code
    _to(record, record.state if record.state.final else State.TEARDOWN, context)
    stack = stack_of(record, context)
    if before is not None and before.process != procs.me():
        stack.oust(before.process, before.host, shared.earlier_hosts(record.run_id))
    give_back_fleet(stack, sellers_of(record), fleet, context, remove=maker(record).own_stack, name=record.fleet_name)
    record.teardown = "confirmed"
    revoke_store(record, context.emit)
    record.costs_no_more(time.time())
    if record.state.final:
        _to(record, record.state, context)
        context.emit(ended(record))  # again: its machines are gone now
        tidy_store(record, context.emit)
        return
    error = remembered(record)
    record.exit_code = record.verdict
    if error is None and (error := judged(record)) is not None:
        record.exit_code, record.reason = error.exit_code, error.what
    _to(record, final_state(error), context)
    for event in endings(record):
        context.emit(event)
    tidy_store(record, context.emit)


def _to(record: Record, state: State, context: Context) -> None:
    """Moves the record on, on disk first."""
    before = record.state
    record.to(state)
    keep(record, context)
    if before is not state:
        now = time.time()
        context.emit(RunStateChanged(record.run_id, record.attempt, now, state=str(state), before=str(before)))


def keep(record: Record, context: Context) -> None:
    """Saves a record; one that cannot be written is told."""
    try:
        save(record)
    except OSError as error:  # a full disk of this machine keeps no machine alive
        context.emit(Warned(f"the record of run {record.run_id} cannot be written: {error.strerror or error}"))


def stack_down(project: Path, name: str, context: Context) -> None:
    """Gives the fleet of one of the user's stacks back; the empty stack stays.

    Raises:
        InputError: there is no such stack, a run uses its fleet, or it is not mgpu's.
    """
    stack = open_stack(project, name, project / "mgpu.yaml", None, context)
    fleet = stack.outputs()
    if fleet is not None:
        require_ours(name, fleet)
        refuse_used(fleet)
    elif not stack.exists():
        raise InputError(
            f"there is no stack {name} of the project in {project}", "", "`pulumi stack ls` names them; see `mgpu ls`."
        )
    give_back_fleet(stack, [lambda: _provider(project, fleet)], fleet, context, remove=False)


def _provider(project: Path, fleet: StackOutput | None) -> Provider:
    """Of a stack whose fleet is not known (it never came up whole), the one of the project's run file."""
    if fleet is not None:
        return registry.get(fleet.provider, fleet.options)
    run_file = project / "mgpu.yaml"  # of several providers the first, as plain `pulumi up` has it
    return provider_for(first(run_file)) if run_file.exists() else registry.get(registry.EMBEDDED)
