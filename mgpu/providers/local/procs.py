"""Processes of this machine, known by what no other process ever shares: pid, start time and boot. Linux only.

A pid alone is reused; every signal here goes through a pidfd whose identity was checked after it was opened.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "MGPU_INSTANCE"  # in the environment of everything that runs on a node
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """One process: `start_ticks` is field 22 of /proc/<pid>/stat (clock ticks since boot)."""

    pid: int
    start_ticks: int
    boot_id: str

    @property
    def alive(self) -> bool:
        """True while it runs; a zombie has ended."""
        stat = _stat(self.pid)
        return stat is not None and stat.state not in "ZX" and self == of(self.pid)

    def send(self, signum: int) -> bool:
        """Signals exactly this process. True: delivered; False: it is gone, or another one has its pid."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(fd, signum)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        # the second field is the program's name in brackets and may hold anything: read behind its last bracket
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[19])) if len(fields) > 19 else None


def boot_id() -> str:
    """This boot of the machine; a pid of another boot says nothing."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def uptime_s() -> float:
    """Seconds since boot: a clock that nobody can set."""
    return float((_PROC / "uptime").read_text().split()[0])


def of(pid: int) -> Process | None:
    """The process that has this pid now."""
    stat = _stat(pid)
    return Process(pid, stat.start_ticks, boot_id()) if stat else None


def _pids() -> Iterable[int]:
    return [int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit()]


def marked() -> dict[str, list[Process]]:
    """All living processes that carry the mark, by instance id. Those of other users cannot be read, nor seen."""
    found: dict[str, list[Process]] = {}
    key = f"{MARK}=".encode()
    for pid in _pids():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        for entry in environment.split(b"\0"):
            process = of(pid) if entry.startswith(key) else None
            if process is not None:
                found.setdefault(entry[len(key) :].decode(errors="replace"), []).append(process)
                break
    return found


def descendants(root: int) -> list[Process]:
    """All processes below `root`, zombies left out."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
    below, queue = [], list(children.get(root, []))
    while queue:
        pid = queue.pop()
        queue += children.get(pid, [])
        below.append(of(pid))
    return [process for process in below if process is not None and process.alive]


def end(find: Callable[[], list[Process]], *, term_s: float, kill_s: float, reap: Callable[[], object]) -> bool:
    """Ends what `find` finds, until it finds nothing: SIGTERM at first, after `term_s` seconds SIGKILL.

    Returns False when something is left `kill_s` seconds after that (uninterruptible I/O).
    """
    start, warned = time.monotonic(), set[Process]()
    while processes := find():
        elapsed = time.monotonic() - start
        if elapsed > term_s + kill_s:
            return False
        for process in processes:
            if elapsed >= term_s:
                process.send(signal.SIGKILL)
            elif process not in warned:
                process.send(signal.SIGTERM)
                process.send(signal.SIGCONT)  # a stopped process would never see the SIGTERM
                warned.add(process)
        time.sleep(0.01)
        reap()
    return True


def become_subreaper() -> None:
    """From here on orphans below this process become its children: nothing on a node gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """This process is killed when its parent, which is `parent`, ends.

    Raises:
        SystemExit: it has ended already.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the parent has ended")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


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
