"""The run's folders on the node."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.uploads import saves

_ROOM = 64 << 20  # bytes without which nothing can begin
_LEAST = 1 << 20  # bytes: a disk that has fewer left is full


def inside(folder: Path, name: str, what: str) -> Path:
    """The path of `name` in `folder`.

    Raises:
        AttemptFailed: it leads out of the folder.
    """
    path = Path(os.path.normpath(folder / name))
    if not path.is_relative_to(folder):
        raise AttemptFailed(Fault.USER, f"{what}: {name!r} leads out of the work folder")
    return path


def make_folders(attempt: Attempt) -> None:
    """Makes the run's folders, and the job file that the ranks read.

    Raises:
        AttemptFailed: the code was not sent, or the disk refuses.
    """
    layout, job = attempt.layout, attempt.job
    if job.workdir is not None and not attempt.work.is_dir():
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"the code is not in {attempt.work}: it was not sent")
    try:
        for folder in (layout.work, layout.checkpoints, layout.metrics, layout.stacks(job.attempt)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        Path(layout.attempt_job(job.attempt)).write_text(
            job.model_dump_json(indent=1, by_alias=True) + "\n", encoding="utf-8"
        )
    except OSError as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"the run's folder cannot be written: {error}") from error


def check_room(attempt: Attempt) -> None:
    """Refuses to begin on a full disk.

    Raises:
        AttemptFailed: there is no room.
    """
    free = shutil.disk_usage(attempt.checkpoints).free
    if free < _ROOM:
        why = f"only {free >> 20} MiB are free on the disk of {attempt.checkpoints}; {_ROOM >> 20} are needed"
        raise AttemptFailed(Fault.INFRASTRUCTURE, why)


def full(folder: Path) -> bool:
    """Whether a folder's disk has no room left, for bytes or for files."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < _LEAST or (found.f_files > 0 and found.f_favail == 0)


def clear_local(attempt: Attempt, but: str | None = None) -> None:
    """Deletes what older attempts left in the checkpoint folder: it is not this attempt's to upload, and its names are
    in the way. What the attempt resumes from lies elsewhere, verified; until then the copy `but` may stay.

    Raises:
        AttemptFailed: the folder cannot be emptied.
    """
    try:
        saves.clear(attempt.checkpoints, attempt.checkpoints / but if but else None)
    except OSError as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"{attempt.checkpoints} cannot be emptied: {error}") from error
