"""`mgpu gc`: machines that carry our owner tag and that nothing uses, or whose run was left by its supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.errors import MgpuError

if TYPE_CHECKING:
    from mgpu.run.fleet.inventory import Survey


@click.command()
@parameters.json_option
@click.option("--yes", "-y", is_flag=True, help="End what was found. Without it nothing is changed.")
def gc(as_json: bool, yes: bool) -> int:
    """List machines of yours, and what stands for each; with --yes, end those that nothing stands for.

    Of a run whose supervisor died: while it makes, repairs or gives back machines, they are ended; while it trains, it
    uses them (`mgpu attach`).
    """
    from mgpu.run.fleet import inventory
    from mgpu.run.lifecycle.gc import end_all, take_rights_away

    console = Console(as_json=as_json)
    with console.waiting(wiring.ASKING):
        survey = inventory.survey()
    found = survey.fleets
    lost = [fleet for fleet in found if not fleet.used_by]
    if not as_json:
        _show(console, survey)
    if lost and not yes:
        console.next("mgpu gc --yes    end what nothing uses")
    failures: list[MgpuError] = []
    ended: list[str] = []
    for fleet, error in end_all(lost if yes else [], wiring.context(console)):
        if error is not None:  # the others go all the same
            failures.append(error)
        else:
            ended.append(fleet.name)
            console.say(f"fleet {fleet.name}: ended, confirmed by the provider")
    if yes:
        take_rights_away(wiring.context(console))
    if as_json:
        from mgpu.cli import results

        console.result(results.Fleets(fleets=[results.Fleet(**each.to_json()) for each in survey.by_name], ended=ended))
    for error in failures[1:]:
        console.error(error)
    code = wiring.not_asked(console, survey)
    if failures:
        raise failures[0]
    return code


def _show(console: Console, survey: Survey) -> None:
    rows = [(f.name, f.provider, len(f.ids), f"${f.usd_per_hour:.2f}", wiring.user_of(f)) for f in survey.by_name]
    if rows:
        console.table(("fleet", "provider", "nodes", "$/h", "used by"), rows)
    else:
        console.prose("no machines of yours at any provider" + (" that could be asked" if survey.failures else ""))
