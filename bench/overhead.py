"""What orchestration costs: wall time of `mgpu launch` less the same trainer under bare torchrun, with its parts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mgpu_train.config import Job

from bench.report import Report
from bench.tools import MGPU, ROOT

LIMIT_S = 4.5
RUN_FILE = """
name: bench
provider: local
nodes: 2
processes_per_node: 1
market: spot
max_price_usd_per_hour: 0.20
max_hours: 0.5
train: {task: lm, strategy: fsdp, steps: 40, global_batch: 32, seed: 1}
checkpoint: {every_steps: 20}
"""


def main() -> None:
    """Prints both wall times, the difference, and the parts of a launch."""
    with tempfile.TemporaryDirectory(dir=ROOT / ".mgpu") as folder:
        run_file = Path(folder, "bench.yaml")
        run_file.write_text(RUN_FILE)
        begin = time.perf_counter()
        done = subprocess.run(
            [str(MGPU), "launch", str(run_file), "--yes", "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        launched = time.perf_counter() - begin
        record = json.loads(done.stdout)
        bare = _bare(Path(folder))
    print("orchestration overhead, 2 nodes x 1 process, 40 steps, wall seconds")
    print(f"  mgpu launch           {launched:6.1f}")
    for name, seconds in record["phase_seconds"].items():
        print(f"    {name:<19} {seconds:6.1f}")
    print(f"  bare torchrun         {bare:6.1f}")
    Report().at_most("overhead", launched - bare, LIMIT_S, " s")


def _bare(folder: Path) -> float:
    """The same trainer, two torchrun launchers on this machine, nothing else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    begin = time.perf_counter()
    launchers = [_torchrun(folder, rank, port) for rank in range(2)]
    codes = [launcher.wait() for launcher in launchers]
    if any(codes):
        raise SystemExit(f"bare torchrun ended with {codes}")
    return time.perf_counter() - begin


def _torchrun(folder: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    node = folder / f"node-{rank}"
    (node / "checkpoints").mkdir(parents=True)
    (node / "metrics").mkdir()
    job = Job.model_validate(
        {
            "run_id": "bench",
            "attempt": 1,
            "writer": "bench",
            "node_rank": rank,
            "nodes": 2,
            "processes_per_node": 1,
            "master_addr": "127.0.0.1",
            "master_port": port,
            "train": {"task": "lm", "strategy": "fsdp", "steps": 40, "global_batch": 32, "seed": 1},
            "checkpoint": {"to": f"file://{node}/store", "every_steps": 20, "writers": "all"},
        }
    )
    (node / "job.json").write_text(job.model_dump_json())
    env = os.environ | {
        "MGPU_JOB": str(node / "job.json"),
        "MGPU_CHECKPOINT_DIR": str(node / "checkpoints"),
        "MGPU_METRICS_DIR": str(node / "metrics"),
    }
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
    argv += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "mgpu_train.loop"]
    return subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
