"""How a step's gradients are made and applied."""

from __future__ import annotations

from mgpu_train.engines.plain import Plain
from mgpu_train.parallel import Place


def of(place: Place) -> type[Plain]:
    """The engine for a rank of this place."""
    if place.pipeline == 1:
        return Plain
    from mgpu_train.engines.pipelined import Pipelined  # 0.3 s, which few need

    return Pipelined
