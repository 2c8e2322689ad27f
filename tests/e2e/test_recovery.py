"""A machine dies in the middle of a run: it alone is replaced, and the run goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import suppress

from mgpu.paths import state_dir
from mgpu.providers.local import bill
from mgpu.providers.local.procs import marked


def record() -> dict:
    found = list((state_dir() / "runs").glob("*/record.json"))
    return json.loads(found[0].read_text()) if found else {}


def kill_node(instance: str) -> None:
    """All of a machine at once, as when its host loses power: every process, then its disk."""
    node = next(node for node in bill.read(state_dir() / "local").alive if node.start.instance == instance)
    for pid in {node.start.pid, *(process.pid for process in marked().get(instance, ()))}:
        with suppress(ProcessLookupError):  # what died with its node process
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(state_dir() / "local" / "nodes" / instance, ignore_errors=True)


def test_a_lost_node_is_replaced_alone_and_the_run_goes_on(project):
    project.write(["train.py", "60", "0.1"], nodes=2, more="recovery: {attempts: 3, wait_minutes: 1}\n")
    launch = project.start("launch", "--yes", "--json")
    try:
        project.wait(lambda: record().get("checkpoint_step", -1) >= 10)
        before = [node["id"] for node in record()["fleet"]["nodes"]]
        kill_node(before[1])
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 0, err
    run = json.loads(out)
    after = [node["id"] for node in run["fleet"]["nodes"]]
    assert after[0] == before[0], "the survivor stays"
    assert after[1] != before[1]
    assert (run["state"], run["attempt"], run["recoveries"], run["checkpoint_step"]) == ("succeeded", 2, 1, 60)
    log = project.mgpu("logs", run["run_id"], "--node", "1").stdout
    assert "from 0" in log
    assert any(f"from {step}" in log for step in range(10, 60, 10)), "it went on from a checkpoint"
    assert project.billed() == 0


def test_without_another_attempt_a_lost_node_is_the_end_and_nothing_is_left(project):
    project.write(["train.py", "1000", "0.1"], nodes=2)
    launch = project.start("launch", "--yes")
    try:
        project.wait(lambda: record().get("checkpoint_step", -1) >= 10)
        kill_node(record()["fleet"]["nodes"][1]["id"])
        _, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 6
    assert "node 1 is gone" in err
    assert "--resume" in err, "how to go on is said"
    assert project.billed() == 0
