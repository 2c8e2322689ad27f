"""`mgpu` on another machine than the one it runs on, as far as provider `local` lets it be another: its machines are
processes of this one, so no namespace may hide processes.

    python elsewhere.py reconcile     and whatever that starts; MGPU_DIE_AT names where it dies (operator.py)

A process of another machine cannot be seen, so nobody here may know that it is dead, and its engine is not found: those
of this machine have its XDG_STATE_HOME. MGPU_HOST names the machine, and MGPU_NOT_HERE folders that are empty on it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys
from pathlib import Path

import stand_in
from fakes.pulumi_programs import SERVER
from mgpu_train.agent.machine import procs

from mgpu.iac.engine import operations
from mgpu.run.record import shared
from mgpu.schedule import supervisors

CLONE_NEWNS, CLONE_NEWUTS = 0x00020000, 0x04000000  # linux/sched.h
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18  # linux/mount.h


def _move(host: str, hidden: list[str]) -> None:
    """This process, and all that it starts, to another host."""
    kernel = ctypes.CDLL(None, use_errno=True)

    def must(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    must(kernel.unshare(CLONE_NEWNS | CLONE_NEWUTS))
    must(kernel.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    socket.sethostname(host)
    for folder in filter(os.path.isdir, hidden):
        must(kernel.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), None))


def _started_here(process: procs.Process) -> bool:
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return os.fsencode(f"XDG_STATE_HOME={os.environ['XDG_STATE_HOME']}") in environment


def _carriers(mark: str) -> dict[str, list[procs.Process]]:
    found = _all_carriers(mark)
    if mark != operations.MARK:  # machines are everybody's
        return found
    return {value: [each for each in processes if _started_here(each)] for value, processes in found.items()}


_all_carriers, procs.carriers = procs.carriers, _carriers
shared._space = lambda: "elsewhere"
_command = supervisors._command
supervisors._command = lambda *need: [sys.executable, "-P", stand_in.__file__, SERVER, __file__, *_command(*need)[3:]]

if __name__ == "__main__":
    if host := os.environ.pop("MGPU_HOST", ""):  # what it starts is there already
        _move(host, os.environ.pop("MGPU_NOT_HERE").split(os.pathsep))
    if point := os.environ.get("MGPU_DIE_AT"):
        operator = runpy.run_path(str(Path(__file__).with_name("operator.py")))
        operator["install"](operator["Points"](None, point))
    from mgpu.cli import main

    main(sys.argv[1:])
