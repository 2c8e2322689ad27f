"""`mgpu stop`: save a checkpoint and end a run."""

from __future__ import annotations

import time

import click

from mgpu.cli import common
from mgpu.console import Console
from mgpu.run.record import Folder, Record, State, load, supervised

LOOK_EVERY_S = 0.2


@click.command()
@common.run_argument
@click.option("--wait/--no-wait", default=True, help="Wait until the machines are gone (default), or return at once.")
def stop(run: str, wait: bool) -> int:
    """Ask RUN (default: the newest) to save a checkpoint and end; its machines go as the run file says.

    The exit code is 0 when it has ended; how else the run failed, above all 7: something may still be billed.
    """
    record = load(run)
    console = Console()
    if record.state.final:
        console.say(f"run {record.run_id} is over already: {record.state}")
        console.next(*common.next_lines(record))
        return 0
    Folder(record.run_id).stop.touch()
    if supervised(record.run_id):
        console.say(f"asked {record.run_id} to save and stop")
        if not wait:
            console.next(f"mgpu status {record.run_id}")
            return 0
    while not (record := load(record.run_id)).state.final:
        if not supervised(record.run_id):
            taken = _take_over(console, record)
            if taken is not None:
                return taken
        time.sleep(LOOK_EVERY_S)
    console.table(("run", record.run_id), common.summary(record))
    console.next(*common.next_lines(record, resume=True))
    return _code(record)


def _take_over(console: Console, record: Record) -> int | None:
    from mgpu.run import takeover

    console.say("its supervisor is gone: taking over to end it")
    outcome = takeover.attach(record, common.context(console))
    if outcome is None:  # somebody else was faster
        return None
    code = common.finish(console, outcome)
    return code if outcome.left else _code(outcome.record)


def _code(record: Record) -> int:
    over = record.state in (State.STOPPED, State.SUCCEEDED)
    return 0 if over else record.exit_code or 0
