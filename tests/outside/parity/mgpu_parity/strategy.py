"""Replicas whose gradients are averaged by hand, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout
from torch import distributed, nn


class ByHand(Strategy):
    """What DDP does, without its speed."""

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        return model.to(self.place.device)

    @contextmanager
    def forward_pass(self, model: nn.Module, *, reduce: bool) -> Iterator[None]:
        with super().forward_pass(model, reduce=reduce):
            yield
        for parameter in model.parameters() if reduce else ():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= self.place.world_size
