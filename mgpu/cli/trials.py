"""`--smoke`, `--tune`, `--lr-range` of `mgpu run` and `mgpu launch`: what they make of a run file, and how they end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.record.record import Record, State

if TYPE_CHECKING:
    from mgpu.spec.model import RunSpec
    from mgpu.spec.text.change import Change

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 20  # rates of a table


@dataclass(frozen=True)
class Asked:
    """What the options say."""

    smoke: bool
    tune: bool
    lr_range: bool
    write: bool

    def load(self, run_file: Path, changes: list[Change], resume: str | None, *, detach: bool) -> RunSpec:
        """The run file, or the trials that it is asked for. Raises InputError: the options do not go together."""
        from mgpu.spec import trials
        from mgpu.spec.load import first, load, whole

        if self.write and not (self.tune or self.lr_range):
            raise InputError("--write is for --tune and --lr-range", "It writes what was found into the run file.")
        asked = {"--tune": self.tune, "--lr-range": self.lr_range, "--smoke": self.smoke}
        option, *others = [name for name, given in asked.items() if given] or [None]
        if option is None:
            return load(run_file, changes=changes)
        others += [name for name, given in {"--resume": resume, "--detach": detach}.items() if given]
        if others:
            raise InputError(
                f"{option} and {others[0]} do not go together", "Trials are short, and keep no checkpoint."
            )
        if self.tune:
            return trials.tune(whole(run_file, changes))
        spec = load(run_file, changes)
        if not self.lr_range:
            return trials.smoke(spec)
        others = [each for each in changes if each.at != ("train", "lr_from")]
        kept = first(run_file, others).train if self.write else None
        if kept is not None and kept.lr_from is not None:
            raise InputError(
                f"{run_file}: `train.lr_from` and --write do not go together",
                "With it in the file each run is a range test, whatever `lr` is written.",
                "Take it out of the file, and give it by `--set`.",
            )
        return trials.lr_range(spec)

    def end(self, console: Console, run_file: Path, record: Record) -> None:
        """Writes what was found into the run file, where that was asked for."""
        found = best(record)
        if not self.write or found is None or record.state is not State.SUCCEEDED:
            return
        from mgpu.spec.trials import words, write

        write(run_file, found)
        console.say(f"{run_file}: `train` has {words(found)}")


def options(command: F) -> F:
    """--smoke, --tune, --lr-range and --write: the command is given `asked`."""

    @functools.wraps(command)
    def told(*args: Any, smoke: bool, tune: bool, lr_range: bool, write: bool, **rest: Any) -> Any:
        return command(*args, asked=Asked(smoke, tune, lr_range, write), **rest)

    words = "Five steps with one process, one node, all: where does it break? Keeps no checkpoint."
    smoke = click.option("--smoke", is_flag=True, help=words)
    words = "Try settings of `train` (those of `matrix`, or usual ones) for a few steps each: which is fastest?"
    tune = click.option("--tune", is_flag=True, help=words)
    words = "Train for 100 steps while the learning rate grows: with which one does the loss fall fastest?"
    lr_range = click.option("--lr-range", is_flag=True, help=words)
    words = "With --tune, --lr-range: write what was found into RUN_FILE."
    write = click.option("--write", is_flag=True, help=words)
    return cast(F, smoke(tune(lr_range(write(told)))))


def fastest(record: Record) -> dict[str, Any] | None:
    """The row of the fastest; None: nothing was compared."""
    rows = [row for row in record.trials if row["outcome"] == "ok" and row["units_per_s"] and row["purpose"] == "tune"]
    return max(rows, key=lambda row: row["units_per_s"], default=None)


def best(record: Record) -> dict[str, Any] | None:
    """Keys of `train`, as they were found to be best; None: nothing was found."""
    if row := fastest(record):
        return row["train"]
    return next(({"lr": row["lr"]} for row in record.trials if row.get("lr")), None)


def show(console: Console, record: Record) -> None:
    """What became of each trial, as a table; and what was found to be best, as a run file has it."""
    if not record.trials:
        return
    rows, winner = record.trials, fastest(record)
    unit = next((row["unit"] for row in rows if row["unit"]), "units")
    known = {
        f"{unit}/s": ("units_per_s", "{:,.0f}"),
        "GiB": ("memory_gib", "{:.2f}"),
        "MFU": ("mfu", "{:.1%}"),
        f"$ per million {unit}": ("usd_per_million", "{:.4f}"),
        "seconds": ("seconds", "{:.1f}"),
    }
    columns = {name: each for name, each in known.items() if any(row[each[0]] for row in rows)}
    table = [
        [
            row["name"] + (" *" if row is winner else ""),
            *("" if row[key] is None else form.format(row[key]) for key, form in columns.values()),
            row["outcome"] + (f": {row['said']}" if row["said"] else ""),
        ]
        for row in rows
    ]
    console.text("")
    console.table(("trial", *columns, "outcome"), table, numbers=(*columns,))
    for row in rows:
        if row.get("rates"):
            _rates(console, row)
    if found := best(record):
        from mgpu.spec.trials import words

        which = f"the fastest of all {len(rows)}" if winner else "where the loss falls fastest"
        console.say(f"* {which}; in the run file (`--write` does it):")
        console.text(f"\ntrain: {{{words(found)}}}")


def _rates(console: Console, row: dict[str, Any]) -> None:
    """The loss of each rate, of one in so many steps; the one that is suggested has a star."""
    rates, lr = row["rates"], row["lr"]
    nearest = min(range(len(rates)), key=lambda at: abs(math.log(rates[at]["lr"] / lr))) if lr else -1
    shown = sorted({*range(0, len(rates), -(-len(rates) // _SHOWN)), *((nearest,) if lr else ())})
    table = [[f"{rates[at]['lr']:.1e}" + (" *" if at == nearest else ""), f"{rates[at]['smooth']:.4f}"] for at in shown]
    console.text("")
    console.table(("lr", "loss"), table, numbers=("loss",))
    if not lr:
        console.say("the loss falls with none of these rates by more than its noise", "yellow")
