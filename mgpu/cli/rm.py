"""`mgpu rm`: remove what this machine remembers of runs that are over."""

from __future__ import annotations

import sys
import time

import click

from mgpu.cli import complete
from mgpu.cli.common import parameters
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.lifecycle import removal
from mgpu.run.record import record
from mgpu.words import amount, count


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete.runs)
@click.option("--older-than-days", type=parameters.Number(min=0), help="Instead: runs that ended so many days ago.")
@click.option("--keep-last", type=click.IntRange(min=0), help="Instead: all but the newest so many.")
@click.option("--dry-run", is_flag=True, help="Only show which ones.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; what goes is still shown.")
@parameters.json_option
def rm(
    runs: tuple[str, ...],
    older_than_days: float | None,
    keep_last: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Remove records, logs and kept code of runs that are over. Their checkpoints stay where they are.

    RUNs are named, or chosen by age and number; both rules have to agree. What may still be billed is never removed.
    """
    by_rule = older_than_days is not None or keep_last is not None
    if by_rule == bool(runs):
        raise InputError(
            "no run is named" if not runs else "runs are named, and rules are given",
            "RUNs are removed, or those that --older-than-days and --keep-last choose.",
            "Name runs (see `mgpu ls`), or give rules: `mgpu rm --older-than-days 30 --keep-last 20`.",
        )
    console = Console(as_json=as_json)
    if by_rule:
        chosen = removal.due(older_than_days, keep_last)
    else:
        chosen = list({each.run_id: each for each in map(record.load, runs)}.values())
        removal.require_removable(chosen)
    if not chosen:
        console.say("no run to remove")
    elif not as_json:
        console.table(
            ("run", "state", "ended", "newest checkpoint"),
            [(each.run_id, str(each.state), _day(each), _checkpoint(each)) for each in chosen],
            spare=("newest checkpoint",),
        )
    freed = 0
    if chosen and not dry_run:
        _agree(console, len(chosen), yes)
        freed = removal.remove(chosen)
        console.say(f"{count(len(chosen), 'record')} removed, {amount(freed)} freed")
    if as_json:
        from mgpu.cli.results import Removed

        console.result(Removed(runs=[each.run_id for each in chosen], bytes=freed, dry_run=dry_run))
    return 0


def _agree(console: Console, records: int, yes: bool) -> None:
    if not yes and not console.confirm(f"remove {count(records, 'record')}? checkpoints stay"):
        why = "" if sys.stdin.isatty() else "Standard input is not a terminal."
        raise InputError("not agreed", f"{why} Nothing was removed.".strip(), "Add `--yes` to agree.")


def _day(each: record.Record) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(each.ended_at or each.created_at))


def _checkpoint(each: record.Record) -> str:
    return f"step {each.checkpoint_step} in {each.store}/{each.run_id}" if each.checkpoint_id else "none"
