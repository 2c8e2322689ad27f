"""Every strategy and product of strategies trains alike, and goes on from any other's checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

PROGRAM = Path(__file__).with_name("products.py")
STEPS = 5
Losses = Callable[..., list[list[float]]]
# name: ranks, and what the run file says of them. Losses are those of "single", whose batches are the same
PRODUCTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "ddp-3": (3, {"strategy": "ddp"}),
    "ddp-cut": (2, {"strategy": "ddp", "micro_batch": 3}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp-3": (3, {"strategy": "fsdp", "micro_batch": 2}),
    "fsdp-saved": (2, {"strategy": "fsdp", "activation_checkpointing": "full"}),
    "ddp-saved": (2, {"strategy": "ddp", "activation_checkpointing": "selective", "micro_batch": 4}),
    "muon": (1, {"strategy": "single", "optimizer": "muon", "ema": 0.9, "lr": 0.01}),
    "muon-fsdp": (2, {"strategy": "fsdp", "optimizer": "muon", "ema": 0.9, "lr": 0.01}),
    "muon-tensor-ddp": (4, {"strategy": "ddp", "tensor_parallel": 2, "optimizer": "muon", "ema": 0.9, "lr": 0.01}),
    "ema": (1, {"strategy": "single", "ema": 0.9, "validate_every": 2}),
    "ema-fsdp": (2, {"strategy": "fsdp", "ema": 0.9, "validate_every": 2}),
    "hsdp": (4, {"strategy": "hsdp", "replicas": 2}),
    "hsdp-cut": (4, {"strategy": "hsdp", "replicas": 2, "micro_batch": 1}),
    "tensor": (2, {"strategy": "single", "tensor_parallel": 2}),
    "tensor-4": (4, {"strategy": "single", "tensor_parallel": 4, "micro_batch": 5}),
    "tensor-ddp": (4, {"strategy": "ddp", "tensor_parallel": 2}),
    "tensor-fsdp": (4, {"strategy": "fsdp", "tensor_parallel": 2, "micro_batch": 2}),
    "tensor-saved": (2, {"strategy": "single", "tensor_parallel": 2, "activation_checkpointing": "full"}),
    "pipeline": (2, {"strategy": "single", "pipeline_parallel": 2, "micro_batch": 3}),
    "pipeline-4": (4, {"strategy": "single", "pipeline_parallel": 4, "micro_batch": 3}),
    "pipeline-ddp": (4, {"strategy": "ddp", "pipeline_parallel": 2, "micro_batch": 3}),
    "pipeline-fsdp": (4, {"strategy": "fsdp", "pipeline_parallel": 2, "micro_batch": 2}),
    "pipeline-tensor": (4, {"strategy": "single", "pipeline_parallel": 2, "tensor_parallel": 2, "micro_batch": 4}),
    "pipeline-tensor-fsdp": (
        8, {"strategy": "fsdp", "pipeline_parallel": 2, "tensor_parallel": 2, "micro_batch": 2},
    ),
    "tensor-hsdp": (8, {"strategy": "hsdp", "replicas": 2, "tensor_parallel": 2}),
}  # fmt: skip
ALONE = ("single", "muon", "ema", "lm", "lm16", "lmbf16")
GPT = {
    "task": "lm", "seq_len": 16,
    "model": {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "mlp": "swiglu", "qk_norm": True},
}  # fmt: skip
PRODUCTS |= {
    "lm": (1, {"strategy": "single", **GPT}),
    "lm-fsdp": (2, {"strategy": "fsdp", "activation_checkpointing": "selective", **GPT}),
    "lm-tensor": (2, {"strategy": "single", "tensor_parallel": 2, **GPT}),
    "lm-pipeline": (2, {"strategy": "single", "pipeline_parallel": 2, "micro_batch": 3, **GPT}),
    "lm-all": (
        8, {"strategy": "fsdp", "pipeline_parallel": 2, "tensor_parallel": 2, "micro_batch": 2, **GPT},
    ),
}  # fmt: skip
PRODUCTS |= {
    "lm-context": (2, {"strategy": "ddp", "context_parallel": 2, **GPT}),
    "lm-context-4": (4, {"strategy": "fsdp", "context_parallel": 4, "activation_checkpointing": "full", **GPT}),
    "lm-context-ddp": (4, {"strategy": "ddp", "context_parallel": 2, "micro_batch": 4, **GPT}),
    "lm-context-fsdp": (
        4, {"strategy": "fsdp", "context_parallel": 2, "activation_checkpointing": "selective", **GPT},
    ),
    "lm-context-hsdp": (4, {"strategy": "hsdp", "replicas": 2, "context_parallel": 2, **GPT}),
    "lm-context-tensor": (4, {"strategy": "ddp", "context_parallel": 2, "tensor_parallel": 2, **GPT}),
    "lm-context-pipeline": (
        4, {"strategy": "ddp", "context_parallel": 2, "pipeline_parallel": 2, "micro_batch": 3, **GPT},
    ),
    "lm-context-all": (
        8,
        {"strategy": "fsdp", "context_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch": 3}
        | GPT,
    ),
}  # fmt: skip
BF16 = {**GPT, "precision": "bf16", "ema": 0.9, "validate_every": 2}
PRODUCTS |= {
    "lmbf16": (1, {"strategy": "single", **BF16}),
    "lmbf16-context": (2, {"strategy": "fsdp", "context_parallel": 2, **BF16}),
}
# of sums over 2 and 3 samples the loss has another scale: all ranks take the least
FP16 = {**GPT, "precision": "fp16", "global_batch": 5, "lr": 0.01}
PRODUCTS |= {
    "lm16": (1, {"strategy": "single", **FP16}),
    "lm16-ddp": (2, {"strategy": "ddp", **FP16}),
    "lm16-fsdp": (3, {"strategy": "fsdp", **FP16}),
    "lm16-pipeline": (2, {"strategy": "single", "pipeline_parallel": 2, "micro_batch": 1, **FP16}),
}
# goes on from the third step of the first one
RESUMED = {
    "single-from-pipeline-tensor": ("pipeline-tensor", "single"),
    "pipeline-fsdp-from-tensor-fsdp": ("tensor-fsdp", "pipeline-fsdp"),
    "tensor-fsdp-from-tensor-fsdp": ("tensor-fsdp", "tensor-fsdp"),
    "pipeline-from-pipeline": ("pipeline", "pipeline"),
    "hsdp-from-hsdp": ("hsdp", "hsdp"),
    "muon-fsdp-from-muon-fsdp": ("muon-fsdp", "muon-fsdp"),
    "muon-from-muon-fsdp": ("muon-fsdp", "muon"),
    "lm-tensor-from-lm-all": ("lm-all", "lm-tensor"),
    "lm-pipeline-from-lm-pipeline": ("lm-pipeline", "lm-pipeline"),
    "lm-context-from-lm-tensor": ("lm-tensor", "lm-context"),
    "lm-fsdp-from-lm-context-4": ("lm-context-4", "lm-fsdp"),
    "lm-context-fsdp-from-lm-context-fsdp": ("lm-context-fsdp", "lm-context-fsdp"),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """`lines(name, kind)`: loss, error and norm of each line of this kind, of all ranks."""
    out = tmp_path_factory.mktemp("products")

    def train(name: str) -> None:
        if not (out / name).exists():
            before, of = RESUMED.get(name, ("", name))
            if before:
                train(before)
            count, settings = PRODUCTS[of]
            given, said = [out, name, count, json.dumps(settings), before], out / f"{name}.said"
            assert ranks.start(PROGRAM, given, said, os.environ).wait() == 0, said.read_text()

    def of(name: str, kind: str = "step") -> list[list[float]]:
        train(name)
        found: dict[Path, list[Any]] = {
            path: [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]
            for path in (out / name / "metrics").glob("rank-*.jsonl")
        }
        keys = ["loss", *(["grad_norm"] if kind == "step" else []), *([] if name.startswith("lm") else ["error"])]
        if name.startswith("lm"):  # what only validation tells
            assert {"bits_per_byte" in line for each in found.values() for line in each} == {kind == "validation"}
            keys += ["bits_per_byte"] if kind == "validation" else []
        if kind == "validation" and "ema" in PRODUCTS[RESUMED.get(name, ("", name))[1]][1]:
            keys += ["ema_loss", *([] if name.startswith("lm") else ["ema_error"])]
        numbers = [[line[key] for line in each for key in keys] for each in found.values()]
        assert all(each == numbers[0] for each in numbers), "ranks tell the same"
        return [[line[key] for key in keys] for line in next(iter(found.values()))]

    return of


def far(name: str) -> float:
    """Muon orthogonalises in bf16, and all of lm16 is in fp16."""
    return {"muon": 2e-2, "lm16": 2e-3, "lmbf16": 5e-3}.get(name.split("-")[0], 1e-5)


def flat(rows: list[list[float]]) -> list[float]:
    return [number for row in rows for number in row]


@pytest.mark.drawn("strategies and their products", "train/mgpu_train/strategies", "train/mgpu_train/engines")
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in ALONE])
def test_every_product_has_the_losses_of_one_process(lines, name):
    assert len(lines(name)) == STEPS, "none is skipped"
    alone = next((each for each in ALONE if name.split("-")[0] == each), "single")
    for kind in ("step", "validation"):
        assert flat(lines(name, kind)) == pytest.approx(flat(lines(alone, kind)), rel=far(name))


@pytest.mark.drawn("resumes by other strategies", "train/mgpu_train/strategies", "train/mgpu_train/engines")
@pytest.mark.parametrize("name", RESUMED)
def test_every_product_goes_on_from_the_checkpoint_of_another(lines, name):
    before, now = RESUMED[name]
    for kind, first in (("step", 3), ("validation", -1)):
        expected = flat(lines(now, kind)[first:])
        assert flat(lines(name, kind)) == (expected if now == before else pytest.approx(expected, rel=far(now)))
