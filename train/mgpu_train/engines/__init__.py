"""How a step's gradients are made and applied."""

from __future__ import annotations

from mgpu_train import entries
from mgpu_train.engines.plain import Plain
from mgpu_train.strategies.base import Strategy


def of(strategy: Strategy) -> type[Plain]:
    """The engine for a rank whose model was spread by this strategy. Raises TrainError: the strategy's own is none for
    stages of a pipeline."""
    base: type[Plain] = Plain
    if strategy.place.pipeline > 1:
        from mgpu_train.engines.pipelined import Pipelined  # 0.3 s, which few need

        base = Pipelined
    return base if strategy.engine is None else entries.load(strategy.engine, base, "train.strategy")
