"""`mgpu gc`: machines that carry our owner tag and that nothing uses."""

from __future__ import annotations

import click

from mgpu.cli import common
from mgpu.console import Console


@click.command()
@common.json_option
@click.option("--yes", "-y", is_flag=True, help="End what was found. Without it nothing is changed.")
def gc(as_json: bool, yes: bool) -> int:
    """List machines of yours that no stack and no run stands for; with --yes, end them."""
    from mgpu.run import fleets

    console = Console(as_json=as_json)
    found = fleets.alive()
    lost = [fleet for fleet in found if not fleet.used_by]
    if as_json:
        console.data([fleet.to_json() for fleet in found])
    elif found:
        rows = [(f.name, f.provider, len(f.ids), f"${f.usd_per_hour:.2f}", f.used_by or "nothing") for f in found]
        console.table(("fleet", "provider", "nodes", "$/h", "used by"), rows)
    else:
        console.text("no machines of yours at any provider")
    if lost and not yes:
        console.next("mgpu gc --yes    end what nothing uses")
    if yes:
        timeouts = common.context(console).timeouts
        for fleet in lost:
            fleets.end(fleet, timeouts, console.emit)
            console.say(f"fleet {fleet.name}: ended, confirmed by the provider")
    return 0
