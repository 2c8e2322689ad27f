"""`make demo-aws`'s program, as it is: a run on the fake AWS, one machine taken in the middle, and nothing left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mgpu.iac.engine import install

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_on_a_fake_aws_loses_a_machine_and_leaves_nothing(namespaces, require):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    done = subprocess.run(
        [sys.executable, "demo_aws.py"], cwd=ROOT, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "still billed: 0" in done.stdout.splitlines()
    assert "0 billed, 0 launch templates, 0 placement groups, 0 addresses, 0 schedules" in done.stdout
    (asked,) = [line for line in done.stdout.splitlines() if line.startswith("machines asked for")]
    assert [ask.rpartition(": ")[2] for ask in asked.split(", ")] == ["no capacity", "granted", "granted"]

    (path,) = (ROOT / ".mgpu" / "demo-aws" / "state" / "mgpu" / "runs").glob("[!.]*/record.json")
    run = json.loads(path.read_text())
    assert (run["state"], run["teardown"]) == ("succeeded", "confirmed")
    assert run["step"] == run["steps"] == run["checkpoint_step"] == 80
    assert run["metrics"]["validation_loss"] <= 3.0 < run["metrics"]["unigram_entropy"]
    (interruption,) = run["interruptions"]
    assert (interruption["fault"], interruption["nodes"]) == ("provider", [1])
    assert interruption["step"] - interruption["resumed_step"] <= 40, "two checkpoint intervals at most"
