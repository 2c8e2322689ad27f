"""Losses of several batches and ranks, added up."""

from __future__ import annotations

import math

from torch import Tensor

from mgpu_train.parallel import Place
from mgpu_train.tasks.base import Loss


class Sums:
    """What was added: totals by name, and the weight that all of them are divided by."""

    def __init__(self) -> None:
        self.weight = 0.0
        self.totals: dict[str, float] = {}

    def add(self, loss: Loss) -> None:
        """One batch more. On a GPU it is waited for."""
        self.weight += float(loss.weight)
        for name, value in {**loss.values, "loss": loss.total}.items():
            number = value.item() if isinstance(value, Tensor) else value  # float() of what has a gradient warns
            self.totals[name] = self.totals.get(name, 0.0) + number

    def reduce(self, place: Place, *others: float) -> list[float]:
        """Adds up what all ranks have, in one exchange; it also carries `others`, whose sums it returns."""
        names = sorted(self.totals)
        self.weight, *sums = place.sum(self.weight, *(self.totals[name] for name in names), *others)
        self.totals = dict(zip(names, sums, strict=False))
        return sums[len(names) :]

    @property
    def means(self) -> dict[str, float]:
        """By name; of nothing they are no numbers."""
        return {name: total / (self.weight or math.nan) for name, total in self.totals.items()}
