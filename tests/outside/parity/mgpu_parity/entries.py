"""What is known of them without torch."""

from __future__ import annotations

from mgpu_train.strategies.entry import Sizes, StrategyEntry
from mgpu_train.tasks.entry import TaskEntry
from pydantic import BaseModel, ConfigDict, Field


class ParityOptions(BaseModel):
    """`train.options` of task parity."""

    model_config = ConfigDict(extra="forbid")

    bits: int = Field(6, ge=2, le=12, description="how long a number is")
    width: int = Field(32, ge=1, description="of the hidden layer")


def _even(sizes: Sizes) -> str | None:
    return None if sizes.world_size % 2 == 0 else f"byhand takes ranks in pairs, and there are {sizes.world_size}"


PARITY = TaskEntry(task="mgpu_parity.task:Parity", options=ParityOptions)
BY_HAND = StrategyEntry(strategy="mgpu_parity.strategy:ByHand", refuse=_even)
