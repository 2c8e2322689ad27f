"""A run is submitted before anything supervises it: from then on it exists, with its run file, image and code. What it
begins with may be set aside, too, and be submitted again and again."""

from __future__ import annotations

import getpass
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu.backend import location
from mgpu.errors import InputError, Interrupted, MgpuError, StackError, TakenOver
from mgpu.fields import plain
from mgpu.iac.engine.project import keep_program, project_name
from mgpu.iac.naming import PROJECT, RUNS_PROJECT, fleet_name
from mgpu.iac.outputs import StackOutput
from mgpu.plan import rank
from mgpu.run.fleet.stack import project_of, refuse_used
from mgpu.run.job import images
from mgpu.run.job.git_code import GitCode
from mgpu.run.job.images import Settled
from mgpu.run.job.on_sale import sellers
from mgpu.run.job.request import Request, resolve
from mgpu.run.nodes import code_upload
from mgpu.run.record import checks, files, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, every, find, load, of_json, opening, save
from mgpu.spec.load import accepted, require_files, text_of
from mgpu.spec.model import ANY


def submit(
    request: Request,
    run_file: Path,
    *,
    stack: str | None = None,
    fleet: StackOutput | None = None,
    resume: Record | None = None,
    image: Settled | None = None,
    of: Sequence[str] = (),
    **more: Any,
) -> Record:
    """A queued run, with `more` in its record. Whoever supervises it needs nothing more of the folder that it comes
    from, so what is changed there later does not change the run. `stack` and `fleet`: it runs there; without them it
    gets a fleet of its own, of one of the providers `of`; empty: of any that the run file names.

    Raises:
        InputError: the run that is resumed is not over; the code cannot be kept; another run uses the fleet. Nothing
            was changed.
        StackError, Interrupted: it may be queued, and the error names it; of others nothing was changed.
    """
    run_id = request.run_id
    if resume is not None:
        resume = load(run_id)
        _require_over(resume, own_stack=stack is None)
    folder, sent = Folder(run_id), False
    folder.make()
    try:
        with code_upload.set_aside(request) as code, opening():
            if fleet is not None:
                refuse_used(fleet, but=run_id)
            record = _record(request, run_file, stack, fleet, resume, image, of)
            record = replace(record, **more)
            record.earlier = checks.earlier(record.expect, _alike(record))
            _placed(request, run_file, code, record)
            sent = location.current().shared is not None
            save(record)  # last: a run whose record is there is whole
            return record
    except BaseException as error:
        if sent and (unsure := _unsure(run_id, error)):
            shared.forget(run_id)  # of one that is resumed the backend may have what was before
            raise unsure from error
        if resume is None and not sent:
            shutil.rmtree(folder.root, ignore_errors=True)
        raise


def set_aside(request: Request, run_file: Path, folder: Path, at: str, image: Settled | None) -> dict[str, Any]:
    """Keeps what runs begin with in `folder`, and in a bucket below the key `at`; returns the record of such a run, as
    plain data.

    Raises:
        InputError: the code cannot be kept; nothing is.
        StackError: the backend does not answer.
    """
    record = _record(request, run_file, None, None, None, image)
    folder.mkdir(parents=True, mode=0o700)
    try:
        with code_upload.set_aside(request, folder / "work") as code:
            if code is not None:
                code.replace(folder / "work")
        (folder / files.RUN_FILE).write_text(text_of(request.spec, run_file), encoding="utf-8")
        keep_program(Path(record.project), folder / "program")
        files.keep_folder(folder, at)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return plain(record)


def submit_kept(
    folder: Path, at: str, fields: dict[str, Any], run_id: str, code: GitCode | None = None, **more: Any
) -> Record:
    """A queued run of what `set_aside` has kept, with an id of its own and `more` in its record; with `code`, a commit,
    in the place of the code that was kept. Whoever does it again, on whichever machine, gets the one that is there.

    Raises:
        InputError: what was set aside is gone; the code cannot be fetched, or has no such program.
        StackError: the backend does not answer.
    """
    own = Folder(run_id)
    with opening():
        if (there := find(run_id)) is not None:
            return there
        if not files.bring_folder(folder, at):
            raise InputError(f"{location.current().place}/{at} is gone", "It held the run file and the code.")
        begins = dict.fromkeys(("created_at", "submitted_at"), time.time())
        try:
            record = of_json({**fields, "run_id": run_id, "stack": run_id, **begins, **more})
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            what, cure = f"the record that {at} begins with cannot be read", "Use the newer mgpu that wrote it."
            raise InputError(what, f"{type(error).__name__}: {error}", cure) from error
        record.project_name = project_name(folder / "program")
        record.fleet_name = fleet_name(record.project_name, run_id)
        own.make()
        if code is not None:
            record.code = str(code)
            _fetch(code, folder / files.RUN_FILE, run_id)
        elif (folder / "work").is_dir():
            _copy(folder / "work", own.work, _linked)
        _copy(folder / "program", own.program, shutil.copy2)  # its settings are changed on each machine
        shutil.copyfile(folder / files.RUN_FILE, own.run_file)
        if code is not None:
            files.keep(run_id)
        else:
            files.keep_same(run_id, folder)
        with suppress(TakenOver):  # another machine was faster
            save(record)
    return find(run_id) or record


def _alike(record: Record) -> Iterator[dict[str, float]]:
    """What earlier runs of the same name and project, and of a sweep with the same setting, have measured, newest
    first."""
    for each in reversed(every()):
        same = (each.name, _project(each), each.setting) == (record.name, _project(record), record.setting)
        if same and each.run_id != record.run_id:
            yield checks.good(each)


def _project(record: Record) -> str:
    name = record.project_name or record.fleet_name.removesuffix(record.stack).removesuffix("-")
    return "" if name in (PROJECT, RUNS_PROJECT) else name


def _fetch(code: GitCode, run_file: Path, run_id: str) -> None:
    """The code of a run as its commit has it."""
    spec, work = accepted(run_file.read_text(encoding="utf-8"), str(run_file)), Folder(run_id).work
    with code.at(code.ref) as base:
        require_files(spec, base, str(code))
        request = resolve(spec, run_id, base, timeouts=Timeouts())  # type: ignore[call-arg]
        with code_upload.set_aside(request) as found:
            shutil.rmtree(work, ignore_errors=True)
            if found is not None:
                found.replace(work)


def _copy(source: Path, target: Path, copy: Callable[[str, str], object]) -> None:
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    for old in (aside, target):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(source, aside, symlinks=True, copy_function=copy)
    aside.rename(target)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a disk without links
        shutil.copy2(source, target, follow_symlinks=False)


def _record(
    request: Request,
    run_file: Path,
    stack: str | None,
    fleet: StackOutput | None,
    resume: Record | None,
    image: Settled | None,
    of: Sequence[str] = (),
) -> Record:
    spec, run_id = request.spec, request.run_id
    names = tuple(of) or sellers(spec)
    settings = {name: dict(rank.requirements(spec.of(name)).provider_options) for name in names}
    provider = fleet.provider if fleet else names[0]
    needed = rank.requirements(spec.of(provider))
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
        fleet_name=fleet.fleet if fleet else fleet_name(project_name(project), stack_name),
        provider=provider,
        project_name=project_name(project),
        options=dict(fleet.options if fleet else settings[provider]),
        candidates=settings if len(names) > 1 or of or ANY in spec.providers else {},
        nodes=spec.nodes,
        attempt=resume.attempt if resume else 0,
        spending=resume.spending if resume else [],
        searches=resume.searches if resume else 0,
        newer=resume.newer if resume else {},
        store=resume.store if resume else None,
        checkpoint_id=resume.checkpoint_id if resume else None,
        checkpoint_step=resume.checkpoint_step if resume else -1,
        idle_step=resume.checkpoint_step if resume else -1,
        created_at=resume.created_at if resume else time.time(),
        submitted_at=time.time(),
        created_by=user(),
        max_hours=spec.max_hours,
        max_usd=spec.max_usd or 0.0,
        expect={metric: each.model_dump(exclude_none=True) for metric, each in spec.expect.items()},
        fleet=fleet.model_dump(mode="json") if fleet else None,
        needs=needed.model_dump(mode="json"),
        share=spec.share,
        has_sinks=any(getattr(spec.sinks, name) is not None for name in type(spec.sinks).model_fields),
    )
    images.remember(record, image)
    return record


def user() -> str:
    """Who begins the run, as this machine names them."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        name = str(os.getuid())
    return f"{name}@{os.uname().nodename}"


def _unsure(run_id: str, error: BaseException) -> MgpuError | None:
    """Of a run whose record was on its way to a bucket; None: the error says enough."""
    if not isinstance(error, StackError | OSError | KeyboardInterrupt):
        return None
    kind = Interrupted if isinstance(error, KeyboardInterrupt) else StackError
    cure = f"`mgpu queue ls` says whether it is, `mgpu queue rm {run_id}` takes it out; another try is another run."
    return kind(f"run {run_id} may be queued: nobody has confirmed it", str(error), cure)


def _placed(request: Request, run_file: Path, code: Path | None, record: Record) -> None:
    """Puts its files in their places, all at once: what may fail or take long was done before."""
    folder, said = Folder(request.run_id), text_of(request.spec, run_file)
    shutil.rmtree(folder.work, ignore_errors=True)  # a run that is begun again takes its code as it is now
    if code is not None:
        code.replace(folder.work)
    folder.run_file.write_text(said, encoding="utf-8")
    if location.current().folder is None:
        keep_program(Path(record.project), folder.program)
    files.keep(request.run_id)
    shared.withdraw_stop(request.run_id)


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
