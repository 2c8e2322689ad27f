"""What this process has of its machine: cores, and memory; and the words in which memory is said to be lacking."""

from __future__ import annotations

import ctypes
import math
import os
import re
from contextlib import suppress
from pathlib import Path

# a GPU's: torch's allocator, the runtime and the driver beside it, cuBLAS and its kin, NCCL (src/include/alloc.h)
NO_GPU_MEMORY = re.compile(
    r"out[ _]?of[ _]?memory|CU\w+_ALLOC_FAILED|Failed to CUDA (?:host )?[cm]?alloc", re.IGNORECASE
)
# the host's: torch's CPU allocator, C++, Python and NumPy, Linux
NO_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: not enough memory|can(?:'|no)t allocate memory|bad_alloc|(?<!OutOf)MemoryError\b",
    re.IGNORECASE,
)


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
        most, taken = (int((group / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current"))
        free = min(free, most - taken + _number(group / "memory.stat", "inactive_file"))  # which the kernel drops
    return free


def resident_bytes(*, most: bool = False) -> int:
    """Of host memory, what this process has; `most`: has had since `forget_most`. Raises OSError where no Linux is."""
    return 1024 * _number(Path("/proc/self/status"), "VmHWM:" if most else "VmRSS:")


def forget_most() -> None:
    """What `resident_bytes` calls the most counts from now. Raises OSError where the kernel has no such thing."""
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)  # what is kept for later would hide what is had again
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def lacks_memory(words: str) -> bool:
    """True for the words of an error, its class included, that a smaller batch may not meet."""
    return bool(NO_GPU_MEMORY.search(words) or NO_HOST_MEMORY.search(words))


def _number(path: Path, name: str) -> int:
    """Behind this name, in a file that has one a line. Raises StopIteration: there is none."""
    return next(
        int(line.split()[1]) for line in path.read_text(encoding="utf-8").splitlines() if line.split()[:1] == [name]
    )
