"""How long a run's code takes to its nodes: 2,000 files to 8 nodes of provider local, then to the next run's folders,
with 3 of them changed.

The second is what somebody waits for who has changed a line and trains again on machines that stand. Every node has an
SSH server of its own on this machine, so all nine sides share its cores and its disk.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.timeouts import Timeouts

from bench.report import Report
from bench.tools import MGPU, PLAIN_RUN
from mgpu.iac.outputs import StackOutput
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job.stack_output import targets

NODES, FILES, CHANGED, RUNS = 8, 2_000, 3, 5
SIZES = (500, 2_000, 4_000, 12_000)  # bytes; what a source tree is made of
LIMIT_S = 2.0
RUN_FILE = f"{PLAIN_RUN}nodes: {NODES}\nteardown: keep\n"


def main() -> None:
    """Prints both, and what the phase `sending` of a whole run takes: the node side's package and its Python, too."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as home:
        folder = Path(home, "project")
        env = os.environ | {f"XDG_{kind}_HOME": str(Path(home, kind.lower())) for kind in ("STATE", "CONFIG", "DATA")}
        folder.mkdir()
        (folder / "train.py").write_text("print('here')\n")
        _mgpu(["init"], folder, env)
        (folder / "mgpu.yaml").write_text(RUN_FILE)
        run = _mgpu(["launch", "--yes"], folder, env)
        try:
            write_sources(folder)
            first, again = _synced(run, folder)
            whole = _mgpu(["run", "--stack", run["stack"]], folder, env)["phase_seconds"]["sending"]
        finally:
            _mgpu(["down", "--stack", run["stack"]], folder, env)
    print(f"a run's code, {FILES:,} files, to {NODES} nodes on loopback, wall seconds")
    print(f"  to machines that have nothing  {first:6.2f}")
    print(f"  {CHANGED} files changed, each time     {' '.join(f'{each:6.2f}' for each in again)}")
    print(f"  the phase `sending` of a run   {whole:6.2f}")
    Report().at_most(f"{CHANGED} of {FILES:,} files changed, {NODES} nodes", statistics.median(again), LIMIT_S, " s")


def _synced(run: dict[str, Any], folder: Path) -> tuple[float, list[float]]:
    fleet = StackOutput.model_validate(run["fleet"])
    times, like = [], str(RunLayout("bench-*").work)
    with NodeSet.connect(targets(fleet), Path(fleet.private_key_file), Timeouts()) as nodes:
        for number in range(RUNS + 1):
            for file in range(CHANGED):
                (folder / "package07" / f"module{file:03}.py").write_text(f"CHANGED = {number}\n")
            begin = time.perf_counter()
            nodes.sync(folder, str(RunLayout(f"bench-{number}").work), like=like)
            times.append(time.perf_counter() - begin)
    return times[0], times[1:]


def write_sources(folder: Path) -> None:
    """A source tree of FILES files."""
    rng = random.Random(1)
    for number in range(FILES):
        path = folder / f"package{number % 20:02}" / f"module{number // 20:03}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice(SIZES)))


def _mgpu(words: list[str], folder: Path, env: dict[str, str]) -> dict[str, Any]:
    as_json = ["--json"] if words[0] in ("launch", "run") else []
    done = subprocess.run([str(MGPU), *words, *as_json], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mgpu {' '.join(words)}: {done.stderr}")
    return json.loads(done.stdout) if as_json else {}
