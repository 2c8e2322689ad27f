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
from mgpu.errors import (
    InputError,
    Interrupted,
    MgpuError,
    ProviderError,
    RemoteError,
    StackError,
    Stopped,
    TeardownIncomplete,
    TrainingFailed,
)
from mgpu.events import Emit, Note, Warned
from mgpu.iac.engine import Stack
from mgpu.iac.naming import fleet_name
from mgpu.iac.outputs import StackOutput
from mgpu.iac.project import project_name
from mgpu.plan import rank
from mgpu.providers import registry
from mgpu.providers.base import Provider
from mgpu.run.conduct import conduct, watch_again
from mgpu.run.record import Folder, Record, State, every, load, new_run_id, opening, save, supervising
from mgpu.run.recover import Attempts
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
        return self.error.exit_code if self.error else self.record.exit_code or 0


@dataclass(frozen=True)
class Context:
    """What a command gives every run: where events go, the deadlines, and how to ask on a terminal."""

    emit: Emit
    timeouts: Timeouts
    ask_to_stop: Callable[[], bool | None] | None = None


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
    run_id = resume.run_id if resume else new_run_id(spec.name)
    request = resolve(spec, run_id, run_file.resolve().parent, timeouts=context.timeouts)
    secrets = secrets_of(spec, request.checkpoint, os.environ)
    with _opened(run_id, context, lambda: _record(run_file, spec, run_id, stack=None, resume=resume)) as session:
        stack = _stack(session.record, context)

        def body() -> Ended:
            with session.phase("provisioning", f"{spec.nodes} nodes of {spec.provider}"):
                fleet = _up(session, stack)
            session.check()
            return _attempts(session, stack, request, secrets, lambda: _conduct(session, request, fleet, secrets))

        return _conclude(session, stack, spec.teardown, body)


def run(run_file: Path, spec: RunSpec, stack_name: str, context: Context, *, resume: Record | None = None) -> Outcome:
    """Runs on the fleet of a stack that stands."""
    run_id = resume.run_id if resume else new_run_id(spec.name)
    stack = open_stack(project_of(run_file), stack_name, run_file, None, context)
    fleet = _standing(stack, spec)
    request = resolve(spec, run_id, run_file.resolve().parent, store=fleet.store, timeouts=context.timeouts)
    secrets = secrets_of(spec, request.checkpoint, os.environ)

    def made() -> Record:
        refuse_used(fleet)
        return _record(run_file, spec, run_id, stack=stack_name, resume=resume, fleet=fleet)

    price = f"${fleet.price_usd_per_hour:.2f} per hour, all nodes"
    context.emit(Note(f"fleet {fleet.fleet}: {len(fleet.nodes)} nodes, {price}, rented already"))
    with _opened(run_id, context, made) as session:

        def body() -> Ended:
            return _attempts(session, stack, request, secrets, lambda: _conduct(session, request, fleet, secrets))

        return _conclude(session, stack, spec.teardown, body)


def attach(record: Record, context: Context) -> Outcome | None:
    """Takes over a run whose supervisor is gone; None: another supervisor is alive, so there is nothing to take."""
    with _supervised(record.run_id, context, lambda: load(record.run_id)) as session:
        if session is None:
            return None
        record = session.record  # as its supervisor left it, which may have been a moment ago
        if record.state.final:
            return Outcome(record)
        path = Folder(record.run_id).run_file
        spec = loads(path.read_text(), str(path))  # as it was; what it names beside itself is on the nodes by now
        stack = _stack(record, context)
        if record.state is State.TEARDOWN:
            return _conclude(session, stack, spec.teardown, lambda: _remembered(record))
        fleet = stack.outputs() if record.fleet is None else StackOutput.model_validate(record.fleet)
        record.fleet = fleet.model_dump(mode="json") if fleet else None  # above all: whose it is

        def body() -> Ended:
            if fleet is None or record.attempt == 0:
                return Ended(False, "the supervisor ended before the training began", Fault.INFRASTRUCTURE)
            if record.state is State.PROVISIONING:
                session.to(State.RUNNING)
            request = resolve(
                spec, record.run_id, Path(record.project_base), store=fleet.store, timeouts=context.timeouts
            )
            return watch_again(session, fleet, _provider(fleet), request)

        return _conclude(session, stack, spec.teardown, body)


def preflight(run_file: Path, spec: RunSpec) -> Path:
    """What can be known before money is spent: project, secrets, provider. Returns the project's folder.

    Raises:
        InputError, ProviderError: what is missing.
    """
    project = project_of(run_file)
    request = resolve(spec, spec.name, run_file.resolve().parent, timeouts=Timeouts())  # type: ignore[call-arg]
    secrets_of(spec, request.checkpoint, os.environ)
    registry.get(spec.provider, rank.requirements(spec).provider_options).check()
    return project


def down(record: Record, context: Context) -> Record:
    """Gives a run's fleet back, in the place of a supervisor; a run that was not over is stopped by that.

    Raises:
        InputError: the run is supervised, another run uses its fleet, or the machines are not mgpu's.
    """
    with supervising(record.run_id) as free:
        if not free:
            raise _busy(record.run_id)
        record = load(record.run_id)
        fleet = StackOutput.model_validate(record.fleet) if record.fleet else None
        if fleet is not None:
            _require_ours(record.stack, fleet)
            refuse_used(fleet, but=record.run_id)
        if record.teardown == "confirmed":
            return record
        record.teardown = "asked"
        if not record.state.final:
            record.to(State.TEARDOWN)
            if record.verdict is None:
                record.reason, record.verdict = "its machines were given back by `mgpu down`", Interrupted.exit_code
        save(record)
        _give_back(_stack(record, context), record.provider, fleet, context, remove=record.own_stack)
        record.teardown = "confirmed"
        if not record.state.final:
            record.exit_code = record.verdict
            record.to(_final(_remembered(record)))
        save(record)
        return record


def stack_down(project: Path, name: str, context: Context) -> None:
    """Gives the fleet of one of the user's stacks back; the empty stack stays.

    Raises:
        InputError: there is no such stack, a run uses its fleet, or it is not mgpu's.
    """
    stack = open_stack(project, name, project / "mgpu.yaml", None, context)
    fleet = stack.outputs()
    if fleet is not None:
        _require_ours(name, fleet)
        refuse_used(fleet)
    elif not stack.exists():
        raise InputError(
            f"there is no stack {name} of the project in {project}", "", "`pulumi stack ls` names them; see `mgpu ls`."
        )
    _give_back(stack, fleet.provider if fleet else "local", fleet, context, remove=False)


def _require_ours(stack: str, fleet: StackOutput) -> None:
    if not fleet.owner:
        raise InputError(f"stack {stack} is not made by mgpu", "Its output names no owner.", "Use `pulumi destroy`.")


def refuse_used(fleet: StackOutput, but: str = "") -> None:
    """Raises InputError when a run that is not over uses machines of this fleet; `but` is a run that may."""
    ids = {node.id for node in fleet.nodes}
    for record in every():
        theirs = {node.get("id") for node in (record.fleet or {}).get("nodes", ())}
        if not record.state.final and record.run_id != but and ids & theirs:
            raise InputError(
                f"fleet {fleet.fleet} is used by run {record.run_id}",
                f"That run is not over: {record.state}.",
                f"Follow it with `mgpu attach {record.run_id}`, or end it with `mgpu stop {record.run_id}`.",
            )


def _give_back(stack: Stack, provider: str, fleet: StackOutput | None, context: Context, *, remove: bool) -> None:
    give_back(
        stack,
        registry.get(provider),
        fleet.owner if fleet else paths.owner(),
        context.timeouts,
        context.emit,
        remove=remove,
        fleet=fleet.fleet if fleet else None,
    )
    # earlier runs that kept this fleet: what their records say of it is not true any more
    names = (stack.fleet, fleet.fleet if fleet else stack.fleet)
    for record in every():
        if record.teardown == "kept" and (record.fleet or {}).get("fleet") in names:
            record.teardown = "confirmed"
            save(record)


# --- the steps they share -----------------------------------------------------------------------------------------


def _record(
    run_file: Path,
    spec: RunSpec,
    run_id: str,
    *,
    stack: str | None,
    resume: Record | None,
    fleet: StackOutput | None = None,
) -> Record:
    if resume is not None:
        resume = load(run_id)
        _require_over(resume, own_stack=stack is None)
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
        store=resume.store if resume else None,
        checkpoint_id=resume.checkpoint_id if resume else None,
        checkpoint_step=resume.checkpoint_step if resume else -1,
        created_at=resume.created_at if resume else time.time(),
        max_hours=spec.max_hours,
        fleet=fleet.model_dump(mode="json") if fleet else None,
    )
    folder = Folder(run_id)
    folder.make()
    shutil.copyfile(run_file, folder.run_file)
    folder.stop.unlink(missing_ok=True)
    save(record)
    return record


def _require_over(record: Record, *, own_stack: bool) -> None:
    run = record.run_id
    if not record.state.final:
        raise InputError(
            f"run {run} is not over: {record.state}",
            "Its machines may still train.",
            f"Follow it with `mgpu attach {run}`, or end it with `mgpu stop {run}`.",
        )
    if own_stack and record.teardown in ("kept", "asked"):
        again = f", or go on with them: `mgpu run --stack {record.stack} --resume {run}`"
        raise InputError(
            f"run {run} has machines already",
            "They were kept." if record.teardown == "kept" else "Nobody has confirmed that they are gone.",
            f"Give them back first: `mgpu down {run}`{again if record.teardown == 'kept' else ''}.",
        )


def new_stack_name(run_id: str, resume: Record | None) -> str:
    """The run's id; a resumed run's new fleet gets a new name, because two fleets never share one."""
    return run_id if resume is None else f"{run_id}-r{resume.attempt + 1}"


@contextmanager
def _opened(run_id: str, context: Context, make: Callable[[], Record]) -> Iterator[Session]:
    """A run that begins now: its record is made under the lock that its supervisor holds."""

    def alone() -> Record:
        with opening():
            return make()

    with _supervised(run_id, context, alone) as session:
        if session is None:
            raise _busy(run_id)
        context.emit(Note(f"run {run_id}; from another terminal: `mgpu status`, `mgpu logs -f`, `mgpu stop`"))
        yield session


@contextmanager
def _supervised(run_id: str, context: Context, record: Callable[[], Record]) -> Iterator[Session | None]:
    """This process's hold on the run; None: another process has it. `record` is called when nobody else can write."""
    with supervising(run_id) as free:
        if not free:
            yield None
            return
        interrupts = Interrupts()
        with interrupts.installed():
            yield Session(record(), context.emit, context.timeouts, interrupts, context.ask_to_stop)


def _busy(run_id: str) -> InputError:
    return InputError(
        f"run {run_id} has a supervisor already",
        "One process at a time supervises a run.",
        f"Follow it with `mgpu attach {run_id}`, or end it with `mgpu stop {run_id}`.",
    )


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
    with session.undoing(stack.interrupt):
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


def _attempts(session: Session, stack: Stack, request: Request, secrets: Secrets, first: Callable[[], Ended]) -> Ended:
    """`first`, and what the run file's `recovery` allows after it; a fleet that is not mgpu's is not ours to repair."""
    if not StackOutput.model_validate(session.record.fleet).owner:
        return first()
    return Attempts(
        session,
        request.spec.recovery,
        conduct=lambda fleet: _conduct(session, request, fleet, secrets),
        repair=lambda: _up(session, stack),
    ).run(first)


def _provider(fleet: StackOutput) -> Provider | None:
    """Who describes the machines; None for a fleet that a program of the user's own made."""
    return registry.get(fleet.provider) if fleet.owner else None


_Result = Ended | MgpuError | None  # None: remembered as a success


def _conclude(session: Session, stack: Stack, teardown: str, body: Callable[[], _Result]) -> Outcome:
    try:
        return _finish(session, stack, teardown, _guarded(session, body))
    except KeyboardInterrupt:  # a second signal: the engine goes on by itself
        session.journal.append("left", state=str(session.record.state))
        save(session.record)
        return Outcome(session.record, left=True)


def _guarded(session: Session, body: Callable[[], _Result]) -> _Result:
    try:
        return body()
    except MgpuError as error:
        session.journal.append("error", what=error.what)
        if session.asked_to_end:
            return Interrupted("interrupted", error.what, "`mgpu ls` shows what is billed now.")
        return error
    except Exception as bug:
        run_id = session.record.run_id
        session.journal.append("bug", what=type(bug).__name__)
        if session.record.state is State.PROVISIONING:  # nothing trains yet: undone like any other failure
            return _Bug(bug)
        go_on = f"`mgpu attach {run_id}` takes it over, `mgpu stop {run_id}` ends it"
        session.emit(Warned(f"a bug of mgpu ends this supervisor; the run goes on without one: {go_on}"))
        raise


def _finish(session: Session, stack: Stack, teardown: str, result: _Result) -> Outcome:
    record = session.record
    if isinstance(result, Ended) and result.left:
        session.emit(Note("left running"))
        save(record)
        return Outcome(record, left=True)
    if isinstance(result, Ended):
        record.fault = str(result.fault) if result.fault else None
    return _close(session, stack, teardown, _error(record, result))


def _close(session: Session, stack: Stack, teardown: str, error: MgpuError | None) -> Outcome:
    """The fleet goes or stays, then the record is closed; a supervisor that dies in between has left its verdict."""
    record = session.record
    record.verdict = error.exit_code if error else 0
    record.reason = error.what if error else ""
    try:
        _teardown(session, stack, teardown)
    except TeardownIncomplete as incomplete:
        error = incomplete
    except (MgpuError, OSError) as failure:
        error = _incomplete(record, failure)
    record.exit_code = error.exit_code if error else 0
    record.reason = error.what if error else ""
    session.to(_final(error))
    session.journal.close()
    if isinstance(error, _Bug):
        raise error.bug
    return Outcome(record, error)


class _Bug(MgpuError):
    """Carries what nobody foresaw past the teardown, to be raised as it was after that."""

    def __init__(self, bug: Exception) -> None:
        super().__init__(f"{type(bug).__name__}: {bug}")
        self.bug = bug


def _final(error: MgpuError | None) -> State:
    if error is None:
        return State.SUCCEEDED
    return State.STOPPED if isinstance(error, Interrupted | Stopped) else State.FAILED


_VERDICTS = {cls.exit_code: cls for cls in (Interrupted, Stopped, ProviderError, StackError, RemoteError, InputError)}


def _remembered(record: Record) -> MgpuError | None:
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


def _error(record: Record, result: _Result) -> MgpuError | None:
    if not isinstance(result, Ended):
        return result
    kept = f"The newest committed checkpoint is step {record.checkpoint_step}." if record.checkpoint_id else ""
    go_on = f"mgpu launch{record.file_argument} --resume {record.run_id}"
    again = f"Go on from it with `{go_on}`." if record.checkpoint_id else ""
    if result.succeeded:  # it may have ended by itself while it was asked to stop
        return None
    if result.stopped_by == "deadline":
        return Stopped(f"run {record.run_id} stopped at its hard cap (max_hours)", kept, again)
    if result.stopped_by == "user":
        return Interrupted(f"run {record.run_id} was stopped", kept, again)
    why = {
        Fault.USER: "The cause is the program, or what it needs; the machines are not.",
        Fault.INFRASTRUCTURE: "The machines or the store are at fault.",
    }
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
    with session.interrupts.leaving(), session.phase("teardown"):
        _give_back(stack, record.provider, fleet, context, remove=record.own_stack)
    record.teardown = "confirmed"
