"""`mgpu launch`: rent a fleet, run on it, give it back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli import trials
from mgpu.cli.common import agreement, closing, parameters, wiring
from mgpu.console import Console

if TYPE_CHECKING:
    from mgpu.spec.text.change import Change


@click.command()
@parameters.run_file_argument
@parameters.change_options
@parameters.yes_option
@parameters.json_option
@parameters.resume_option
@parameters.detach_option
@trials.options
def launch(
    run_file: Path,
    changes: list[Change],
    yes: bool,
    as_json: bool,
    resume: str | None,
    detach: bool,
    asked: trials.Asked,
) -> int:
    """Rent what RUN_FILE asks for, run on it, keep the checkpoints, give every machine back."""
    from mgpu.run.lifecycle import launch as runs
    from mgpu.run.lifecycle.resume import before as resumed

    spec = asked.load(run_file, changes, resume, detach=detach)
    console = Console(as_json=as_json, show_logs=spec.command is not None)
    before = resumed(resume, run_file, spec)
    machines = agreement.agreed(console, run_file, spec, yes, before, begins=True)
    context = wiring.context(console, watch_s=0.0 if detach else None)
    outcome = runs.launch(run_file, spec, context, resume=before, machines=machines)
    code = closing.finish(console, outcome)
    asked.end(console, run_file, outcome.record)
    return code
