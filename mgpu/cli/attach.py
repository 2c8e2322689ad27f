"""`mgpu attach`: follow a run, or take it over."""

from __future__ import annotations

import time
from pathlib import Path

import click

from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console
from mgpu.events import LogChunk, MetricsSampled
from mgpu.run.record import files
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State, known, load, supervised, supervisor_of

FOLLOW_EVERY_S = 0.5
TAIL = 4096  # bytes of each log that are shown first


@click.command()
@parameters.run_argument
@parameters.json_option
@click.option("--take-over", is_flag=True, help="Take its place although it lives: it is stuck, or cannot be reached.")
@click.option("--detach", "-d", is_flag=True, help="Leave again once it trains and needs nothing; follow nobody.")
@click.option("--for", "watch_s", type=parameters.Span(), help="As --detach, but watch it for this time first: `50m`.")
def attach(run: str, as_json: bool, take_over: bool, detach: bool, watch_s: float | None) -> int:
    """Follow RUN (default: the newest). Where its supervisor is gone, take its place, wherever the run is: make or
    repair the machines, watch, recover, judge, tear down.

    Ending this command while it only follows ends nothing else; with --detach or --for it never does.
    """
    from mgpu.run.lifecycle import attach
    from mgpu.run.lifecycle.outcome import Outcome

    record = load(run)
    # as `mgpu launch` shows it: a program of the user's own by what it prints, the bundled trainer by its numbers
    console = Console(as_json=as_json, show_logs=record.steps is None)
    if record.state.final:
        console.say(f"run {record.run_id} is over")
        return closing.finish(console, Outcome(record))
    if not supervised(record.run_id):
        how = "is queued: beginning with it" if record.state is State.QUEUED else "has no supervisor: taking over"
        console.say(f"run {record.run_id} {how}")
    elif take_over:
        console.say(f"taking run {record.run_id} from {supervisor_of(record.run_id)}")
    if detach or watch_s is not None:
        return _pass_by(console, record, watch_s or 0.0, take_over=take_over)
    while (outcome := attach.attach(record, wiring.context(console), force=take_over)) is None:
        record = _follow(console, record.run_id)
        if record.state.final:
            outcome = Outcome(record)
            break
        console.say("its supervisor is gone: taking over")
    return closing.finish(console, outcome)


def _pass_by(console: Console, record: Record, watch_s: float, *, take_over: bool) -> int:
    """Does what the run needs now, and leaves it."""
    from mgpu.run.lifecycle import attach

    outcome = attach.attach(record, wiring.context(console, watch_s=watch_s, leave=True), force=take_over)
    if outcome is not None:
        return closing.finish(console, outcome)
    console.say(f"run {record.run_id} is supervised by {supervisor_of(record.run_id)}: it is left to that")
    closing.tell_as_json(console, load(record.run_id))
    return 0


def _follow(console: Console, run_id: str) -> Record:
    """Shows what the supervisor writes down, until the run is over or has none. Ending this ends nothing else."""
    console.say(f"following {run_id}; Ctrl-C ends only this view")
    files.follow(run_id)
    folder, nodes = Folder(run_id), range(load(run_id).nodes)
    offsets = {path: max(0, path.stat().st_size - TAIL) for rank in nodes for path in folder.logs(rank)}
    while True:
        watched = supervised(run_id)
        record = load(run_id)
        ends = record.state.final or not watched
        files.follow(run_id, last=ends)
        for rank in nodes:
            for path in folder.logs(rank):
                _pass_on(console, path, rank, offsets)
        if ends:
            console.done()
            return record
        told = {"step": known(record.step), "steps": record.steps, "phase": "training", "values": record.metrics}
        console.emit(MetricsSampled(record.run_id, record.attempt, time.time(), **told))
        time.sleep(FOLLOW_EVERY_S)


def _pass_on(console: Console, path: Path, rank: int, offsets: dict[Path, int]) -> None:
    with path.open("rb") as file:
        offset = file.seek(offsets.get(path, 0))
        while data := file.read(1 << 20):
            console.emit(LogChunk(rank, offset, data))
            offset += len(data)
    offsets[path] = offset
