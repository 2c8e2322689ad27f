"""What commands begin with: the backend, the context of a run, deadlines, and how one ends with an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mgpu.backend import location
from mgpu.console import Console
from mgpu.errors import InputError, MgpuError, ProviderError, StackError
from mgpu.run.record import shared
from mgpu.run.record.record import load
from mgpu.words import duration

if TYPE_CHECKING:
    from mgpu_train.timeouts import Timeouts

    from mgpu.context import Context
    from mgpu.run.fleet.inventory import StandingFleet, Survey
    from mgpu.run.nodes.ssh_config import SshRoute

RUN_FILE = "mgpu.yaml"
ASKING = "asking every provider, in all its regions, what you have there"
ANSWER_S = 60.0  # to say whether a run is to stop; nobody watches it meanwhile


def choose_backend(folder: Path) -> None:
    """Until this command ends its backend is that of the project in `folder`."""
    location.choose(folder)
    click.get_current_context().call_on_close(lambda: location.choose(None))


@contextmanager
def as_known(console: Console) -> Iterator[float | None]:
    """For commands that only look: where the backend does not answer they see what this machine knows of it, while the
    block runs. That is said, and how many seconds old it is is yielded; None: it answers. Raises StackError: nothing is
    known."""
    age_s = None
    with ExitStack() as stack:
        try:
            shared.pull()
        except StackError as error:
            if (age_s := shared.known_s_ago()) is None:
                raise
            stack.enter_context(shared.as_known())
            why = error.why.partition("\n")[0]
            console.say(f"{error.what} ({why}); this is what this machine knew {duration(age_s)} ago", "yellow")
        yield age_s


def ssh_route_to(run: str, stack: str | None) -> SshRoute:
    """How to get to the machines of a run, or of a stack, which is given instead. Raises InputError."""
    from mgpu.run.fleet import key
    from mgpu.run.fleet.stack import project_of
    from mgpu.run.nodes import ssh_config

    if stack is None:
        record = load(run)
        key.bring(record, context(Console()))
        return ssh_config.to_run(record)
    if run != "last":
        raise InputError(
            "either RUN or --stack is given, not both", f"`{run}` is a run, `{stack}` a stack.", "Give one of them."
        )
    return ssh_config.to_stack(project_of(Path(RUN_FILE)), stack, context(Console()))


def context(console: Console, *, watch_s: float | None = None, leave: bool = False) -> Context:
    """What a run is given by this command: its console, its deadlines, and how to ask on a terminal."""
    from mgpu.context import Context
    from mgpu.sinks.delivery import Delivery

    ask, delivery = None, Delivery(console.emit)
    if command := click.get_current_context(silent=True):
        command.call_on_close(delivery.close)
    if sys.stdin.isatty() and sys.stderr.isatty():
        ask = lambda first: console.answer(f"stop the run ({first}, then teardown)? `n` leaves it running", ANSWER_S)  # noqa: E731
    return Context(delivery.emit, timeouts(), ask, watch_s, leave)


def timeouts() -> Timeouts:
    """See `mgpu.context.timeouts`."""
    from mgpu.context import timeouts

    return timeouts()


def made(folder: Path) -> Path:
    """The folder that a command is to write into.

    Raises:
        InputError: it is not there and cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}."
        raise InputError(f"{folder}: the folder cannot be made", why, "Name another one; nothing was done.") from error
    return folder


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Files are written into `folder` meanwhile.

    Raises:
        InputError: one cannot be.
    """
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}: {error.filename}." if error.filename else f"{error}."
        cure = "Mend that, or name another folder; what was written stays."
        raise InputError(f"{folder}: a file cannot be written", why, cure) from error


def user_of(fleet: StandingFleet) -> str:
    """What uses a fleet, in words."""
    return fleet.used_by or (f"nothing: left by run {fleet.left_by}" if fleet.left_by else "nothing")


def not_asked(console: Console, survey: Survey) -> int:
    """Shows who could not be asked what is billed; returns the exit code that follows."""
    survey.warn(console.emit)
    for error in survey.failures:
        console.error(error)
    return ProviderError.exit_code if survey.failures else 0


def exit_with(console: Console, error: MgpuError) -> int:
    """Shows an error and gives its exit code."""
    console.error(error)
    return error.exit_code
