"""`mgpu stop`: save a checkpoint and end a run."""

from __future__ import annotations

import time

import click

from mgpu.cli import common
from mgpu.console import Console
from mgpu.run.record import Folder, load, supervised

LOOK_EVERY_S = 0.2


@click.command()
@common.run_argument
@click.option("--wait/--no-wait", default=True, help="Wait until the machines are gone (default), or return at once.")
def stop(run: str, wait: bool) -> int:
    """Ask RUN (default: the newest) to save a checkpoint and end; its machines go as the run file says."""
    record = load(run)
    console = Console()
    if record.state.final:
        console.say(f"run {record.run_id} is over already: {record.state}")
        console.next(*common.next_lines(record))
        return 0
    Folder(record.run_id).stop.touch()
    if not supervised(record.run_id):
        from mgpu.run import launch as runs

        console.say("its supervisor is gone: taking over to end it")
        outcome = runs.attach(record, common.context(console))
        return common.finish(console, outcome) and 0 if outcome else 0
    console.say(f"asked {record.run_id} to save and stop")
    while wait and not (record := load(record.run_id)).state.final:
        time.sleep(LOOK_EVERY_S)
    if wait:
        console.table(("run", record.run_id), common.summary(record))
    console.next(f"mgpu status {record.run_id}")
    return 0
