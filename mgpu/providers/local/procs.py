"""Processes of provider `local`'s nodes: found by their mark, ended with a warning, mourned by their node process.

What a process is, and how exactly one is signalled, stands in `mgpu_train.agent.machine.procs`. Standard library only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from mgpu_train.agent.machine.procs import (
    Process,
    boot_id,
    carriers,
    descendants,
    kill_all,
    me,
    of,
    uptime_s,
)
from mgpu_train.system.prctl import become_subreaper, die_with_parent

__all__ = [
    "MARK",
    "Process",
    "of",
    "me",
    "boot_id",
    "uptime_s",
    "marked",
    "descendants",
    "end",
    "become_subreaper",
    "die_with_parent",
    "reap_children",
]

MARK = "MGPU_INSTANCE"  # in the environment of everything that runs on a node
_POLL_S = 0.01


def marked() -> dict[str, list[Process]]:
    """All living processes that carry the mark, by instance id."""
    return carriers(MARK)


def end(
    find: Callable[[], list[Process]], *, term_s: float, kill_s: float, reap: Callable[[], object] = lambda: None
) -> bool:
    """Ends what `find` finds, until it finds nothing: SIGTERM at first, after `term_s` seconds SIGKILL.

    Returns False when something is left `kill_s` seconds after that: in uninterruptible I/O, or another user's.
    """
    warned, deadline = set[Process](), time.monotonic() + term_s
    while time.monotonic() < deadline and (processes := find()):
        for process in set(processes) - warned:
            with suppress(PermissionError):  # another user's (`sudo`): `kill_all` knows them, too
                process.send(signal.SIGTERM)
                process.send(signal.SIGCONT)  # a stopped process would never see the SIGTERM
            warned.add(process)
        time.sleep(_POLL_S)
        reap()
    return kill_all(find, kill_s, reap=reap)


def reap_children() -> dict[int, int]:
    """Takes leave of all ended children of this process: pid -> wait status."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended
