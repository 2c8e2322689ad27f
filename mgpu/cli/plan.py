"""`mgpu plan`: what a run file would rent."""

from __future__ import annotations

from pathlib import Path

import click

from mgpu.cli import common
from mgpu.console import Console


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
    rows = [
        (
            "take" if index == 0 else "then",
            o.instance_type,
            f"{o.gpus} x {o.gpu}" if o.gpu else "none",
            o.market,
            o.zone or o.region,
            f"${o.price_usd_per_hour:.2f}",
            f"${o.price_usd_per_hour * nodes:.2f}",
            "",
        )
        for index, o in enumerate(decided.offers)
    ]
    rows += [
        (
            "no",
            r.offer.instance_type,
            f"{r.offer.gpus} x {r.offer.gpu}" if r.offer.gpu else "none",
            r.offer.market,
            r.offer.zone or r.offer.region,
            f"${r.offer.price_usd_per_hour:.2f}",
            f"${r.offer.price_usd_per_hour * nodes:.2f}",
            r.reason,
        )
        for r in decided.refused
    ]
    columns = ("", "machine", "GPUs", "market", "where", "$/h a node", f"$/h all {nodes}", "why not")
    console.table(columns if decided.refused else columns[:-1], rows if decided.refused else [r[:-1] for r in rows])
    common.show_plan(console, decided)
    console.next(f"mgpu launch {run_file}")
