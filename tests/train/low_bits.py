"""What test_low_bits.py looks at: trainings with moments, weights and products of few bits, by ranks that are forked.

`low_bits.py OUT STORIES`: of finetunes.py, by the number of ranks. In place of a GPU's matrix units torchao emulates
fp8 here. All packages are imported once, before ranks are forked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import mgpu_train.models.nf4
import mgpu_train.optim.eight_bit  # noqa: F401
import torch
from finetunes import train
from mgpu_train import parallel
from mgpu_train.strategies import fp8
from products import Chain, Rotation
from saves import ranks
from torch import nn


class Rows(Chain):
    """With a parameter of 8 bits and one row, of which other ranks hold nothing, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.idle = nn.Parameter(torch.empty(1, 64, 64)), nn.Linear(64, 64)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """(B, 6) -> (B, 6)."""
        return super().forward(given @ self.row[0, :6, :6])


class Uneven(Rotation):
    """Rotation's data."""

    def model(self) -> nn.Module:
        return Rows()

    def initialise(self, model: nn.Module) -> None:
        super().initialise(model)
        nn.init.normal_(model.get_parameter("row"))


def main() -> None:
    """All of them."""
    out, stories = Path(sys.argv[1]), json.loads(sys.argv[2])
    emulated = dataclasses.replace(fp8.recipe(), emulate=True)

    def each(place: parallel.Place) -> None:
        with patch.object(fp8, "require"), patch.object(fp8, "recipe", lambda: emulated):
            for name, story in stories[str(place.world_size)].items():
                train(out, name, place, **story)

    for count in map(int, stories):
        assert ranks(count, each) == [0] * count


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
