"""What a forward pass in training changes of a model by itself: the statistics of batch norms, for instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors as apart  # as DistributedDataParallel does

from mgpu_train.checkpoint.distributed.staging import local

Where = tuple[nn.Module, str]


class Buffers:
    """A model's buffers as they were when they were kept. Those of a type are one vector on the way: a batch norm has
    three, and a network many of them.

    Left out are weights that are kept in 8 bits, which no pass changes and a copy would double, and what is expanded,
    which nothing can change in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name, each in module.named_buffers(recurse=False)
            if (each.itemsize > 1 or each.dtype == torch.bool) and 0 not in each.stride()
        ]
        self._kept: dict[Where, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """As they are now."""
        self._kept, now = {}, self._now()
        for group in _groups(now):
            values = [now[place] for place in group]
            self._kept.update(zip(group, apart(_joined(values), values), strict=True))

    @torch.no_grad()
    def put_back(self, where: Tensor | None = None) -> None:
        """As they were kept, if `where` is true (bool of no dimension; None: in any case); a GPU is not waited for. One
        that has become another, as a cache that grows, stays as it is."""
        now = {place: each for place, each in self._now().items() if _alike(each, self._kept.get(place))}
        for group in _groups(now):
            values, old = [now[place] for place in group], _joined(self._kept[place] for place in group)
            if where is not None:
                old = torch.where(where.to(old.device), old, _joined(values))
            torch._foreach_copy_(values, apart(old, values))  # pyright: ignore[reportPrivateImportUsage] - optimizers do

    def _now(self) -> dict[Where, Tensor]:
        """A module may have put another tensor in a buffer's place, or none."""
        found = ((place, place[0]._buffers.get(place[1])) for place in self._places)
        return {place: local(each) for place, each in found if each is not None}


def _groups(tensors: Mapping[Where, Tensor]) -> Iterable[list[Where]]:
    """Of one type, on one device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Where]] = {}
    for place, each in tensors.items():
        groups.setdefault((each.dtype, each.device), []).append(place)
    return groups.values()


def _alike(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _joined(tensors: Iterable[Tensor]) -> Tensor:
    """A copy, also of one tensor alone."""
    return torch.cat([each.flatten() for each in tensors])
