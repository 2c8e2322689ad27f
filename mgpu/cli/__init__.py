"""The `mgpu` command: one module a command, imported only when that command is called."""

from __future__ import annotations

import importlib
import os
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn

import click
from mgpu_train.system import collector

from mgpu import __version__

if TYPE_CHECKING:
    from mgpu.errors import MgpuError

# command -> its line in `mgpu --help`; the module mgpu.cli.<command> holds a click command of the same name.
# Listing them here keeps `mgpu --help` from importing any of them.
COMMANDS = {
    "init": "Make this folder a project: run file, Pulumi program, engine.",
    "bootstrap": "Make what machines at a provider stand on: bucket, roles, security group.",
    "check": "Test what a provider needs: credentials, permissions, network, quotas. Names a cure for each red line.",
    "policy": "Print the least permissions that mgpu needs at a provider.",
    "spec": "Print the keys of the run file: type, default, meaning.",
    "offers": "List what providers sell, and the age of the prices.",
    "reservations": "Find, buy or list machines that are reserved for a time.",
    "image": "Build, push or inspect the container image of a run file.",
    "plan": "Show what a run file would rent, and the price. Rents nothing.",
    "launch": "Rent a fleet, run on it, give it back.",
    "run": "Run on the fleet of a stack that is up.",
    "submit": "Queue a run: the next `mgpu reconcile` begins with it.",
    "queue": "List queued runs, change their order, take one out.",
    "schedule": "Run files that are due again and again, every night: add, list, show, pause, remove.",
    "reconcile": "Do what is due: start runs, look after those whose supervisor is gone.",
    "status": "Show a run: phase, progress, price.",
    "logs": "Show a run's logs, also after its machines are gone.",
    "attach": "Follow a run, or take it over when its supervisor is gone.",
    "stop": "Save a checkpoint and end a run.",
    "down": "Give a fleet back now.",
    "ls": "List runs and what is billed.",
    "limits": "Limit what all runs may spend, and how many there may be: set, show, unset.",
    "costs": "Show what runs have spent: by project, run, provider, owner or month.",
    "ssh": "Log in on a node, or run a command there.",
    "exec": "Run a command on the nodes of a run or a stack.",
    "checkpoints": "List, verify, download, export or prune a run's checkpoints.",
    "outputs": "Download a run's outputs from its store.",
    "rm": "Remove the records of runs that are over.",
    "gc": "Find machines that nothing uses, and end them.",
    "backend": "Show where records and the state of stacks are, or move them: to a bucket, or back.",
    "completion": "Print what a shell needs to complete commands, runs and stacks.",
    "local": "Take machines of provider local away, as a cloud would: to see a run recover.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of a run's life."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command's module."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"mgpu.cli.{cmd_name}"), cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest name for a typing error."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f". Did you mean `{near[0]}`?" if near else ""
            ctx.fail(f"no command `{args[0]}`{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, but whoever reads standard output may stop: `mgpu logs | head -1`. What a command has failed with
        stays its exit code, wherever its result went."""
        from mgpu.backend import location

        location.tell_of_waits(_say)
        result = None
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except OSError as error:
            if result:
                _drop_the_rest()
            elif isinstance(error, BrokenPipeError):
                _unread()
            else:
                raise
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help text, without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="mgpu")
def cli() -> None:
    """Rent multi-GPU machines, train on them, keep the checkpoints, give every machine back."""


def _say(text: str) -> None:
    """On stderr, whatever the command prints its result as."""
    from mgpu.console import Console

    Console().say(text, "dim")


def _unread() -> NoReturn:
    """Ends as a program that SIGPIPE ends, without a word."""
    _drop_the_rest()
    sys.exit(141)


def _drop_the_rest() -> None:
    """What standard output did not take: at its end the interpreter would try to write it again, and say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_streams() -> None:
    """Those that were closed (`<&-`, a service), on nothing: else the next file that is opened takes the place. What
    the encoding does not have is escaped."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            there = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(there, there == number)
            setattr(sys, name, open(there, "w" if number else "r"))  # noqa: PTH123, SIM115 - until this process ends
    if isinstance(sys.stdout, TextIOWrapper) and (sys.stdout.errors == "strict" or sys.stdout.encoding == "ascii"):
        sys.stdout.reconfigure(errors="backslashreplace")


def main(args: list[str] | None = None) -> Any:
    """The entry point: every error of ours, and every mistake on the command line, becomes three lines and a code.
    With --json it is an object, too, unless the command has printed its result."""
    collector.seldom()
    _open_streams()
    if known := sys.modules.get("mgpu.console"):
        known.Console.told = False
    try:
        result = cli.main(args=args, prog_name="mgpu", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        told = _told(error)
        if told is None:
            if known := sys.modules.get("mgpu.writer"):
                known.settle(sys.stderr)  # a traceback stands below what was said before it
            raise
        from mgpu.console import Console

        console = Console()
        console.error(told)
        try:
            if "--json" in (sys.argv[1:] if args is None else args) and not Console.told:
                console.data({"version": 1, "error": told.to_json()})
            sys.stdout.flush()
        except OSError:  # told already, where it is the error
            _drop_the_rest()
        sys.exit(told.exit_code)
    sys.exit(result if isinstance(result, int) else 0)


def _told(error: Exception) -> MgpuError | None:
    """The error as users are told of it; None: it is a bug."""
    from mgpu.errors import MgpuError, of_this_machine

    if isinstance(error, MgpuError):
        return error
    return _mistake(error) if isinstance(error, click.ClickException) else of_this_machine(error)


def _mistake(error: click.ClickException) -> MgpuError:
    """A mistake on the command line."""
    from mgpu.errors import InputError

    what = error.format_message().removesuffix(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return InputError(what)
    usage = " ".join(context.get_usage().split())
    return InputError(
        f"{context.command_path}: {what[:1].lower()}{what[1:]}", usage, f"See `{context.command_path} --help`."
    )
