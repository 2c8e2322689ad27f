"""One forward and one backward pass in turn (1F1B; Narayanan et al. 2021), by torch.distributed.pipelining."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from mgpu_train.data.seeds import mix
from mgpu_train.engines.plain import Plain, norm_of
from mgpu_train.errors import TrainError
from mgpu_train.metrics.sums import Names, Sums
from mgpu_train.tasks.base import Batch, Loss, Task


class Pipelined(Plain):
    """For a model of which this rank has one stage. All micro-batches have the same shape."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        place = self.strategy.place
        assert place.mesh is not None  # noqa: S101 - there is more than one stage
        if "arg_mbs" not in inspect.signature(Schedule1F1B.step).parameters:
            raise TrainError(f"`train.pipeline_parallel` needs PyTorch 2.15, and this is {torch.__version__}")
        self._first, self._last = place.stage == 0, place.stage == place.pipeline - 1
        self._group = place.mesh["pipeline"].get_group()
        stage = Stage(self.model, place.stage, place.pipeline, place.device, group=self._group)
        self._schedule = Schedule1F1B(stage, self._count, self._loss_of, scale_grads=False)
        self._batches: list[Batch] = []
        self._losses: dict[int, Loss] = {}  # by micro-batch
        self._names: dict[bool, Names] = {}  # of training, and of validation, which may tell more
        self._seed, self._ran = 0, 0  # of the streams of this step; micro-batches that have drawn from them
        self._met = False  # stages have told each other the shapes of what they hand on

    def gradients(self, batches: Iterable[Batch | None]) -> Sums:
        """Each stage sees all micro-batches; the last one has their losses."""
        given, seed = list(batches), torch.initial_seed()  # which all stages of a copy have in this step
        self._buffers.keep()
        if not self._met:  # torch runs a micro-batch for it, which draws: what comes after must not depend on that
            self._part_streams(seed)
            self._gradients(given)
            self.optimizers.zero_grad()
            self._buffers.put_back()
            self._met = True
            if self._scale is not None:
                self._scale.begin(self._losses[0].weight if self._last else None)
        self._part_streams(seed)
        return self._agreed(self._gradients(given))

    def _part_streams(self, seed: int) -> None:
        """Each stage draws its own, so that no two drop the same values; by NumPy and `random` only tasks do."""
        self._seed, self._ran = seed, 0
        torch.manual_seed(mix(seed, self.strategy.place.stage) >> 1)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)

    @contextmanager
    def _stream(self, number: int) -> Iterator[None]:
        """What a task draws for a micro-batch is the same on the first stage, for its inputs, and on the last one, for
        its loss."""
        device = self.strategy.place.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(mix(self._seed, -1, self._ran + number) >> 1)
            yield

    def _gradients(self, batches: Iterable[Batch | None]) -> Sums:
        with self.strategy.forward_pass(self.model, reduce=True):
            return self._run(batches, self._schedule.step)

    def evaluate(self, batches: Iterable[Batch | None]) -> Sums:
        """As many micro-batches at a time as in a step."""
        sums, rest = Sums(), iter(batches)
        self._part_streams(torch.initial_seed())
        while some := list(islice(rest, self._count)):
            with torch.no_grad(), self.strategy.forward_pass(self.model, reduce=False):
                sums.include(self._run(some, self._schedule.eval))
        return self._agreed(sums)

    def _run(self, batches: Iterable[Batch | None], schedule: Callable[..., object]) -> Sums:
        self._batches, self._losses = [batch for batch in batches if batch is not None], {}
        inputs = [self._inputs(number) for number in range(len(self._batches))] if self._first else None
        numbers = [torch.tensor(number) for number in range(self._count)] if self._last else None
        schedule(arg_mbs=inputs, target_mbs=numbers)
        self._ran += len(self._batches)
        self._did()
        sums = Sums()
        for _, loss in sorted(self._losses.items()):
            sums.add(loss)
        return sums

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        answers = _Answers(output).train(self.model.training)
        batch = self._batches[int(number)]
        with self._stream(int(number)):
            loss = (self.task.loss if self.model.training else self.task.evaluate)(answers, batch)
        self._losses[int(number)] = loss.detached
        self._did()
        return self._scale.up(loss.total) if self._scale else loss.total

    def _inputs(self, number: int) -> tuple[Any, ...]:
        """What the task gives its model of a micro-batch."""
        with self._stream(number):
            return _inputs(self.task, self._batches[number])

    def _agreed(self, sums: Sums) -> Sums:
        """With the names that the last stage has."""
        place, training = self.strategy.place, self.model.training
        if training not in self._names:
            self._names[training] = next(names for names in place.gather(sums.names) if names != ((), ()))
        return sums.named(self._names[training], place.device)

    def _norm(self) -> Tensor:
        """Over all stages."""
        squared = norm_of(self.model).square()
        distributed.all_reduce(squared, group=self._group)
        return squared.sqrt()


class Stage(PipelineStage):
    """Torch's own, whose backward pass would be within the autocast of the forward one."""

    def backward_one_chunk(self, *given: Any, **named: Any) -> None:
        """What was computed in float32 goes back in it."""
        with torch.autocast(self.device.type, enabled=False):
            super().backward_one_chunk(*given, **named)


class _Answers(nn.Module):
    """A model that has given its answer already."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, *_given: Any) -> Tensor:
        return self._answer


class _Asked(Exception):
    """What a task gives its model."""


class _Asks(nn.Module):
    def forward(self, *given: Any) -> Tensor:
        raise _Asked(given)


def _inputs(task: Task, batch: Batch) -> tuple[Any, ...]:
    try:
        task.loss(_Asks(), batch)
    except _Asked as asked:
        return asked.args[0]
    raise TrainError(f"`train.pipeline_parallel`: the loss of {type(task).__name__} does not call its model")
