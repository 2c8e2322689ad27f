"""`mgpu submit`: runs that wait for `mgpu reconcile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli.common import agreement, closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError, MgpuError
from mgpu.run.record.record import Record, load, new_run_id
from mgpu.words import count

if TYPE_CHECKING:
    from mgpu.acquire.fit import Machines
    from mgpu.spec.model import RunSpec
    from mgpu.spec.text.change import Change


@click.command()
@parameters.run_file_argument
@parameters.change_options
@click.option("--priority", type=int, default=0, show_default=True, help="Of the queue, the highest begins first.")
@click.option("--after", multiple=True, metavar="RUN", help="Begin once RUN has succeeded; several times for several.")
@click.option("--max-parallel", type=click.IntRange(1), help="Of a sweep, at most so many runs at a time.")
@parameters.machines_option
@parameters.yes_option
@parameters.json_option
def submit(
    run_file: Path,
    changes: list[Change],
    priority: int,
    after: tuple[str, ...],
    max_parallel: int | None,
    machines: str,
    yes: bool,
    as_json: bool,
) -> int:
    """Submit RUN_FILE: it exists from now on, with its code and image as they are. The next `mgpu reconcile` on any
    machine that shares the backend begins with it: on a kept fleet that fits, or on new machines. With a `matrix` it
    is a sweep, of many runs.
    """
    from mgpu.run.lifecycle import launch as runs
    from mgpu.spec.load import sweep

    specs, console = sweep(run_file, changes=changes), Console(as_json=as_json)
    before = [load(run).run_id for run in after]
    if max_parallel and len(specs) == 1:
        why = "It limits the runs of a sweep, and the run file has no `matrix`."
        raise InputError("--max-parallel has nothing to limit", why, "Leave it out, or use `--after RUN`.")
    fitting = _agreed(console, run_file, [spec for _, spec in specs], yes)
    whole = new_run_id(specs[0][1].name) if len(specs) > 1 else ""
    made = list[Record]()
    for (setting, spec), fits in zip(specs, fitting, strict=True):
        more = {"priority": priority, "after": before, "sweep": whole, "setting": setting, "machines": machines}
        limit = {"max_parallel": max_parallel or 0}
        try:
            made.append(runs.submitted(run_file, spec, wiring.context(console), fits, **more, **limit))
        except MgpuError as error:
            error.queued = tuple(each.run_id for each in made)
            raise
        console.say(f"run {made[-1].run_id} is queued" + "".join(f", {key} {setting[key]}" for key in setting))
    if len(made) == 1:
        closing.tell_as_json(console, made[0])
    elif as_json:
        from mgpu.cli.results import Submitted
        from mgpu.run.view import RunView

        console.result(Submitted(sweep=whole, runs=[RunView.of(each) for each in made]))
    first = made[0].run_id
    console.next(
        "mgpu reconcile    begin with what nothing holds up",
        f"mgpu attach {first}    begin with it, and follow it" if len(made) == 1 else "mgpu queue ls",
    )
    return 0


def _agreed(console: Console, run_file: Path, specs: list[RunSpec], yes: bool) -> list[Machines]:
    """Asks once for all; what their images have to fit. Those that rent the same are looked at once."""
    wants = [_rents(spec) for spec in specs]
    known: list[tuple[object, Machines]] = []
    found: list[Machines] = []
    for spec, want in zip(specs, wants, strict=True):
        machines = next((there for key, there in known if key == want), None)
        if machines is None:
            if (alike := wants.count(want)) > 1:
                console.say(f"{count(alike, 'run')}, each:")
            machines = agreement.looked_at(console, run_file, spec)
            known.append((want, machines))
        found.append(machines)
    agreement.agree(console, yes)
    return found


def _rents(spec: RunSpec) -> object:
    """Equal for run files that ask for the same, whatever they train."""
    from mgpu_train.tasks import extras

    from mgpu.plan import rank, room

    needs = {*extras.lacking(spec.train, ())} if spec.train and spec.image else set[str]()  # of the image
    rest = spec.model_copy(update={"train": None, "command": None, "env": {}})
    return rank.requirements(spec), room.of(spec), needs, rest
