"""Shards: every rank has a part of each block, and gathers one block at a time (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout


class Shards(Strategy):
    """torch's `fully_shard`, block by block and around the whole."""

    shards = True

    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The same model, its parameters shared out."""
        low = torch.bfloat16 if self.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for block in (*map(model.get_submodule, layout.blocks), model):
            fully_shard(block, mp_policy=policy)
        return model

    def forward_pass(self, model: nn.Module, *, reduce: bool) -> AbstractContextManager[object]:
        """It casts by its own policy, and keeps what it gathers in bf16 as well."""
        assert isinstance(model, FSDPModule)  # noqa: S101
        model.set_requires_gradient_sync(reduce)
        return nullcontext()
