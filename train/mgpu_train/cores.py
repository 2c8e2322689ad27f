"""How many cores there are for this process."""

from __future__ import annotations

import os


def usable() -> int:
    """Cores that this process may run on: fewer than the machine has in a container, or under taskset."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share(slots: tuple[int, ...], of: int) -> set[int]:
    """The cores of this process that go with these of so many slots: others than with other slots, where there are
    enough of them."""
    mine = sorted(os.sched_getaffinity(0))
    bounds = ((len(mine) * slot // of, len(mine) * (slot + 1) // of) for slot in slots)
    return {core for first, end in bounds for core in mine[first : max(end, first + 1)]}
