"""A learning-rate range test: which rate the losses suggest of one short training whose rate grows from step to step
(Smith 2017, "Cyclical Learning Rates for Training Neural Networks", section 3.3)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mgpu_train.config import Rate

_AROUND = 20  # the mean is of one in so many steps to each side: it is not late, as a running mean would be
_SURE = 2.0  # standard deviations of a step's loss by which it has to fall


def curve(steps: Sequence[tuple[float, float]]) -> tuple[Rate, ...]:
    """Of the rate and the loss of each step, in their order."""
    losses, side = [loss for _, loss in steps], max(1, len(steps) // _AROUND)
    means = [statistics.fmean(losses[max(0, at - side) : at + side + 1]) for at in range(len(steps))]
    return tuple(Rate(lr=lr, loss=loss, smooth=mean) for (lr, loss), mean in zip(steps, means, strict=True))


def suggested(rates: Sequence[Rate]) -> float | None:
    """Where the smoothed loss falls fastest by the logarithm of the rate, before it is least: what Lightning's finder
    suggests, too. Two digits of it; None: it does not fall by more than its noise."""
    least = min(range(len(rates)), key=lambda at: rates[at].smooth, default=0)
    falling = rates[: least + 1]
    if len(falling) < 3:
        return None
    noise = statistics.stdev(each.loss - each.smooth for each in falling)
    if falling[0].smooth - falling[-1].smooth <= _SURE * noise:
        return None

    def slope(at: int) -> float:
        before, after = falling[at - 1], falling[at + 1]
        return (after.smooth - before.smooth) / math.log(after.lr / before.lr)

    return float(f"{falling[min(range(1, least), key=slope)].lr:.2g}")
