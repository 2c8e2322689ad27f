"""`mgpu costs`: what runs have spent."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import click

from mgpu.cli.common import parameters
from mgpu.console import Console
from mgpu.run.budget.costs import KEYS, Sum, all_records, stretches, sums, total
from mgpu.words import count

_NUMBERS = ("runs", "hours", "machines", "beside", "total")
_SPARE = ("hours", "beside", "machines")
_NAMED = 5  # runs, of which something is not known


class _Day(click.ParamType):
    """The beginning of a day or a month of UTC, UNIX seconds."""

    name = "date"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As UNIX seconds."""
        form = "%Y-%m-%d" if value.count("-") > 1 else "%Y-%m"
        try:
            return datetime.strptime(value, form).replace(tzinfo=UTC).timestamp()
        except ValueError:
            self.fail(f"`{value}` is no date: write 2026-11-01, or 2026-11", param, ctx)


@click.command()
@click.option("--by", type=click.Choice([*KEYS]), default="project", show_default=True, help="What belongs together.")
@click.option("--since", type=_Day(), help="Only what was spent from this day on: 2026-11-01.")
@parameters.json_option
def costs(by: str, since: float | None, as_json: bool) -> int:
    """Show what the runs of this backend have spent on machines, their disks and public addresses, also those that are
    over or removed, by the prices that they were told. Months and days are those of UTC."""
    console, now = Console(as_json=as_json), time.time()
    found = [*stretches(all_records(), now, since or 0.0)]
    rows, whole = sums(found, by), total(found)
    if as_json:
        from mgpu.cli.results import Costs, CostView

        views = [CostView.of(each) for each in rows]
        console.result(Costs(by=by, since=since, until=now, rows=views, total=CostView.of(whole)))
        return 0
    if not rows:
        console.prose("nothing was spent " + ("since then" if since else "yet"))
        return 0
    console.table((by, *_NUMBERS), [_row(each) for each in (*rows, whole)], spare=_SPARE, numbers=_NUMBERS)
    if whole.unpriced:
        console.prose(f"not counted, for the price of the machines is not known: {_named(whole.unpriced)}")
    if whole.other_unpriced:
        console.prose(f"without disks and addresses, whose price is not known: {_named(whole.other_unpriced)}")
    return 0


def _row(each: Sum) -> tuple[str, ...]:
    beside = _dollars(each.other_usd, each.other_unpriced | each.unpriced)
    parts = (_dollars(each.machines_usd, each.unpriced), beside, _dollars(each.usd, each.unpriced))
    return (each.key, str(len(each.runs)), f"{each.hours:,.1f}", *parts)


def _dollars(usd: float, unknown: set[str]) -> str:
    """`>`: and what nobody knows."""
    return "unknown" if unknown and not usd else f"{'>' if unknown else ''}${usd:,.2f}"


def _named(runs: Iterable[str]) -> str:
    names = sorted(runs)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{count(len(names), 'run')}: {', '.join(names[:_NAMED])}{more}"
