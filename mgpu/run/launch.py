"""A run from request to nothing left: `launch` (a fleet of its own), `run` (a stack that stands), `attach` (take over).

All three end in `_finish`: the fleet is given back or kept, the record is closed, and the outcome says the exit code.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.agent.status import Fault
from mgpu_train.config import Secrets
from mgpu_train.timeouts import Timeouts

from mgpu import paths
from mgpu.errors import InputError, Interrupted, MgpuError, StackError, Stopped, TrainingFailed
from mgpu.events import Emit, Note, Warned
from mgpu.iac.engine import Stack
from mgpu.iac.naming import fleet_name
from mgpu.iac.outputs import StackOutput
from mgpu.iac.project import project_name
from mgpu.plan import rank
from mgpu.providers import registry
from mgpu.providers.base import Provider
from mgpu.remote.nodeset import NodeSet
from mgpu.run.conduct import conduct, targets, watch
from mgpu.run.record import Folder, Record, State, new_run_id, save, supervising
from mgpu.run.request import Request, resolve, secrets_of
from mgpu.run.session import Interrupts, Session
from mgpu.run.supervise import Ended
from mgpu.run.teardown import give_back
from mgpu.spec.load import loads
from mgpu.spec.model import RunSpec


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `error` is None for success; `left`: it goes on without a supervisor."""

    record: Record
    error: MgpuError | None = None
    left: bool = False

    @property
    def exit_code(self) -> int:
        """The process's exit code."""
        if self.left:
            return Interrupted.exit_code
        return self.error.exit_code if self.error else 0


@dataclass(frozen=True)
class Context:
    """What a command gives every run: where events go, the deadlines, and how to ask on a terminal."""

    emit: Emit
    timeouts: Timeouts
    ask_to_stop: Callable[[], bool] | None = None


def project_of(run_file: Path) -> Path:
    """The folder with Pulumi.yaml: the run file's own, or the nearest above it.

    Raises:
        InputError: there is none.
    """
    for folder in (run_file.resolve().parent, *run_file.resolve().parents):
        if (folder / "Pulumi.yaml").exists():
            return folder
    raise InputError(
        f"{run_file}: no Pulumi.yaml in its folder or above",
        "mgpu rents machines through a Pulumi program that you own.",
        "Run `mgpu init` in your project's folder: it writes Pulumi.yaml and infra/.",
    )


def launch(run_file: Path, spec: RunSpec, context: Context, *, resume: Record | None = None) -> Outcome:
    """Makes a stack of its own, runs on it, and gives the fleet back (or keeps it: `teardown: keep`)."""
    record = _record(run_file, spec, stack=None, resume=resume)
    with _supervised(record, context) as session:
        request = resolve(spec, record.run_id, Path(record.project_base), timeouts=context.timeouts)
        secrets = secrets_of(spec, request.checkpoint, os.environ)
        stack = _stack(record, context)

        def body() -> Ended:
            with session.phase("provisioning", f"{spec.nodes} nodes of {spec.provider}"):
                fleet = _up(session, stack)
            session.interrupts.check()
            return _conduct(session, request, fleet, secrets)

        return _finish(session, stack, spec.teardown, _guarded(session, body))


def run(run_file: Path, spec: RunSpec, stack_name: str, context: Context, *, resume: Record | None = None) -> Outcome:
    """Runs on the fleet of a stack that stands."""
    record = _record(run_file, spec, stack=stack_name, resume=resume)
    stack = _stack(record, context)
    fleet = _standing(stack, spec)
    with _supervised(record, context) as session:
        request = resolve(spec, record.run_id, Path(record.project_base), store=fleet.store, timeouts=context.timeouts)
        secrets = secrets_of(spec, request.checkpoint, os.environ)
        session.record.fleet = fleet.model_dump(mode="json")
        return _finish(
            session, stack, spec.teardown, _guarded(session, lambda: _conduct(session, request, fleet, secrets))
        )


def attach(record: Record, context: Context) -> Outcome | None:
    """Takes over a run whose supervisor is gone; None: another supervisor is alive, so there is nothing to take."""
    with supervising(record.run_id) as free:
        if not free:
            return None
    path = Folder(record.run_id).run_file
    spec = loads(path.read_text(), str(path))  # as it was; what it names beside itself is on the nodes by now
    with _supervised(record, context) as session:
        stack = _stack(record, context)
        fleet = stack.outputs() if record.fleet is None else StackOutput.model_validate(record.fleet)

        def body() -> Ended:
            if fleet is None or record.attempt == 0:
                return Ended(False, "the supervisor ended before the training began", Fault.INFRASTRUCTURE)
            if record.state is State.PROVISIONING:
                session.to(State.RUNNING)
            request = resolve(spec, record.run_id, Path(record.project_base), timeouts=context.timeouts)
            nodes = NodeSet.connect(targets(fleet), Path(fleet.private_key_file).expanduser(), context.timeouts)
            try:
                return watch(session, nodes, fleet, _provider(fleet), request)
            finally:
                nodes.close()

        return _finish(session, stack, spec.teardown, _guarded(session, body))


def preflight(run_file: Path, spec: RunSpec) -> Path:
    """What can be known before money is spent: project, secrets, provider. Returns the project's folder.

    Raises:
        InputError, ProviderError: what is missing.
    """
    project = project_of(run_file)
    secrets_of(spec, None, os.environ)
    registry.get(spec.provider, rank.requirements(spec).provider_options).check()
    return project


def down(record: Record, context: Context) -> None:
    """Gives a run's fleet back without a supervisor; the record says so afterwards."""
    fleet = StackOutput.model_validate(record.fleet) if record.fleet else None
    stack = _stack(record, context)
    _give_back(stack, record.provider, fleet, context, remove=record.own_stack)
    record.teardown = "confirmed"


def stack_down(project: Path, name: str, context: Context) -> None:
    """Gives the fleet of one of the user's stacks back; the empty stack stays."""
    stack = open_stack(project, name, project / "mgpu.yaml", None, context)
    fleet = stack.outputs()
    if fleet is not None and not fleet.owner:
        raise InputError(f"stack {name} is not made by mgpu", "Its output names no owner.", "Use `pulumi destroy`.")
    _give_back(stack, fleet.provider if fleet else "local", fleet, context, remove=False)


def _give_back(stack: Stack, provider: str, fleet: StackOutput | None, context: Context, *, remove: bool) -> None:
    give_back(
        stack,
        registry.get(provider),
        fleet.owner if fleet else paths.owner(),
        context.timeouts,
        context.emit,
        remove=remove,
    )


# --- the steps they share -----------------------------------------------------------------------------------------


def _record(run_file: Path, spec: RunSpec, *, stack: str | None, resume: Record | None) -> Record:
    run_id = resume.run_id if resume else new_run_id(spec.name)
    stack_name = stack or new_stack_name(run_id, resume)
    project = project_of(run_file)
    record = Record(
        run_id=run_id,
        name=spec.name,
        project=str(project),
        project_base=str(run_file.resolve().parent),
        run_file=str(run_file.resolve()),
        stack=stack_name,
        own_stack=stack is None,
        fleet_name=fleet_name(project_name(project), stack_name),
        provider=spec.provider,
        nodes=spec.nodes,
        attempt=resume.attempt if resume else 0,
        created_at=resume.created_at if resume else time.time(),
        max_hours=spec.max_hours,
    )
    folder = Folder(run_id)
    folder.make()
    shutil.copyfile(run_file, folder.run_file)
    folder.stop.unlink(missing_ok=True)
    save(record)
    return record


def new_stack_name(run_id: str, resume: Record | None) -> str:
    """The run's id; a resumed run's new fleet gets a new name, because two fleets never share one."""
    return run_id if resume is None else f"{run_id}-r{resume.attempt + 1}"


@contextmanager
def _supervised(record: Record, context: Context) -> Iterator[Session]:
    with supervising(record.run_id) as free:
        if not free:
            raise InputError(
                f"run {record.run_id} has a supervisor already",
                "One process at a time supervises a run.",
                f"Follow it with `mgpu attach {record.run_id}`, or end it with `mgpu stop {record.run_id}`.",
            )
        interrupts = Interrupts()
        with interrupts.installed():
            yield Session(record, context.emit, context.timeouts, interrupts, context.ask_to_stop)


def _stack(record: Record, context: Context) -> Stack:
    log_dir = Folder(record.run_id).pulumi if record.own_stack else None
    return open_stack(Path(record.project), record.stack, Path(record.run_file), log_dir, context)


def open_stack(project: Path, name: str, run_file: Path, log_dir: Path | None, context: Context) -> Stack:
    """A stack by name. `log_dir`: where a stack of mgpu's own keeps configuration and logs; None: the user's stack."""
    return Stack(
        project,
        name,
        run_file,
        log_dir=log_dir or paths.state_dir() / "stacks" / name,
        emit=context.emit,
        timeouts=context.timeouts,
        own_config=log_dir is not None,
    )


def _up(session: Session, stack: Stack) -> StackOutput:
    session.journal.append("up", stack=stack.name)  # the undo is known before the machines are asked for
    with session.interrupts.calling(stack.interrupt):
        stack.init()
        stack.up()
    fleet = stack.outputs()
    if fleet is None:
        raise StackError(
            f"stack {stack.name} has no output `mgpu`",
            "The Pulumi program in infra/ ran, but did not export it.",
            'Export it: pulumi.export("mgpu", fleet.output); docs/formats.md describes it.',
        )
    session.record.fleet = fleet.model_dump(mode="json")
    session.record.price_usd_per_hour = fleet.price_usd_per_hour
    session.record.hard_cap_at = fleet.hard_cap_at
    save(session.record)
    return fleet


def _standing(stack: Stack, spec: RunSpec) -> StackOutput:
    fleet = stack.outputs()
    if fleet is None:
        raise StackError(
            f"stack {stack.name} has no fleet",
            "It has no output `mgpu`: it was never brought up, or was destroyed.",
            "Run `. .mgpu/env && pulumi up` first, or use `mgpu launch`, which does both halves.",
        )
    if len(fleet.nodes) != spec.nodes or fleet.provider != spec.provider:
        raise InputError(
            f"stack {stack.name} has {len(fleet.nodes)} nodes of {fleet.provider}, "
            f"the run file wants {spec.nodes} of {spec.provider}",
            "The fleet was made from another run file, or before it was changed.",
            "Run `pulumi up` to bring the fleet in line with the run file.",
        )
    return fleet


def _conduct(session: Session, request: Request, fleet: StackOutput, secrets: Secrets) -> Ended:
    record = session.record
    record.price_usd_per_hour, record.hard_cap_at = fleet.price_usd_per_hour, fleet.hard_cap_at
    return conduct(session, request, fleet, _provider(fleet), secrets)


def _provider(fleet: StackOutput) -> Provider | None:
    """Who describes the machines; None for a fleet that a program of the user's own made."""
    return registry.get(fleet.provider) if fleet.owner else None


def _guarded(session: Session, body: Callable[[], Ended]) -> Ended | MgpuError:
    try:
        return body()
    except MgpuError as error:
        session.journal.append("error", what=error.what)
        if session.interrupts.count:
            return Interrupted("interrupted", error.what, "Nothing is left behind if the next lines say so.")
        return error


def _finish(session: Session, stack: Stack, teardown: str, result: Ended | MgpuError) -> Outcome:
    record = session.record
    if isinstance(result, Ended) and result.left:
        session.emit(Note("left running"))
        save(record)
        return Outcome(record, left=True)
    error = _error(record, result)
    try:
        _teardown(session, stack, teardown)
    except MgpuError as incomplete:
        error = incomplete
    final = State.SUCCEEDED if error is None else State.STOPPED if isinstance(error, _STOPS) else State.FAILED
    record.exit_code = error.exit_code if error else 0
    record.reason = error.what if error else ""
    record.fault = str(result.fault) if isinstance(result, Ended) and result.fault else None
    session.to(final)
    session.journal.close()
    return Outcome(record, error)


_STOPS = (Interrupted, Stopped)


def _error(record: Record, result: Ended | MgpuError) -> MgpuError | None:
    if isinstance(result, MgpuError):
        return result
    kept = f"The newest committed checkpoint is step {record.checkpoint_step}." if record.checkpoint_id else ""
    again = f"Go on from it with `mgpu launch --resume {record.run_id}`." if record.checkpoint_id else ""
    if result.stopped_by == "deadline":
        return Stopped(f"run {record.run_id} stopped at its hard cap (max_hours)", kept, again)
    if result.stopped_by == "user":
        return Interrupted(f"run {record.run_id} was stopped", kept, again)
    if result.succeeded:
        return None
    why = {Fault.USER: "The program itself ended so.", Fault.INFRASTRUCTURE: "The machines or the store are at fault."}
    because = why.get(result.fault, "") if result.fault else ""
    return TrainingFailed(
        f"run {record.run_id} failed: {result.reason}", f"{because} {kept}".strip(), f"See `mgpu logs {record.run_id}`."
    )


def _teardown(session: Session, stack: Stack, teardown: str) -> None:
    record = session.record
    fleet = StackOutput.model_validate(record.fleet) if record.fleet else None
    if fleet is not None and not fleet.owner:
        record.teardown = "not ours"
        session.emit(Warned(f"stack {stack.name} is not made by mgpu: its machines are left as they are"))
        return
    # a fleet that never came up is never kept: nobody could use it
    if teardown == "keep" and fleet is not None:
        record.teardown = "kept"
        return
    session.to(State.TEARDOWN)
    record.teardown = "asked"
    context = Context(session.emit, session.timeouts)
    with session.phase("teardown"):
        _give_back(stack, record.provider, fleet, context, remove=record.own_stack)
    record.teardown = "confirmed"
