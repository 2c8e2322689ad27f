"""A run from request to nothing left: `launch` (a fleet of its own) and `run` (a stack that stands).

Both end in `finish.conclude`, as does `takeover.attach`, which goes on with what they began.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mgpu_train.config import Secrets
from mgpu_train.timeouts import Timeouts

from mgpu.acquire import fit
from mgpu.acquire.fit import Machines
from mgpu.context import Context
from mgpu.errors import InputError, ProviderError
from mgpu.events import Emit, Note, RunStateChanged, Warned
from mgpu.iac.engine.project import project_name
from mgpu.iac.engine.stack import Stack
from mgpu.iac.naming import fleet_name
from mgpu.iac.outputs import StackOutput
from mgpu.plan import rank
from mgpu.run.fleet.stack import bring_up, open_stack, project_of, refuse_used, stack_of, standing
from mgpu.run.job import images
from mgpu.run.job.images import Settled
from mgpu.run.job.request import Request, build_secrets, resolve, secrets_of, store_keys
from mgpu.run.job.stack_output import provider_for, provider_of
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.run.lifecycle.attempt import conduct
from mgpu.run.lifecycle.attempt_start import require_data, require_store
from mgpu.run.lifecycle.capacity_wait import CapacityWait
from mgpu.run.lifecycle.outcome import Outcome, conclude
from mgpu.run.lifecycle.recovery import Attempts
from mgpu.run.nodes import code_upload
from mgpu.run.record.record import Folder, Record, busy, load, new_run_id, opening, save, supervising
from mgpu.run.record.session import Session
from mgpu.run.record.signals import Interrupts
from mgpu.run.supervision.supervisor import Ended
from mgpu.spec.load import text_of
from mgpu.spec.model import RunSpec
from mgpu.words import count


def launch(
    run_file: Path,
    spec: RunSpec,
    context: Context,
    *,
    resume: Record | None = None,
    machines: Machines = fit.ANY,
) -> Outcome:
    """Makes a stack of its own, runs on it, and gives the fleet back (or keeps it: `teardown: keep`). The image is in
    its registry before anything is rented, and fits `machines`."""
    run_id = resume.run_id if resume else new_run_id(spec.name)
    base = run_file.resolve().parent
    request = resolve(spec, run_id, base, timeouts=context.timeouts)
    secrets = secrets_of(spec, request.checkpoint, os.environ, provider_for(spec))
    image = images.settle(spec, base, context.emit, machines)

    def made() -> Record:
        return _record(run_file, spec, run_id, stack=None, resume=resume, image=image)

    with _opened(run_id, context, made) as session:
        stack = stack_of(session.record, context)
        return conclude(session, stack, spec.teardown, lambda: rented(session, stack, request, secrets))


def run(run_file: Path, spec: RunSpec, stack_name: str, context: Context, *, resume: Record | None = None) -> Outcome:
    """Runs on the fleet of a stack that stands."""
    run_id = resume.run_id if resume else new_run_id(spec.name)
    stack = open_stack(project_of(run_file), stack_name, run_file, None, context)
    fleet = standing(stack, spec)
    request = resolve(spec, run_id, run_file.resolve().parent, store=fleet.store, timeouts=context.timeouts)
    secrets = secrets_of(spec, request.checkpoint, os.environ, provider_of(fleet))
    image = images.for_stack(spec, request.base, fleet, context.emit)

    def made() -> Record:
        refuse_used(fleet)
        return _record(run_file, spec, run_id, stack=stack_name, resume=resume, fleet=fleet, image=image)

    price = f"${fleet.price_usd_per_hour:.2f} per hour, all nodes"
    context.emit(Note(f"fleet {fleet.fleet}: {count(len(fleet.nodes), 'node')}, {price}, rented already"))
    with _opened(run_id, context, made) as session:
        return conclude(session, stack, spec.teardown, lambda: used(session, stack, request, secrets, fleet))


def preflight(run_file: Path, spec: RunSpec, emit: Emit) -> Path:
    """What can be known before money is spent: project, code, secrets, provider, store. Returns the project's folder.
    What the user should know of the code is emitted.

    Raises:
        InputError, ProviderError: what is missing.
    """
    project = project_of(run_file)
    request = resolve(spec, spec.name, run_file.resolve().parent, timeouts=Timeouts())  # type: ignore[call-arg]
    told = code_upload.look(request)
    provider = provider_for(spec)
    secrets_of(spec, request.checkpoint, os.environ, provider)
    build_secrets(spec, os.environ)
    provider.check()
    require_store(request)
    require_data(request, emit)
    for each in told:
        emit(each)
    return project


def _record(
    run_file: Path,
    spec: RunSpec,
    run_id: str,
    *,
    stack: str | None,
    resume: Record | None,
    fleet: StackOutput | None = None,
    image: Settled | None = None,
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
        options=dict(fleet.options if fleet else rank.requirements(spec).provider_options),
        nodes=spec.nodes,
        attempt=resume.attempt if resume else 0,
        spending=resume.spending if resume else [],
        store=resume.store if resume else None,
        checkpoint_id=resume.checkpoint_id if resume else None,
        checkpoint_step=resume.checkpoint_step if resume else -1,
        idle_step=resume.checkpoint_step if resume else -1,
        created_at=resume.created_at if resume else time.time(),
        max_hours=spec.max_hours,
        fleet=fleet.model_dump(mode="json") if fleet else None,
    )
    images.remember(record, image)
    folder = Folder(run_id)
    folder.make()
    folder.run_file.write_text(text_of(spec, run_file))
    folder.stop.unlink(missing_ok=True)
    shutil.rmtree(folder.work, ignore_errors=True)  # a run that is begun again takes its code as it is now
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

    with supervision(run_id, context, alone) as session:
        if session is None:
            raise busy(run_id)
        context.emit(Note(f"run {run_id}; from another terminal: `mgpu status`, `mgpu logs -f`, `mgpu stop`"))
        session.tell(RunStateChanged, state=str(session.record.state), before="")
        yield session


@contextmanager
def supervision(
    run_id: str, context: Context, record: Callable[[], Record], *, force: bool = False
) -> Iterator[Session | None]:
    """This process's hold on the run; None: another process has it. `record` is called when nobody else can write."""
    with supervising(run_id, force=force) as token:
        if not token:
            yield None
            return
        interrupts = Interrupts()
        with interrupts.installed():
            found = record()
            found.supervisor = token
            yield Session(found, context.emit, context.timeouts, interrupts, context.ask_to_stop, detach=context.detach)


def rented(session: Session, stack: Stack, request: Request, secrets: Secrets) -> Ended:
    """The run on a fleet that is made for it; what an earlier process made of it is adopted. Where there is no capacity
    now, it is asked for again until `recovery.wait_minutes`."""
    with session.phase("provisioning", f"{count(request.spec.nodes, 'node')} of {request.spec.provider}"):
        fleet = CapacityWait(session, request.spec.recovery.wait_minutes).granted(lambda: bring_up(session, stack))
    session.check()
    return used(session, stack, request, secrets, fleet)


def used(session: Session, stack: Stack, request: Request, secrets: Secrets, fleet: StackOutput) -> Ended:
    """The run on a fleet that stands."""
    return attempts(session, stack, request, secrets).run(lambda: conducted(session, request, fleet, secrets))


def conducted(session: Session, request: Request, fleet: StackOutput, secrets: Secrets) -> Ended:
    """One attempt on a fleet that stands. Raises what `conduct` raises."""
    record = session.record
    record.price_usd_per_hour, record.hard_cap_at = fleet.price_usd_per_hour, fleet.hard_cap_at
    record.costs(fleet.generation, fleet.price_usd_per_hour, time.time())  # where a stack stood already
    provider = provider_of(fleet)
    request = _with_image(session, request, fleet)
    keys = store_keys(request.spec, request.checkpoint, os.environ, provider)
    return conduct(session, request, fleet, provider, _fresh(session, secrets, keys), keys)


def _with_image(session: Session, request: Request, fleet: StackOutput) -> Request:
    """The digest of the record is what runs; at a run's first attempt a stack may bring one."""
    if session.record.image is None and fleet.image:
        images.remember(session.record, images.for_stack(request.spec, request.base, fleet))
        session.save()
    image = images.remembered(session.record)
    if image is None:
        return request
    fit.require(image.labels, Machines(tuple(filter(None, [fleet.gpu]))))
    return replace(request, code_folder=image.workdir if images.in_image(request.spec) else "")


def _fresh(session: Session, secrets: Secrets, keys: StoreKeys) -> Secrets:
    """With the store's credentials as they are now: a later attempt may begin hours after they were read first."""
    try:
        return secrets.model_copy(update={"store": keys.now()})
    except (InputError, ProviderError) as error:
        session.emit(Warned(f"{error.what}: the nodes get those that this command began with"))
        return secrets


def attempts(session: Session, stack: Stack, request: Request, secrets: Secrets) -> Attempts:
    """What the run file's `recovery` allows; a fleet that is not mgpu's is not ours to repair."""
    recovery = request.spec.recovery
    ours = StackOutput.model_validate(session.record.fleet).owner
    return Attempts(
        session,
        recovery if ours else recovery.model_copy(update={"attempts": 1}),
        conduct=lambda fleet: conducted(session, request, fleet, secrets),
        repair=lambda lost: bring_up(session, stack, lost),
    )
