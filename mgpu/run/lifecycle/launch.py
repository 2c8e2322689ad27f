"""`launch` (a fleet of its own) and `run` (a stack that stands): submit a run, and supervise it to its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu.acquire import fit
from mgpu.acquire.fit import Machines
from mgpu.context import Context
from mgpu.errors import InputError, MgpuError, ProviderError
from mgpu.events import Emit, Note, RunStateChanged, Warned
from mgpu.run.budget import account
from mgpu.run.fleet import reuse
from mgpu.run.fleet.stack import open_stack, project_of, standing, take
from mgpu.run.job import images
from mgpu.run.job.on_sale import priced, sellers
from mgpu.run.job.request import build_secrets, require_all_secrets, require_secrets, resolve
from mgpu.run.job.stack_output import provider_for, provider_of, usd_per_hour
from mgpu.run.lifecycle.attempt_start import require_data, require_store
from mgpu.run.lifecycle.outcome import Outcome
from mgpu.run.lifecycle.submit import set_aside, submit
from mgpu.run.lifecycle.supervise import supervise, supervision
from mgpu.run.nodes import code_upload
from mgpu.run.record.record import Record, busy, new_run_id
from mgpu.run.record.session import Session
from mgpu.spec import sink as sinks
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
    its registry before anything is rented, and fits `machines`. Where there are limits, its machines are of providers
    that say what they cost. Raises OverLimit: there is no room for it now."""
    run_id = resume.run_id if resume else new_run_id(spec.name)
    base = run_file.resolve().parent
    request = resolve(spec, run_id, base, timeouts=context.timeouts)
    require_all_secrets(request, os.environ, context.emit)  # what is missing is told before a build
    image = images.settle(spec, base, context.emit, machines)
    of = tuple[str, ...]()

    def price() -> float | None:
        nonlocal of
        found = priced(spec, threading.Event().wait, context.emit, image.labels if image else {})
        found.warn(context.emit)
        of = found.providers if found.without else ()
        return found.usd_per_hour

    def made() -> Record:
        return submit(request, run_file, resume=resume, image=image, of=of)

    with account.place(run_id, price), _opened(run_id, context, made) as session:
        return supervise(session, context, submitted=True)


def submitted(run_file: Path, spec: RunSpec, context: Context, fits: Machines = fit.ANY, **more: Any) -> Record:
    """A queued run that whoever looks for such runs begins with, with `more` in its record; its image is in its
    registry, and fits these machines."""
    run_id, base = new_run_id(spec.name), run_file.resolve().parent
    request = resolve(spec, run_id, base, timeouts=context.timeouts)
    return submit(request, run_file, image=images.settle(spec, base, context.emit, fits), **more)


def kept_for_later(
    run_file: Path, spec: RunSpec, context: Context, folder: Path, at: str, machines: Machines = fit.ANY
) -> dict[str, Any]:
    """Keeps in `folder`, and in a bucket below the key `at`, what runs begin with; returns the record of one, as
    `submit_kept` takes it. The image is in its registry."""
    base = run_file.resolve().parent
    request = resolve(spec, spec.name, base, timeouts=context.timeouts)
    return set_aside(request, run_file, folder, at, images.settle(spec, base, context.emit, machines))


def run(run_file: Path, spec: RunSpec, stack_name: str, context: Context, *, resume: Record | None = None) -> Outcome:
    """Runs on the fleet of a stack that stands. Raises OverLimit: there is no room for it now."""
    run_id = resume.run_id if resume else new_run_id(spec.name)
    stack = open_stack(project_of(run_file), stack_name, run_file, None, context)
    fleet = standing(stack, spec)
    request = resolve(spec, run_id, run_file.resolve().parent, store=fleet.store, timeouts=context.timeouts)
    require_secrets(request, os.environ, provider_of(fleet))  # what is missing is told before a build
    image = images.for_stack(spec, request.base, fleet, context.emit)

    def made() -> Record:
        take(fleet, run_id)
        try:
            return submit(request, run_file, stack=stack_name, fleet=fleet, resume=resume, image=image)
        except BaseException:
            reuse.let_go(run_id)
            raise

    price = f"${fleet.price_usd_per_hour:.2f} per hour, all nodes"
    context.emit(Note(f"fleet {fleet.fleet}: {count(len(fleet.nodes), 'node')}, {price}, rented already"))
    with account.place(run_id, lambda: usd_per_hour(fleet)), _opened(run_id, context, made) as session:
        return supervise(session, context, submitted=True)


def preflight(run_file: Path, spec: RunSpec, emit: Emit, code: str = "") -> Path:
    """What can be known before money is spent: project, code, sinks, secrets, provider, store. Returns the project's
    folder. What the user should know of the code is emitted. `code`: where each run has it from; empty: the folder.

    Of several providers one that cannot be asked is told of, and hinders no other.

    Raises:
        InputError, ProviderError: what is missing.
    """
    project = project_of(run_file)
    sinks.require(spec.sinks, code)
    request = resolve(spec, spec.name, run_file.resolve().parent, timeouts=Timeouts())  # type: ignore[call-arg]
    told = code_upload.look(request)
    require_all_secrets(request, os.environ, emit)
    build_secrets(spec, os.environ)
    _require_provider(spec, emit)
    require_store(request)
    require_data(request, emit)
    for each in told:
        emit(each)
    return project


def _require_provider(spec: RunSpec, emit: Emit) -> None:
    """Raises what the last of the run file's providers says, if none can be asked."""
    failed, names = dict[str, MgpuError](), sellers(spec)
    for name in names:
        try:
            provider_for(spec.of(name)).check()
        except (InputError, ProviderError) as error:
            failed[name] = error
    if len(failed) == len(names):
        raise failed.popitem()[1]
    for name, error in failed.items():
        emit(Warned(f"{name} cannot be asked now, others can: {error.what}"))


@contextmanager
def _opened(run_id: str, context: Context, make: Callable[[], Record]) -> Iterator[Session]:
    """A run that begins now: its record is made under the lock that its supervisor holds."""
    with supervision(run_id, context, make) as session:
        if session is None:
            raise busy(run_id)
        context.emit(Note(f"run {run_id}; from another terminal: `mgpu status`, `mgpu logs -f`, `mgpu stop`"))
        session.tell(RunStateChanged, state=str(session.record.state), before="")
        yield session
