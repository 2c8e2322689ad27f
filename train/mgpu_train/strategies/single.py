"""One copy of the model."""

from __future__ import annotations

from torch import nn

from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout


class Single(Strategy):
    """The whole model in one process, or one whose layers and blocks several processes share."""

    @property
    def shards(self) -> bool:  # type: ignore[override]
        """Where others have parts of the model."""
        return self.place.parted

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model on the device."""
        return model if self.shards else model.to(self.place.device)
