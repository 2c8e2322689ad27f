"""`mgpu queue`: runs that were submitted and that nobody has begun with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.record.record import Record, State, busy, find, load, save, supervised, supervising, unsettled
from mgpu.words import count, duration

if TYPE_CHECKING:
    from mgpu.schedule.queue import Queued


@click.group()
def queue() -> None:
    """Runs that wait for their turn: `mgpu submit` puts them there, `mgpu reconcile` begins with them.

    The higher priority first; of one priority that of whoever has the fewest runs at work; of these the oldest.
    """


@queue.command()
@parameters.json_option
def ls(as_json: bool) -> int:
    """List them in their order, and what each waits for."""
    console, damaged = Console(as_json=as_json), dict[str, InputError]()
    line, at_work = _line(lambda error: damaged.update({error.what: error}))
    if as_json:
        from mgpu.cli.results import Queue, QueuedRun

        console.result(Queue(queued=[QueuedRun.of(each) for each in line]))
        return _told(console, damaged.values())
    if line:
        columns = ("run", "priority", "by", "since", "setting", "waits for")
        console.table(columns, [_row(each) for each in line], spare=("by", "since", "setting"))
    else:
        console.prose("no run is queued")
    console.prose(f"at work: {count(at_work, 'run')}")
    console.next("mgpu reconcile    begin with what nothing holds up" if line else "mgpu submit")
    return _told(console, damaged.values())


def _told(console: Console, damaged: Iterable[InputError]) -> int:
    """The exit code, once it is said which records cannot be read: such a run is in no line."""
    return max((wiring.exit_with(console, error) for error in damaged), default=0)


@queue.command()
@click.argument("run")
@click.option("--first", is_flag=True, help="Before all others.")
@click.option("--last", is_flag=True, help="After all others.")
@click.option("--priority", type=int, help="To this priority.")
@parameters.json_option
def mv(run: str, first: bool, last: bool, priority: int | None, as_json: bool) -> int:
    """Change the place of RUN."""
    if [first, last, priority is not None].count(True) != 1:
        raise InputError("where is it to go?", "One of --first, --last and --priority says it.", "Give one of them.")
    console, run_id = Console(as_json=as_json), _queued(run).run_id
    others = [each.record.priority for each in _line()[0] if each.record.run_id != run_id] or [0]
    place = max(others) + 1 if first else min(others) - 1 if last else priority or 0

    def moved(record: Record) -> None:
        record.priority = place

    record = _change(run_id, moved)
    console.say(f"run {run_id} has priority {place}")
    closing.tell_as_json(console, record)
    console.next("mgpu queue ls")
    return 0


@queue.command()
@click.argument("run")
@parameters.json_option
@click.pass_context
def rm(context: click.Context, run: str, as_json: bool) -> int:
    """Take RUN out: it ends as stopped, and nothing was rented for it."""
    from mgpu.cli.stop import stop

    return context.invoke(stop, run=_queued(run).run_id, as_json=as_json, wait=True)


def _line(damaged: Callable[[InputError], None] = lambda _: None) -> tuple[list[Queued], int]:
    """The queue, and how many runs are at work; `damaged` is told why a record cannot be read."""
    from mgpu.run.fleet import reuse
    from mgpu.schedule import kept
    from mgpu.schedule.decide import Seen
    from mgpu.schedule.decide import queue as line_up

    seen = {record.run_id: Seen(record, supervised(record.run_id)) for record in unsettled(damaged)}
    now = time.time()
    fleets = reuse.standing(now) if any(each.in_line for each in seen.values()) else []

    def found(run_id: str) -> Record | None:
        return seen[run_id].record if run_id in seen else kept.run_of(run_id, damaged)

    return line_up(seen.values(), found, fleets, now), sum(each.at_work for each in seen.values())


def _queued(run: str) -> Record:
    """Raises InputError: it is not queued."""
    record = load(run)
    if record.state is not State.QUEUED or supervised(record.run_id):
        state = "has begun" if record.state is State.QUEUED else f"is {record.state}"
        cure = f"`mgpu stop {record.run_id}` ends it." if not record.state.final else ""
        raise InputError(f"run {record.run_id} is not in the queue: it {state}", "", cure)
    return record


def _change(run_id: str, how: Callable[[Record], None]) -> Record:
    """Changes the record while nobody else can. Raises InputError: it was begun with a moment ago."""
    with supervising(run_id) as token:
        if not token:
            raise busy(run_id)
        record = _still(find(run_id), run_id)
        record.supervisor = token
        how(record)
        save(record)
        return record


def _still(record: Record | None, run_id: str) -> Record:
    if record is None or record.state is not State.QUEUED:
        raise InputError(f"run {run_id} is not in the queue any more", "It was begun with, or removed, a moment ago.")
    return record


def _row(each: Queued) -> tuple[str, ...]:
    record = each.record
    setting = ", ".join(f"{key} {value}" for key, value in record.setting.items())
    begins = f"the next pass, on kept fleet {each.starts_on}" if each.starts_on else ""
    waits = each.waits_for or begins or record.reason.removeprefix("waits: ") or "the next pass"
    since = duration(max(0.0, time.time() - record.created_at))
    return record.run_id, str(record.priority), record.created_by, since, setting, waits
