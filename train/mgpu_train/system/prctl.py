"""What Linux does for a process beyond its own life; see prctl(2). Standard library only."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: not between fork and exec


def become_subreaper() -> None:
    """From here on orphans below this process become its children: nothing that runs below it gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int, parent: int) -> None:
    """This process, a fresh child of `parent`, gets `signum` when the parent's thread that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
