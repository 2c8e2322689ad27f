"""`mgpu stop`: save a checkpoint and end a run."""

from __future__ import annotations

import time

import click

from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import Interrupted, TeardownIncomplete
from mgpu.run.record import shared
from mgpu.run.record.record import Record, State, load, supervised, supervisor_of
from mgpu.run.supervision.limits import drain_s, last_save_s

LOOK_EVERY_S = 0.2


@click.command()
@parameters.run_argument
@parameters.json_option
@click.option(
    "--wait/--no-wait",
    default=True,
    help="Wait until the machines are gone (default), or return at once, where somebody supervises it.",
)
def stop(run: str, as_json: bool, wait: bool) -> int:
    """Ask RUN (default: the newest) to save a checkpoint and end; its machines go as the run file says.

    The exit code is 0 when it has ended; how else the run failed, above all 7: something may still be billed.
    """
    record = load(run)
    console = Console(as_json=as_json)
    if record.state.final:
        console.say(f"run {record.run_id} is over already: {record.state}")
        closing.tell_as_json(console, record)
        console.next(*closing.next_lines(record))
        return 0
    shared.ask_to_stop(record.run_id)
    if supervised(record.run_id):
        console.say(f"asked {record.run_id} to save and stop")
        _require_moving(record, waited_s=0.0)
        if not wait:
            closing.tell_as_json(console, record)
            console.next(f"mgpu status {record.run_id}")
            return 0
    asked_at = time.monotonic()
    while not (record := load(record.run_id)).state.final:
        if supervised(record.run_id):
            _require_moving(record, time.monotonic() - asked_at)
        else:
            taken = _take_over(console, record)
            if taken is not None:
                return taken
        time.sleep(LOOK_EVERY_S)
    if not as_json:
        console.table(("run", record.run_id), closing.summary(record))
    closing.tell_as_json(console, record)
    console.next(*closing.next_lines(record, resume=True))
    return _code(record)


def _require_moving(record: Record, waited_s: float) -> None:
    """Raises TeardownIncomplete for a supervisor that does nothing: it is suspended, or has had all its time."""
    times, who = wiring.timeouts(), supervisor_of(record.run_id)
    suspended = who is not None and who.suspended
    agents_s = times.grace_s(last_save_s(record)) + drain_s(record, times)
    enough_s = times.sync_s + agents_s + times.engine_s + times.destroy_s
    if waited_s < enough_s and not suspended:
        return
    why = "It was suspended (Ctrl-Z, SIGSTOP)" if suspended else f"It was asked {waited_s / 60:.0f} min ago"
    raise TeardownIncomplete(
        f"run {record.run_id} does not end: its supervisor, {who or 'another process'}, does nothing",
        f"{why}; the machines may be billed until then, at the latest until their hard cap.",
        f"Let it go on, or take its place: `mgpu attach {record.run_id} --take-over` ends the run as you asked.",
    )


def _take_over(console: Console, record: Record) -> int | None:
    """Ends the run; the exit code, None: its record says how it has ended."""
    from mgpu.run.lifecycle import attach

    console.say("its supervisor is gone: taking over to end it")
    outcome = attach.attach(record, wiring.context(console))
    if outcome is None:  # somebody else was faster
        return None
    if not outcome.left and isinstance(outcome.error, Interrupted):  # as was asked for, which is no error
        console.done()
        return None
    code = closing.finish(console, outcome)
    return code if outcome.left else _code(outcome.record)


def _code(record: Record) -> int:
    over = record.state in (State.STOPPED, State.SUCCEEDED)
    return 0 if over else record.exit_code or 0
