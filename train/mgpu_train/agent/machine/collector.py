"""How often Python looks for reference cycles, in processes that import much and live for a command.

Imports make hundreds of thousands of objects and no garbage, which the collector goes through again and again: a
seventh of the CPU time that the plug-in needs until it can begin, a twelfth of that of `mgpu attach` (CPython 3.11).
"""

from __future__ import annotations

import gc

_SELDOM = (100_000, 50, 50)  # cycles that nobody needs may add up to some 10 MB
_usual = gc.get_threshold()


def seldom() -> None:
    """From here on this process looks for cycles a hundred times less often."""
    gc.set_threshold(*_SELDOM)


def as_usual() -> None:
    """Takes `seldom` back: where a cycle may hold the memory of a GPU."""
    gc.set_threshold(*_usual)
