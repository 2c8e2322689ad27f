"""Whether a number has an even or an odd number of ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mgpu_train.tasks.base import Batch, Data, Layout, Loss, Split, Task
from torch import nn
from torch.nn import functional

from mgpu_parity.entries import ParityOptions


class Numbers:
    """All numbers of so many bits, each of them twice in the training data."""

    def __init__(self, bits: int, copies: int) -> None:
        self.bits, self._copies = bits, copies
        self.fingerprint = f"{copies} x {bits} bits"

    def __len__(self) -> int:
        return self._copies << self.bits

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """The bits as numbers, and the class; every third number counts three times."""
        numbers = torch.tensor(samples) % (1 << self.bits)
        bits = numbers.unsqueeze(1) >> torch.arange(self.bits) & 1
        return {"bits": bits.float(), "odd": bits.sum(1) % 2, "weight": 1.0 + 2.0 * (numbers % 3 == 0)}


class Parity(Task):
    """A perceptron that learns the parity."""

    Options = ParityOptions
    unit = "numbers"
    options: ParityOptions

    def data(self, split: Split) -> Data:
        return Numbers(self.options.bits, 2 if split == "train" else 1)

    def model(self) -> nn.Module:
        bits, width = self.options.bits, self.options.width
        return nn.Sequential(nn.Linear(bits, width), nn.ReLU(), nn.Linear(width, 2))

    def initialise(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        guess, weight = model(batch["bits"]), batch["weight"]
        each = functional.cross_entropy(guess, batch["odd"], reduction="none")
        right = (guess.argmax(1) == batch["odd"]).float()
        return Loss((weight * each).sum(), weight.sum(), {"accuracy": (weight * right).sum()})

    def layout(self, model: nn.Module) -> Layout:
        return Layout(blocks=("0", "2"))
