"""When validation has stopped getting better."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mgpu_train.config import EarlyStopping


class Patience:
    """How often in a row a value of the validations was no better than the best one before."""

    def __init__(self, config: EarlyStopping) -> None:
        self._config, self.metric = config, config.metric
        self._watched = f"{config.metric} {config.mode}"
        self._sign = 1.0 if config.mode == "min" else -1.0
        self.best, self.worse = math.inf, 0

    @property
    def over(self) -> bool:
        """Training ends."""
        return self.worse >= self._config.patience

    def take(self, means: dict[str, float]) -> bool:
        """Counts one validation; False: it has no value of this name."""
        if self._config.metric not in means:
            return False
        value = self._sign * means[self._config.metric]
        better = value < self.best - self._config.min_delta
        self.worse = 0 if better else self.worse + 1
        self.best = value if better else self.best
        return True

    def state_dict(self) -> dict[str, Any]:
        """Two numbers, by what is watched."""
        return {self._watched: {"best": self.best, "worse": self.worse}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from them; where another value was watched, begins anew: no loss is as good as an accuracy."""
        if kept := state.get(self._watched):
            self.best, self.worse = kept["best"], kept["worse"]

    def steady(self) -> Iterable[Tensor]:
        """No tensor."""
        return ()
