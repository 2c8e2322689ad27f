"""`make demo-nightly`'s program, as it is: to its end, and interrupted; nothing of it is left, either way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu.iac.engine import install

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "mgpu-demo-nightly-"


@pytest.fixture
def demo(tmp_path: Path, require):
    """The program, begun; what it makes is below this test's own folder."""
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    begun = subprocess.Popen(
        [sys.executable, "demo_nightly.py"], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    yield begun
    begun.kill()
    begun.wait()


def left(tmp_path: Path) -> list[str]:
    """What is left of it: files, and processes that name its folder in their words or their environment."""
    found = [str(path) for path in tmp_path.glob(f"{FOLDER}*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if f"{tmp_path}/{FOLDER}".encode() in words:
            found.append(words.replace(b"\0", b" ")[:200].decode(errors="replace"))
    return found


def test_two_nights_one_of_which_loses_its_machine_while_nobody_is_awake(demo, tmp_path):
    screen = demo.communicate(timeout=600)[0]
    assert demo.returncode == 0, screen
    (passed,) = re.findall(r"(?ms)^due +outcome.*?^\$ mgpu gc$", screen)
    assert re.findall(r" (succeeded|failed|stopped|missed|skipped) ", passed) == ["succeeded"] * 2, screen
    assert "by hand" in passed.splitlines()[2]
    assert len(re.findall(r"^run +nightly-.*: succeeded, step 400 of 400$", screen, re.M)) == 2
    assert re.search(r"^interruptions +1: ", screen, re.M), screen
    assert re.search(r"^  steps done again +\d+ \(from step [1-9]\d*", screen, re.M), screen
    assert "no machines of yours at any provider\n" in screen
    assert "still billed: 0 nodes, $0.00 per hour\n" in screen
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "at", ["▸ provisioning", "now it is killed", "▸ repairing"], ids=["renting", "killed", "repairing"]
)
def test_whoever_interrupts_it_finds_nothing_left(demo, tmp_path, at):
    for line in demo.stdout:
        if at in line:
            break
    demo.send_signal(signal.SIGINT)
    screen = demo.communicate(timeout=600)[0]
    assert demo.returncode == 130, screen
    assert left(tmp_path) == [], screen
