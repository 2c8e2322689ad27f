"""`mgpu status`: what is remembered of a run, with its age; `--live` asks provider and nodes."""

from __future__ import annotations

import time
from typing import Any

import click

from mgpu.cli import trials
from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import MgpuError
from mgpu.run.record.record import Record, State, load, supervised, supervisor_of
from mgpu.run.record.supervisor_lock import Holder


@click.command()
@parameters.run_argument
@parameters.json_option
@click.option("--live", is_flag=True, help="Ask the provider and the nodes now.")
def status(run: str, as_json: bool, live: bool) -> int:
    """Show RUN (default: the newest): phase, progress, price, machines."""
    console = Console(as_json=as_json)
    with wiring.as_known(console) as stale_s:
        return _shown(console, run, stale_s, live=live)


def _shown(console: Console, run: str, stale_s: float | None, *, live: bool) -> int:
    record = load(run)
    watched = not record.state.final and supervised(record.run_id)
    who = supervisor_of(record.run_id)
    now, problem = _live(record) if live else (None, None)
    if console.as_json:
        console.result(closing.result_of(record, supervised=watched, live=now, stale_s=stale_s))
        return wiring.exit_with(console, problem) if problem else 0
    rows = closing.summary(record)
    if not record.state.final:
        age = f"{time.time() - record.updated_at:.0f} s ago"
        rows[0] = (rows[0][0], rows[0][1] + ("" if watched else f", as it was {age}"))
        rows.append(("nodes", ", ".join(record.node_phases) or "none yet"))
        unwatched = "not known" if stale_s is not None else _unwatched(record)
        rows.append(("supervisor", _watching(who) if watched else unwatched))
        rows.append(("seen", age))
    for node in now or []:
        rows.append((f"node {node['rank']} now", _words(node, record)))
    console.table(("run", record.run_id), rows)
    trials.show(console, record)
    if watched or stale_s is None:
        console.next(*_next(record, watched, stuck=who is not None and who.suspended))
    return wiring.exit_with(console, problem) if problem else 0


def _watching(who: Holder | None) -> str:
    return f"suspended: {who} does nothing until it goes on" if who and who.suspended else f"watching: {who}"


def _unwatched(record: Record) -> str:
    """What becomes of a run that nobody supervises."""
    end = f", at the latest {closing.clock(record.hard_cap_at)}" if record.hard_cap_at else ""
    if record.state is State.QUEUED:
        return "none yet: nothing is rented for it until somebody supervises it"
    if record.state in (State.RUNNING, State.STOPPING):
        return (
            f"gone: nobody supervises it. The nodes train on by themselves; a crashed attempt ends with its lease{end}"
        )
    if record.state is State.TEARDOWN:
        return "gone: nobody supervises it. What was not given back may still be billed"
    return f"gone: nobody supervises it. What was rented ends with its lease{end}"


def _next(record: Record, watched: bool, *, stuck: bool) -> list[str]:
    run = record.run_id
    if record.state.final:
        return closing.next_lines(record, resume=True)
    if watched and stuck:
        return [f"mgpu attach {run} --take-over    take its place"]
    if watched:
        return [f"mgpu logs -f {run}", f"mgpu stop {run}"]
    if record.state is State.TEARDOWN:
        return [f"mgpu attach {run}    end what was begun", "mgpu ls    what is billed now"]
    if record.state is State.QUEUED:
        return [f"mgpu attach {run}    begin with it", f"mgpu stop {run}    end it"]
    return [f"mgpu attach {run}    take it over, and go on", f"mgpu stop {run}    end it"]


def _live(record: Record) -> tuple[list[dict[str, Any]], MgpuError | None]:
    from mgpu.run.fleet import key
    from mgpu.run.supervision.status_probe import look

    key.bring(record, wiring.context(Console()))
    return look(record, wiring.timeouts())


def _words(node: dict[str, Any], record: Record) -> str:
    """A node now, in words."""
    machine = f"{node.get('phase', 'machine unknown')} {node.get('reason', '')}".strip()
    agent = node["agent"]
    if agent is None:
        answers = node.get("phase") in ("stopping", "ending", "terminated") or record.state.final
        return machine + ("" if answers else ", no answer over SSH in time")
    risk = ", the provider may take it soon" if agent["at_risk_since"] else ""
    step = f", step {agent['step']}" if isinstance(agent["step"], int) and agent["step"] >= 0 else ""
    return f"{machine}, {agent['phase']}{step}{risk}"
