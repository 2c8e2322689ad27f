"""`make demo`'s program: the main job on real data, less of it, and nothing left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from mgpu.iac.engine import install
from mgpu.paths import state_dir
from mgpu.providers.local import bill

ROOT = Path(__file__).resolve().parents[2]
STEPS = 50  # of 300: the model has learnt by then what is asked of it here


def test_the_demo_trains_keeps_and_gives_back(xdg, require):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    command = [sys.executable, "demo.py", "--steps", str(STEPS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "still billed: 0 nodes, $0.00 per hour" in done.stdout
    assert not bill.read(state_dir() / "local").alive

    (path,) = (state_dir() / "runs").glob("*/record.json")
    run = json.loads(path.read_text())
    assert (run["state"], run["teardown"]) == ("succeeded", "confirmed")
    assert run["step"] == run["steps"] == run["checkpoint_step"] == STEPS
    assert (run["store"], run["checkpoint_id"]) == (None, None), "nobody is sent to an S3 that is gone"
    assert run["metrics"]["validation_loss"] <= 3.0 < run["metrics"]["unigram_entropy"]
    assert run["first_metrics"]["validation_loss"] > 5.0

    pulled = re.search(r"verified: (\S+)", done.stdout)
    assert pulled, done.stdout
    assert any((ROOT / pulled[1]).glob("*.distcp"))
