"""Which GPU of a machine is not fit to train on, by what its driver and the kernel say. Pure: text in, words out.

The driver is asked by `nvidia-smi`, which is wherever the driver is, and by which a user can look for himself. NVML's
own library has the same figures, but its Python binding would be one more package on every node, and a library that
hangs in the driver takes its process with it; a program of its own is given up after a time.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable

from mgpu_train.agent.attempt import faults

# nvidia-smi's own names of what it is asked for
STATE = ("pci.bus_id", "ecc.errors.uncorrected.volatile.total", "mig.mode.current")
ROWS = ("gpu_bus_id", "remapped_rows.pending", "remapped_rows.failure")


_GPU = re.compile(r"GPU \d+: (.*?)(?: \(UUID: .*\))?$")
_LINK = re.compile(r"\s+Link \d+: ([\d.]+) GB/s$")
# cards of which a machine may have linked some, and others not
_BRIDGED = re.compile(r"PCI|\bNVL\b|RTX|\bA(10|16|30|40)\b|Quadro|TITAN", re.IGNORECASE)


def by_state(text: str) -> str | None:
    """A GPU whose memory has lost data since its driver began, or that is divided; None: there is none, or the driver
    does not say."""
    for bus, count, _ in _rows(text, len(STATE)):
        if count.isdecimal() and int(count):
            return f"GPU {bus} has {count} uncorrectable ECC errors"
    return by_mig(text)


def by_mig(text: str) -> str | None:
    """A GPU in MIG mode (the same answer as `by_state`'s): of all such GPUs together a process sees one part of one,
    whatever nvidia-smi lists (NVIDIA's MIG user guide; pytorch/pytorch#102715)."""
    for bus, _, mode in _rows(text, len(STATE)):
        if mode == "Enabled":
            return f"GPU {bus} is in MIG mode, and a program sees one part of it: `sudo nvidia-smi -mig 0` ends that"
    return None


def by_links(text: str) -> str | None:
    """A GPU with fewer NVLinks than most others of its machine, in what `nvidia-smi nvlink --status` prints; None:
    there is none, or they have none that can be compared.

    A link that is not active is no fault by itself: cards in slots have more of them than their bridges use.
    """
    names, links = list[str](), list[int]()
    for line in text.splitlines():
        if found := _GPU.match(line):
            names.append(found[1])
            links.append(0)
        elif links and (found := _LINK.match(line)) and float(found[1]):
            links[-1] += 1
    if len(set(names)) != 1 or _BRIDGED.search(names[0]):
        return None
    usual, gpus = Counter(links).most_common(1)[0]
    least = min(links)
    if least >= usual or 2 * gpus <= len(links):
        return None
    return f"GPU {links.index(least)} ({names[0]}) has {least} active NVLinks, and the machine's others {usual}"


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
