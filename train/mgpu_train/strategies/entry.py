"""The strategies that are installed: entries of the group `mgpu_train.strategies`, ours and anybody's.

An entry is read without importing the strategy, which needs torch.

    [project.entry-points."mgpu_train.strategies"]
    fsdp = "mgpu_train.strategies.entry:FSDP"
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from mgpu_train import entries
from mgpu_train.entries import Entries

GROUP = "mgpu_train.strategies"


@dataclass(frozen=True)
class Sizes:
    """What is known of the ranks before there are any."""

    world_size: int


def _nothing(_: Sizes) -> str | None:
    return None


def _several(sizes: Sizes) -> str | None:
    if sizes.world_size == 1:
        return None
    return f"single is for one process, and {sizes.world_size} are asked for: use ddp or fsdp"


@dataclass(frozen=True)
class StrategyEntry:
    """What an entry of the group names. The entry's own name is what a run file says in `train.strategy`."""

    strategy: str  # "package.module:Class", a `mgpu_train.strategies.base.Strategy`; imported on nodes
    refuse: Callable[[Sizes], str | None] = _nothing  # why it cannot be, in a sentence; asked before anything is rented
    sharded: bool = False  # a rank holds parts of the model that no other has


SINGLE = StrategyEntry("mgpu_train.strategies.single:Single", refuse=_several)
DDP = StrategyEntry("mgpu_train.strategies.ddp:Replicas")
FSDP = StrategyEntry("mgpu_train.strategies.fsdp:Shards", sharded=True)

OURS = {"single": SINGLE, "ddp": DDP, "fsdp": FSDP}  # by name, since a node has no entry points of ours


@functools.cache
def installed() -> Entries[StrategyEntry]:
    """The strategies of this environment."""
    return entries.read(GROUP, StrategyEntry)


def told(name: str) -> str:
    """What nodes are told of `train.strategy`: one of ours by its name, any other by its import path."""
    return name if name in OURS or ":" in name else entries.need(installed(), name, "train.strategy").strategy
