"""`mgpu plan`: what a run file would rent."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli.common import agreement, parameters
from mgpu.console import Console
from mgpu.errors import ImageError, InputError, MgpuError, ProviderError

if TYPE_CHECKING:
    from mgpu.plan.model import Offer, Plan
    from mgpu.run.job.images import Looked
    from mgpu.spec.model import RunSpec
    from mgpu.spec.text.change import Change

_SHOWN = 20  # of those that will be asked for; --json has all
_REFUSED = 6  # of those that will not: the nearest


@click.command()
@parameters.run_file_argument
@parameters.change_options
@parameters.json_option
def plan(run_file: Path, changes: list[Change], as_json: bool) -> int:
    """Show what RUN_FILE would rent and run, and the price of all nodes. Rents and builds nothing."""
    from mgpu.spec import environment
    from mgpu.spec.load import load

    console = Console(as_json=as_json)
    spec = load(run_file, changes=changes)
    decided = agreement.make_plan(spec)
    image, problems = None, list[MgpuError]()
    try:
        machines = agreement.machines_of(spec, decided)
        image, decided = agreement.look_at_image(console, spec, run_file, decided, machines)
    except (ImageError, InputError, ProviderError) as error:
        problems.append(error)
    doubts = environment.unset(spec, os.environ)
    try:
        doubts += _doubts(spec, run_file)
    except InputError as error:
        problems.append(error)
    costs, budget = agreement.other_costs(spec, decided), agreement.Budget(spec.max_usd)
    try:
        agreement.require_paid(decided, budget, agreement.most_usd_per_hour(spec, decided, costs))
    except InputError as error:
        problems.append(error)
    if as_json:
        from mgpu.cli.results import Planned

        prices = {
            "costs": [each.model_dump() for each in costs],
            "price_usd_per_hour": decided.price_usd_per_hour,
            "max_cost_usd": min(decided.max_cost_usd, budget.left),
            "hours": decided.hours,
        }
        console.result(Planned.model_validate({**dict(decided), **prices, "image": _words(image)}))
    else:
        _show(console, spec, decided)
        agreement.show_plan(console, decided, costs, budget)
    for doubt in doubts:
        console.say(f"warning: {doubt}", "yellow")
    for each in problems:  # the price is known all the same
        console.error(each)
    if problems:
        return problems[0].exit_code
    if image is not None:
        console.say(str(image))
    changed = (word for each in changes for word in (each.option, each.given))
    console.next(shlex.join(["mgpu", "launch", str(run_file), *changed]))
    return 0


def _show(console: Console, spec: RunSpec, decided: Plan) -> None:
    """What will be asked for, and what not, as a table."""
    nodes = decided.requirements.nodes
    rows = [_row("then" if index else "take", o, nodes) for index, o in enumerate(decided.offers[:_SHOWN])]
    rows += [_row("no", r.offer, nodes, r.reason) for r in decided.refused[:_REFUSED]]
    columns = ("", "provider", "machine", "GPUs", "market", "where", "$/h a node", f"$/h all {nodes}", "why not")
    without = [1] * (len(spec.candidates) == 1) + [len(columns) - 1] * (not decided.refused)
    shown = [[cell for place, cell in enumerate(row) if place not in without] for row in (columns, *rows)]
    console.table(shown[0], shown[1:], spare=("$/h a node", "GPUs", "where"))
    hidden = len(decided.offers) + len(decided.refused) - len(rows)
    if hidden:
        console.prose(f"and {hidden} more: `mgpu plan --json`")


def _doubts(spec: RunSpec, run_file: Path) -> list[str]:
    """What a launch would warn of, of the code and of what of the run file is left out of the image.

    Raises:
        InputError: a launch would refuse the code, or a sink.
    """
    from mgpu.spec import sink

    sink.require(spec.sinks, "")
    found = _of_the_code(spec, run_file)
    if spec.image is None:
        return found
    from mgpu.run.job import images

    return found + images.unused_args(spec.image, run_file.resolve().parent)


def _of_the_code(spec: RunSpec, run_file: Path) -> list[str]:
    from mgpu_train.timeouts import Timeouts

    from mgpu.events import Warned
    from mgpu.run.job.request import resolve
    from mgpu.run.nodes import code_upload

    request = resolve(spec, spec.name, run_file.resolve().parent, timeouts=Timeouts())  # type: ignore[call-arg]
    return [event.text for event in code_upload.look(request) if isinstance(event, Warned)]


def _words(image: Looked | None) -> dict[str, str | bool | None] | None:
    if image is None:
        return None
    there = image.there
    return {"name": image.name, "in_registry": there is not None, "reference": there.reference if there else None}


def _row(word: str, offer: Offer, nodes: int, reason: str = "") -> tuple[str, ...]:
    return (
        word,
        offer.provider,
        offer.instance_type,
        f"{offer.gpus} x {offer.gpu}" if offer.gpu else "none",
        offer.market,
        offer.zone or offer.region,
        *(agreement.mark(offer) + agreement.cents(offer.price_usd_per_hour * count) for count in (1, nodes)),
        reason,
    )
