"""How a step's gradients are made and applied."""

from __future__ import annotations

from mgpu_train import entries
from mgpu_train.engines.plain import Plain
from mgpu_train.strategies.base import Strategy

_PIPELINED = "mgpu_train.engines.pipelined:Pipelined"  # 0.3 s to import, which few need


def of(strategy: Strategy) -> type[Plain]:
    """The engine for a rank whose model was spread by this strategy."""
    path = _PIPELINED if strategy.place.pipeline > 1 else strategy.engine
    return Plain if path is None else entries.load(path, Plain, "train.strategy")
