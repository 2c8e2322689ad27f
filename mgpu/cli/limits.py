"""`mgpu limits`: what all runs of the backend may spend together."""

from __future__ import annotations

import time
from dataclasses import fields

import click

from mgpu.cli.common import parameters
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.budget import account
from mgpu.run.budget.account import Limits, Usage
from mgpu.run.budget.costs import month
from mgpu.words import count

_NAMES = tuple(each.name for each in fields(Limits))


@click.group()
def limits() -> None:
    """What all runs of this backend may spend together, and how many there may be at once.

    A launch that would be over a limit is refused before anything is rented; a queued run waits. When a month's budget
    is spent, runs save a checkpoint and end.
    """


@limits.command("set")
@click.option("--usd-per-month", type=parameters.Number(min=0, min_open=True), help="In a month of UTC.")
@click.option("--usd-per-hour", type=parameters.Number(min=0, min_open=True), help="By all that is rented at a time.")
@click.option("--runs", type=click.IntRange(min=1), help="At once.")
@parameters.json_option
def set_(usd_per_month: float | None, usd_per_hour: float | None, runs: int | None, as_json: bool) -> int:
    """Set limits; those that are not named stay as they are."""
    given = zip(_NAMES, (usd_per_month, usd_per_hour, runs), strict=True)
    wanted = {name: value for name, value in given if value is not None}
    if not wanted:
        raise InputError("no limit is named", "", "`mgpu limits set --usd-per-month 2000 --usd-per-hour 60 --runs 2`")
    return _show(Console(as_json=as_json), account.change(**wanted))


@limits.command()
@parameters.json_option
def show(as_json: bool) -> int:
    """Show the limits, and what is in use."""
    return _show(Console(as_json=as_json), account.limits())


@limits.command()
@click.option("--usd-per-month", is_flag=True)
@click.option("--usd-per-hour", is_flag=True)
@click.option("--runs", is_flag=True)
@parameters.json_option
def unset(usd_per_month: bool, usd_per_hour: bool, runs: bool, as_json: bool) -> int:
    """Take these limits away; without an option, all."""
    named = [name for name, given in zip(_NAMES, (usd_per_month, usd_per_hour, runs), strict=True) if given]
    return _show(Console(as_json=as_json), account.change(**dict.fromkeys(named or _NAMES, 0)))


def _show(console: Console, found: Limits) -> int:
    used = account.in_use(time.time())
    if console.as_json:
        from mgpu.cli import results

        shown = {name: getattr(found, name) or None for name in _NAMES}
        more = {"spent_usd": round(used.month_usd, 4), "in_use_usd_per_hour": round(used.usd_per_hour, 4)}
        known = {"month": month(used.at), "running": list(used.runs), "unpriced": used.unpriced}
        console.result(results.Limits.model_validate(shown | more | known))
        return 0
    if not found:
        console.prose("no limits")
        console.next("mgpu limits set --usd-per-month 2000    what all runs may spend in a month")
        return 0
    columns = ("limit", "now", "at most", "left")
    console.table(columns, [*_rows(found, used)], numbers=columns[1:])
    if used.runs:
        console.prose(f"{count(len(used.runs), 'run')}: {', '.join(used.runs)}")
    if used.unpriced:
        console.prose(f"not counted, for the price is not known: {', '.join(used.unpriced)}")
    return 0


def _rows(found: Limits, used: Usage) -> list[tuple[str, ...]]:
    dollars = ((f"USD in {month(used.at)}", used.month_usd, found.usd_per_month),)
    dollars += (("USD per hour", used.usd_per_hour, found.usd_per_hour),)
    rows = [
        (name, f"${now:,.2f}", f"${most:,.2f}", f"${max(0.0, most - now):,.2f}") for name, now, most in dollars if most
    ]
    if found.runs:
        rows.append(("runs", str(len(used.runs)), str(found.runs), str(max(0, found.runs - len(used.runs)))))
    return rows
