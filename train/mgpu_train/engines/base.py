"""What an engine is: it owns the backward pass and the update of a step, and nothing of data, order or saving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mgpu_train.checkpoint.state import Part
from mgpu_train.metrics.sums import Sums, Totals
from mgpu_train.tasks.base import Batch


@dataclass(frozen=True)
class Update:
    """What became of an update: numbers of no dimension, on the device."""

    norm: Tensor  # of the mean gradient over all ranks, before clipping
    skipped: Tensor  # 1 where it was not finite and nothing was changed, else 0


class Engine(ABC):
    """One rank's. All ranks make one each and call the same methods together; a GPU is not waited for."""

    @abstractmethod
    def gradients(self, batches: Iterable[Batch | None]) -> Sums:
        """Adds up the gradients of this rank's micro-batches, and its losses; None: it has no samples in that one."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch | None]) -> Sums:
        """Adds up losses alone, as many micro-batches of each global batch as in a step."""

    @abstractmethod
    def update(self, lr: float, totals: Totals) -> Update:
        """Changes the parameters by the mean gradient of all ranks, whose losses `totals` are. Where the loss or the
        gradient is no finite number, nothing is changed."""

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """What it has to find again after an interruption, by name."""
