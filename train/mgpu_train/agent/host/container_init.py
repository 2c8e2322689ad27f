"""What a run's container holds itself open with. It is run inside, below the container's own init, as `python3 -I`.

Standard library only, Python 3.8 or newer. An agent that was started by `docker exec` ends with the container, and no
signal to the container would reach it. So whoever stops the container (`docker stop`, the machine's own shutdown) asks
this program, and it asks the agents: they save and end in order, and then the container ends.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Callable  # noqa: UP035 - for the Python 3.8 of older images

STOPS = {signal.SIGTERM, signal.SIGINT}
POLL_S = 0.1


def agents() -> set[int]:
    """Who else is a child of the container's init: agents, and what a dead agent left."""
    there = {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()} - {os.getpid()}
    return {pid for pid in there if _parent(pid) == os.getppid()}


def _parent(pid: int) -> int:
    """The parent of a process; -1 when it is gone or has ended."""
    try:
        # the second field is the program's name in brackets and may hold anything: read behind its last bracket
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[1])


def stop(find: Callable[[], set[int]] = agents) -> None:
    """Asks each agent once, and waits for all; whoever asked has a deadline, and kills after it."""
    asked: set[int] = set()
    while there := find():
        for pid in there - asked:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        asked |= there
        time.sleep(POLL_S)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    signal.sigwait(STOPS)
    stop()
