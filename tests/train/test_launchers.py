"""What each launcher of ours starts on the second of two nodes with four processes: words and variables."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from mgpu_train import launchers
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.phases import launcher_process
from mgpu_train.config import Job
from waiting import until

LAYOUT = RunLayout("r", PurePosixPath("/h"))
PROGRAM = ("train.py", "--name", "$(id) `x`;")
OF_TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501", "NODE_RANK": "1"}
FAILURES = {"MGPU_FAILURE_FILE": "/h/runs/r/failure-3.json"}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "torchrun": (
        "/py -m mgpu_train.agent.launchers.torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr 10.0.0.1 "
        "--master-port 29501 --rdzv-backend static --rdzv-id r-3 --rdzv-conf timeout=1800 --max-restarts 0",
        FAILURES,
    ),
    "accelerate": (
        "/py -m mgpu_train.agent.launchers.torchrun accelerate --num_machines 2 --machine_rank 1 --num_processes 8 "
        "--main_process_ip 10.0.0.1 --main_process_port 29501 --same_network --rdzv_backend static "
        "--rdzv_conf timeout=1800 --max_restarts 0 --deepspeed_multinode_launcher standard",
        FAILURES,
    ),
    "deepspeed": (
        "/py -m deepspeed.launcher.launch --world_info "
        "eyJub2RlLTAiOiBbMCwgMSwgMiwgM10sICJub2RlLTEiOiBbMCwgMSwgMiwgM119 "
        "--node_rank 1 --master_addr 10.0.0.1 --master_port 29501",
        {},
    ),
    "python": (
        "/py",
        {**OF_TORCHRUN, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ),
    "jax": (
        "/py",
        {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:29501", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    ),
    "tensorflow": (
        "/py",
        {
            "TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:29501", "10.0.0.2:29501"]}, '
            '"task": {"type": "worker", "index": 1}}'
        },
    ),
    "mpi": (
        "/py -m mgpu_train.agent.launchers.mpi -np 4 /py",
        {
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    ),
    "bash": (
        "",  # below
        {
            **OF_TORCHRUN, "NNODES": "2", "NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "29501",
            "PET_RDZV_CONF": "timeout=1800",
        },
    ),
}  # fmt: skip


def job(launcher: str, **changes: Any) -> Job:
    return Job.model_validate({
        "run_id": "r", "attempt": 3, "writer": "w", "node_rank": 1, "nodes": 2, "processes_per_node": 4,
        "master_addr": "10.0.0.1", "master_port": 29501, "addresses": ("10.0.0.1", "10.0.0.2"),
        "launcher": launcher, "command": PROGRAM, **changes,
    })  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_words_and_variables(name):
    words, variables = CASES[name]
    made = launcher_process.argv(job(name), LAYOUT, "/py")
    begin = made[:2] if name == "bash" else made[: -len(PROGRAM)]
    assert (begin, tuple(made[-len(PROGRAM) :])) == (["bash", "-c"] if name == "bash" else words.split(), PROGRAM)
    environment = launcher_process.environment(job(name), {}, LAYOUT, {})
    assert {each: environment.get(each) for each in variables} == variables
    assert environment["NCCL_DEBUG"] == "WARN", "what NCCL is told is told under every launcher"


def test_there_is_a_case_for_each():
    assert set(CASES) == set(launchers.installed().names)


def test_deepspeed_is_told_the_ranks_of_every_node():
    words = launcher_process.argv(job("deepspeed"), LAYOUT, "/py")
    told = json.loads(base64.urlsafe_b64decode(words[words.index("--world_info") + 1]))
    assert list(told.items()) == [("node-0", [0, 1, 2, 3]), ("node-1", [0, 1, 2, 3])]


@pytest.mark.parametrize(
    ("addresses", "workers"),
    [
        (("127.0.0.1", "127.0.0.1"), ["127.0.0.1:29501", "127.0.0.1:29502"]),
        (("fd00::1", "fd00::2"), ["[fd00::1]:29501", "[fd00::2]:29501"]),
        ((), ["10.0.0.1:29501", "10.0.0.1:29502"]),
    ],
)
def test_nodes_of_one_address_have_ports_of_their_own(addresses, workers):
    told = job("tensorflow", addresses=addresses)
    made = launcher_process.environment(told, {}, LAYOUT, {})
    assert json.loads(made["TF_CONFIG"])["cluster"]["worker"] == workers
    assert (
        launcher_process.environment(job("jax", addresses=addresses), {}, LAYOUT, {})["JAX_COORDINATOR_ADDRESS"]
        == workers[0]
    )


def test_a_job_that_names_some_of_its_nodes_is_refused():
    with pytest.raises(ValueError, match="1 addresses of 2 nodes"):
        job("jax", addresses=("10.0.0.1",))


def test_a_python_without_accelerate_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "accelerate.py").write_text("raise ImportError('not here')\n")
    words = [sys.executable, "-m", "mgpu_train.agent.launchers.torchrun", "accelerate", "train.py"]
    environment = {**launcher_process.os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert re.fullmatch(
        r"`launcher: accelerate` finds no accelerate in .*\(not here\)\. .*`launcher: torchrun`\.\n", done.stderr
    )


# As Open MPI's: where it is itself asked to end, it kills at once. Each rank has a worker, which is not to be asked.
MPIRUN = """#!{python}
import os, signal, subprocess, sys
assert sys.argv[1:3] == ["-np", "2"], sys.argv
ranks = [
    subprocess.Popen(sys.argv[3:], env={{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank)}}) for rank in range(2)
]
signal.signal(signal.SIGTERM, lambda *_: [rank.kill() for rank in ranks])
sys.exit(max(rank.wait() for rank in ranks))
"""
RANK = """
import os, pathlib, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
rank = os.environ["OMPI_COMM_WORLD_RANK"]
pathlib.Path(f"ready-{rank}").touch()
signal.sigwait({signal.SIGTERM})
worker.stdin.close()
pathlib.Path(f"saved-{rank}-{worker.wait()}").touch()
"""


def mpi(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**launcher_process.os.environ, "PATH": str(folder)}
    command = [sys.executable, "-m", "mgpu_train.agent.launchers.mpi", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def test_ranks_of_mpirun_are_asked_to_end_and_it_is_not(tmp_path: Path):
    (tmp_path / "mpirun").write_text(MPIRUN.format(python=sys.executable))
    (tmp_path / "mpirun").chmod(0o700)
    (tmp_path / "rank.py").write_text(RANK)
    started = mpi(tmp_path, "-np", "2", sys.executable, "rank.py")
    try:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60, lambda: "no ranks")
        started.terminate()
        assert (started.wait(60), started.stderr.read()) == (0, "")
    finally:
        started.kill()
    ended = sorted(path.name for path in tmp_path.glob("saved-*"))
    assert ended == ["saved-0-1", "saved-1-1"], "their workers ended by themselves: EOFError, not SIGTERM"


def test_a_node_without_mpirun_is_told_in_one_line(tmp_path: Path):
    started = mpi(tmp_path, "-np", "2", "train.py")
    said = started.communicate(timeout=60)[1]
    assert (started.returncode, said.count("\n")) == (1, 1)
    assert said.startswith("`launcher: mpi` cannot start mpirun on this node (No such file or directory). Install")
