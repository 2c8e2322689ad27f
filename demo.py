"""`make demo`: the main job on this machine, with nothing but this machine.

Two nodes of provider `local` (real processes, real SSH, the real Pulumi engine) train a byte-level language model on
the sources of Python's standard library; checkpoints go to an S3 endpoint that this program starts on loopback for its
own duration. At the end the final checkpoint is pulled and verified, and the bill is read: it has to be 0.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# the run file of this checkout, with the demo's own store put in
RUN_FILE = ROOT / ".mgpu" / "demo.yaml"
STORE = "s3://mgpu-demo/runs"


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


def write_run_file() -> None:
    """mgpu.yaml with `checkpoint.to` set to the demo's bucket."""
    import yaml

    run = yaml.safe_load((ROOT / "mgpu.yaml").read_text())
    run["checkpoint"]["to"] = STORE
    RUN_FILE.write_text(yaml.safe_dump(run, sort_keys=False))


def main() -> int:
    """Runs the demo; the exit code is the run's, or 7 when something is still billed."""
    began = time.monotonic()
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server, endpoint = start_s3()
    from mgpu.cli import common
    from mgpu.cli.checkpoints import pull_into
    from mgpu.console import Console
    from mgpu.errors import MgpuError
    from mgpu.paths import state_dir
    from mgpu.providers.local import bill
    from mgpu.run import launch as runs
    from mgpu.spec.load import load

    console = Console()
    try:
        console.say(f"S3 for the demo: {endpoint} (this process, this machine)")
        write_run_file()
        spec = load(RUN_FILE)
        runs.preflight(RUN_FILE, spec)
        common.show_plan(console, common.make_plan(spec))
        outcome = runs.launch(RUN_FILE, spec, common.context(console))
        console.done()
        record = outcome.record
        pulled = None
        if record.checkpoint_id:
            pulled = pull_into(record, None, ROOT / "mgpu-runs" / record.run_id, console)
    except MgpuError as error:
        console.error(error)
        return error.exit_code
    finally:
        server.stop()  # type: ignore[attr-defined]

    ledger = bill.read(state_dir() / "local")
    rows = [
        ("run", record.run_id),
        ("state", str(record.state)),
        ("steps", f"{record.step} of {record.steps}"),
        ("validation loss, first", _loss(record.first_validation_loss)),
        ("validation loss, final", _loss(record.validation_loss)),
        ("  the text's unigram entropy", _loss(record.unigram_entropy)),
        ("  the text's bigram entropy", _loss(record.bigram_entropy)),
        ("wall time", f"{time.monotonic() - began:.1f} s"),
        ("  by phase, s", common.phases(record)),
        ("simulated cost", f"${ledger.cost_usd(record.fleet['fleet'] if record.fleet else record.stack):.5f}"),
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
