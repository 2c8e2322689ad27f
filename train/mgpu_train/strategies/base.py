"""What a strategy is: how a model is spread over ranks, and nothing of what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mgpu_train import entries
from mgpu_train.errors import TrainError
from mgpu_train.parallel import DIMENSIONS, Place
from mgpu_train.strategies import entry
from mgpu_train.strategies.entry import Sizes
from mgpu_train.strategies.precision import Policy
from mgpu_train.tasks.base import Layout


class Strategy(ABC):
    """How a model is spread over ranks. `shards`: `apply` takes a model without values, on the meta device, and leaves
    DTensors of it, which get their values afterwards; no rank ever has the whole model. `engine`: the import path of
    what does backward and update in the way that the strategy needs (`mgpu_train.engines.plain.Plain`, or a class
    derived from it; with `pipeline_parallel` from `mgpu_train.engines.pipelined.Pipelined`); None: as for any other.
    """

    shards: bool = False
    engine: str | None = None

    def __init__(self, place: Place, policy: Policy) -> None:
        self.place, self.policy = place, policy

    def groups(self, sizes: Sizes) -> tuple[int, int]:
        """How many groups of ranks have a copy of the model each, and how many ranks share one; here none are shared.
        It is asked before `apply`, which finds a mesh of these sizes in `place` where there is more than one group."""
        return sizes.copies, 1

    @abstractmethod
    def apply(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model, spread, on the device of this rank. It comes with the same values on all ranks, on the host; where
        the strategy leaves `shards`, it comes and goes without any."""

    def forward_pass(self, model: nn.Module, *, reduce: bool) -> AbstractContextManager[object]:
        """Around forward and backward of one micro-batch of the spread model, and around a forward pass alone. With
        `reduce`, its end leaves the mean of all ranks' gradients on each. Here: the precision alone."""
        _ = model, reduce
        return torch.autocast(self.place.device.type, self.policy.low, enabled=self.policy.low is not None)


def load(name: str, place: Place, sizes: Sizes, policy: Policy) -> Strategy:
    """The strategy of this name, or at this path, with its place among the ranks.

    Raises:
        TrainError: it cannot be imported, or does not go with so many ranks.
    """
    ours = entry.OURS.get(name)
    if why := sizes.refuse() or (ours and ours.refuse(sizes)):
        raise TrainError(f"`train.strategy`: {why}")
    kind: type[Strategy] = entries.load(ours.strategy if ours else entry.told(name), Strategy, "train.strategy")
    spread = replace(place, tensor=sizes.tensor, context=sizes.context, pipeline=sizes.pipeline)
    strategy = kind(spread, policy)
    replicate, shard = strategy.groups(sizes)
    if strategy.place.parted or (replicate > 1 and shard > 1):
        shape = (sizes.pipeline, replicate, shard, sizes.tensor)
        mesh = init_device_mesh(place.device.type, shape, mesh_dim_names=DIMENSIONS)
        strategy.place = replace(strategy.place, mesh=mesh)
    return strategy
