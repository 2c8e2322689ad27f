"""`mgpu status`: what is remembered of a run, with its age; `--live` asks provider and nodes."""

from __future__ import annotations

import time
from typing import Any

import click

from mgpu.cli import common
from mgpu.console import Console
from mgpu.run.record import Record, load, supervised


@click.command()
@common.run_argument
@common.json_option
@click.option("--live", is_flag=True, help="Ask the provider and the nodes now.")
def status(run: str, as_json: bool, live: bool) -> None:
    """Show RUN (default: the newest): phase, progress, price, machines."""
    console = Console(as_json=as_json)
    record = load(run)
    watched = not record.state.final and supervised(record.run_id)
    now = _live(record) if live else None
    if as_json:
        console.data(common.result_of(record) | {"supervised": watched, "live": now})
        return
    age = time.time() - record.updated_at
    rows = common.summary(record)
    if not record.state.final:
        rows.append(("nodes", ", ".join(record.node_phases) or "none yet"))
        gone = "gone: the nodes go on by themselves" if record.fleet else "gone"
        rows.append(("supervisor", "watching" if watched else gone))
        rows.append(("seen", f"{age:.0f} s ago"))
    for node in now or []:
        rows.append((f"node {node['rank']} now", f"{node['phase']} {node['reason']}".strip()))
    console.table(("run", record.run_id), rows)
    if record.state.final:
        console.next(*common.next_lines(record, resume=True))
    elif watched:
        console.next(f"mgpu logs -f {record.run_id}", f"mgpu stop {record.run_id}")
    else:
        console.next(f"mgpu attach {record.run_id}    take it over")


def _live(record: Record) -> list[dict[str, Any]]:
    if not record.fleet:
        return []
    from mgpu.iac.outputs import StackOutput
    from mgpu.providers import registry
    from mgpu.run.conduct import handle_of

    fleet = StackOutput.model_validate(record.fleet)
    if not fleet.owner:
        return []
    state = registry.get(fleet.provider).describe(handle_of(fleet))
    return [node.model_dump(mode="json") for node in state.nodes]
