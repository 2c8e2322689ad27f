"""One process."""

from __future__ import annotations

from torch import nn

from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout


class Single(Strategy):
    """The whole model in one process."""

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model on the device."""
        return model.to(self.place.device)
