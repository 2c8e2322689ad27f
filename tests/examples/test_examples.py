"""The examples of other libraries under real agents: stopped, resumed, and the same at the end as if uninterrupted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy
import pytest
import torch
from fakes.nodes import Node
from mgpu_train.agent.machine import ports
from mgpu_train.checkpoint.transfer.fetch import fetch
from safetensors.torch import load_file

from mgpu.cli import cli
from mgpu.cli.common.agreement import make_plan
from mgpu.spec.load import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in EXAMPLES.rglob("*.yaml"))
LONG_S = 600  # two processes that import these libraries at once on a busy machine
RARELY = 1_000_000  # steps: no checkpoint but the last one


def program(name: str) -> Path:
    """What the example's run file runs."""
    command = load(EXAMPLES / f"{name}.yaml").command
    assert command
    return (EXAMPLES / f"{name}.yaml").with_name(command[0])


@pytest.fixture
def fleet(tmp_path: Path, name: str) -> Iterator[list[Node]]:
    """The nodes that the example's run file asks for, with its code; in the end whatever runs there is killed."""
    count = load(EXAMPLES / f"{name}.yaml").nodes
    (tmp_path / "store").mkdir()
    nodes = [Node(tmp_path / f"home-{rank}", tmp_path / "store", rank, count) for rank in range(count)]
    for node in nodes:
        shutil.copy(program(name), node.run / "work")
    yield nodes
    for node in nodes:
        node.kill()


def start(nodes: list[Node], example: str, steps: int, every_steps: int, **job: Any) -> None:
    """As the run file says, but for the number of steps and how often to save."""
    spec = load(EXAMPLES / f"{example}.yaml")
    assert spec.command
    assert spec.command[1] == "--steps"
    assert not isinstance(spec.checkpoint, str)
    port = ports.free(1)[0]
    for node in nodes:
        node.job(
            launcher=spec.launcher,
            processes_per_node=spec.processes_per_node or 1,
            master_port=port,
            env={"OMP_NUM_THREADS": "1"},  # sums depend on it
            command=[spec.command[0], "--steps", str(steps)],
            checkpoint={"to": node.url, "every_steps": every_steps, "writers": spec.checkpoint.writers or "rank0"},
            **job,
        )
        node.start()


def stop(nodes: list[Node]) -> None:
    asked = [node.popen("stop", "--run", "r") for node in nodes]
    assert [process.communicate(timeout=60)[1] for process in asked] == [b""] * len(nodes)


def contents(folder: Path) -> dict[str, Any]:
    """A checkpoint as its program would load it, less random states, which nobody has seeded, and what only describes
    the run."""
    read = {".safetensors": load_file, ".npz": arrays, ".pt": whole, ".ckpt": whole, ".bin": whole}
    told = ("random_states", "rng_state", "training_args")
    files = sorted(path for path in folder.iterdir() if path.suffix in read and not path.name.startswith(told))
    return {path.name: read[path.suffix](path) for path in files}


def arrays(path: Path) -> dict[str, torch.Tensor]:
    with numpy.load(path) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def uninterrupted(example: str, steps: int, folder: Path) -> Path:
    """The last checkpoint of as many processes, started by hand: mgpu has nothing to do with it."""
    spec = load(EXAMPLES / f"{example}.yaml")
    processes = spec.nodes * (spec.processes_per_node or 1)
    environment = {**os.environ, "MGPU_CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program(example)), "--steps", str(steps), "--save-every", str(RARELY)]
    port, ran = ports.free(1)[0], []
    for rank in range(processes):
        torchs = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        torchs |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        jaxs = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": processes, "JAX_PROCESS_ID": rank}
        place = {name: str(value) for name, value in (torchs | jaxs).items()} if processes > 1 else {}
        ran.append(subprocess.Popen(command, env={**environment, **place}, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=LONG_S)[1] for process in ran]
    assert [process.returncode for process in ran] == [0] * processes, b"".join(said).decode()
    return folder / f"step-{steps}"


def whole(path: Path) -> Any:
    return torch.load(path, weights_only=False)  # of a program that this very test has run


def same(one: Any, other: Any, at: str) -> None:
    assert type(one) is type(other) or {type(one), type(other)} == {list, tuple}, at  # torch makes one of the other
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


@pytest.mark.timeout(4 * LONG_S)
@pytest.mark.parametrize("name", NAMES)
def test_stopped_and_resumed_it_ends_as_if_uninterrupted(fleet, tmp_path, name):
    start(fleet, name, RARELY, every_steps=500)
    first = fleet[0]
    first.until(lambda: first.commits, LONG_S)
    stop(fleet)
    for node in fleet:
        node.ended()
    cut = first.commit_log.checkpoints()[0]
    assert cut.step % 500  # made because of SIGTERM

    resume = {"checkpoint_id": cut.checkpoint_id, "seq": cut.seq}
    start(fleet, name, cut.step + 50, RARELY, attempt=2, writer="writer-2", resume=resume)
    first.until(lambda: first.said["attempt"] == 2 and first.said["phase"] in ("done", "failed"), LONG_S)
    assert [node.ended()["phase"] for node in fleet] == ["done"] * len(fleet), first.log
    assert f"goes on from step {cut.step}" in first.log
    last = first.commit_log.checkpoints()[0]
    assert last.step == cut.step + 50

    fetch(first.opened, "r", first.commit_log.manifest(last), tmp_path / "resumed")
    straight = uninterrupted(name, last.step, tmp_path / "straight")
    assert contents(straight)
    same(contents(tmp_path / "resumed"), contents(straight), name)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_without_mgpu_and_saves_nothing(tmp_path, name):
    known = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
    command = [sys.executable, program(name), "--steps", "3", "--save-every", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("step")] == ["step 2", "step 3"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", NAMES)
def test_its_run_file_names_what_lies_beside_it(name):
    assert program(name).is_file()
    assert program(name).name in (f"{name}.py", "train.py")


def test_there_is_one_for_each_library_and_one_for_every_night():
    libraries = {"accelerate_ddp", "fabric_ddp", "hf_trainer", "jax_data_parallel", "tensor_parallel", "torch_save"}
    assert set(NAMES) == {*libraries, "nightly/nightly"}
    assert {*EXAMPLES.rglob("*.py")} == {program(name) for name in NAMES}


# --- examples/nightly: what its README says to do -------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path, xdg: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as a user has copied it, and is in it."""
    shutil.copytree(EXAMPLES / "nightly", tmp_path / "my-nightly")
    monkeypatch.chdir(tmp_path / "my-nightly")
    monkeypatch.delenv("PULUMI_BACKEND_URL", raising=False)
    return tmp_path / "my-nightly"


def test_what_the_readme_says_to_type_can_be_typed(copied):
    blocks = re.findall(r"(?ms)^```\n(.*?)^```", (copied / "README.md").read_text())
    typed = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert typed.pop(0)[:3] == ["cp", "-r", "examples/nightly"]
    assert len(typed) >= 10
    for words in typed:
        assert words[0] == "mgpu"
        group, rest = cli, words[1:]
        while isinstance(group, click.Group):
            _, group, rest = group.resolve_command(click.Context(group), rest)
        group.make_context(group.name, rest)


def test_the_lines_for_aws_and_for_who_is_told_are_right(copied):
    run_file = copied / "nightly.yaml"
    here = load(run_file)
    assert (here.checkpoint.to, make_plan(here).best.provider) == (None, "local")
    lines = [line for line in run_file.read_text().splitlines() if "# local: " not in line]
    assert len(run_file.read_text().splitlines()) - len(lines) == 2
    run_file.write_text("\n".join(re.sub(r"^# (.*) # (aws|told)\b.*", r"\1", line) for line in lines))
    there = load(run_file)
    assert (there.checkpoint.to, there.sinks.apprise.urls) == ("s3://my-bucket/runs", ("SLACK_URL",))
    best = make_plan(there).best
    assert (best.provider, best.gpus) == ("aws", 1)
