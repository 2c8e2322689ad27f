"""The trainer as the agent starts it: real processes, real signals, exit codes and last words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Start = Callable[..., list[subprocess.Popen[str]]]
TINY = {
    "steps": 100_000, "global_batch": 4, "seq_len": 16, "validate_batches": 1, "validate_every": 100_000,
    "model": {"layers": 1, "dim": 16, "heads": 2},
}  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(2, strategy="ddp")` starts a rank a process; whatever is left at the end of the test is killed."""
    for number in range(12):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}").write_text("the quick brown fox " * 20)
    started: list[subprocess.Popen[str]] = []

    def begin(ranks: int, **train: object) -> list[subprocess.Popen[str]]:
        job = {
            "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": ranks,
            "master_addr": "127.0.0.1", "master_port": 1, "train": {**TINY, "text": str(tmp_path / "text"), **train},
            "checkpoint": {"to": "file:///x", "every_steps": 100_000, "writers": "all"},
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "MGPU_JOB": str(tmp_path / "job.json"),
            "MGPU_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
            "MGPU_METRICS_DIR": str(tmp_path / "metrics"),
        }
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "mgpu_train.loop"],
                    env=environment if ranks == 1 else {**environment, **place, **rendezvous},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for_step(metrics: Path, rank: int, limit_s: float = 60) -> None:
    path = metrics / f"rank-{rank}.jsonl"
    deadline = time.monotonic() + limit_s
    while not (path.exists() and '"kind": "step"' in path.read_text()):
        assert time.monotonic() < deadline, "no step in time"
        time.sleep(0.05)


def last_event(metrics: Path, rank: int) -> dict:
    return json.loads((metrics / f"rank-{rank}.jsonl").read_text().splitlines()[-1])


def test_sigterm_to_one_rank_saves_and_ends_all_with_exit_code_0(start, tmp_path):
    ranks = start(2, strategy="fsdp")
    wait_for_step(tmp_path / "metrics", 1)
    ranks[1].send_signal(signal.SIGTERM)
    assert [process.wait(30) for process in ranks] == [0, 0]
    ends = [last_event(tmp_path / "metrics", rank) for rank in (0, 1)]
    assert [(end["kind"], end["reason"]) for end in ends] == [("end", "stopped")] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{ends[0]['step']}"]


def test_a_killed_rank_ends_the_other_with_exit_code_1_and_a_last_word(start, tmp_path):
    survivor, victim = start(2, strategy="ddp")
    wait_for_step(tmp_path / "metrics", 0)
    victim.kill()
    _, said = survivor.communicate(timeout=30)
    assert survivor.returncode == 1
    assert said.splitlines()[-1].startswith("[rank0]: ")
    assert "Error: " in said.splitlines()[-1]
    assert last_event(tmp_path / "metrics", 0)["kind"] != "end"


def test_one_process_needs_no_torchrun(start, tmp_path):
    (process,) = start(1, steps=3, strategy="single")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert last_event(tmp_path / "metrics", 0)["reason"] == "done"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


def test_a_mistake_is_one_line_and_exit_code_1(start, tmp_path):
    (process,) = start(1, text=str(tmp_path / "absent"))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = said.splitlines()
    assert line == f"[rank0]: TrainError: `train.text` names {tmp_path / 'absent'}, which is no folder on this node"
