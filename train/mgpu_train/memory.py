"""How much memory is left."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path


def free_bytes() -> float:
    """Of host memory, what processes of this machine, or of this container, can still have; infinite: not known."""
    free = math.inf
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max": none
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free
