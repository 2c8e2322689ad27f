"""A user's own folder, the `mgpu` command in it, and the bill that is the judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import command
from waiting import until

from mgpu.iac.engine import install
from mgpu.paths import state_dir
from mgpu.providers.local import bill

MGPU = str(Path(sys.executable).with_name("mgpu"))

# a program without torch: it counts, saves by renaming a folder, and stops when it is asked to
COUNTER = Path(__file__).parents[1].joinpath("programs", "count.py").read_text()

RUN_FILE = """
name: {name}
provider: local
nodes: {nodes}
market: spot
max_price_usd_per_hour: 0.20
max_hours: 0.2
launcher: python
command: {command}
"""


@dataclass
class Project:
    """A folder made by `mgpu init`, with its own state, and the command run in it."""

    folder: Path
    env: dict[str, str]

    def mgpu(self, *args: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        return command.mgpu(*args, folder=self.folder, env=self.env, timeout=timeout)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [MGPU, *args], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def write(self, command: list[str], *, nodes: int = 1, name: str = "e2e", more: str = "") -> None:
        text = RUN_FILE.format(name=name, nodes=nodes, command=json.dumps(command)) + more
        (self.folder / "mgpu.yaml").write_text(text)

    def result(self, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert done.stdout.strip(), done.stderr
        return json.loads(done.stdout)

    def billed(self) -> int:
        return len(bill.read(state_dir() / "local").alive)

    def wait(self, what: Callable[[], bool], seconds: float = 60) -> None:
        until(what, seconds)


@pytest.fixture
def project(tmp_path: Path, xdg: Path, require, monkeypatch) -> Iterator[Project]:
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")
    for name in ("PULUMI_STACK", "PULUMI_BACKEND_URL", "PULUMI_CONFIG_PASSPHRASE_FILE", "PULUMI_CONFIG_PASSPHRASE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "mine"
    made = Project(folder, dict(os.environ))
    folder.mkdir()
    (folder / "train.py").write_text(COUNTER)
    done = made.mgpu("init")
    assert done.returncode == 0, done.stderr
    yield made
    # whatever the test has proved, nothing of it goes on living
    left = bill.read(state_dir() / "local").alive
    if left:
        made.mgpu("gc", "--yes")
        for stack in {node.start.fleet for node in left}:
            made.mgpu("down", "--stack", stack)
