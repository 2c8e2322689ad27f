"""`mgpu checkpoints prune`: which checkpoints go, why the others stay, and after a yes it is done."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mgpu.cli.checkpoints import source
from mgpu.cli.checkpoints.source import Source
from mgpu.cli.common import closing, parameters
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.words import amount, count

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.lines import Commit
    from mgpu_train.checkpoint.retention import PrunePlan
    from mgpu_train.config import Retention


_MODES: dict[str | None, str] = {"higher": "max", "lower": "min"}
_STUCK = "does not let all be removed that is given up"


@click.command()
@source.options
@click.option("--keep-last", type=click.IntRange(min=1), help="So many of the newest stay.")
@click.option("--keep-every-hours", type=parameters.Number(min=0), help="Beside them one every so many hours; 0: none.")
@click.option("--keep-best", type=click.IntRange(min=0), help="Beside them so many with the best metric; 0: none.")
@click.option("--metric", "best_metric", help="What is compared: a name in the checkpoints' meta.json.")
@click.option("--mode", "best_mode", type=click.Choice(("min", "max")), help="Which value of it is the best.")
@click.option("--deep", is_flag=True, help="Read every byte of the newest that is to verify, before others go.")
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; what goes is still shown.")
@parameters.json_option
def prune(
    run: str, url: str | None, profile: str | None, deep: bool, dry_run: bool, yes: bool, as_json: bool, **given: Any
) -> None:
    """Give up checkpoints of RUN that need not be kept.

    It shows which, and asks. What no option says is as in the run file. The newest that verifies stays, whatever the
    options say. The run may be going on: its own agent prunes after each commit, by the run file.
    """
    from mgpu_train.checkpoint.retention import plan_prune
    from mgpu_train.checkpoint.retention import prune as carry_out

    from mgpu.run.lifecycle.removal import attempts_over

    console = Console(as_json=as_json)
    found = source.find(run, url, profile)
    retention = _retention(found, {name: value for name, value in given.items() if value is not None})
    commits = found.commits()
    with source.readable(found.store.url), console.waiting("looking for the newest checkpoint that verifies"):
        plan = plan_prune(found.store, found.run_id, retention, deep=deep, log=found.log)
    _show(console, found, commits, plan)
    gone: list[str] = []
    if not dry_run:
        if plan.drop:
            _agree(yes, console)
        with source.readable(found.store.url, _STUCK), console.waiting("removing what was given up"):
            over = attempts_over(found.record, found.log, time.time()) if found.record else 0
            gone = carry_out(found.store, found.run_id, plan, log=found.log, over=over)
        _done(console, gone, plan)
    if as_json:
        from mgpu.cli import results

        console.result(results.Pruned(**asdict(plan), gone=gone, dry_run=dry_run))
    elif dry_run and plan.drop:
        console.next(f"mgpu checkpoints prune {found.arguments}{_said(given, deep)}    do it")


def _said(given: dict[str, Any], deep: bool) -> str:
    """The options that were given, as they are typed."""
    rules = {each.opts[0]: given.get(str(each.name)) for each in click.get_current_context().command.params}
    words = [word for name, value in rules.items() if value is not None for word in (name, str(value))]
    return "".join(f" {shlex.quote(word)}" for word in (*words, *(["--deep"] if deep else ())))


def _retention(found: Source, given: dict[str, Any]) -> Retention:
    """The run file's, changed by what was given; 0 takes a rule away.

    Raises InputError where neither says what stays, or a mode that a metric's name speaks against.
    """
    from mgpu_train.config import Retention

    from mgpu.spec.expect import by_name

    given = {name: value or None for name, value in given.items()}
    base = found.retention()
    if base is None and "keep_last" not in given:
        raise InputError(
            f"run {found.run_id}: nothing says how many of the newest are to stay",
            "Its run file is on the machine that launched it.",
            "Add `--keep-last N`.",
        )
    wanted = (base or Retention()).model_copy(update=given)
    ours = base is not None and base.best_metric == wanted.best_metric  # else the run file's mode is another one's
    said = wanted.model_fields_set if ours else given
    mode = _MODES.get(by_name(wanted.best_metric), wanted.best_mode)
    if wanted.keep_best and "best_mode" not in said and mode != wanted.best_mode:
        raise InputError(
            f"nothing says which value of `{wanted.best_metric}` is the best",
            f"By its name it is the {mode}, and without a word the {wanted.best_mode} would stay, and the best go.",
            f"Add `--mode {mode}`.",
        )
    return wanted


def _show(console: Console, found: Source, commits: list[Commit], plan: PrunePlan) -> None:
    """Every checkpoint with what becomes of it. Damaged ones are named, whether they go or not."""
    if commits and not console.as_json:
        rows = [
            (
                each.checkpoint_id,
                each.step,
                amount(each.bytes),
                closing.when(each.at),
                f"stays: {plan.keep[each.checkpoint_id]}" if each.checkpoint_id in plan.keep else "goes",
            )
            for each in commits
        ]
        console.table(("checkpoint", "step", "size", "committed", "verdict"), rows, spare=("committed",))
    for name, problem in plan.damaged.items():
        console.say(f"warning: {name} does not verify: {problem}", "bold yellow")
    if found.record is not None and not found.record.state.final:
        console.say("the run is not over: after each commit its agent prunes too, by the run file alone", "dim")
    console.say(f"{len(plan.drop)} of {count(len(commits), 'checkpoint')} can go: {amount(plan.bytes)}")


def _agree(yes: bool, console: Console) -> None:
    """Raises InputError when the answer is no, or there is nobody to ask."""
    if yes or console.confirm("give them up?"):
        return
    if sys.stdin.isatty():
        raise InputError("not agreed", "Nothing was removed.")
    raise InputError(
        "this command removes checkpoints and nobody can be asked",
        "Standard input is not a terminal. Nothing was removed.",
        "Add `--yes` to agree to what is shown above, or `--dry-run`.",
    )


def _done(console: Console, gone: list[str], plan: PrunePlan) -> None:
    given_up = [name for name in gone if name in plan.drop]
    if given_up:
        console.say(f"given up: {', '.join(given_up)}", "green")
    if parts := [name for name in gone if name not in plan.drop]:
        console.say(f"removed, of saves that were never committed: {', '.join(parts)}")
