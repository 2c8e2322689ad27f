"""`mgpu outputs`: a run's outputs from its store, when they did not come home."""

from __future__ import annotations

from pathlib import Path

import click

from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.run.record.record import load
from mgpu.words import amount, count


@click.command()
@parameters.run_argument
@click.option("--to", type=click.Path(path_type=Path, file_okay=False), help="Folder (default: mgpu-runs/RUN/outputs).")
@parameters.json_option
def outputs(run: str, to: Path | None, as_json: bool) -> None:
    """Download what the agents of RUN have kept of its `outputs:` in the store.

    At the end of every attempt they come home by themselves; this is for a run that nobody watched to its end.
    """
    from mgpu.run.nodes import outputs as kept

    console, record = Console(as_json=as_json), load(run)
    folder = wiring.made(to) if to else kept.home(record)
    with console.waiting("downloading"):
        files, size = kept.pull(record, folder)
    if as_json:
        from mgpu.cli import results

        console.result(results.Outputs(run_id=record.run_id, folder=str(folder), files=files, bytes=size))
    elif files:
        console.prose(f"{count(files, 'file')} ({amount(size)}) in {folder}")
    else:
        console.say(f"{record.store} has no outputs of run {record.run_id}")
