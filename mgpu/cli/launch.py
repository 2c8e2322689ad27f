"""`mgpu launch`: rent a fleet, run on it, give it back."""

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
@common.resume_option
@common.detach_option
def launch(run_file: Path, changes: list[Change], yes: bool, as_json: bool, resume: str | None, detach: bool) -> int:
    """Rent what RUN_FILE asks for, run on it, keep the checkpoints, give every machine back."""
    from mgpu.run.lifecycle import launch as runs
    from mgpu.run.lifecycle.resume import before as resumed
    from mgpu.spec.load import load

    spec = load(run_file, changes=changes)
    console = Console(as_json=as_json, show_logs=spec.command is not None)
    before = resumed(resume, run_file, spec)
    with console.waiting(common.PREFLIGHT):
        runs.preflight(run_file, spec, console.emit)
    plan = common.make_plan(spec)
    machines = common.machines_of(spec, plan)
    try:
        image, plan = common.look_at_image(console, spec, run_file, plan, machines)
    finally:  # the price is known all the same
        common.show_plan(console, plan, common.other_costs(spec, plan))
    common.require_begun(plan, spec.recovery.wait_minutes)
    if image is not None:
        console.say(str(image))
    if before is not None:
        common.show_changes(console, before, spec)
    common.agree(console, yes)
    context = common.context(console, detach=detach)
    return common.finish(console, runs.launch(run_file, spec, context, resume=before, machines=machines))
