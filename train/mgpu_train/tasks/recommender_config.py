"""What task `recommender` may be told."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mgpu_train.config import Model, Text

Width = Annotated[int, Field(ge=1, le=1 << 16)]


class RecommenderOptions(Model):
    """Task recommender: what rating a user gives to an item."""

    data: Text = Field(description="file on the node, a rating a row: .csv (.tsv, .txt, .data), .parquet or .npy")
    user: Text = Field("user", description="column of users; all three by number from 0 where the file has no names")
    item: Text = Field("item", description="column of items")
    rating: Text = Field("rating", description="column of ratings")
    separator: Text = Field(",", min_length=1, max_length=1, description="between the columns of a CSV file")
    dim: int = Field(32, ge=1, le=4096, description="numbers of the vector that each user and each item has")
    hidden: tuple[Width, ...] = Field(
        (64, 32),
        max_length=16,
        description="widths of the perceptron's layers; []: none, plain matrix factorisation (default: [64, 32])",
    )
