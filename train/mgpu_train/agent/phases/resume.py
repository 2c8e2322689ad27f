"""RESUMING: the one checkpoint that the attempt starts from, every byte checked before anything of it is read."""

from __future__ import annotations

from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.status.status import Fault
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.config import Resume
from mgpu_train.store import StoreError, open_store
from mgpu_train.words import count


def resume(attempt: Attempt, wanted: Resume) -> int:
    """Fetches what the attempt resumes from into its folder, local copies first; returns its step.

    Raises:
        AttemptFailed: it is not there, damaged, or the store failed; the reason begins with `resume:`.
    """
    target = attempt.job.checkpoint
    if target is None:
        raise AttemptFailed(Fault.INFRASTRUCTURE, "resume: the job names no store to resume from")
    try:
        cap = target.max_bytes_per_s
        store = open_store(target.to, attempt.secrets.store, timeouts=attempt.times, max_bytes_per_s=cap)
        manifest = CommitLog(store, attempt.job.run_id).manifest_at(wanted.seq, wanted.checkpoint_id)
        # the folder that is linked to is deleted before the program starts
        here = [attempt.checkpoints / f"step-{manifest.step}"]
        report = fetch(store, attempt.job.run_id, manifest, Path(attempt.layout.resume), local=here, link=True)
    except (StoreError, OSError) as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"resume: {error}") from error
    attempt.say(
        f"resume: {manifest.checkpoint_id}, {count(report.files, 'file')}, {report.bytes >> 20} MiB, "
        f"{report.reused} of them from this disk"
    )
    return manifest.step
