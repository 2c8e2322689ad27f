"""The real engine in the environment that set-up leaves: plain `pulumi` from a shell that read `.mgpu/env`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu.backend import location
from mgpu.iac import environment
from mgpu.iac.engine import install

PROGRAM = """
import sys
import pulumi

pulumi.export("prefix", sys.prefix)
pulumi.export("token", pulumi.Output.secret("plain-words"))
"""


def checkout(folder: Path) -> Path:
    (folder / "infra").mkdir(parents=True)
    (folder / "infra" / "__main__.py").write_text(PROGRAM)
    (folder / "Pulumi.yaml").write_text("name: presence\nruntime: python\nmain: infra/\n")
    install.set_up(folder, print)
    return folder


def shell(folder: Path, script: str) -> str:
    """Runs a script in a shell that knows nothing but a home, the system's programs, and `.mgpu/env`."""
    env = {"HOME": str(folder), "PATH": "/usr/bin:/bin", environment.AMBIENT_PASSPHRASE: ""}
    command = ["/bin/sh", "-euc", f". .mgpu/env; {script}"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def _engine(require, xdg):
    require("engine", install.find_engine() is not None, "no Pulumi engine; `make setup` installs one")


@pytest.mark.usefixtures("_engine")
def test_plain_pulumi_works_from_two_checkouts_on_one_stack(tmp_path):
    first, second = checkout(tmp_path / "a b"), checkout(tmp_path / "second")
    shell(first, "pulumi up --yes --skip-preview")
    seen = json.loads(shell(second, "pulumi stack output --json --show-secrets"))
    assert seen["token"] == "plain-words"
    assert Path(seen["prefix"]) == Path(sys.prefix), "the program runs in the environment that holds mgpu"
    assert "1 unchanged" in shell(second, "pulumi up --yes --skip-preview")
    states = [path.read_text() for path in location.current().folder.rglob("*.json*")]
    assert states
    assert not any("plain-words" in state for state in states)
    assert not (first / ".pulumi").exists(), "nothing is written to the user's own ~/.pulumi"
