"""`mgpu submit`: a run that waits for `mgpu reconcile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli import common
from mgpu.console import Console

if TYPE_CHECKING:
    from mgpu.spec.change import Change


@click.command()
@common.run_file_argument
@common.change_options
@common.yes_option
@common.json_option
def submit(run_file: Path, changes: list[Change], yes: bool, as_json: bool) -> int:
    """Submit RUN_FILE: it exists from now on, with its code and image as they are. The next `mgpu reconcile` on any
    machine that shares the backend rents what it asks for, and runs it."""
    from mgpu.run.lifecycle import launch as runs
    from mgpu.spec.load import load

    spec = load(run_file, changes=changes)
    console = Console(as_json=as_json)
    machines = common.agreed(console, run_file, spec, yes)
    record = runs.submitted(run_file, spec, common.context(console), machines)
    console.say(f"run {record.run_id} is queued")
    common.tell_as_json(console, record)
    console.next("mgpu reconcile    begin with it", f"mgpu attach {record.run_id}    begin with it, and follow it")
    return 0
