"""Which machine of a fleet has a GPU that is not fit to train on. Pure: what was asked and measured in, words out.

A GPU that is broken, or slower than all others, costs the whole fleet: every step waits for the last rank.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from mgpu_train.agent.attempt import faults

# nvidia-smi's own names of what it is asked for
MEMORY = ("pci.bus_id", "ecc.errors.uncorrected.volatile.total")
ROWS = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")
SLOW = 0.7  # of the fleet's median product of matrices; GPUs of one kind differ by a tenth
NARROW = 0.5  # of the fleet's median between the GPUs of a machine


def by_memory(text: str) -> str | None:
    """A GPU whose memory has lost data since its driver began; None: none has, or the driver does not say."""
    for bus, count in _rows(text, len(MEMORY)):
        if count.isdecimal() and int(count):
            return f"GPU {bus} has {count} uncorrectable ECC errors"
    return None


def by_rows(text: str) -> str | None:
    """A GPU that has to be reset, or has no spare memory left (NVIDIA's row remapping)."""
    for bus, pending, failed in _rows(text, len(ROWS)):
        if failed.lower() in ("yes", "1"):
            return f"GPU {bus} has no spare memory rows left"
        if pending.lower() in ("yes", "1"):
            return f"GPU {bus} has to be reset: a memory row waits to be replaced"
    return None


def by_kernel(lines: Iterable[str]) -> str | None:
    """What the kernel has said of a GPU since the machine began."""
    found = faults.hardware(lines)
    return f"{found.sign.means}: {found.line}" if found else None


def by_figures(ranks: Sequence[dict[str, Any]], node_rank: int, processes: int) -> str | None:
    """This node's share in what was measured on all ranks, compared with the fleet's; None: nothing is odd, or what was
    written makes no sense."""
    try:
        mine = [each for each in ranks if each["rank"] // processes == node_rank]
        return _wrong(mine) or _slow(mine, ranks) or _narrow(mine, ranks)
    except (KeyError, TypeError, ValueError, statistics.StatisticsError):
        return None


def _wrong(mine: Sequence[dict[str, Any]]) -> str | None:
    wrong = [each["rank"] for each in mine if not each["inside"]["right"]]
    return f"a sum over its own GPUs is wrong on rank {wrong[0]}" if wrong else None


def _slow(mine: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]) -> str | None:
    median = statistics.median(each["tflops"] for each in ranks)
    slowest = min(mine, key=lambda each: each["tflops"])
    if slowest["tflops"] >= SLOW * median:
        return None
    return f"the GPU of rank {slowest['rank']} does {slowest['tflops']:.0f} TFLOPS, and the fleet's median {median:.0f}"


def _narrow(mine: Sequence[dict[str, Any]], ranks: Sequence[dict[str, Any]]) -> str | None:
    known = [each["inside"]["gb_per_s"] for each in ranks if each["inside"]["gb_per_s"] is not None]
    here = [each["inside"]["gb_per_s"] for each in mine if each["inside"]["gb_per_s"] is not None]
    if not here or min(here) >= NARROW * statistics.median(known):
        return None
    return f"between its GPUs go {min(here):.0f} GB/s, and the fleet's median is {statistics.median(known):.0f}"


def summary(ranks: Sequence[dict[str, Any]]) -> str:
    """What was measured, in a line."""

    def least(part: str) -> str:
        known = [each[part]["gb_per_s"] for each in ranks if each[part]["gb_per_s"] is not None]
        return f"{min(known):.1f} GB/s" if known else "not measured"

    slowest = min(each["tflops"] for each in ranks)
    words = f"{len(ranks)} ranks, {slowest:.3g} TFLOPS each at least"
    return f"{words}, a sum inside a node {least('inside')}, over all ranks {least('between')}"


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    return [row for row in rows if len(row) == width]
