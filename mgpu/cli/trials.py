"""`--smoke` and `--tune` of `mgpu run` and `mgpu launch`: what they make of a run file, and how they end."""

from __future__ import annotations

import functools
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


@dataclass(frozen=True)
class Asked:
    """What the options say."""

    smoke: bool
    tune: bool
    write: bool

    def load(self, run_file: Path, changes: list[Change], resume: str | None, *, detach: bool) -> RunSpec:
        """The run file, or the trials that it is asked for. Raises InputError: the options do not go together."""
        from mgpu.spec import trials
        from mgpu.spec.load import load, whole

        if self.write and not self.tune:
            raise InputError("--write is for --tune", "It writes what was found to be fastest into the run file.")
        if not (self.smoke or self.tune):
            return load(run_file, changes=changes)
        option = "--tune" if self.tune else "--smoke"
        for other, given in (("--smoke", self.smoke and self.tune), ("--resume", resume), ("--detach", detach)):
            if given:
                raise InputError(
                    f"{option} and {other} do not go together", "Trials are short, and keep no checkpoint."
                )
        return trials.tune(whole(run_file, changes)) if self.tune else trials.smoke(load(run_file, changes))

    def end(self, console: Console, run_file: Path, record: Record) -> None:
        """Writes the fastest into the run file, where that was asked for."""
        found = fastest(record)
        if not self.write or found is None or record.state is not State.SUCCEEDED:
            return
        from mgpu.spec.trials import write

        write(run_file, found["train"])
        console.say(f"{run_file}: `train` has what was fastest")


def options(command: F) -> F:
    """--smoke, --tune and --write: the command is given `asked`."""

    @functools.wraps(command)
    def told(*args: Any, smoke: bool, tune: bool, write: bool, **rest: Any) -> Any:
        return command(*args, asked=Asked(smoke, tune, write), **rest)

    words = "Five steps with one process, one node, all: where does it break? Keeps no checkpoint."
    smoke = click.option("--smoke", is_flag=True, help=words)
    words = "Try settings of `train` (those of `matrix`, or usual ones) for a few steps each: which is fastest?"
    tune = click.option("--tune", is_flag=True, help=words)
    write = click.option("--write", is_flag=True, help="With --tune: write the fastest into RUN_FILE.")
    return cast(F, smoke(tune(write(told))))


def fastest(record: Record) -> dict[str, Any] | None:
    """The row of the fastest; None: nothing was compared."""
    rows = [row for row in record.trials if row["outcome"] == "ok" and row["units_per_s"] and row["purpose"] == "tune"]
    return max(rows, key=lambda row: row["units_per_s"], default=None)


def show(console: Console, record: Record) -> None:
    """What became of each trial, as a table; and of several settings the fastest, as a run file has it."""
    if not record.trials:
        return
    rows, best = record.trials, fastest(record)
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
            row["name"] + (" *" if row is best else ""),
            *("" if row[key] is None else form.format(row[key]) for key, form in columns.values()),
            row["outcome"] + (f": {row['said']}" if row["said"] else ""),
        ]
        for row in rows
    ]
    console.text("")
    console.table(("trial", *columns, "outcome"), table, numbers=(*columns,))
    if best is not None:
        from mgpu.spec.trials import words

        console.say(f"* the fastest of all {len(rows)}; in the run file (`--write` does it):")
        console.text(f"\ntrain: {{{words(best['train'])}}}")
