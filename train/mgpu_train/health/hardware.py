"""What this process has of its machine: cores, and memory."""

from __future__ import annotations

import ctypes
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
        free = 1024 * _number(Path("/proc/meminfo"), "MemAvailable:")
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, StopIteration):  # "max": none
        most, taken = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, most - taken + _number(group / "memory.stat", "inactive_file"))  # which the kernel drops
    return free


def resident_bytes(*, most: bool = False) -> int:
    """Of host memory, what this process has; `most`: has had since `forget_most`. Raises OSError where no Linux is."""
    return 1024 * _number(Path("/proc/self/status"), "VmHWM:" if most else "VmRSS:")


def forget_most() -> None:
    """What `resident_bytes` calls the most counts from now. Raises OSError where the kernel has no such thing."""
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)  # what is kept for later would hide what is had again
    Path("/proc/self/clear_refs").write_text("5")


def _number(path: Path, name: str) -> int:
    """Behind this name, in a file that has one a line. Raises StopIteration: there is none."""
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name])
