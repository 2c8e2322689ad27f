"""`mgpu checkpoints ls`: what is committed, and why it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mgpu.cli.checkpoints import source
from mgpu.cli.checkpoints.source import Source
from mgpu.cli.common import closing, parameters
from mgpu.console import Console
from mgpu.words import amount

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.config import Retention

METRIC = "validation_loss"  # what is shown where no run file names another
_SURPLUS = "nothing any more"  # `prune` takes it, or the agent at the next commit
_SPARE = ("files", "attempt", "committed")


@click.command("ls")
@source.options
@parameters.json_option
def list_(run: str, url: str | None, profile: str | None, as_json: bool) -> None:
    """List the committed checkpoints of RUN.

    Newest first, with what the run file's retention keeps each for.
    """
    console = Console(as_json=as_json)
    found = source.find(run, url, profile)
    with console.waiting(f"reading the commit log in {found.store.url}"):
        commits, retention = found.commits(), found.retention()
        kept = _kept(found, retention) if retention else {}
    if as_json:
        from mgpu.cli import results

        told = [results.Checkpoint(**as_data(each), kept_because=kept.get(each.checkpoint_id)) for each in commits]
        console.result(results.Checkpoints(checkpoints=told, gaps=found.gaps))
        return
    for gap in found.gaps:
        console.say(f"warning: {gap}", "yellow")
    if not commits:
        console.prose("no checkpoint is committed")
        if found.record:
            console.next(f"mgpu logs {found.run_id}")
        return
    columns, rows = table(commits, retention.best_metric if retention else METRIC)
    if kept:
        columns = (*columns, "kept because")
        rows = [(*row, kept.get(each.checkpoint_id, _SURPLUS)) for row, each in zip(rows, commits, strict=True)]
    console.table(columns, rows, spare=_SPARE)
    console.next(f"mgpu checkpoints verify {found.arguments}", f"mgpu checkpoints pull {found.arguments}")


def _kept(found: Source, retention: Retention) -> Mapping[str, str]:
    """Why the run file's retention keeps what it keeps, by id. Raises InputError when the store cannot be read."""
    from mgpu_train.checkpoint.retention import plan_prune

    with source.readable(found.store.url):
        return plan_prune(found.store, found.run_id, retention, log=found.log).keep


def table(commits: Sequence[Commit], metric: str) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Columns and rows; the metric's own column where a checkpoint has it."""
    measured = any(metric in each.meta for each in commits)
    columns = ("checkpoint", "step", "attempt", "size", "files", "committed", *((metric,) if measured else ()))
    rows = [
        (
            each.checkpoint_id, each.step, each.attempt, amount(each.bytes), each.files, closing.when(each.at),
            *((_number(each.meta.get(metric)),) if measured else ()),
        )
        for each in commits
    ]  # fmt: skip
    return columns, rows


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)


def as_data(commit: Commit) -> dict[str, Any]:
    """A commit as JSON, without its writer's token."""
    return {
        "checkpoint_id": commit.checkpoint_id, "step": commit.step, "attempt": commit.attempt, "seq": commit.seq,
        "committed_at": commit.at, "nodes": commit.nodes, "world_size": commit.world_size, "files": commit.files,
        "bytes": commit.bytes, "manifest_sha256": commit.manifest_sha256, "meta": commit.meta,
    }  # fmt: skip
