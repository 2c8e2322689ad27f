"""`expect:` what a run that has succeeded has to have measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mgpu.spec.block import Block

Better = Literal["lower", "higher"]

OF_THE_RUN = ("cost_usd", "duration_s", "recoveries")
"""What mgpu itself knows of a run, beside the metrics of its program."""

_HIGHER = ("accuracy", "_per_s", "_per_second")
_LOWER = ("loss", "perplexity", "error", "_s", "_usd", "recoveries")  # after those: `tokens_per_s` ends with `_s`


class Expectation(Block):
    """What one metric has to be: at most, at least, or not worse than before."""

    max: float | None = Field(None, description="the value is at most this (default: no limit)")
    min: float | None = Field(None, description="the value is at least this (default: no limit)")
    median_of: int | None = Field(
        None,
        ge=1,
        le=100,
        description="not worse than the median of so many earlier runs of the same schedule (without one: of the same "
        "name and project) that succeeded, and were as expected in this metric; compared once there are so many "
        "(default: not compared)",
    )
    tolerance_percent: float | None = Field(
        None, ge=0, description="with `median_of`: by how much it may be worse (default: needed with it)"
    )
    better: Better | None = Field(
        None,
        description="with `median_of`: which value is the better one. It follows from names that end in loss, "
        "perplexity, error, _s, _usd, recoveries (lower), or accuracy, _per_s, _per_second (higher) (default: by the "
        "name, or needed)",
    )

    def direction(self, metric: str) -> Better | None:
        """Whether lower or higher is better; None: neither the run file nor the name says it."""
        return self.better or by_name(metric)


def by_name(metric: str) -> Better | None:
    """Which value of a metric is the better one, as far as its name says it."""
    if metric.endswith(_HIGHER):
        return "higher"
    return "lower" if metric.endswith(_LOWER) else None
