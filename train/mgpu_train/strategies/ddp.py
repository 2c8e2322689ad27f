"""Replicas: every rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout


class Replicas(Strategy):
    """torch's DistributedDataParallel."""

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model in a wrapper that averages gradients."""
        devices = [self.place.local_rank] if self.place.device.type == "cuda" else None
        return DistributedDataParallel(
            model.to(self.place.device),
            device_ids=devices,
            broadcast_buffers=False,  # they begin alike
            gradient_as_bucket_view=True,  # gradients are reduced where they are, not copied there and back
        )

    @contextmanager
    def forward_pass(self, model: nn.Module, *, reduce: bool) -> Iterator[None]:
        """Gradients are exchanged while the last micro-batch's are made."""
        assert isinstance(model, DistributedDataParallel)  # noqa: S101
        with nullcontext() if reduce else model.no_sync(), super().forward_pass(model, reduce=reduce):
            yield
