"""Which machine of a fleet is not fit to train on, by what was measured on all. Pure: figures in, words out.

One that is broken, or slower than all others, costs the whole fleet: every step waits for the last rank. Standard
library only: launchers judge by it, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NARROW = 0.5  # of the fleet's median between the GPUs of a machine


@dataclass(frozen=True)
class Kind:
    """What multiplies matrices. `slow`: the share of the fleet's median below which a machine is at fault;
    `per_tflops`: its own units in one TFLOPS."""

    one: str  # and the number of what has one: rank or node
    many: str
    slow: float
    unit: str
    per_tflops: float

    def words(self, tflops: float) -> str:
        """So many, in this kind's own unit."""
        return f"{tflops * self.per_tflops:.4g} {self.unit}"


GPUS = Kind("the GPU of rank", "ranks", 0.7, "TFLOPS", 1)  # those of one kind differ by a tenth
PROCESSORS = Kind("the processor of node", "nodes", 0.5, "GFLOPS", 1000)  # of one kind may be of two generations


def by_figures(ranks: Sequence[dict[str, Any]], node_rank: int, processes: int, kind: Kind = GPUS) -> str | None:
    """This node's share in what was measured on all ranks, compared with the fleet's; None: nothing is odd, or what was
    written makes no sense. `processes` of each node have measured."""
    try:
        mine = [each for each in ranks if each["rank"] // processes == node_rank]
        return _wrong(mine) or _slow(mine, ranks, kind) or _narrow(mine, ranks)
    except (KeyError, TypeError, ValueError, statistics.StatisticsError):
        return None


def between(ranks: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong between the nodes, which no single one of them can be blamed for; None: nothing is."""
    try:
        wrong = [each["rank"] for each in ranks if each["between"]["right"] is False]
    except (KeyError, TypeError):
        return None
    return f"a sum over all nodes is wrong on rank {wrong[0]}" if wrong else None


def summary(ranks: Sequence[dict[str, Any]], kind: Kind = GPUS) -> str:
    """What was measured, in a line. Raises KeyError, TypeError and ValueError: it makes no sense."""

    def least(part: str) -> str:
        known = [each[part]["gb_per_s"] for each in ranks if each[part]["gb_per_s"] is not None]
        return f"{min(known):.3g} GB/s" if known else "not measured"

    slowest = min(each["tflops"] for each in ranks)
    words = f"{len(ranks)} {kind.many}, {kind.words(slowest)} each at least"
    inside = f", a sum inside a node {least('inside')}" if kind is GPUS else ""
    return f"{words}{inside}, over all {kind.many} {least('between')}"


def _wrong(mine: Sequence[dict[str, Any]]) -> str | None:
    wrong = [each["rank"] for each in mine if not each["inside"]["right"]]
    return f"a sum over its own GPUs is wrong on rank {wrong[0]}" if wrong else None


def _slow(mine: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]], kind: Kind) -> str | None:
    median = statistics.median(each["tflops"] for each in ranks)
    slowest = min(mine, key=lambda each: each["tflops"])
    if slowest["tflops"] >= kind.slow * median:
        return None
    does = f"{kind.one} {slowest['rank']} does {kind.words(slowest['tflops'])}"
    return f"{does}, and the fleet's median is {kind.words(median)}"


def _narrow(mine: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]) -> str | None:
    known = [each["inside"]["gb_per_s"] for each in ranks if each["inside"]["gb_per_s"] is not None]
    here = [each["inside"]["gb_per_s"] for each in mine if each["inside"]["gb_per_s"] is not None]
    if not here or min(here) >= NARROW * statistics.median(known):
        return None
    return f"between its GPUs go {min(here):.0f} GB/s, and the fleet's median is {statistics.median(known):.0f}"
