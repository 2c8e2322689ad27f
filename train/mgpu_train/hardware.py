"""What this process has of its machine: cores, and memory."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def cores() -> int:
    """Those that this process may run on: fewer than the machine has in a container, or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_bytes() -> float:
    """Of host memory, what processes of this machine, or of this container, can still have; infinite: not known."""
    free = math.inf
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max": none
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free
