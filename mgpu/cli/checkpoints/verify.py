"""`mgpu checkpoints verify`: does the store still hold what was committed?"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from mgpu.cli.checkpoints import source
from mgpu.cli.checkpoints.source import Source
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.words import amount, count

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.lines import Commit

_SHOWN = 3  # problems of one checkpoint in the table; `--json` has all


@click.command()
@source.options
@click.option("--deep", is_flag=True, help="Read every byte, not only sizes and the store's own checksums.")
@click.option("--step", type=click.IntRange(min=0), help="Only this step's.")
@parameters.json_option
def verify(run: str, url: str | None, profile: str | None, deep: bool, step: int | None, as_json: bool) -> int:
    """Verify the committed checkpoints of RUN.

    Exit code 6 when one of them, or an entry of the commit log, is missing or damaged.
    """
    console = Console(as_json=as_json)
    found = source.find(run, url, profile)
    commits = found.commits(step)
    problems = _look(console, found, commits, deep)
    _show(console, found, problems, deep)
    whole = [each for each in commits if not problems[each.checkpoint_id]]
    damaged = [name for name, each in problems.items() if each] + ["the commit log"] * bool(found.gaps)
    if damaged:
        return wiring.exit_with(console, source.damaged(found, damaged, whole))
    if not deep and commits:
        console.next(f"mgpu checkpoints verify --deep {found.arguments}    read every byte")
    return 0


def _show(console: Console, found: Source, problems: dict[str, tuple[str, ...]], deep: bool) -> None:
    if console.as_json:
        from mgpu.cli import results

        told = {name: list(each) for name, each in problems.items()}
        console.result(results.Verified(deep=deep, checkpoints=told, gaps=found.gaps))
        return
    if not problems and not found.gaps:
        console.prose("no checkpoint is committed")
        return
    rows = [(name, in_short(each) or "ok") for name, each in problems.items()]
    rows += [("commit log", gap) for gap in found.gaps]
    console.table(("checkpoint", "every byte" if deep else "sizes and stored checksums"), rows)


def in_short(problems: tuple[str, ...]) -> str:
    """The first few problems in a line; empty where there are none."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _look(console: Console, found: Source, commits: list[Commit], deep: bool) -> dict[str, tuple[str, ...]]:
    """The problems of each checkpoint. Raises InputError when the store cannot be read."""
    total, began = sum(each.bytes for each in commits), time.monotonic()
    what = f"reading {count(len(commits), 'checkpoint')}"
    with source.readable(found.store.url):
        if not deep:
            with console.waiting(f"asking {found.store.url} for its objects' sizes and checksums"):
                return {each.checkpoint_id: _problems(found, each, deep=False) for each in commits}
        with console.transfer(what, total) as add:
            problems = {each.checkpoint_id: _problems(found, each, deep=True, progress=add) for each in commits}
    seconds = max(time.monotonic() - began, 0.001)
    console.say(f"{amount(total)} read in {seconds:.1f} s, {amount(total / seconds)}/s", "dim")
    return problems


def _problems(
    found: Source, commit: Commit, *, deep: bool, progress: Callable[[int], None] | None = None
) -> tuple[str, ...]:
    from mgpu_train.checkpoint.transfer.verify import verify as check
    from mgpu_train.store import Damaged, NotFound

    try:
        manifest = found.log.manifest(commit)
    except (Damaged, NotFound) as error:
        return (str(error),)
    return check(found.store, found.run_id, manifest, deep=deep, progress=progress)
