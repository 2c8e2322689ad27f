"""A whole run on a real Slurm: asked for, trained, a node lost, the gang made anew, and nothing left in the queue."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

from fakes.slurm import Cluster

from mgpu.paths import state_dir

RUN_FILE = """
name: e2e
provider: slurm
nodes: 2
market: on-demand
max_price_usd_per_hour: 0.20
max_hours: 0.2
launcher: python
command: [train.py, "60", "0.1"]
checkpoint: {{to: "file://{store}", every_steps: 10, keep_last: 2}}
recovery: {{attempts: 3, wait_minutes: 1}}
slurm: {options}
"""


def record() -> dict:
    found = list((state_dir() / "runs").glob("*/record.json"))
    return json.loads(found[0].read_text()) if found else {}


def test_a_run_loses_a_node_and_its_gang_is_made_anew_and_nothing_is_left(project, slurm: Cluster, tmp_path: Path):
    work = tmp_path / "work"
    options = {**slurm.options, "work_folder": str(work), "python": sys.executable, "price_usd_per_hour": 0.05}
    text = RUN_FILE.format(store=tmp_path / "store", options=json.dumps(options))
    (project.folder / "mgpu.yaml").write_text(text)
    project.env |= slurm.env
    launch = project.start("launch", "--yes", "--json")
    try:
        project.wait(lambda: launch.poll() is not None or record().get("checkpoint_step", -1) >= 10)
        assert launch.poll() is None, launch.communicate()
        before = [node["id"] for node in record()["fleet"]["nodes"]]
        (keeper,) = work.glob(f"gangs/{before[1].partition('-')[0]}*/node-1.json")
        os.kill(json.loads(keeper.read_text())["pid"], signal.SIGKILL)
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 0, err
    run = json.loads(out)
    after = [node["id"] for node in run["fleet"]["nodes"]]
    assert not {*before} & {*after}, "an allocation cannot be refilled: the whole gang is another one"
    assert (run["state"], run["attempt"], run["recoveries"], run["checkpoint_step"]) == ("succeeded", 2, 1, 60)
    log = project.mgpu("logs", run["run_id"], "--node", "1").stdout
    assert re.search(r"rank 1 of 2 from [1-9]", log), "it went on from a checkpoint"
    assert slurm.jobs() == []
    assert list((slurm.folder / "nodes").iterdir()) == [], "no node's folder stays"
