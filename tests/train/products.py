"""What test_products.py looks at: one task, trained by strategies and products of them, by ranks that are forked here.

`products.py OUT NAME RANKS SETTINGS RESUME` trains in OUT/NAME; RESUME: another one, of which it goes on from step 3.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import prose
import torch
from mgpu_train import parallel
from mgpu_train.config import Job
from mgpu_train.data.base import Batch, Data
from mgpu_train.engines import scale
from mgpu_train.environment import Folders
from mgpu_train.loop import Trainer
from mgpu_train.signals import StopRequest
from mgpu_train.tasks.base import Layout, Loss, Split, Task
from pydantic import BaseModel
from saves import ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

STEPS, BLOCKS, WIDTH = 5, 4, 16


class Options(BaseModel):
    """None."""


class Numbers:
    """Vectors whose target is a rotation of them, and that weigh differently."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 60

    def batch(self, samples: Any, seeds: Any) -> Batch:
        """By number."""
        given = torch.stack([torch.sin(torch.arange(6) * (1.0 + sample)) for sample in samples])
        return {"given": given, "wanted": given.roll(1, 1), "weight": 1.0 + torch.tensor(samples) % 3}


class Block(nn.Module):
    """Two layers that ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """(B, WIDTH) -> (B, WIDTH)."""
        return x + self.down(torch.tanh(self.up(self.norm(x)) * scale))


class Chain(nn.Module):
    """Blocks, and what is before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """(B, 6) -> (B, 6)."""
        x = self.embed(given)
        for block in self.blocks:
            x = block(x, self.get_buffer("scale"))
        return self.head(x)


class Rotation(Task):
    """Learns to rotate a vector."""

    Options = Options

    def data(self, split: Split) -> Data:
        return Numbers()

    def model(self) -> nn.Module:
        return Chain()

    def initialise(self, model: nn.Module) -> None:
        model.get_buffer("scale").fill_(1.5)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        each = (model(batch["given"]) - batch["wanted"]).square().sum(1)
        return Loss((batch["weight"] * each).sum(), batch["weight"].sum(), {"error": each.sqrt().sum()})

    def layout(self, model: nn.Module) -> Layout:
        blocks = tuple(f"blocks.{number}" for number in range(BLOCKS))
        plan: dict[str, Any] = {}
        for block in blocks:
            plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
        return Layout(blocks, first=("embed",), last=("head",), tensor=plan)


def train(
    out: Path, name: str, resume: str | None, place: parallel.Place, *, every_steps: int = 3, **settings: Any
) -> None:
    """One of them."""
    given = {
        "task": "products:Rotation", "steps": STEPS, "global_batch": 12, "lr": 0.05, "warmup_steps": 0,
        "validate_every": STEPS, "validate_batches": 2, "threads": 1, **settings,
    }  # fmt: skip
    if given["task"] == "lm" and "tokens" not in given:
        given.setdefault("text", str(out / "prose"))
    job = Job.model_validate({
        "run_id": "test", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 8,
        "master_addr": "127.0.0.1", "master_port": 1, "train": given,
        "checkpoint": {"to": "file:///x", "every_steps": every_steps, "writers": "all"},
    })  # fmt: skip
    checkpoint = out / resume / "checkpoints" / "step-3" if resume else None
    try:
        Trainer(
            job, Folders(out / name / "checkpoints", out / name / "metrics", checkpoint), place, StopRequest()
        ).run()
    except Exception:
        traceback.print_exc()
        raise


def main() -> None:
    """One training."""
    out, name, count, settings, resume = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))
    prose.written(Path(out) / "prose")
    scale.HIGHEST = 2.0**12  # what overflows fp16 at the first tries, and is skipped, depends on the processor
    given, ways = json.loads(settings), int(count)
    assert ranks(ways, lambda place: train(Path(out), name, resume or None, place, **given)) == [0] * ways


if __name__ == "__main__":
    main()
