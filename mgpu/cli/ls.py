"""`mgpu ls`: runs, and what is billed now."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console
from mgpu.run.record.record import Record, State, every, supervised
from mgpu.words import count

if TYPE_CHECKING:
    from mgpu.cli.results import Result
    from mgpu.run.fleet.inventory import StandingFleet


_SPARE = ("begun", "checkpoint", "step")  # columns that a narrow terminal does without


@click.command()
@parameters.json_option
@click.option("--all", "all_runs", is_flag=True, help="All runs, not only the newest 20.")
def ls(as_json: bool, all_runs: bool) -> int:
    """List runs, newest last, and ask the providers what is billed now."""
    console = Console(as_json=as_json)
    with wiring.as_known(console) as stale_s:
        return _listed(console, every() if all_runs else every()[-20:], stale_s)


def _listed(console: Console, records: list[Record], stale_s: float | None) -> int:
    from mgpu.run.fleet.inventory import Survey, survey

    with console.waiting(wiring.ASKING):  # what stands for machines, the backend knows
        seen = survey() if stale_s is None else Survey(())
    fleets = seen.by_name
    if console.as_json:
        console.result(_result(records, fleets, stale_s))
        return wiring.not_asked(console, seen)
    billed = {each for fleet in fleets for each in fleet.ids}
    rows = [
        (
            r.run_id,
            _state(r, known=stale_s is None),
            "" if r.step < 0 else f"{r.step}/{r.steps}" if r.steps else r.step,
            f"step {r.checkpoint_step}" if r.checkpoint_id else "",
            _ago(r.created_at),
            _machines(r, None if seen.failures or stale_s is not None else billed),
        )
        for r in records
    ]
    if rows:
        console.table(("run", "state", "step", "checkpoint", "begun", "machines"), rows, spare=_SPARE)
    else:
        console.prose("no runs yet")
    if stale_s is not None:
        console.prose("billed now: not asked")
        return 0
    for fleet in fleets:
        console.prose(
            f"fleet {fleet.name}: {count(len(fleet.ids), 'node')} of {fleet.provider}, "
            f"${fleet.usd_per_hour:.2f} per hour, used by {wiring.user_of(fleet)}"
        )
    nodes, dollars = sum(len(f.ids) for f in fleets), sum(f.usd_per_hour for f in fleets)
    rest = ", and what those have that could not be asked" if seen.failures else ""
    console.prose(f"billed now: {count(nodes, 'node')}, ${dollars:.2f} per hour{rest}")
    if any(not fleet.used_by for fleet in fleets):
        console.next("mgpu gc --yes    end what nothing uses")
    else:
        begin = "mgpu launch" if Path(wiring.RUN_FILE).exists() else "mgpu init"
        console.next(f"mgpu status {records[-1].run_id}" if records else begin)
    return wiring.not_asked(console, seen)


def _result(records: list[Record], fleets: Iterable[StandingFleet], stale_s: float | None) -> Result:
    from mgpu.cli import results
    from mgpu.run.view import RunView

    runs = [RunView.of(each) for each in records]
    return results.Runs(runs=runs, fleets=[results.Fleet(**each.to_json()) for each in fleets], stale_s=stale_s)


def _state(record: Record, *, known: bool = True) -> str:
    """Not `known`: whether it is supervised."""
    if record.unmet:
        return f"{record.state}, not as expected"
    if record.state is State.QUEUED:
        return f"queued, {record.reason}" if record.reason else record.state
    if record.state.final or supervised(record.run_id):
        return record.state
    return f"{record.state}, no supervisor" if known else f"{record.state}, as it was"


def _machines(record: Record, billed: set[str] | None) -> str:
    """`billed` None: not all of it is known."""
    # `pulumi destroy` and the end of a lease tell no record
    ids = {node.get("id") for node in (record.fleet or {}).get("nodes", ())}
    if record.teardown == "kept" and billed is not None and not billed & ids:
        return "kept, and gone since"
    return closing.machines(record).partition(", confirmed")[0]


def _ago(at: float) -> str:
    seconds = max(0, int(time.time() - at))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
