"""A moving average of the parameters, which often generalises better than the newest ones (Polyak, Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_train.checkpoint.distributed.staging import local
from mgpu_train.parallel import is_sharded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Average:
    """One of each parameter that is learned. In the first steps it forgets quickly: the decay of step n is at most
    (1 + n) / (10 + n), as in TensorFlow's ExponentialMovingAverage."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._decay = decay
        self._parameters = {name: each for name, each in inner.named_parameters() if each.requires_grad}
        self._averages = {name: each.detach().clone() for name, each in self._parameters.items()}
        self._sharded: list[FSDPModule] = []
        if any(map(is_sharded, self._parameters.values())):
            from torch.distributed.fsdp import FSDPModule  # most of a second, of which the others have no need

            self._sharded = [each for each in inner.modules() if isinstance(each, FSDPModule)]

    @torch.no_grad()
    def restart(self) -> None:
        """From the parameters as they are."""
        for name, each in self._averages.items():
            local(each).copy_(local(self._parameters[name]))

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor) -> None:
        """After a step that was skipped (1) or not (0)."""
        weight = (1 - min(self._decay, (1 + step) / (10 + step))) * (1 - skipped)
        averages = [local(each) for each in self._averages.values()]
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage] - what torch.optim.swa_utils calls
            averages, [local(each) for each in self._parameters.values()], [weight] * len(averages)
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average's values meanwhile."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            one, other = local(parameter), local(self._averages[name])
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        for each in self._sharded:  # what a forward pass alone has left gathered would be taken by the next one
            each.reshard()

    @property
    def nbytes(self) -> float:
        """Of the whole one."""
        return sum(each.numel() * each.element_size() for each in self._averages.values())

    def state_dict(self) -> dict[str, Any]:
        """By the parameters' names."""
        return dict(self._averages)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place."""
        for name, each in self._averages.items():
            local(each).copy_(local(state[name]))

    def steady(self) -> Iterable[Tensor]:
        """All of it."""
        return self._averages.values()
