"""How long it takes to list 10,000 commits, with the index that committing writes and without any."""

from __future__ import annotations

from pathlib import Path

from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import (
    AttemptEntry,
    CheckpointEntry,
    FileEntry,
    Manifest,
    checkpoint_id,
    to_bytes,
)
from mgpu_train.store import open_store

from bench.clients import RUN
from bench.gateway import BUCKET, versitygw
from bench.measure import Cost
from bench.race import client, race
from bench.report import Report

COMMITS = 10_000
LIMIT_S = 2.0
_WRITER = "bench"
_META = {"strategy": "fsdp", "mesh": "dp=8", "loss": 2.5, "validation_loss": 2.75, "torch": "2.15.0", "seed": 1}


def listing(report: Report) -> None:
    """Through a real server. The log is laid into its folder; the index is the product's own, by one more commit."""
    with versitygw() as server:
        _lay(server.folder)

        def listed(_round: int) -> Cost:
            cost = client(server, "ours-list", f"s3://{BUCKET}", server.folder)
            if cost.says["result"] < COMMITS:
                raise SystemExit(f"{cost.says['found']} commits were listed, and there are {COMMITS}")
            return cost

        race(report, f"listing {COMMITS} commits, no index", {"ours": listed}, rounds=1)
        CommitLog(open_store(f"file://{server.folder}"), RUN).commit(_manifest(COMMITS + 1), _WRITER)
        costs = race(report, f"listing {COMMITS} commits, by their index", {"ours": listed})
    report.at_most(f"listing {COMMITS} commits", costs["ours"].wall_s, LIMIT_S, " s")


def _lay(folder: Path) -> None:
    """Writes an attempt's beginning and 10,000 commits as the objects that they are."""
    (folder / keys.commits(RUN)).mkdir(parents=True)
    begun = AttemptEntry(seq=0, attempt=1, writer=_WRITER, at=0.0)
    (folder / keys.commit(RUN, 0)).write_bytes(to_bytes(begun))
    for seq in range(1, COMMITS + 1):
        manifest = _manifest(seq)
        entry = CheckpointEntry(
            seq=seq, attempt=1, writer=_WRITER, at=0.0, manifest=manifest, manifest_sha256=manifest.sha256()
        )
        (folder / keys.commit(RUN, seq)).write_bytes(to_bytes(entry))


def _manifest(step: int) -> Manifest:
    files = (FileEntry(path=f"__{rank}_0.distcp", size=1 << 30, crc64nvme="0" * 16, node=0) for rank in range(16))
    return Manifest(
        run_id=RUN,
        checkpoint_id=checkpoint_id(1, step),
        attempt=1,
        step=step,
        nodes=1,
        world_size=16,
        writers=(0,),
        files=tuple(files),
        created_at=0.0,
        meta=_META,
    )
