"""How long a killed node keeps a run from its next new step, and how much of that nobody could save."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.tools import MGPU, ROOT
from demo import floor_s
from mgpu.paths import state_dir
from mgpu.providers.local import control
from mgpu.providers.local.nodes import Instance
from mgpu.run.record import record as records
from mgpu.run.record.record import Record

LIMIT_S = 20.0
AT_AWS_LIMIT_S, ENDING_S = 25.0, 400.0  # machines of EC2's with GPUs are `shutting-down` for so long
REPEATS = 3
RUN_FILE = """
name: bench
provider: local
nodes: 2
processes_per_node: 1
market: spot
max_price_usd_per_hour: 0.20
max_hours: 0.5
train: {task: lm, strategy: ddp, steps: 400, global_batch: 32, seed: 1}
checkpoint: {every_steps: 50}
recovery: {attempts: 2, wait_minutes: 1}
"""


def main() -> None:
    """Prints every kill's way back, and the median beyond the floor."""
    print("recovery, 2 nodes x 1 process: node 1 killed with its disk; seconds after the kill")
    beyond = [_one() for _ in range(REPEATS)]
    print(f"  beyond the floor, median {statistics.median(beyond):6.1f}   (limit {LIMIT_S:.0f})")
    _at_aws()


def _at_aws() -> None:
    """On the fake AWS, where the killed machine is on its way out for minutes. The floor has no boot in it here: a
    machine of the fake's boots in a second or two."""
    sys.path.insert(0, str(ROOT / "tests"))
    from fakes.aws import world
    from fakes.aws.operator import operator
    from waiting import until

    print(f"recovery, 2 nodes on the fake AWS, whose machines end in {ENDING_S:.0f} s; seconds after the kill")
    if why := world.missing():
        print(f"  not measured: {why}")
        return
    with tempfile.TemporaryDirectory() as folder, operator(Path(folder)) as user:
        user.aws.quick(ending_s=ENDING_S)
        user.write(command=["count.py", "300", "0.1"], recovery={"attempts": 2, "wait_minutes": 1})
        launch = user.start("launch", "--yes")
        try:
            until(lambda: user.run().get("checkpoint_step", -1) >= 20, 120)
            killed_at = time.time()
            user.aws.kill(user.ids[1])
            until(lambda: any(way.get("resumed_at") for way in user.run()["interruptions"]), 120)
            run = user.run()
            user.aws.pace(ending_s=0)
            user.aws.age(ENDING_S)
            launch.communicate(timeout=180)
        finally:
            launch.kill()
    whole = run["interruptions"][0]["resumed_at"] - killed_at
    floor = sum(run["agent_seconds"].get(part, 0.0) for part in ("resuming", "launching"))
    print(f"  first new step {whole:5.1f}, floor {floor:5.1f}")
    print(f"  beyond the floor         {whole - floor:6.1f}   (limit {AT_AWS_LIMIT_S:.0f})")


def _one() -> float:
    with tempfile.TemporaryDirectory(dir=ROOT / ".mgpu") as folder:
        run_file = Path(folder, "bench.yaml")
        run_file.write_text(RUN_FILE)
        launch = subprocess.Popen(
            [str(MGPU), "launch", str(run_file), "--yes", "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        killed_at = _kill(launch)
        out, _ = launch.communicate()
        record = records.load(json.loads(out)["run_id"])
    way, floor = record.interruptions[0], floor_s(record)
    if way.resumed_at is None:
        raise SystemExit(f"run {record.run_id} did not go on: {record.reason}")
    whole = way.resumed_at - killed_at
    moments = {
        "seen": way.noticed_at,
        "stopped": way.ended_at,
        "repaired": way.repaired_at,
        "started": way.started_at,
    }
    print(
        f"  first new step {whole:5.1f}, floor {sum(floor.values()):5.1f}: "
        + ", ".join(f"{what} {at - killed_at:.1f}" for what, at in moments.items() if at)
        + " | "
        + ", ".join(f"{what} {seconds:.1f}" for what, seconds in floor.items())
    )
    return whole - sum(floor.values())


def _kill(launch: subprocess.Popen[str]) -> float:
    """Waits for a committed checkpoint of the run that this launch has begun, then kills its last node."""
    while launch.poll() is None:
        time.sleep(0.1)
        mine = [each for each in records.every() if each.supervisor_pid == launch.pid]
        if mine and mine[-1].checkpoint_step >= 100 and mine[-1].step >= mine[-1].checkpoint_step + 20:
            return _kill_last_node(mine[-1])
    raise SystemExit("the run ended before a node was killed")


def _kill_last_node(record: Record) -> float:
    node = (record.fleet or {})["nodes"][-1]
    killed_at = time.time()
    control.kill(Instance(state_dir() / "local", node["id"]))
    return killed_at
