"""Task `recommender`: which rating a user gives to an item.

In shapes, B is ratings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import nn

from mgpu_train.data.base import Batch, Data
from mgpu_train.data.ratings import Ratings, open_ratings
from mgpu_train.models.dlrm import DLRM
from mgpu_train.tasks.base import Layout, Loss, Split, Task
from mgpu_train.tasks.recommender_config import RecommenderOptions


class Recommender(Task):
    """Ratings, by tables of users and items."""

    Options = RecommenderOptions
    unit = "ratings"
    options: RecommenderOptions

    def data(self, split: Split) -> Data:
        """Nine ratings of ten, or the tenth."""
        return self._splits[split == "validation"]

    def model(self) -> nn.Module:
        """Tables for all users and items of the file."""
        users, items = self._splits[0].counts
        return DLRM(users, items, dim=self.options.dim, hidden=self.options.hidden)

    def initialise(self, model: nn.Module) -> None:
        """So that it guesses the mean rating, nearly."""
        assert isinstance(model, DLRM)  # noqa: S101
        model.initialise(self._mean)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Squares of the errors."""
        return _squares(model(batch["user"], batch["item"]), batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        """The same of guesses that are as high and as low as ratings are."""
        ratings = self._splits[0].ratings
        return _squares(model(batch["user"], batch["item"]).clamp(ratings.min(), ratings.max()), batch)

    def derived(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """The error in the unit of ratings: the root of the mean of all ranks' squares, and not a mean of roots."""
        return {"rmse": math.sqrt(means["loss"])}

    def layout(self, model: nn.Module) -> Layout:
        """Ranks that share the tables have some of the rows each, and exchange what a batch needs."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import RowwiseParallel

        rows = RowwiseParallel(input_layouts=Replicate())
        return Layout(tensor={"users": rows, "items": rows})

    def facts(self) -> Mapping[str, float]:
        """How many users and items there are, and the RMSE of who always guesses the mean: the mark to fall below."""
        users, items = self._splits[0].counts
        errors = self._splits[1].ratings - self._mean
        return {"users": users, "items": items, "constant_rmse": round(float(np.sqrt((errors**2).mean())), 4)}

    @cached_property
    def _splits(self) -> tuple[Ratings, Ratings]:
        options = self.options
        return open_ratings(options.data, (options.user, options.item, options.rating), options.separator)

    @cached_property
    def _mean(self) -> float:
        return float(self._splits[0].ratings.mean())


def _squares(guess: torch.Tensor, batch: Batch) -> Loss:
    return Loss((guess - batch["rating"]).square().sum(), len(guess))
