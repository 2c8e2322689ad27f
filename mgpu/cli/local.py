"""`mgpu local`: what a cloud does to its customers, on request: interruptions, no capacity, lost answers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import click

from mgpu.backend.owner import owner
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.providers.local import bill, control
from mgpu.providers.local.nodes import Instance
from mgpu.providers.local.options import Options
from mgpu.run.record.record import Record, every, load

_SECONDS = {"ignore_unknown_options": True}  # `-5` is a number here: control says what is wrong with it
_INSTANCE = re.compile(r"[0-9a-f]{10}-[0-9]{1,6}")
_RANK = re.compile(r"(?:(?P<run>.+)/)?(?P<rank>[0-9]{1,6})")
node_argument = click.argument("node")


@click.group()
def local() -> None:
    """Take machines of provider local away, as a cloud would: to see a run recover.

    NODE is a node_rank of the newest run in progress (`1`), of any run (`RUN/1`), or a machine's own id.
    """


@local.command(short_help="Warn a node, and take its machine later.", context_settings=_SECONDS)
@node_argument
@click.option(
    "--notice", type=float, metavar="SECONDS", default=120, show_default=True, help="From the warning to the end."
)
def interrupt(node: str, notice: float) -> None:
    """Warn NODE, and take its machine when the time is over: SIGKILL to all of it, and its folder is gone."""
    instance, name, record = _find(node)
    at = control.notice(instance, notice)
    told = f"told now, and taken in {notice:g} s, at {_clock(at)}, with all that runs and lies there"
    _say(f"{name}: {told}", record)


@local.command(short_help="Take a node's machine now.")
@node_argument
def kill(node: str) -> None:
    """Take NODE's machine now, without a warning: SIGKILL to all of it, and its folder is gone."""
    instance, name, record = _find(node)
    control.kill(instance)
    _say(f"{name}: taken now, with all that runs and lies there", record)


@local.command("no-capacity", short_help="Rent nothing out for a time.", context_settings=_SECONDS)
@click.argument("seconds", type=float)
def no_capacity(seconds: float) -> None:
    """Rent nothing out for SECONDS: creates and repairs are refused. 0: rent out again."""
    until = control.no_capacity(_root(), seconds)
    if seconds:
        Console().say(f"provider local has no capacity for {seconds:g} s, until {_clock(until)}: nothing new is made")
        Console().next("mgpu local no-capacity 0    rent out again")
    else:
        Console().say("provider local has capacity")


@local.command("lose-answer", short_help="Lose the answer to the next create.")
def lose_answer() -> None:
    """Lose the answer to the next create or repair: the machines are made, and mgpu has to find them."""
    control.next_creates(_root(), "lost")
    Console().say("the next create or repair makes its machines, and its answer is lost")
    Console().next("mgpu launch")


def _root() -> Path:
    from mgpu.providers.local.provider import LocalProvider

    return LocalProvider().root


def _say(text: str, record: Record | None) -> None:
    console = Console()
    console.say(text)
    console.next(f"mgpu attach {record.run_id}    see what becomes of the run" if record else "mgpu ls")


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _find(node: str) -> tuple[Instance, str, Record | None]:
    """The machine that NODE stands for, what to call it, and its run.

    Raises:
        InputError: there is no such node, or it has no machine now.
    """
    if _INSTANCE.fullmatch(node):
        return Instance(_root(), node), f"machine {node}", None
    asked = _RANK.fullmatch(node)
    if asked is None:
        raise InputError(f"no node `{node}`", "", "Give a node_rank (`1`), RUN/RANK, or a machine's id.")
    record, rank = load(asked["run"]) if asked["run"] else _newest(), int(asked["rank"])
    if rank >= record.nodes:
        raise InputError(f"no node {rank}", f"Run {record.run_id} has nodes 0 to {record.nodes - 1}.", "See `mgpu ls`.")
    machine = _machine(record, rank)
    return Instance(_root(), machine), f"node {rank} of run {record.run_id} (machine {machine})", record


def _newest() -> Record:
    going_on = [record for record in every() if not record.state.final and record.provider == Options.block]
    if not going_on:
        raise InputError("no run of provider local is in progress", "", "Name one: RUN/RANK. See `mgpu ls`.")
    return going_on[-1]


def _machine(record: Record, rank: int) -> str:
    fleets = {record.fleet_name, (record.fleet or {}).get("fleet")}
    started = [each for each in bill.read(_root()).nodes if each.start.owner == owner()]
    had = [n for n in started if n.start.fleet in fleets and n.start.instance.endswith(f"-{rank}")]
    alive = [each.start.instance for each in had if each.alive]
    if not alive:
        last = f"{had[-1].start.instance} is gone: {had[-1].reason or 'not known why'}" if had else "none was made yet"
        raise InputError(f"node {rank} of run {record.run_id} has no machine now", last, "See `mgpu ls`.")
    return alive[-1]
