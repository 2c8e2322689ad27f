"""What data is: samples by number. Order, slices, prefetch and resume are the trainer's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]


class Data(Protocol):
    """Samples by number; their order, each rank's share and the resume are the trainer's."""

    @property
    def fingerprint(self) -> str:
        """Two nodes with the same one see the same samples."""
        ...

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """These samples, as tensors in the memory of the host. What is drawn for one (a crop, noise) follows from its
        seed: that of its position in training, whoever trains on it. Called by threads beside training."""
        ...
