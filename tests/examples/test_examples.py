"""The examples of other libraries under real agents: stopped, resumed, and the same at the end as if uninterrupted."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.nodes import Node
from mgpu_train.checkpoint.fetch import fetch
from safetensors.torch import load_file

from mgpu.spec.load import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
ENDS = ("done", "failed")
LONG_S = 240  # two processes that import these libraries at once on a busy machine
RARELY = 1_000_000  # steps: no checkpoint but the last one
Fleet = Callable[[str], list[Node]]


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """`fleet("name")` makes the nodes that the example's run file asks for, with its code; in the end all is killed."""
    example = request.node.callspec.params["name"]
    made: list[Node] = []

    def make(name: str) -> list[Node]:
        count = load(EXAMPLES / f"{example}.yaml").nodes
        (tmp_path / name / "store").mkdir(parents=True)
        nodes = [Node(tmp_path / name / str(rank), tmp_path / name / "store", rank, count) for rank in range(count)]
        for node in nodes:
            shutil.copy(EXAMPLES / f"{example}.py", node.run / "work")
        made.extend(nodes)
        return nodes

    yield make
    for node in made:
        node.kill()


def start(nodes: list[Node], example: str, steps: int, every_steps: int, **job: Any) -> None:
    """As the run file says, but for the number of steps and how often to save."""
    spec = load(EXAMPLES / f"{example}.yaml")
    assert spec.command
    assert spec.command[1] == "--steps"
    assert not isinstance(spec.checkpoint, str)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for node in nodes:
        node.job(
            launcher=spec.launcher,
            processes_per_node=spec.processes_per_node,
            master_port=port,
            command=[spec.command[0], "--steps", str(steps)],
            checkpoint={"to": node.url, "every_steps": every_steps, "writers": spec.checkpoint.writers or "rank0"},
            **job,
        )
        node.start()


def stop(nodes: list[Node]) -> None:
    asked = [node.popen("stop", "--run", "r") for node in nodes]
    assert [process.communicate(timeout=60)[1] for process in asked] == [b""] * len(nodes)


def final(nodes: list[Node], dest: Path) -> tuple[int, dict[str, Any]]:
    """Step and contents of the newest committed checkpoint, with the parts of all nodes."""
    log = nodes[0].commit_log
    newest = log.checkpoints()[0]
    fetch(nodes[0].opened, "r", log.manifest(newest), dest)
    files = sorted(path for path in dest.rglob("*") if path.is_file())
    readers = {".safetensors": load_file}
    return newest.step, {
        path.name: readers.get(path.suffix, whole)(path) for path in files if not path.name.startswith("random_states")
    }


def whole(path: Path) -> Any:
    return torch.load(path, weights_only=False)  # of a program that this very test has run


def same(one: Any, other: Any, at: str) -> None:
    assert type(one) is type(other), at
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), at
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), at
        for key in one:
            same(one[key], other[key], f"{at}.{key}")
    elif isinstance(one, list | tuple):
        for number, pair in enumerate(zip(one, other, strict=True)):
            same(*pair, f"{at}.{number}")
    else:
        assert one == other, at


@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_resumed_it_ends_as_if_uninterrupted(fleet, tmp_path, name):
    cut, straight = fleet("cut"), fleet("straight")
    start(cut, name, RARELY, every_steps=500)
    cut[0].until(lambda: cut[0].commits, LONG_S)
    stop(cut)
    for node in cut:
        node.until(lambda node=node: node.said["phase"] in ENDS, LONG_S)
        node.ended()
    newest = cut[0].commit_log.checkpoints()[0]
    assert newest.step % 500  # made because of SIGTERM
    last = newest.step + 50
    resume = {"checkpoint_id": newest.checkpoint_id, "seq": newest.seq}
    start(cut, name, last, RARELY, attempt=2, writer="writer-2", resume=resume)
    start(straight, name, last, RARELY)
    for nodes in (cut, straight):
        nodes[0].until(lambda nodes=nodes: nodes[0].said["phase"] in ENDS, LONG_S)
        assert [node.ended()["phase"] for node in nodes] == ["done"] * len(nodes), nodes[0].log
    assert f"goes on from step {newest.step}" in cut[0].log

    (step, resumed), (other_step, uninterrupted) = final(cut, tmp_path / "a"), final(straight, tmp_path / "b")
    assert step == other_step == last
    assert sum(isinstance(value, dict) for value in resumed.values()) > 0
    same(resumed, uninterrupted, "")


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_without_mgpu_and_saves_nothing(tmp_path, name):
    known = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
    command = [sys.executable, EXAMPLES / f"{name}.py", "--steps", "3", "--save-every", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("step")] == ["step 2", "step 3"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_its_run_file_names_what_lies_beside_it(name):
    spec = load(EXAMPLES / f"{name}.yaml")
    assert spec.command
    assert (EXAMPLES / spec.command[0]).is_file()
    assert spec.command[0] == f"{name}.py"


def test_there_is_one_for_each_library():
    assert NAMES == ["accelerate_ddp", "fabric_ddp", "torch_save"]
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NAMES)
