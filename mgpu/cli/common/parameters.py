"""Options and arguments that several commands have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from mgpu.cli import complete
from mgpu.cli.common import wiring
from mgpu.words import seconds_of

if TYPE_CHECKING:
    from mgpu.spec.text.change import Change

F = TypeVar("F", bound=Callable[..., Any])


def run_file_argument(command: F) -> F:
    """RUN_FILE, by default the one of this folder."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.argument("run_file", type=kind, default=Path(wiring.RUN_FILE), callback=_of_its_project)(command)


def _of_its_project(_context: click.Context, _argument: click.Parameter, run_file: Path) -> Path:
    wiring.choose_backend(run_file.parent)
    return run_file


def change_options(command: F) -> F:
    """--set and --env: the command is given `changes`."""

    @functools.wraps(command)
    def told(*args: Any, keys: list[Change], env: list[Change], **rest: Any) -> Any:
        return command(*args, changes=[*keys, *env], **rest)

    keys = set_option("Change the run file: `--set train.steps=100`; several times for several.")
    words = "Set a variable of the program; several times for several."
    env = click.option("--env", multiple=True, metavar="NAME=VALUE", callback=_changes, help=words)
    return cast(F, keys(env(told)))


def set_option(words: str) -> Callable[[F], F]:
    """--set: the command is given `keys`, a list of `Change`s."""
    return click.option("--set", "keys", multiple=True, metavar="KEY=VALUE", callback=_changes, help=words)


def _changes(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> list[Change]:
    from mgpu.spec.text.change import Change

    try:
        return [Change.of(option.opts[0], each) for each in given]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def run_argument(command: F) -> F:
    """RUN, by default the newest; the beginning of an id is enough."""
    return click.argument("run", default="last", shell_complete=complete.runs)(command)


class AfterDashes(click.Command):
    """What follows `--` is a command of the user's, also where no RUN stands before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with the newest run put where none is named."""
        if "--" in args:
            at = args.index("--")
            named, _, _ = self.make_parser(ctx).parse_args(list(args[:at]))
            if not isinstance(named["run"], str):
                args = [*args[:at], "last", *args[at:]]
        return super().parse_args(ctx, args)


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def resume_option(command: F) -> F:
    """--resume RUN."""
    words = "Go on with this run from its newest checkpoint that verifies."
    return click.option("--resume", metavar="RUN", shell_complete=complete.runs, help=words)(command)


def detach_option(command: F) -> F:
    """--detach."""
    words = "Leave once it trains: until `mgpu attach` nobody replaces a lost machine."
    return click.option("--detach", "-d", is_flag=True, help=words)(command)


def machines_option(command: F) -> F:
    """--machines."""
    words = "A kept fleet that fits and that nobody uses, else new ones; a kept one, which is waited for; or new ones."
    kinds = click.Choice(["any", "kept", "new"])
    return click.option("--machines", type=kinds, default="any", show_default=True, help=words)(command)


def yes_option(command: F) -> F:
    """--yes."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask; the price is still shown.")(command)


class Number(click.FloatRange):
    """A number in a range: nan, which is in every range for click, is none, nor is infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As a float."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number to count with", param, ctx)
        return number


class Span(click.ParamType):
    """A length of time, in seconds: `50m`, `4h`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As seconds."""
        try:
            return value if isinstance(value, float) else seconds_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
