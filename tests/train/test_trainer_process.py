"""The trainer as the agent starts it: real processes, real signals, exit codes and last words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ranks
from mgpu_train.agent.uploads import saves
from mgpu_train.checkpoint.local import finished
from ranks import Rank

Start = Callable[..., list[Rank]]
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
    started: list[Rank] = []

    def begin(
        count: int, home: Path = tmp_path, every_steps: int = 100_000, resume: Path | None = None, **train: object
    ) -> list[Rank]:
        home.mkdir(exist_ok=True)
        job = {
            "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": count,
            "master_addr": "127.0.0.1", "master_port": 1, "train": {**TINY, "text": str(tmp_path / "text"), **train},
            "checkpoint": {"to": "file:///x", "every_steps": every_steps, "writers": "all"},
            "resume": {"checkpoint_id": "a001-step-1", "seq": 1} if resume else None,
        }  # fmt: skip
        (home / "job.json").write_text(json.dumps(job))
        environment = {
            **os.environ,
            "MGPU_JOB": str(home / "job.json"),
            "MGPU_CHECKPOINT_DIR": str(home / "checkpoints"),
            "MGPU_METRICS_DIR": str(home / "metrics"),
            **({"MGPU_RESUME_DIR": str(resume)} if resume else {}),
        }
        said = home / "said"
        if count == 1:
            begun = [ranks.start("mgpu_train.loop", [], said, environment)]
        else:
            begun = ranks.meet("mgpu_train.loop", count, said=said, env=environment)
        started.extend(begun)
        return begun

    yield begin
    for process in started:
        process.kill()


# Half of a start each, or more: what saves, shards and compiles
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.tensor")


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_the_first_step_imports_nothing_that_it_does_not_need(tmp_path, strategy):
    """Without a checkpoint nothing is saved; with one it is imported after the first step."""
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox " * 20)
    train = {**TINY, "text": str(tmp_path), "strategy": strategy, "steps": 1}
    (tmp_path / "job.json").write_text(json.dumps({
        "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1, "train": train,
    }))  # fmt: skip
    told = f"print(*(name for name in {HEAVY} if name in sys.modules), flush=True)"
    program = f"import os, sys; from mgpu_train.loop import main; code = main(); {told}; os._exit(code)"
    environment = {**os.environ, "MGPU_JOB": str(tmp_path / "job.json")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert "Warning" not in done.stderr, "it is the trainer's first lines that a user reads"


def wait_until(condition: Callable[[], object], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_for_step(metrics: Path, rank: int) -> None:
    path = metrics / f"rank-{rank}.jsonl"
    wait_until(lambda: path.exists() and '"kind": "step"' in path.read_text())


def last_event(metrics: Path, rank: int) -> dict:
    return json.loads((metrics / f"rank-{rank}.jsonl").read_text().splitlines()[-1])


def test_sigterm_to_one_rank_saves_and_ends_all_with_exit_code_0(start, tmp_path):
    both = start(2, strategy="fsdp")
    wait_for_step(tmp_path / "metrics", 1)
    both[1].send_signal(signal.SIGTERM)
    assert [process.wait() for process in both] == [0, 0]
    ends = [last_event(tmp_path / "metrics", rank) for rank in (0, 1)]
    assert [(end["kind"], end["reason"]) for end in ends] == [("end", "stopped")] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{ends[0]['step']}"]


def test_a_killed_rank_ends_the_other_with_exit_code_1_and_a_last_word(start, tmp_path):
    survivor, victim = start(2, strategy="ddp")
    wait_for_step(tmp_path / "metrics", 0)
    victim.kill()
    assert survivor.wait() == 1
    last = survivor.said.splitlines()[-1]
    assert last.startswith("[rank0]: ")
    assert "Error: " in last
    assert last_event(tmp_path / "metrics", 0)["kind"] != "end"


def test_one_process_needs_no_torchrun(start, tmp_path):
    (process,) = start(1, steps=3, strategy="single")
    assert process.wait() == 0, process.said
    assert last_event(tmp_path / "metrics", 0)["reason"] == "done"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-3"]


def test_a_mistake_is_one_line_and_exit_code_1(start, tmp_path):
    (process,) = start(1, text=str(tmp_path / "absent"))
    assert process.wait() == 1
    (line,) = process.said.splitlines()
    assert line == f"[rank0]: TrainError: `train.text` names {tmp_path / 'absent'}, which is no folder on this node"


def test_killed_in_the_middle_of_a_save_leaves_nothing_that_looks_whole_and_is_not(start, tmp_path, same_bits):
    """F23: again and again, at other moments of a save; each attempt goes on from what is whole."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = {"strategy": "fsdp", "steps": 40, "every_steps": 2}
    assert [rank.wait() for rank in start(2, home=whole, **settings)] == [0, 0]
    halves = 0
    for moment in ("__1_0.distcp", ".metadata"):
        both = start(2, home=cut, resume=newest(cut), **settings)
        half = f".tmp-step-*/{moment}"
        wait_until(lambda half=half: finished(cut / "checkpoints") and any((cut / "checkpoints").glob(half)))
        for rank in both:
            rank.kill()
        assert [rank.wait() for rank in both] == [-signal.SIGKILL] * 2
        halves += any((cut / "checkpoints").glob(".tmp-step-*"))
        for step, folder in finished(cut / "checkpoints"):
            other = whole / "checkpoints" / f"step-{step}"  # while one save is under way the next one is skipped
            same_bits(folder, other if other.is_dir() else folder)
    assert halves, "no kill was in the middle of a save"
    assert [rank.wait() for rank in start(2, home=cut, resume=newest(cut), **settings)] == [0, 0]
    same_bits(whole / "checkpoints" / "step-40", cut / "checkpoints" / "step-40")


def newest(home: Path) -> Path | None:
    """The newest whole checkpoint, moved to where the agent puts what an attempt goes on from."""
    checkpoints, resume = home / "checkpoints", home / "resume"
    if not (found := finished(checkpoints)):
        return None
    shutil.rmtree(resume, ignore_errors=True)
    shutil.copytree(found[-1][1], resume)
    saves.clear(checkpoints)
    return resume
