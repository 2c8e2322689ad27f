"""How often Python looks for reference cycles, in processes that import much and live for a command.

Imports make hundreds of thousands of objects and no garbage, which the collector goes through again and again: a
seventh of the CPU time that the plug-in needs until it can begin, a twelfth of that of `mgpu attach` and of torchrun's
import of torch (CPython 3.11).
"""

from __future__ import annotations

import gc


def seldom() -> None:
    """From here on this process looks for cycles a hundred times less often; those that nobody needs may add up to some
    10 MB."""
    gc.set_threshold(100_000, 50, 50)
