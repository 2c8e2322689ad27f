"""`mgpu checkpoints`: what a run's commit log holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli import common
from mgpu.console import Console
from mgpu.errors import InputError, MgpuError
from mgpu.run.record import Record, load

if TYPE_CHECKING:
    from mgpu_train.checkpoint.commitlog import CommitLog
    from mgpu_train.checkpoint.lines import Commit
    from mgpu_train.store.base import Store


class DamagedCheckpoint(MgpuError):
    """A checkpoint does not verify."""

    exit_code = 6


@click.group()
def checkpoints() -> None:
    """List, verify or download the checkpoints of a run."""


@checkpoints.command("ls")
@common.run_argument
@common.json_option
def list_(run: str, as_json: bool) -> None:
    """List the committed checkpoints of RUN, newest first."""
    console = Console(as_json=as_json)
    record = load(run)
    with _readable(record):
        _, _, entries = _log(record)
    if as_json:
        console.data([entry.model_dump(mode="json", exclude={"writer"}) for entry in entries])
        return
    rows = [
        (
            e.checkpoint_id,
            e.step,
            e.attempt,
            e.files,
            f"{e.bytes / 2**20:.1f}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.at)),
        )
        for e in entries
    ]
    console.table(("checkpoint", "step", "attempt", "files", "MiB", "committed"), rows)
    if rows:
        console.next(f"mgpu checkpoints verify {record.run_id}", f"mgpu checkpoints pull {record.run_id}")
    else:
        console.next(f"mgpu logs {record.run_id}")


@checkpoints.command()
@common.run_argument
@click.option("--deep", is_flag=True, help="Read every byte, not only sizes and the store's own checksums.")
@common.json_option
def verify(run: str, deep: bool, as_json: bool) -> int:
    """Verify every committed checkpoint of RUN. Exit code 6 when one is damaged."""
    from mgpu_train.checkpoint.newest import problems_of

    console = Console(as_json=as_json)
    record = load(run)
    with _readable(record):
        store, log, entries = _log(record)
        found = {e.checkpoint_id: problems_of(store, log, e, deep=deep) for e in entries}
    if as_json:
        console.data({name: list(problems) for name, problems in found.items()})
    else:
        rows = [(name, "; ".join(problems) or "ok") for name, problems in found.items()]
        console.table(("checkpoint", "every byte" if deep else "sizes and stored checksums"), rows)
    damaged = [name for name, problems in found.items() if problems]
    if damaged:
        return common.exit_with(console, _damaged(record, damaged))
    return 0


@checkpoints.command()
@common.run_argument
@click.option("--step", type=int, help="Take this step's (default: the newest that verifies).")
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: ./mgpu-runs/RUN).")
def pull(run: str, step: int | None, to: Path | None) -> None:
    """Download a checkpoint of RUN and verify every byte of it."""
    record = load(run)
    console = Console()
    folder = pull_into(record, step, to or Path("mgpu-runs") / record.run_id, console)
    console.text(str(folder))


def pull_into(record: Record, step: int | None, to: Path, console: Console) -> Path:
    """Fetches a checkpoint into `to/step-<n>`; every byte is checked before the folder has its name."""
    from mgpu_train.checkpoint.fetch import fetch
    from mgpu_train.store import Damaged, NotFound

    with _readable(record):
        store, log, entries = _log(record)
    wanted = [e for e in entries if step is None or e.step == step]
    for entry in wanted:
        folder = to / f"step-{entry.step}"
        try:
            with _readable(record):
                report = fetch(store, record.run_id, log.manifest(entry), folder)
        except (Damaged, NotFound) as error:
            console.say(f"warning: {entry.checkpoint_id} does not verify: {error}", "yellow")
            continue
        console.say(f"{report.files} files, {report.bytes / 2**20:.1f} MiB, every byte verified")
        return folder
    if not wanted:
        which = f"of step {step}" if step is not None else "committed"
        raise InputError(
            f"run {record.run_id}: no checkpoint {which}", "", f"See `mgpu checkpoints ls {record.run_id}`."
        )
    raise _damaged(record, [e.checkpoint_id for e in wanted])


def _log(record: Record) -> tuple[Store, CommitLog, list[Commit]]:
    if record.store is None:
        raise InputError(
            f"run {record.run_id} has no checkpoints", "Its run file says `checkpoint: none`, or it never began."
        )
    from mgpu_train.checkpoint.commitlog import CommitLog
    from mgpu_train.store import open_store

    store = open_store(record.store)
    log = CommitLog(store, record.run_id)
    return store, log, log.checkpoints()


@contextmanager
def _readable(record: Record) -> Iterator[None]:
    """Tells a store that cannot be read from a checkpoint that is damaged."""
    from mgpu_train.store import Damaged, NotFound, StoreError

    try:
        yield
    except (Damaged, NotFound):
        raise
    except StoreError as error:
        raise InputError(
            f"{record.store} cannot be read", str(error), "Check the address and the credentials."
        ) from error


def _damaged(record: Record, names: list[str]) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"run {record.run_id}: {', '.join(names)} damaged or incomplete",
        "What the store holds is not what the commit log says was written.",
        "Older checkpoints are listed by `mgpu checkpoints ls`; take one with `--step`.",
    )
