"""The trainer beside the loop that one would write by hand: the same losses, whatever else it does meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ranks

PLAIN = Path(__file__).parents[2] / "bench" / "train_plain.py"
STEPS = 30


def train(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "text").mkdir(exist_ok=True)
    for number in range(20):
        words = "".join(f"def f{number}(x{each}): return {each * number}\n" for each in range(20))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    return {
        "steps": STEPS, "global_batch": 8, "seq_len": 16, "warmup_steps": 3, "lr": 0.01, "threads": 1,
        "strategy": "single", "precision": "fp32", "model": {"layers": 2, "dim": 32, "heads": 2},
        "text": str(tmp_path / "text"), **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("by-hand")
    rank = ranks.start(PLAIN, [json.dumps(train(folder))], folder / "said", os.environ)
    assert rank.wait() == 0, rank.said
    return json.loads(rank.said.splitlines()[-1])["losses"]


def losses_of_ours(tmp_path: Path, count: int, **changes: Any) -> list[float]:
    job = {
        "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": count,
        "master_addr": "127.0.0.1", "master_port": 1, "train": train(tmp_path, **changes),
        "checkpoint": {"to": "file:///x", "every_steps": 5, "writers": "all"},
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    folders = {"MGPU_JOB": "job.json", "MGPU_CHECKPOINT_DIR": "checkpoints", "MGPU_METRICS_DIR": "metrics"}
    environment = {**os.environ, **{name: str(tmp_path / path) for name, path in folders.items()}}
    started = ranks.meet("mgpu_train.loop", count, said=tmp_path / "said", env=environment)
    try:
        assert [rank.wait() for rank in started] == [0] * count, started[0].said
    finally:
        for rank in started:
            rank.kill()
    lines = map(json.loads, (tmp_path / "metrics" / "rank-0.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize(("strategy", "count"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_its_losses_are_those_of_a_loop_by_hand_with_saves_validation_and_accumulation(
    tmp_path, by_hand, strategy, count
):
    ours = losses_of_ours(tmp_path, count, strategy=strategy, validate_every=4, validate_batches=2, micro_batch=3)
    assert len(ours) == STEPS
    assert ours == pytest.approx(by_hand, rel=1e-5)
    assert by_hand[-1] < by_hand[0] - 1, "it has learned"
