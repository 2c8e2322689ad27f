"""RESUMING: the one checkpoint that the attempt starts from, every byte checked before anything of it is read."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.status.words import count
from mgpu_train.agent.uploads import saves
from mgpu_train.checkpoint.formats import rows
from mgpu_train.checkpoint.formats.shards import read_metadata
from mgpu_train.checkpoint.local import discard
from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import Manifest
from mgpu_train.checkpoint.transfer.fetch import Choose, FetchReport, fetch
from mgpu_train.config import Job, Resume
from mgpu_train.launchers import PYTHON, TORCHRUN
from mgpu_train.store import Damaged, NoRoom, Store, StoreError, open_store
from mgpu_train.store.listed import twice
from mgpu_train.strategies.entry import FSDP, OURS


def resume(attempt: Attempt, wanted: Resume) -> int:
    """Fetches what the attempt resumes from into its folder, local copies first; returns its step. What is damaged was
    so twice.

    Raises:
        AttemptFailed: it is not there, damaged, or the store failed; the reason begins with `resume:`.
    """
    target = attempt.job.checkpoint
    if target is None:
        raise AttemptFailed(Fault.INFRASTRUCTURE, "resume: the job names no store to resume from")
    try:
        cap = target.max_bytes_per_s
        store = open_store(target.to, attempt.secrets.store, timeouts=attempt.times, max_bytes_per_s=cap)
        run_id = attempt.job.run_id
        log = CommitLog(store, run_id)
        entry = keys.commit(run_id, wanted.seq)
        manifest = twice(store, entry, lambda: log.manifest_at(wanted.seq, wanted.checkpoint_id))
        report = _fetched(attempt, store, manifest)
    except Damaged as error:
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"resume: {error}", damaged=wanted.checkpoint_id) from error
    except (StoreError, OSError) as error:  # NotFound, too: the operator has just seen it whole, so it is elsewhere
        raise AttemptFailed(Fault.INFRASTRUCTURE, f"resume: {error}") from error
    left = len(manifest.files) - report.files
    attempt.say(
        f"resume: {manifest.checkpoint_id}, {count(report.files, 'file')}, {report.bytes >> 20} MiB, "
        f"{report.reused} of them from this disk"
        + (f"; {count(left, 'other')} no rank of this node reads" if left else "")
    )
    return manifest.step


def _fetched(attempt: Attempt, store: Store, manifest: Manifest) -> FetchReport:
    """What was left here is deleted before the program starts: all but a copy of this one goes now, to make room."""
    here, folder = attempt.checkpoints / f"step-{manifest.step}", Path(attempt.layout.resume)
    saves.clear(attempt.checkpoints, here)
    fetched = partial(
        fetch,
        store,
        attempt.job.run_id,
        manifest,
        folder,
        local=[here],
        link=True,
        choose=choice(attempt.job, manifest),
    )
    try:
        return fetched()
    except NoRoom:
        if not folder.exists():
            raise
        attempt.say("resume: the disk has no room beside what an earlier attempt went on from, which goes first")
        discard(folder)
        return fetched()


def choice(job: Job, manifest: Manifest) -> Choose | None:
    """Which shards the ranks of this node read; None: all, where that is not known before they run."""
    ours = OURS.get(job.train.strategy) if job.train else None
    parted = job.train is not None and job.train.tensor_parallel * job.train.pipeline_parallel > 1
    if ours is not FSDP or parted or job.launcher not in (TORCHRUN, PYTHON) or job.nodes == 1:
        return None
    ranks = rows.Ranks(job.node_rank * job.processes_per_node, job.processes_per_node, job.world_size)
    there = {file.path for file in manifest.files}

    def choose(folder: Path) -> set[str] | None:
        try:
            wanted = rows.files(read_metadata(folder), ranks)
        except StoreError:  # the program is told of what is not understood here, by its own means
            return None
        return wanted if wanted <= there else None

    return choose
