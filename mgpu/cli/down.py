"""`mgpu down`: give a fleet back now."""

from __future__ import annotations

from pathlib import Path

import click

from mgpu.cli import complete
from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.record.record import load, supervised


@click.command()
@click.argument("run", required=False, shell_complete=complete.runs)
@click.option("--stack", shell_complete=complete.stacks, help="A stack of this folder's project instead of a run.")
@parameters.json_option
def down(run: str | None, stack: str | None, as_json: bool) -> int:
    """Give back the machines of RUN (default: the newest run), or of a stack. Nothing is saved first."""
    console = Console(as_json=as_json)
    if stack is not None and run is not None:
        raise InputError(
            "either RUN or --stack is given, not both", f"`{run}` is a run, `{stack}` a stack.", "Give one of them."
        )
    if stack is not None:
        _stack_down(console, stack)
        return 0
    record = load("last" if run is None else run)
    if supervised(record.run_id):
        raise InputError(
            f"run {record.run_id} is being supervised",
            "Its own supervisor gives the machines back.",
            f"Use `mgpu stop {record.run_id}`: it saves a checkpoint first.",
        )
    if record.teardown in ("confirmed", "not ours") and not record.store_granted:
        console.say(f"run {record.run_id}: {closing.machines(record)}; nothing to do")
    else:
        from mgpu.run.lifecycle.down import down as give_back

        record = give_back(record, wiring.context(console))
        console.say(f"run {record.run_id}: {closing.machines(record)}")
        console.next("mgpu ls")
    closing.tell_as_json(console, record)
    return 0


def _stack_down(console: Console, name: str) -> None:
    from mgpu.run.fleet.stack import project_of
    from mgpu.run.lifecycle.down import stack_down

    project = project_of(Path(wiring.RUN_FILE))
    stack_down(project, name, wiring.context(console))
    console.say(f"stack {name}: given back, confirmed by the provider")
    if console.as_json:
        from mgpu.cli.results import StackDown

        console.result(StackDown(stack=name, teardown="confirmed"))
    console.next("mgpu ls")
