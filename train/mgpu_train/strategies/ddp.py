"""Replicas: every rank has the whole model, and gradients are averaged."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_train.strategies.fsdp import Sharding
from mgpu_train.tasks.base import Layout


class _Wrapper(DistributedDataParallel):
    """Torch's own, but that a forward pass does not import torch's compiler to be left alone by it."""

    _inside_ddp_forward = contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Where nothing has imported the compiler, 1.5 s of a start, it need not be imported to say what it says by default
    of DistributedDataParallel: that it would not take the place of its reducer."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    names: Any = vars(torch)
    default = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    names["_dynamo"] = stand_in = SimpleNamespace(utils=default)
    try:
        yield
    finally:
        if names.get("_dynamo") is stand_in:  # else another thread has imported it
            del names["_dynamo"]


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
        with _without_compiler(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".broadcast_buffers. is deprecated")  # older torch has no other
            return _Wrapper(
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
