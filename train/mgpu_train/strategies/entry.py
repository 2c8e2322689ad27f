"""The strategies that are installed: entries of the group `mgpu_train.strategies`, ours and anybody's.

An entry is read without importing the strategy, which needs torch.

    [project.entry-points."mgpu_train.strategies"]
    fsdp = "mgpu_train.strategies.entry:FSDP"
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from mgpu_train import entries
from mgpu_train.config import Training, ZeroStage
from mgpu_train.entries import Entries

GROUP = "mgpu_train.strategies"


@dataclass(frozen=True)
class Sizes:
    """What is known of the ranks before there are any."""

    world_size: int
    nodes: int = 1
    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # stages of blocks
    replicas: int | None = None  # of strategy hsdp; None: one a node
    context: int = 1  # copies of the model that share each sequence
    zero_stage: ZeroStage = 2  # of strategy deepspeed

    @staticmethod
    def of(train: Training, world_size: int, nodes: int) -> Sizes:
        """As a run file says."""
        parts = train.tensor_parallel, train.pipeline_parallel
        return Sizes(world_size, nodes, *parts, train.replicas, train.context_parallel, train.zero_stage)

    @property
    def data(self) -> int:
        """Parts of each batch, which copies of the model learn from."""
        return self.copies // self.context

    @property
    def copies(self) -> int:
        """Copies of the model, sharded or not, that learn from tokens or samples of their own."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def groups(self) -> int:
        """Groups of ranks that share one copy of the model, under hsdp."""
        return self.replicas or self.nodes

    def refuse(self) -> str | None:
        """Why no strategy can take them."""
        parts = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        if self.world_size % math.prod(parts.values()):
            told = " x ".join(f"{size} ({name}_parallel)" for name, size in parts.items() if size > 1)
            return f"{self.world_size} processes cannot be parted by {told}"
        if (self.world_size // self.nodes) % self.tensor:
            return f"the {self.world_size // self.nodes} processes of a node are not a multiple of tensor_parallel"
        return None


def _nothing(_: Sizes) -> str | None:
    return None


def _several(sizes: Sizes) -> str | None:
    if sizes.copies == 1:
        return None
    return f"single is for one process, and {sizes.world_size} are asked for: use ddp or fsdp"


def _groups(sizes: Sizes) -> str | None:
    if sizes.groups > 1 and sizes.copies % sizes.groups == 0 and sizes.copies > sizes.groups:
        return None
    return (
        "hsdp needs 2 replicas or more, of 2 ranks or more each: "
        f"{sizes.copies} ranks cannot be {sizes.groups} replicas"
    )


def _shared_layers(sizes: Sizes) -> str | None:
    if sizes.data == sizes.world_size:
        return None
    return (
        "deepspeed shares out whole layers alone: leave tensor_parallel, pipeline_parallel and context_parallel at 1, "
        "or use fsdp, which goes with all three"
    )


@dataclass(frozen=True)
class StrategyEntry:
    """What an entry of the group names. The entry's own name is what a run file says in `train.strategy`."""

    strategy: str  # "package.module:Class", a `mgpu_train.strategies.base.Strategy`; imported on nodes
    refuse: Callable[[Sizes], str | None] = _nothing  # why it cannot be, in a sentence; asked before anything is rented
    sharded: bool = False  # a rank holds parts of the model that no other has


SINGLE = StrategyEntry("mgpu_train.strategies.single:Single", refuse=_several)
DDP = StrategyEntry("mgpu_train.strategies.ddp:Replicas")
FSDP = StrategyEntry("mgpu_train.strategies.fsdp:Shards", sharded=True)
HSDP = StrategyEntry("mgpu_train.strategies.fsdp:Groups", refuse=_groups, sharded=True)
DEEPSPEED = StrategyEntry("mgpu_train.strategies.deepspeed:DeepSpeed", refuse=_shared_layers, sharded=True)

# by name, since a node has no entry points of ours
OURS = {"single": SINGLE, "ddp": DDP, "fsdp": FSDP, "hsdp": HSDP, "deepspeed": DEEPSPEED}


@functools.cache
def installed() -> Entries[StrategyEntry]:
    """The strategies of this environment."""
    return entries.read(GROUP, StrategyEntry)


def told(name: str) -> str:
    """What nodes are told of `train.strategy`: one of ours by its name, any other by its import path."""
    return name if name in OURS or ":" in name else entries.need(installed(), name, "train.strategy").strategy
