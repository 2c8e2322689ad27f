"""`mgpu run`: one run on the fleet of a stack that is up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli import complete, trials
from mgpu.cli.common import agreement, closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError

if TYPE_CHECKING:
    from mgpu.spec.text.change import Change


@click.command()
@parameters.run_file_argument
@parameters.change_options
@click.option("--yes", "-y", is_flag=True, help="Do not ask; what has changed in a resumed run is still shown.")
@parameters.json_option
@click.option("--stack", shell_complete=complete.stacks, help="Stack to run on (default: the selected, $PULUMI_STACK).")
@parameters.resume_option
@parameters.detach_option
@trials.options
def run(
    run_file: Path,
    changes: list[Change],
    yes: bool,
    as_json: bool,
    stack: str | None,
    resume: str | None,
    detach: bool,
    asked: trials.Asked,
) -> int:
    """Run RUN_FILE on machines that `pulumi up` made, or that an earlier run kept."""
    from mgpu.iac.engine.stack import current_stack
    from mgpu.run.fleet.stack import how_to_rent
    from mgpu.run.lifecycle import launch as runs
    from mgpu.run.lifecycle.resume import before as resumed

    spec = asked.load(run_file, changes, resume, detach=detach)
    console = Console(as_json=as_json, show_logs=spec.command is not None)
    before = resumed(resume, run_file, spec)
    project = runs.preflight(run_file, spec, console.emit)
    name = stack or current_stack(project)
    if name is None:
        raise InputError("no stack is selected", "`--stack` names one that is up.", how_to_rent(project))
    if before is not None and agreement.show_changes(console, before, spec) and not yes:
        agreement.agree_to_changes(console)
    context = wiring.context(console, watch_s=0.0 if detach else None)
    outcome = runs.run(run_file, spec, name, context, resume=before)
    code = closing.finish(console, outcome)
    asked.end(console, run_file, outcome.record)
    return code
