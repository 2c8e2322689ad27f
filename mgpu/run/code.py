"""The code of a run: kept as it was at the first attempt, which every later attempt and every supervisor sends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mgpu_train.agent.layout import RunLayout

from mgpu.errors import InputError
from mgpu.events import Note
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.snapshot import Snapshot, scan
from mgpu.run.request import Request
from mgpu.run.session import Session
from mgpu.words import amount, count


def check(request: Request) -> None:
    """Reads the folder as it would be sent, before anything is rented.

    Raises:
        InputError: files that cannot be sent.
    """
    in_image = request.spec.code is not None and request.spec.code.mode == "image"
    if request.workdir is not None and not in_image:
        scan(request.workdir)


def send(session: Session, request: Request, nodes: NodeSet) -> None:
    """Makes every node hold the run's code; a node that has it is sent nothing. With `train:` there is none.

    Raises:
        InputError: files that cannot be sent, or not be kept here.
        RemoteError: a node could not be reached, or refused.
    """
    if request.workdir is None:
        return
    kept = session.folder.work
    if not kept.exists():
        _keep(session, scan(request.workdir), kept)
    # what was left out when it was kept is not there: nothing more is to be left out
    reports = nodes.sync(kept, str(RunLayout(request.run_id).work), like=str(RunLayout("*").work))
    sent = max(report.sent for report in reports)
    session.emit(Note(f"code: {count(reports[0].files, 'file')}, {sent} sent to each of {count(len(reports), 'node')}"))


def _keep(session: Session, snapshot: Snapshot, kept: Path) -> None:
    aside = kept.with_name(f".work.{os.getpid()}")
    files, size = count(len(snapshot.entries), "file"), amount(sum(entry.size for entry in snapshot.entries.values()))
    session.emit(Note(f"code: {files} ({size}) of {snapshot.folder} kept with the run"))
    try:
        aside.mkdir(mode=0o700)
        snapshot.write_to(aside)
        aside.replace(kept)
    except OSError as error:
        if kept.exists():  # whole: who took the run over meanwhile has kept it
            return
        raise InputError(
            f"the code of run {session.record.run_id} cannot be kept in {kept}",
            f"{error.strerror}: {error.filename}",
            "Make room there, or name large files in .mgpuignore: data has keys of its own (`data:`).",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
