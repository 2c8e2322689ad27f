"""Shards: every rank has a part of each block, and gathers one block at a time (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_train.health.hardware import free_bytes
from mgpu_train.strategies.base import Strategy
from mgpu_train.strategies.entry import Sizes
from mgpu_train.tasks.base import Layout

KEPT_SHARE = 0.1  # of the device's memory, for gradients that are not sharded yet


class Sharding(Strategy):
    """torch's `fully_shard`, block by block and around the whole."""

    shards = True
    _shared = _keeps = False

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The same model, its parameters shared out."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # ddp has no need of it: most of a second

        whole = sum(4 * parameter.numel() for parameter in model.parameters())
        self._keeps = all(self.place.gather(whole <= KEPT_SHARE * self._memory()))
        policy = MixedPrecisionPolicy(param_dtype=self.policy.low, reduce_dtype=torch.float32)
        mesh = self._mesh()
        for block in (*map(model.get_submodule, layout.blocks), model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self._shared = True
        return model

    def forward_pass(self, model: nn.Module, *, reduce: bool) -> AbstractContextManager[object]:
        """Gradients of all micro-batches are exchanged at once only where there is room for whole ones."""
        if self._shared:
            model.set_requires_gradient_sync(reduce or not self._keeps)  # type: ignore[operator] - FSDPModule's
        return super().forward_pass(model, reduce=reduce)

    def _mesh(self) -> DeviceMesh | None:
        """With a dimension of copies only where there are several: else each block's gradients have an all-reduce among
        one rank, and DTensor looks at several times as many ways of each new operation, which is half of a start."""
        mesh = self.place.mesh
        if mesh is None:
            return None
        return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]

    def _memory(self) -> float:
        """Bytes that this rank's device has."""
        if self.place.device.type == "cuda":
            return torch.cuda.get_device_properties(self.place.device).total_memory
        return free_bytes() / self.place.world_size


class Shards(Sharding):
    """Among all ranks that learn from tokens or samples of their own."""

    def groups(self, sizes: Sizes) -> tuple[int, int]:
        """One copy of the model."""
        return 1, sizes.copies


class Groups(Sharding):
    """Among the ranks of a group, a node by default; groups are replicas of each other (HSDP)."""

    def groups(self, sizes: Sizes) -> tuple[int, int]:
        """A copy of the model each."""
        return sizes.groups, sizes.copies // sizes.groups
