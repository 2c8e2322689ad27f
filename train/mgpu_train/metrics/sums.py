"""Losses of several batches and ranks, added up where they are: a GPU is not waited for until somebody reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from mgpu_train.parallel import Place
from mgpu_train.tasks.base import Loss

WEIGHT = "weight"
Names = tuple[tuple[str, ...], tuple[str, ...]]


class Sums:
    """What one rank has added: totals by name, and the weight that all of them are divided by."""

    def __init__(self) -> None:
        self._host: dict[str, float] = {}
        self._device: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> None:
        """One batch more."""
        self._add({**loss.values, "loss": loss.total, WEIGHT: loss.weight})

    def include(self, other: Sums) -> None:
        """What another one has added."""
        self._add({**other._device, **other._host})

    def _add(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.detach().double()
                self._device[name] = self._device[name] + value if name in self._device else value
            else:
                self._host[name] = self._host.get(name, 0.0) + value

    @property
    def names(self) -> Names:
        """Of what lies on the device, and of what lies on the host."""
        return tuple(sorted(self._device)), tuple(sorted(self._host))

    def named(self, names: Names, device: torch.device) -> Sums:
        """With nothing of these names, where they are missing."""
        for name in names[0]:
            self._device.setdefault(name, torch.zeros((), dtype=torch.float64, device=device))
        for name in names[1]:
            self._host.setdefault(name, 0.0)
        return self

    def reduce(self, place: Place, *others: float) -> Totals:
        """Adds up what all ranks have, in one exchange; it also carries `others`. All ranks call it together, with the
        same names."""
        on_device, on_host = self.names
        names, numbers = on_device + on_host, [*(self._host[name] for name in on_host), *others]
        gpu = place.device.type == "cuda"
        vector = torch.tensor(numbers, dtype=torch.float64, pin_memory=gpu).to(place.device, non_blocking=gpu)
        if self._device:
            vector = torch.cat((torch.stack([self._device[name] for name in on_device]), vector))
        if not place.tells:  # another rank has the same
            vector[: len(names)].zero_()
        if place.world_size > 1:
            dist.all_reduce(vector, group=place.data)
        return Totals(names, vector)


@dataclass(frozen=True)
class Totals:
    """Sums over all ranks, on the device: float64, those of `names` first."""

    names: tuple[str, ...]
    vector: Tensor

    def __getitem__(self, name: str) -> Tensor:
        """The sum of this name, of no dimension."""
        return self.vector[self.names.index(name)]

    def means(self, numbers: list[float]) -> dict[str, float]:
        """By name, of what was read of the vector; of nothing they are no numbers."""
        sums: Mapping[str, float] = dict(zip(self.names, numbers, strict=False))
        return {name: total / (sums[WEIGHT] or math.nan) for name, total in sums.items() if name != WEIGHT}


class Reading:
    """Numbers on their way from the device to the host. On a CPU they are there."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._there = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.current_stream().record_event()

    def wait(self) -> list[float]:
        """The numbers, once the device is through with them."""
        if self._there is not None:
            self._there.synchronize()
        return self._host.tolist()
