"""What test_deepspeed.py looks at: trainings by DeepSpeed's ZeRO and by others, one after the other, by forked ranks.

`zero_stages.py OUT STORIES`: STORIES is JSON, for each number of ranks and name {resume, settings...}; `resume`: from
step 3 of another one. It writes into OUT/NAME/, what was refused into OUT/NAME/error, and into OUT/NAME/limits
what collectives may take, in seconds, but for LIMIT_S. All packages are imported once, before ranks are forked.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import products
import prose
import torch
from mgpu_train import parallel
from mgpu_train.checkpoint.distributed import dcp
from mgpu_train.data.base import Batch
from mgpu_train.errors import TrainError
from mgpu_train.tasks.base import Loss
from products import Chain, Rotation
from saves import LIMIT_S, ranks
from torch import distributed as dist
from torch import nn

BAD_STEP = 2  # of training


class Odd(Chain):
    """With a parameter of one row and two names, one that learns nothing, and one of this shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gain, self.row = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(1, 6))
        self.still = nn.Parameter(torch.empty(3), requires_grad=False)
        self.same = self.row

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """(B, 6) -> (B, 6)."""
        return super().forward(given + self.row) * self.gain + self.still.sum()


class Oddities(Rotation):
    """Rotation's data."""

    def model(self) -> nn.Module:
        return Odd(1)

    def initialise(self, model: nn.Module) -> None:
        super().initialise(model)
        for value, name in enumerate(("gain", "row", "still"), 1):
            nn.init.constant_(model.get_parameter(name), value / 2)


class Scalars(Oddities):
    """With a parameter of no dimension."""

    def model(self) -> nn.Module:
        return Odd()


class Based(Rotation):
    """Goes on from no checkpoint of another base, as adapters do not: its model says so as it is loaded."""

    base = 1.5

    def model(self) -> nn.Module:
        made = super().model()
        made.register_load_state_dict_pre_hook(self._refuse)
        return made

    def initialise(self, model: nn.Module) -> None:
        super().initialise(model)
        model.get_buffer("scale").fill_(self.base)

    def _refuse(self, _model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if float(state[f"{prefix}scale"]) != self.base:
            raise TrainError("it is of another base")


class OtherBase(Based):
    """Of which nothing else is different."""

    base = 2.5


class BadLoss(Rotation):
    """The loss of one step is infinite, and its gradient is as good as any."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self.steps = 0

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        loss = super().loss(model, batch)
        self.steps += model.training
        return self.spoiled(loss, model) if model.training and self.steps == BAD_STEP else loss

    def spoiled(self, loss: Loss, model: nn.Module) -> Loss:
        """What comes of it."""
        return Loss(loss.total + torch.inf, loss.weight, loss.values)


class BadGradient(BadLoss):
    """The gradient of one step is no number, and its loss is as good as any."""

    def spoiled(self, loss: Loss, model: nn.Module) -> Loss:
        """The slope of a root at nothing is infinite."""
        return Loss(loss.total + (0 * loss.total).sqrt(), loss.weight, loss.values)


class NoWeight(BadLoss):
    """Nothing counts in one step, as where no token of it is to be predicted."""

    def spoiled(self, loss: Loss, model: nn.Module) -> Loss:
        """Nothing of nothing."""
        return Loss(0 * loss.total, 0 * loss.weight, {name: 0 * each for name, each in loss.values.items()})


def train(out: Path, name: str, place: parallel.Place, resume: str | None = None, **settings: Any) -> None:
    """One of them."""
    try:
        products.train(out, name, resume, place, **settings)
    except TrainError as error:
        (out / name / "error").write_text(str(error))
    every = dist.distributed_c10d._world.pg_map
    limits = {each._get_backend(place.device).options._timeout.total_seconds() for each in every}
    (out / name / "limits").write_text(json.dumps(sorted(limits - {LIMIT_S})))


def _all_shared(config: dict[str, Any]) -> dict[str, Any]:
    """What stage 3 would leave whole of models as small as these, or in one group, it shares out as of large ones."""
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 40}
    return config


def main() -> None:
    """All of them."""
    out, stories = Path(sys.argv[1]), json.loads(sys.argv[2])
    prose.written(out / "prose")
    os.environ["DS_ACCELERATOR"] = "cpu"  # as the strategy says, but that it is imported before
    from mgpu_train.engines.deepspeed import DeepSpeed

    configured = DeepSpeed._config
    DeepSpeed._config = lambda self, bucket: _all_shared(configured(self, bucket))  # type: ignore[method-assign]
    dcp.import_dcp()
    for count, told in stories.items():

        def each(place: parallel.Place, told: dict = told) -> None:
            for name, story in told.items():
                train(out, name, place, **story)

        assert ranks(int(count), each) == [0] * int(count)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
