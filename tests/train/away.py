"""What test_groups.py looks at: one of four ranks stays away from collectives of groups that a strategy has made.

`away.py OUT` writes OUT/RANK.json: what each rank was told by the groups that it has waited in; and before that
OUT/means-RANK.json: what a batch norm has on it whose mean was the rank's number before all were made one.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import saves
import torch
from mgpu_train import parallel
from mgpu_train.strategies import base, context
from mgpu_train.strategies.entry import Sizes
from mgpu_train.strategies.precision import POLICIES
from torch import distributed as dist
from torch import nn

LIMIT_S, ABSENT = 6, 3
MESHES = {
    "fsdp": Sizes(4, tensor=2, pipeline=2),
    "hsdp": Sizes(4, nodes=2),
    "ddp": Sizes(4, context=2),
}


class Sequences:
    """A task that keeps what it is given to share them by."""

    def share_sequences(self, _model: nn.Module, given: Any) -> None:
        """The ranks of one sequence."""
        self.group = given.group


def groups(place: parallel.Place) -> dict[str, dist.ProcessGroup]:
    """By strategy and what they share, those of several ranks that this one is in."""
    made = dict[str, dist.ProcessGroup]()
    for name, sizes in MESHES.items():
        strategy = base.load(name, place, sizes, POLICIES["fp32"])
        if strategy.place.mesh is not None:
            for shared in parallel.DIMENSIONS:
                made[f"{name} {shared}"] = strategy.place.mesh[shared].get_group()
        if sizes.context > 1:
            task: Any = Sequences()
            context.share(nn.Identity(), task, strategy.place)
            made[f"{name} context"] = task.group
    return {name: group for name, group in made.items() if dist.get_world_size(group) > 1}


def wait(made: dict[str, dist.ProcessGroup]) -> dict[str, str]:
    """All at once, in each group that lacks somebody."""
    begun = {
        name: dist.all_reduce(torch.ones(1), group=group, async_op=True)
        for name, group in made.items()
        if ABSENT in dist.get_process_group_ranks(group)
    }
    told = dict[str, str]()
    for name, work in begun.items():
        try:
            work.wait()
            told[name] = ""
        except RuntimeError as error:
            told[name] = str(error)
    return told


def means(place: parallel.Place) -> dict[str, float]:
    """By how the model is parted."""
    found = dict[str, float]()
    for name, sizes in {"pipeline": Sizes(4, pipeline=2), "tensor": Sizes(4, tensor=2)}.items():
        norm = nn.BatchNorm1d(1)
        assert norm.running_mean is not None
        norm.running_mean.fill_(place.rank)
        parallel.mean_statistics(norm, base.load("fsdp", place, sizes, POLICIES["fp32"]).place)
        found[name] = norm.running_mean.item()
    return found


def body(place: parallel.Place) -> None:
    """What each rank does."""
    (Path(sys.argv[1]) / f"means-{place.rank}.json").write_text(json.dumps(means(place)))
    made, store = groups(place), dist.distributed_c10d._get_default_store()
    told = wait(made) if place.rank != ABSENT else {}
    store.set(f"waited-{place.rank}", "")
    store.wait([f"waited-{rank}" for rank in range(4)], timedelta(seconds=10 * LIMIT_S))  # until then nobody leaves
    (Path(sys.argv[1]) / f"{place.rank}.json").write_text(json.dumps(told))
    place.barrier()  # one of them keeps the store


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    saves.LIMIT_S = LIMIT_S
    sys.exit(saves.ranks(4, body) != [0] * 4)
