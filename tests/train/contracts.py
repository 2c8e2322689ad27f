"""What the tests of tasks and strategies look at: small trainings of a task that is not ours, in one process group.

`contracts.py OUT` trains each scenario in OUT/NAME, and writes what failed beside them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mgpu_train import parallel
from mgpu_train.config import Job
from mgpu_train.engines import fit
from mgpu_train.environment import Folders
from mgpu_train.errors import TrainError
from mgpu_train.loop import Trainer
from mgpu_train.signals import StopRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "outside" / "parity"))

MODULE = """
import os
import torch
from torch import nn
from mgpu_parity.task import Parity
from mgpu_train.tasks.base import Layout, Loss

class Doubled(Parity):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(2 * loss.total, 2 * loss.weight, {name: 2 * value for name, value in loss.values.items()})

class Forgetful(Parity):
    def initialise(self, model):
        model[0].reset_parameters()

class Positions(Parity):
    # a buffer of whole numbers that is made where there is no memory, and that `initialise` forgets
    def model(self):
        model = super().model()
        model.register_buffer("positions", torch.arange(3))
        return model

class Tied(Parity):
    def model(self):
        bits, width = self.options.bits, self.options.width
        sizes = ((bits, width), (width, width), (width, width), (width, 2))
        model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
        model[2].weight = model[1].weight
        return model
    def initialise(self, model):
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    def loss(self, model, batch):
        inner = getattr(model, "module", model)
        assert inner[1].weight is inner[2].weight
        return super().loss(model, batch)

class Fixed(Parity):
    # its first layer is random, and stays as it began
    def initialise(self, model):
        super().initialise(model)
        model[0].requires_grad_(False)
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        fixed = getattr(model, "module", model)[0].weight.sum()
        return Loss(loss.total, loss.weight, {"fixed": loss.weight * fixed})

class Frugal(Parity):
    # its machine has memory for two samples
    def loss(self, model, batch):
        assert all(len(values) <= 2 for values in batch.values())
        return super().loss(model, batch)
    def evaluate(self, model, batch):
        assert not model.training
        return self.loss(model, batch)

class Normed(Parity):
    # has statistics, and draws
    def model(self):
        bits, width = self.options.bits, self.options.width
        parts = nn.Linear(bits, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2)
        return nn.Sequential(*parts)
    def initialise(self, model):
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    def layout(self, model):
        return Layout()

class Greedy(Normed):
    # one of its machines has memory for two samples
    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if len(batch["bits"]) > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

class Hungry(Parity):
    # of 24 MiB for each sample, far more than what else comes and goes, and nobody asks for more than 16
    def loss(self, model, batch):
        samples = len(batch["bits"])
        assert samples <= 16
        torch.ones(3 * samples << 23, dtype=torch.uint8)
        return super().loss(model, batch)

class Empty(Parity):
    def data(self, split):
        return []

class Other: pass

class Pairs:
    # sequences of numbers whose sum each token has to find
    fingerprint = "pairs"
    def __len__(self):
        return 16
    def batch(self, samples, seeds):
        numbers = torch.stack([torch.sin(torch.arange(8) * (1.0 + sample)) for sample in samples])
        return {"numbers": numbers, "sum": numbers.sum(1, keepdim=True).expand(-1, 8)}

class Reader(nn.Module):
    # sees the whole sequence, in both directions
    context = None
    def __init__(self):
        super().__init__()
        self.up, self.positions, self.head = nn.Linear(1, 12), nn.Embedding(8, 12), nn.Linear(4, 1)
    def forward(self, numbers):
        places = self.positions.weight if self.context is None else self.context.part(self.positions.weight, 0)
        q, k, v = (self.up(numbers.unsqueeze(-1)) + places).unsqueeze(1).chunk(3, -1)
        attend = nn.functional.scaled_dot_product_attention if self.context is None else self.context.attention
        return self.head(attend(q, k, v).squeeze(1)).squeeze(-1)

class Adding(Parity):
    context = None
    def data(self, split):
        return Pairs()
    def model(self):
        return Reader()
    def initialise(self, model):
        for each in (model.up, model.positions, model.head):
            each.reset_parameters()
    def layout(self, model):
        return Layout()
    def loss(self, model, batch):
        numbers, wanted = batch["numbers"], batch["sum"]
        if self.context is not None:
            numbers, wanted = (self.context.part(each) for each in (numbers, wanted))
        total = (model(numbers) - wanted).square().sum()
        return Loss(total, wanted.numel(), {"accuracy": total.detach() * 0 + wanted.numel()})
    def share_sequences(self, model, context):
        self.context = model.context = context
"""
# bytes of the machine's memory that are free for its two ranks, as `train.micro_batch: auto` sees them
FREE = {
    "hungry": 1200 << 20,
    "hungry-fsdp": 1200 << 20,
    "hungry-on": 640 << 20,
    "starved": 1 << 10,
    "unknown": math.inf,
}
FAKES = Path(__file__).resolve().parents[1] / "fakes"
PARITY = "mgpu_parity.task:Parity"
OPTIONS = {"bits": 5, "width": 8}
HUNGRY = {"task": "tasks_of_tests:Hungry", "global_batch": 64}
SCENARIOS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": {"micro_batch": 1},
    "uneven": {"micro_batch": 3},
    "fsdp": {"strategy": "fsdp", "micro_batch": 2},
    "byhand": {"strategy": "mgpu_parity.strategy:ByHand", "micro_batch": 2},
    "doubled": {"task": "tasks_of_tests:Doubled"},
    "fixed": {"task": "tasks_of_tests:Fixed"},
    "fixed-on": {"task": "tasks_of_tests:Fixed", "resume": "fixed/checkpoints/step-4", "seed": 2, "steps": 6},
    "fixed-on-again": {"task": "tasks_of_tests:Fixed", "resume": "fixed-on/checkpoints/step-6", "seed": 3, "steps": 8},
    "frugal": {"task": "tasks_of_tests:Frugal", "micro_batch": 2},
    "bad-options": {"options": {"bits": 99, "widht": 2}},
    "forgetful": {"task": "tasks_of_tests:Forgetful"},
    "positions": {"task": "tasks_of_tests:Positions"},
    "tied": {"task": "tasks_of_tests:Tied"},
    "empty": {"task": "tasks_of_tests:Empty"},
    "other": {"task": "tasks_of_tests:Other"},
    "no-class": {"task": "tasks_of_tests:Absent"},
    "no-module": {"task": "nowhere.task:Parity"},
    "no-name": {"task": "partiy"},
    "no-strategy": {"strategy": "dpd"},
    "normed": {"task": "tasks_of_tests:Normed", "micro_batch": 2},
    "greedy": {"task": "tasks_of_tests:Greedy", "micro_batch": "auto"},
    "hungry": {**HUNGRY, "micro_batch": "auto", "every_steps": 2},
    "hungry-on": {**HUNGRY, "micro_batch": "auto", "resume": "hungry/checkpoints/step-2"},
    "hungry-fsdp": {**HUNGRY, "micro_batch": "auto", "strategy": "fsdp"},
    "hungry-told": {**HUNGRY, "micro_batch": 16},
    "starved": {"micro_batch": "auto"},
    "unknown": {"micro_batch": "auto"},
    "no-fp8": {"precision": "fp8"},
    "no-sequences": {"context_parallel": 2},
    "no-parts": {"task": "lm", "options": {"seq_len": 18, "text": str(FAKES)}, "context_parallel": 2},
    "adding": {"task": "tasks_of_tests:Adding"},
    "adding-together": {"task": "tasks_of_tests:Adding", "context_parallel": 2, "micro_batch": "auto"},
    "adding-byhand": {
        "task": "tasks_of_tests:Adding", "context_parallel": 2, "strategy": "mgpu_parity.strategy:ByHand",
    },
    "lm-options": {"task": "lm", "options": {"seq_len": 2}},
}  # fmt: skip


def train(out: Path, place: parallel.Place, name: str, **settings: Any) -> str | None:
    """One scenario; why it failed."""
    every_steps, before = settings.pop("every_steps", 4), settings.pop("resume", None)
    given = {
        "task": PARITY, "steps": 4, "global_batch": 8, "lr": 0.01, "warmup_steps": 0, "validate_every": 4,
        "validate_batches": 2, "threads": 1, "options": OPTIONS, **settings,
    }  # fmt: skip
    job = Job.model_validate({
        "run_id": "test", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 2,
        "master_addr": "127.0.0.1", "master_port": 1, "train": given,
        "checkpoint": {"to": "file:///x", "every_steps": every_steps, "writers": "all"},
    })  # fmt: skip
    try:
        with patch.object(fit, "free_bytes", lambda: FREE.get(name, 1 << 34)):
            resume = before and out / before
            folders = Folders(out / name / "checkpoints", out / name / "metrics", resume)
            Trainer(job, folders, place, StopRequest()).run()
    except TrainError as error:
        return str(error)
    return None


def main() -> None:
    out = Path(sys.argv[1])
    (out / "tasks_of_tests.py").write_text(MODULE)
    sys.path.insert(0, str(out))
    place = parallel.join(60, 60)
    failures = {name: train(out, place, name, **settings) for name, settings in SCENARIOS.items()}
    (out / f"failures-{place.rank}.json").write_text(json.dumps(failures))
    parallel.leave()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
    os._exit(0)  # as the trainer ends, and for its reason
