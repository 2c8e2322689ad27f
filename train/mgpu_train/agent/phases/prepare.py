"""PREPARING: the run's folders, room on the disk, the user's requirements, data and set-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.host.layout import ENVIRONMENTS
from mgpu_train.agent.phases import launcher_process, requirements, setup
from mgpu_train.agent.phases.data import fetch_data
from mgpu_train.agent.phases.folders import check_room, clear_local, inside, make_folders
from mgpu_train.checkpoint.log.manifest import local_name


def prepare(attempt: Attempt, environment: Mapping[str, str]) -> str:
    """Makes everything ready for the launcher, and returns the interpreter that it is started with.

    Raises:
        AttemptFailed: folders, requirements or data are not to be had, or the set-up fails.
    """
    wanted = attempt.job.resume
    # an older attempt may have filled the disk; its copy of what this one resumes from need not be fetched again
    clear_local(attempt, local_name(wanted.checkpoint_id) if wanted else None)
    make_folders(attempt)
    check_room(attempt)
    python = launcher_process.python()
    if attempt.job.requirements is not None:
        python = str(
            requirements.install(
                inside(attempt.work, attempt.job.requirements, "requirements"),
                Path(attempt.layout.home / ENVIRONMENTS),
                scope=attempt.job.run_id,
                environment=environment,
                log=attempt.log,
            )
        )
    for item in attempt.job.data:
        fetch_data(attempt, item)
    setup.run(attempt, environment, python)
    return python
