"""Pipeline parallelism: each stage has some of the blocks, and hands what it computes to the next one."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from mgpu_train.errors import TrainError
from mgpu_train.parallel import Place
from mgpu_train.tasks.base import Layout


class Passing(nn.Module):
    """In place of a module that another stage has."""

    def forward(self, given: Tensor, *_others: Any) -> Tensor:
        """What it is given first."""
        return given


def cut(model: nn.Module, layout: Layout, place: Place) -> tuple[nn.Module, Layout]:
    """This rank's stage, whose modules are the model's own, and its layout. Stages differ by one block at most.

    Raises TrainError: the task does not say where to cut, or a parameter would be on two stages.
    """
    stages = place.pipeline
    if not (layout.blocks and layout.first and layout.last):
        missing = "`Layout.blocks`, `first` and `last`"
        raise TrainError(f"`train.pipeline_parallel`: the task does not say where its model can be cut ({missing})")
    if len(layout.blocks) < stages:
        raise TrainError(f"`train.pipeline_parallel`: {len(layout.blocks)} blocks are no {stages} stages")
    bounds = [len(layout.blocks) * stage // stages for stage in range(stages + 1)]
    parts = [list(layout.blocks[begin:end]) for begin, end in pairwise(bounds)]
    parts[0][:0], parts[-1][len(parts[-1]) :] = layout.first, layout.last
    _refuse_tied(model, parts)
    own = set(parts[place.stage])
    stage = _without(model, [name for part in parts for name in part if name not in own])
    return stage, Layout(tuple(name for name in layout.blocks if name in own), tensor=layout.tensor)


def _without(model: nn.Module, names: list[str]) -> nn.Module:
    """The same modules but for these: containers on their paths are copied."""
    made = copy.copy(model)
    made._modules = dict(model._modules)
    paths: dict[str, list[str]] = {}
    for name in names:
        head, _, rest = name.partition(".")
        paths.setdefault(head, []).append(rest)
    for head, rests in paths.items():
        inner = model.get_submodule(head)
        made._modules[head] = Passing() if "" in rests else _without(inner, rests)
    return made


def _refuse_tied(model: nn.Module, parts: list[list[str]]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for stage, names in enumerate(parts):
        for name in names:
            for parameter in model.get_submodule(name).parameters():
                first, other = owner.setdefault(id(parameter), (stage, name))
                if first != stage:
                    raise TrainError(
                        f"`train.pipeline_parallel`: `{other}` and `{name}` share a parameter, on two stages"
                    )
