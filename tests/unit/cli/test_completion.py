"""What Tab completes: commands, runs, stacks, GPUs; quickly, and without saying a word where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from mgpu.backend import location
from mgpu.cli import complete
from mgpu.errors import StackError
from mgpu.run.record.record import State

MGPU = str(Path(sys.executable).with_name("mgpu"))


@pytest.fixture
def tab(world):
    """What the shell is told of a line; the last word is the one that is begun."""
    world.record("first-1", state=State.SUCCEEDED)
    world.record("second-2", state=State.RUNNING, created_at=2.0)

    def ask(line):
        env = os.environ | {"_MGPU_COMPLETE": "zsh_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run([MGPU], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        return done.stdout.splitlines()[1::3]  # kind, value, help

    return ask


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("mgpu stat", ["status"]),
        ("mgpu status ", ["second-2", "first-1", "last"]),
        ("mgpu logs fi", ["first-1"]),
        ("mgpu down se", ["second-2"]),
        ("mgpu rm first-1 s", ["second-2"]),
        ("mgpu launch --resume f", ["first-1"]),
        ("mgpu ssh s", ["second-2"]),
        ("mgpu offers --gpu h1", ["H100-80GB"]),
        ("mgpu completion z", ["zsh"]),
        ("mgpu status nothing", []),
    ],
)
def test_what_is_completed(tab, line, values):
    assert tab(line) == values


def test_stacks_are_those_of_the_backend(tab, world):
    folder = Path(os.environ["XDG_STATE_HOME"]) / "mgpu" / "pulumi" / ".pulumi" / "stacks" / "mine"
    folder.mkdir(parents=True)
    for name in ("dev.json", "dev.json.bak", "night.json.gz"):
        (folder / name).touch()
    assert tab("mgpu run --stack ") == ["dev", "night"]
    assert tab("mgpu down --stack n") == ["night"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_bucket_is_not_asked_and_nothing_is_said(world, monkeypatch, broken):
    world.record("first-1", stack="dev")
    opened = Mock(side_effect=StackError("the backend does not answer"))
    monkeypatch.setattr(location.Backend, "_store", opened)
    bucket = replace(location.current(), folder=None)
    monkeypatch.setattr(location, "current", opened if broken else lambda: bucket)
    assert [each.value for each in complete.runs(Mock(), Mock(), "")] == ["first-1"] * (not broken) + ["last"]
    assert [each.value for each in complete.stacks(Mock(), Mock(), "")] == ["dev"] * (not broken)
    assert broken or not opened.called


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_given_its_words(shell):
    done = subprocess.run([MGPU, "completion", shell], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert f"_MGPU_COMPLETE={shell}_complete" in done.stdout
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=done.stdout, text=True, check=False).returncode == 0
