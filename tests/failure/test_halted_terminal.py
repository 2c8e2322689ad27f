"""The terminal of a launch takes nothing any more (Ctrl-S), nor does the pipe behind it (a pager): it is stopped from
another terminal, and its machine is given back all the same.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest


@pytest.mark.parametrize("kind", ["terminal", "pipe"])
def test_a_run_is_stopped_and_its_machine_given_back_though_nobody_reads(new_world, kind):
    world = new_world()
    # a line of 4 KiB a step: more than either takes
    (world.project / "train.py").write_text(
        "import time\nfor step in range(100_000):\n    print(step, 'x' * 4000, flush=True)\n    time.sleep(0.005)\n"
    )
    world.write(command=["train.py"], checkpoint="none")
    reads, writes = pty.openpty() if kind == "terminal" else os.pipe()
    with (world.root / "result").open("w") as result:
        launch = subprocess.Popen(
            [sys.executable, "-m", "mgpu", "launch", "--yes"], cwd=world.project, env=world.env,
            stdin=subprocess.DEVNULL, stdout=result, stderr=writes,
        )  # fmt: skip
    world.wait(lambda: "training" in world.run().get("node_phases", ()), 90)
    folder = world.state / "runs" / world.run()["run_id"] / "logs"
    world.wait(lambda: sum(path.stat().st_size for path in folder.glob("*.log")) > 1 << 20, 60, "the copy stands still")
    assert world.mgpu("stop").returncode == 0
    world.wait(lambda: world.run()["state"] == "stopped", 90)
    assert world.alive() == 0
    assert launch.wait(60) == 130
    os.close(reads)
    os.close(writes)
