"""Forward and backward, micro-batch by micro-batch, and one step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mgpu_train.checkpoint.state import ModelPart, OptimizerPart, Part
from mgpu_train.engines.base import Engine, Update
from mgpu_train.engines.buffers import Buffers
from mgpu_train.engines.scale import LossScale
from mgpu_train.metrics.sums import WEIGHT, Sums, Totals
from mgpu_train.optim.base import Optimizers
from mgpu_train.parallel import is_sharded
from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Batch, Task


class Plain(Engine):
    """For every strategy that leaves a model which can be called."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        strategy: Strategy,
        optimizers: Optimizers,
        *,
        clip_norm: float,
        micro_batches: int,
        did: Callable[[], None],
    ) -> None:
        """`micro_batches` of each step; `did` is called after each."""
        self.task, self.model, self.strategy, self.optimizers = task, model, strategy, optimizers
        self._clip_norm, self._count, self._did = clip_norm, micro_batches, did
        self._called = model  # by the task
        self._buffers = Buffers(model)
        self._scale = LossScale(strategy.place) if strategy.policy.scaled else None

    def gradients(self, batches: Iterable[Batch | None]) -> Sums:
        """The strategy exchanges them with the last one's."""
        self._buffers.keep()
        sums = Sums()
        for number, (batch, empty) in enumerate(_filled(batches), 1):
            with self.strategy.forward_pass(self.model, reduce=number == self._count):
                loss = self.task.loss(self._called, batch)
                if empty:
                    loss = loss.nothing
                total = loss.total
                if self._scale is not None:
                    self._scale.begin(loss.weight)
                    total = self._scale.up(total)
                # what was computed in float32 goes back in it: autocast would make products of 16 bits of that
                with torch.autocast(total.device.type, enabled=False):
                    self._backward(total)
            sums.add(loss)
            self._did()
        return sums

    def _backward(self, total: Tensor) -> None:
        """Of one micro-batch."""
        total.backward()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch | None]) -> Sums:
        """Forward passes alone."""
        sums = Sums()
        for batch, empty in _filled(batches):
            with self.strategy.forward_pass(self.model, reduce=False):
                loss = self.task.evaluate(self._called, batch)
            sums.add(loss.nothing if empty else loss)
            self._did()
        return sums

    def update(self, lr: float, totals: Totals) -> Update:
        """Mean, clipping and the loss's scale are one factor, which optimizers apply as they read the gradients."""
        # the strategy has left the mean over copies of the gradients of sums
        share = self.strategy.place.copies / totals[WEIGHT] / (1.0 if self._scale is None else self._scale.value)
        norm = share * self._norm()
        factor = share * (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)
        finite = torch.isfinite(norm) & torch.isfinite(totals["loss"])
        skipped = (~finite).float()
        self.optimizers.step(lr, factor, skipped)
        self.optimizers.zero_grad()
        self._buffers.put_back(skipped.bool())
        if self._scale is not None:
            self._scale.update(skipped)
        return Update(norm, skipped)

    def _norm(self) -> Tensor:
        """Of the sum of all gradients, scaled as they are."""
        return norm_of(self.model)

    def parts(self) -> Mapping[str, Part]:
        """Model and optimizer, and the loss's scale where there is one."""
        parts: dict[str, Part] = {
            "model": ModelPart(self.model),
            "optimizer": OptimizerPart(self.model, *self.optimizers.each),
        }
        return parts if self._scale is None else {**parts, "scale": self._scale}


def _filled(batches: Iterable[Batch | None]) -> Iterator[tuple[Batch, bool]]:
    """Each batch; in place of an empty one that before it, and True: other ranks wait for this one's passes."""
    newest = None
    for batch in batches:
        newest = newest if batch is None else batch
        assert newest is not None  # noqa: S101 - each replica has a sample at least
        yield newest, batch is None


def norm_of(model: nn.Module) -> Tensor:
    """Of all gradients that this rank has a part of, over the ranks that have the others: float64, of no dimension."""
    meshes: dict[Any, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [nn.utils.get_total_norm(gradients) for gradients in meshes.values()]
    whole = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack([norm.double() for norm in whole]))
