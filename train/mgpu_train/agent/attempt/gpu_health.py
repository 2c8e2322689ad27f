"""Which GPU of a machine is not fit to train on, by what its driver and the kernel say. Pure: text in, words out."""

from __future__ import annotations

import csv
from collections.abc import Iterable

from mgpu_train.agent.attempt import faults

# nvidia-smi's own names of what it is asked for
MEMORY = ("pci.bus_id", "ecc.errors.uncorrected.volatile.total")
ROWS = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")


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


def _rows(text: str, width: int) -> list[list[str]]:
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    return [row for row in rows if len(row) == width]
