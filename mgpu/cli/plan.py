"""`mgpu plan`: what a run file would rent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli import common
from mgpu.console import Console

if TYPE_CHECKING:
    from mgpu.plan.model import Offer

_SHOWN = 20  # of those that will be asked for; --json has all
_REFUSED = 6  # of those that will not: the nearest


@click.command()
@common.run_file_argument
@common.json_option
def plan(run_file: Path, as_json: bool) -> None:
    """Show what RUN_FILE would rent, and the price of all nodes. Rents nothing."""
    from mgpu.spec.load import load

    console = Console(as_json=as_json)
    spec = load(run_file)
    decided = common.make_plan(spec)
    if as_json:
        extra = {"price_usd_per_hour": decided.price_usd_per_hour, "max_cost_usd": decided.max_cost_usd}
        console.data(decided.model_dump(mode="json") | extra)
        return
    nodes = decided.requirements.nodes
    rows = [_row("then" if index else "take", o, nodes) for index, o in enumerate(decided.offers[:_SHOWN])]
    rows += [_row("no", r.offer, nodes, r.reason) for r in decided.refused[:_REFUSED]]
    columns = ("", "machine", "GPUs", "market", "where", "$/h a node", f"$/h all {nodes}", "why not")
    console.table(columns if decided.refused else columns[:-1], rows if decided.refused else [r[:-1] for r in rows])
    hidden = len(decided.offers) + len(decided.refused) - len(rows)
    if hidden:
        console.text(f"and {hidden} more: `mgpu plan --json`")
    common.show_plan(console, decided)
    console.next(f"mgpu launch {run_file}")


def _row(word: str, offer: Offer, nodes: int, reason: str = "") -> tuple[str, ...]:
    return (
        word,
        offer.instance_type,
        f"{offer.gpus} x {offer.gpu}" if offer.gpu else "none",
        offer.market,
        offer.zone or offer.region,
        f"${offer.price_usd_per_hour:.2f}",
        f"${offer.price_usd_per_hour * nodes:.2f}",
        reason,
    )
