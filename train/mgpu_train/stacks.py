"""A rank that shows the stacks of all its threads when its agent asks, by SIGUSR2: what hangs cannot say it otherwise.

    from mgpu_train import stacks
    stacks.show_on_request()

Python's own handler does it, in C: it needs neither the interpreter nor its lock. The agent asks only a rank that says
so, because the signal would end any other program. Standard library only, and nothing happens where nobody asks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from pathlib import Path
from typing import BinaryIO

FOLDER = "MGPU_STACKS_DIR"
SIGNAL = signal.SIGUSR2

_open: list[BinaryIO] = []  # what the handler writes to has to stay open


def show_on_request(rank: int | None = None) -> None:
    """From here on `<folder>/rank-<rank>.txt` gets the stacks when they are asked for, and `.json` says who is asked.

    Where the folder cannot be written nobody is asked.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    name = f"rank-{os.environ.get('RANK', '0') if rank is None else rank}"
    try:
        file = Path(folder, f"{name}.txt").open("wb", buffering=0)  # noqa: SIM115 - for as long as the process lives
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        _open.append(file)
        aside = Path(folder, f".{name}.json")
        aside.write_text(json.dumps({"pid": os.getpid(), "start_ticks": _start_ticks()}), encoding="utf-8")
        aside.replace(Path(folder, f"{name}.json"))
    except (OSError, ValueError):
        return


def _start_ticks() -> int:
    """When this process began: with its number that is no other one."""
    return int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
