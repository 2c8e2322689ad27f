"""How much memory is left, and how much was taken."""

from __future__ import annotations

import math
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_bytes() -> float:
    """Of host memory, what processes of this machine, or of this container, can still have; infinite: not known."""
    free = math.inf
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # "max": none
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


def peak_bytes(device: torch.device) -> int:
    """The most that this process has had so far: of tensors on its GPU, or of a CPU's memory in all."""
    if device.type == "cuda":
        from torch import cuda

        return cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
