"""Shards: every rank has a part of each block, and gathers one block at a time (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mgpu_train.memory import free_bytes
from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout

KEPT_SHARE = 0.1  # of the device's memory, for gradients that are not sharded yet


class Shards(Strategy):
    """torch's `fully_shard`, block by block and around the whole."""

    shards = True
    _keeps = False

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The same model, its parameters shared out."""
        policy = MixedPrecisionPolicy(param_dtype=self.policy.low, reduce_dtype=torch.float32)
        for block in (*map(model.get_submodule, layout.blocks), model):
            fully_shard(block, mp_policy=policy)
        whole = sum(4 * parameter.numel() for parameter in model.parameters())
        self._keeps = all(self.place.gather(whole <= KEPT_SHARE * self._memory()))
        return model

    def forward_pass(self, model: nn.Module, *, reduce: bool) -> AbstractContextManager[object]:
        """Gradients of all micro-batches are exchanged at once only where there is room for whole ones."""
        assert isinstance(model, FSDPModule)  # noqa: S101
        model.set_requires_gradient_sync(reduce or not self._keeps)
        return super().forward_pass(model, reduce=reduce)

    def _memory(self) -> float:
        """Bytes that this rank's device has."""
        if self.place.device.type == "cuda":
            return torch.cuda.get_device_properties(self.place.device).total_memory
        return free_bytes() / self.place.world_size
