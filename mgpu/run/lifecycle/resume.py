"""What a run may be resumed with: its own project and name. What else has changed in the run file is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mgpu.errors import InputError, MgpuError, StackError
from mgpu.iac.engine.project import project_name
from mgpu.iac.naming import RUNS_PROJECT
from mgpu.run.fleet.stack import project_of
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, load
from mgpu.spec.load import accepted
from mgpu.spec.model import RunSpec


def before(run_id: str | None, run_file: Path, spec: RunSpec) -> Record | None:
    """The run that `--resume` names; None: it was not given.

    Raises:
        InputError: there is no such run, or it is of another project or another name.
    """
    if run_id is None:
        return None
    record = load(run_id)
    if spec.name != record.name:
        raise InputError(
            f"run {record.run_id} is not one of this run file: its name is `{record.name}`",
            f"`name` in {run_file} is `{spec.name}`. A run that is resumed keeps its record and its checkpoints.",
            f"Take the run file of that run ({record.run_file}), or leave `--resume` out: that is a run of its own.",
        )
    project = project_of(run_file)
    _require_folder(record, run_file, project)
    if (theirs := _name_of(Path(record.project))) not in (None, project_name(project)):
        raise InputError(
            f"run {record.run_id} is of another project: `{theirs}` in {record.project}",
            f"{run_file} is of project `{project_name(project)}` in {project}.",
            f"Resume it from there ({record.run_file}), or leave `--resume` out: that is a run of its own.",
        )
    return record


def _require_folder(record: Record, run_file: Path, project: Path) -> None:
    """Raises InputError for another folder's run: folders without a Pulumi program of their own share one project."""
    folder, theirs = run_file.resolve().parent, Path(record.project_base)
    if (
        str(project) == record.project
        and project_name(project) == RUNS_PROJECT
        and theirs != folder
        and theirs.exists()
    ):
        raise InputError(
            f"run {record.run_id} is of another folder: {theirs}",
            f"{run_file} is in {folder}.",
            f"Resume it from there ({record.run_file}), or leave `--resume` out: that is a run of its own.",
        )


def _name_of(project: Path) -> str | None:
    """A project's name; None: it is not there any more, because it was moved or the run is another machine's."""
    try:
        return project_name(project)
    except StackError:
        return None


def changes(record: Record, spec: RunSpec) -> list[str]:
    """What differs from the run file that the run began with, a line a key; none where that cannot be read any more."""
    try:
        path = Folder(record.run_id).run_file
        old = accepted(path.read_text(encoding="utf-8"), str(path))
    except (MgpuError, OSError, ValueError):
        return []
    then, now = (dict(_leaves(each.model_dump(mode="json", by_alias=True))) for each in (old, spec))
    said = {key: (_words(then.get(key)), _words(now.get(key))) for key in sorted(then | now)}
    return [f"{key}: {was} -> {is_now}" for key, (was, is_now) in said.items() if was != is_now]


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{at}.{key}" if at else key)
    else:
        yield at, value


def _words(value: Any) -> str:
    return "none" if value in (None, [], {}) else str(value)
