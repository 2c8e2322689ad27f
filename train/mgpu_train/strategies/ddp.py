"""Replicas: every rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_train.strategies.fsdp import Sharding
from mgpu_train.tasks.base import Layout


class Replicas(Sharding):
    """torch's DistributedDataParallel; shards of one rank each where other ranks have parts of the model."""

    @property
    def shards(self) -> bool:  # type: ignore[override]
        """Where others have parts of the model."""
        return self.place.parted

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model in a wrapper that averages gradients."""
        if self.shards:
            return super().apply(model, layout)
        devices = [self.place.local_rank] if self.place.device.type == "cuda" else None
        return DistributedDataParallel(
            model.to(self.place.device),
            device_ids=devices,
            broadcast_buffers=False,  # they begin alike
            gradient_as_bucket_view=True,  # gradients are reduced where they are, not copied there and back
        )

    def forward_pass(self, model: nn.Module, *, reduce: bool) -> AbstractContextManager[object]:
        """Gradients are exchanged while the last micro-batch's are made."""
        around = ExitStack()
        if isinstance(model, DistributedDataParallel) and not reduce:
            around.enter_context(model.no_sync())
        around.enter_context(super().forward_pass(model, reduce=reduce))
        return around
