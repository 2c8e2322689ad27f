"""One optimizer step: what was computed, and what all ranks know of it once the device is through with it."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, fields

import numpy as np
import torch

from mgpu_train.checkpoint.distributed.dcp import Progress
from mgpu_train.data.seeds import mix
from mgpu_train.engines.base import Update
from mgpu_train.metrics.sums import WEIGHT, Reading, Sums, Totals
from mgpu_train.metrics.timing import Span
from mgpu_train.parallel import Place
from mgpu_train.signals import Wishes

WISHES = len(fields(Wishes))


@dataclass(frozen=True)
class Heard:
    """What all ranks together say of a step."""

    step: int
    samples: int  # that were consumed since training began, with it
    lr: float
    norm: float  # of the gradient, before clipping
    skipped: bool  # loss or gradient were no finite numbers, and nothing was changed
    means: dict[str, float]  # the loss, and the task's other values
    weight: float  # what was trained on, in the task's unit
    wishes: Wishes


class Pending:
    """A step that a GPU may still compute."""

    def __init__(self, progress: Progress, lr: float, totals: Totals, update: Update, span: Span) -> None:
        """`progress`: after it."""
        self._progress, self._lr, self._totals, self.span = progress, lr, totals, span
        self._reading = Reading(torch.cat((totals.vector, torch.stack((update.norm, update.skipped.double())))))

    def heard(self) -> Heard:
        """Waits for it."""
        *numbers, norm, skipped = self._reading.wait()
        wishes = Wishes(*(number > 0 for number in numbers[-WISHES:]))
        weight = numbers[self._totals.names.index(WEIGHT)]
        step, samples = self._progress.step, self._progress.samples
        return Heard(step, samples, self._lr, norm, skipped > 0, self._totals.means(numbers), weight, wishes)


def exchange(place: Place, sums: Sums, wishes: Wishes) -> Totals:
    """One exchange a step carries all that needs agreement: the losses, and what ranks wish."""
    return sums.reduce(place, *astuple(wishes))


def set_streams(seed: int, step: int, copy: int) -> None:
    """What torch (on every device), NumPy and `random` draw in this step, for this copy of the model."""
    number = mix(seed, step, copy)
    torch.manual_seed(number >> 1)  # it takes 63 bits on a GPU
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # what most programs draw from
