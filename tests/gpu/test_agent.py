"""Whole attempts by an agent on a machine with a GPU: what is read of its driver, what is measured, what is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.nodes import Node
from mgpu_train.agent.machine import ports
from mgpu_train.agent.machine.facts import facts
from mgpu_train.config import TrialResults

TRAIN: dict[str, Any] = {
    "steps": 6, "global_batch": 8, "seq_len": 64, "warmup_steps": 2, "validate_every": 3, "validate_batches": 2,
    "model": {"layers": 2, "dim": 64, "heads": 2},
}  # fmt: skip


@pytest.fixture
def node(tmp_path: Path, require) -> Iterator[Node]:
    """One with real agents; whatever still runs on it at the end is killed."""
    require("cuda", torch.cuda.is_available(), "torch sees no CUDA device")
    (tmp_path / "store").mkdir()
    made = Node(tmp_path / "home", tmp_path / "store")
    yield made
    made.kill()


def told(node: Node, **more: Any) -> None:
    """An attempt of the bundled trainer on all GPUs of this machine."""
    count = torch.cuda.device_count()
    own = {"launcher": "torchrun", "command": None, "train": TRAIN, "gpus": count, "processes_per_node": count}
    free = ports.free(2)
    node.job(**{**own, "master_port": free[0], "preflight_port": free[1], **more})


def test_the_driver_is_read(node):
    found = facts()
    assert (found.gpu_problem, len(found.gpus)) == (None, torch.cuda.device_count())
    properties = torch.cuda.get_device_properties(0)
    first = found.gpus[0]
    assert first.name == properties.name
    assert first.compute_capability == f"{properties.major}.{properties.minor}"
    assert abs(first.memory_mib * 2**20 / properties.total_memory - 1) < 0.05
    assert found.cuda == torch.version.cuda


def test_an_attempt_is_examined_trains_and_goes_on_from_what_it_has_committed(node):
    every = {"to": node.url, "every_steps": 3, "writers": "all"}
    told(node, checkpoint=every)
    node.start()
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("done", None), node.log
    assert "preflight: " in node.log
    assert "TFLOPS" in node.log
    assert set(node.commits) <= {3, 6}
    assert 6 in node.commits
    entry = node.commit_log.checkpoints()[0]
    longer = {**TRAIN, "steps": 9}
    told(
        node,
        attempt=2,
        writer="writer-2",
        checkpoint=every,
        train=longer,
        resume={"checkpoint_id": entry.checkpoint_id, "seq": entry.seq},
    )
    node.start()
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("done", None), node.log
    assert "resumed" in node.log
    assert max(node.commits) == 9


def test_a_machine_with_fewer_gpus_than_were_rented_is_at_fault_before_anything_is_trained(node):
    told(node, gpus=torch.cuda.device_count() + 1, processes_per_node=torch.cuda.device_count() + 1)
    node.start()
    status = node.ended()
    assert status["phase"] == "failed"
    assert status["fault"] == "infrastructure", status
    assert "GPU" in status["reason"]
    assert node.commits == []


def test_a_trial_that_lacks_memory_is_a_row_and_the_next_one_has_all_of_it(node):
    """A micro-batch whose logits alone are larger than any GPU."""
    model = {"layers": 2, "dim": 64, "heads": 2, "vocabulary": 50304}
    train = {"seq_len": 512, "global_batch": 4096, "model": model, "validate_batches": 1}
    tries = [
        {"name": "all", "train": {"micro_batch": 4096 // torch.cuda.device_count()}},
        {"name": "few", "train": {"micro_batch": 8}},
    ]
    trials = {"purpose": "tune", "steps": 2, "tries": tries}
    told(node, launcher="python", train=train, trials=trials, checkpoint=None, outputs=["trials.json"])
    node.start()
    status = node.ended()
    assert status["phase"] == "done", node.log
    rows = TrialResults.model_validate_json((node.run / "work" / "trials.json").read_bytes()).rows
    assert [(row.name, row.outcome) for row in rows] == [("all", "out of memory"), ("few", "ok")], node.log
    assert rows[1].units_per_s > 0
    assert rows[1].memory_gib < torch.cuda.get_device_properties(0).total_memory / 2**30
