"""`make demo`: the main job on this machine, with nothing but this machine.

Two nodes of provider `local` (real processes, real SSH, the real Pulumi engine) train a byte-level language model on
the sources of Python's standard library; checkpoints go to an S3 endpoint that this program starts on loopback for its
own duration. In the middle of it one node is killed for real: every process of it, and its disk. The run goes on, on a
new machine in its place. At the end the final checkpoint is pulled and verified, and the bill is read: it has to be 0.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu.events import CheckpointCommitted, Emit, Event, MetricsSampled

if TYPE_CHECKING:
    from mgpu.run.record.record import Record

ROOT = Path(__file__).resolve().parent
# the run file of this checkout, with the demo's own store put in
RUN_FILE = ROOT / ".mgpu" / "demo.yaml"
STORE = "s3://mgpu-demo/runs"
STEPS, LEAST = 300, 50
KILL_AFTER = 5 / 12  # the share of the steps after whose commit a node is killed,
KILL_LATE = 12  # and as many steps later: in the middle between two checkpoints


def start_s3() -> tuple[object, str]:
    """An S3 endpoint on loopback with the demo's bucket in it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    # not secrets: the endpoint accepts any, and ends with this program
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        os.environ.pop(name, None)
    boto3.client("s3").create_bucket(Bucket="mgpu-demo")
    return server, endpoint


def write_run_file(steps: int) -> None:
    """mgpu.yaml with `checkpoint.to` set to the demo's bucket, and so many steps."""
    import yaml

    run = yaml.safe_load((ROOT / "mgpu.yaml").read_text(encoding="utf-8"))
    run["checkpoint"]["to"] = STORE
    run["train"]["steps"] = steps
    RUN_FILE.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")


class Accident:
    """Passes events on, and kills the last node of the run, once, in the middle between two checkpoints."""

    def __init__(self, emit: Emit, say: Callable[[str], None], after: int) -> None:
        """`after`: the committed step from which on it is due."""
        self._emit, self._say, self._after = emit, say, after
        self._committed = -1
        self.at: float | None = None  # UNIX seconds

    def __call__(self, event: Event) -> None:
        self._emit(event)
        if isinstance(event, CheckpointCommitted):
            self._committed = event.step
        late = isinstance(event, MetricsSampled) and (event.step or 0) >= self._committed + KILL_LATE
        due = late and self._committed >= self._after
        if due and self.at is None:
            self._kill()

    def _kill(self) -> None:
        from mgpu.paths import state_dir
        from mgpu.providers.local import control
        from mgpu.providers.local.nodes import Instance
        from mgpu.run.record.record import load

        node = (load("last").fleet or {})["nodes"][-1]
        self._say(f"now node {node['rank']} is killed: every process of it, and its disk (`mgpu local kill`)")
        self.at = time.time()
        control.kill(Instance(state_dir() / "local", node["id"]))


def training(record: Record) -> list[tuple[str, str]]:
    """What was trained, as rows of the table."""
    return [
        ("run", record.run_id),
        ("state", str(record.state)),
        ("steps", f"{record.step} of {record.steps}"),
        ("validation loss, first", _loss(record.first_metrics.get("validation_loss"))),
        ("validation loss, final", _loss(record.metrics.get("validation_loss"))),
        ("  the text's unigram entropy", _loss(record.metrics.get("unigram_entropy"))),
        ("  the text's bigram entropy", _loss(record.metrics.get("bigram_entropy"))),
    ]


def way_back(record: Record, since: float | None, what: str, floor: dict[str, float]) -> list[tuple[str, str]]:
    """What the accident cost, as rows of the table, in seconds after `what`, which was at `since` (UNIX seconds).
    `floor`: what no recovery could do without, in seconds."""
    if not record.interruptions or since is None:
        return [("interruptions", "none")]
    way = record.interruptions[0]
    moments = {
        "seen": way.noticed_at,
        "survivor stopped": way.ended_at,
        "machine replaced": way.repaired_at,
        "agents started": way.started_at,
        "first new step": way.resumed_at,
    }
    return [
        ("interruptions", f"{len(record.interruptions)}: {way.reason}"),
        ("  steps done again", f"{way.steps_lost} (from step {way.resumed_step}, was at {way.step})"),
        (f"  seconds after {what}", ", ".join(f"{name} {at - since:.1f}" for name, at in moments.items() if at)),
        *([("  of that, unavoidable", ", ".join(f"{name} {s:.1f}" for name, s in floor.items()))] if floor else []),
    ]


def floor_s(record: Record) -> dict[str, float]:
    """What a recovery takes at the very least: seconds of the newest machine and of node 0's newest attempt."""
    return {
        "machine's boot": boot_s(record.fleet or {}),
        "checkpoint read": record.agent_seconds.get("resuming", 0.0),
        "torchrun to the first step": record.agent_seconds.get("launching", 0.0),
    }


def boot_s(fleet: dict[str, Any]) -> float:
    """From the newest machine's first process until SSH reaches it."""
    from mgpu.paths import state_dir
    from mgpu.providers.local import bill

    root = state_dir() / "local"
    starts = [node.start for node in bill.read(root).nodes if node.start.fleet == fleet.get("fleet")]
    newest = max(starts, key=lambda start: start.at)
    return max(0.0, (root / "instances" / newest.instance / "endpoint.json").stat().st_mtime - newest.at)


def main() -> int:
    """Runs the demo; the exit code is the run's, or 7 when something is still billed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="the main job on this machine, with nothing but this machine")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps in all (%(default)s)")
    steps = parser.parse_args().steps
    if steps < LEAST:
        parser.error(f"--steps {steps}: in fewer than {LEAST} there is nothing to see")
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server, endpoint = start_s3()
    from mgpu.cli.checkpoints import source
    from mgpu.cli.checkpoints.pull import pull_into
    from mgpu.cli.common import agreement, closing, wiring
    from mgpu.console import Console
    from mgpu.errors import MgpuError
    from mgpu.paths import state_dir
    from mgpu.providers.local import bill
    from mgpu.run.lifecycle import launch as runs
    from mgpu.run.record.record import save
    from mgpu.spec.load import load

    console = Console()
    try:
        console.say(f"S3 for the demo: {endpoint} (this process, this machine)")
        write_run_file(steps)
        spec = load(RUN_FILE)
        runs.preflight(RUN_FILE, spec, console.emit)
        agreement.show_plan(console, agreement.make_plan(spec))
        context = wiring.context(console)
        accident = Accident(context.emit, console.say, round(steps * KILL_AFTER))
        outcome = runs.launch(RUN_FILE, spec, replace(context, emit=accident))
        console.done()
        record = outcome.record
        pulled = None
        if record.checkpoint_id:
            pulled = pull_into(source.of(record), None, ROOT / "mgpu-runs" / record.run_id, console).folder
    except MgpuError as error:
        console.error(error)
        return error.exit_code
    finally:
        server.stop()  # type: ignore[attr-defined]
    record.store = record.checkpoint_id = None  # nobody is told to look for what went with it
    save(record)

    ledger = bill.read(state_dir() / "local").of(record.fleet["fleet"] if record.fleet else record.stack)
    rows = [
        *training(record),
        *way_back(record, accident.at, "the kill", floor_s(record)),
        ("wall time", f"{time.monotonic() - began:.1f} s"),
        ("  by phase, s", closing.phases(record)),
        ("simulated cost", f"${ledger.cost_usd:.5f}"),
        ("final checkpoint", f"step {record.checkpoint_step}, verified: {_near(pulled)}" if pulled else "none"),
        ("  the other checkpoints", "gone with the demo's S3"),
    ]
    console.table(("mgpu demo", ""), rows)
    console.text(f"still billed: {len(ledger.alive)} nodes, ${ledger.usd_per_hour:.2f} per hour")
    if outcome.error is not None:
        console.error(outcome.error)
        return outcome.exit_code
    console.next(
        ". .mgpu/env    puts mgpu and pulumi on PATH of this shell",
        f"mgpu logs {record.run_id}    what the nodes said",
        "mgpu launch    a run of your own from mgpu.yaml",
    )
    return 7 if ledger.alive else 0


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f} nat/byte"


def _near(path: Path) -> str:
    return f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
