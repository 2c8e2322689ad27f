"""Processes of this machine, known by what no other process shares: pid, start time and boot. Linux only.

A pid alone is reused: every signal goes through a pidfd whose identity is checked after it was opened. Standard library
only: the operator's provider `local` stands on this module too, and its node processes have to start fast.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_ENDED = "ZX"  # states of a process that only waits for its parent to ask
MOST_FILES = 1 << 20  # Linux's own limit of one process, unless somebody raises it (fs.nr_open)


@dataclass(frozen=True)
class Process:
    """One process; `start_ticks` is field 22 of /proc/<pid>/stat (clock ticks since boot)."""

    pid: int
    start_ticks: int
    boot_id: str

    @property
    def alive(self) -> bool:
        """True while it runs; a zombie has ended."""
        stat = _stat(self.pid)
        return stat is not None and stat[0] not in _ENDED and stat[2] == self.start_ticks and self.boot_id == boot_id()

    @property
    def suspended(self) -> bool:
        """True while it lives, but was stopped by a signal (SIGSTOP, Ctrl-Z): it does nothing until it is continued."""
        stat = _stat(self.pid)
        return self.alive and stat is not None and stat[0] in "Tt"

    def send(self, signum: int) -> bool:
        """Signals exactly this process; False: it is gone, or another one has its pid. Raises PermissionError for
        another user's."""
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


@cache
def boot_id() -> str:
    """This boot of the machine; a pid of another boot says nothing."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def uptime_s() -> float:
    """Seconds since boot: a clock that nobody can set."""
    return float((_PROC / "uptime").read_text(encoding="utf-8").split()[0])


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed because memory was short: of this container or session where cgroups
    count them (v2: whatever the limit was), else of all this machine since boot; 0 where nobody says."""
    try:
        path = next(
            line for line in (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines() if line.startswith("0::/")
        )
        lines = (_CGROUPS / path.removeprefix("0::/") / "memory.events").read_text(encoding="utf-8").splitlines()
    except (OSError, StopIteration):
        try:
            lines = (_PROC / "vmstat").read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def of(pid: int) -> Process | None:
    """The process that has this pid now."""
    stat = _stat(pid)
    return Process(pid, stat[2], boot_id()) if stat else None


def cores(slots: tuple[int, ...], of: int) -> set[int]:
    """Of the cores that this thread may run on, those that go with these of so many slots: others than with other
    slots, where there are enough of them."""
    mine = sorted(os.sched_getaffinity(0))
    bounds = ((len(mine) * slot // of, len(mine) * (slot + 1) // of) for slot in slots)
    return {core for first, end in bounds for core in mine[first : max(end, first + 1)]}


def catches(pid: int, signum: int) -> bool:
    """True where the process has a handler of its own for a signal: it does not end by it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signum - 1) & 1)


def ended(code: int) -> str:
    """How a process with this exit code has ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def command_line(pid: int) -> str:
    """How it was started; "" when it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def me() -> Process:
    """This process."""
    process = of(os.getpid())
    if process is None:
        raise OSError("there is no /proc to read")
    return process


def descendants(root: int) -> list[Process]:
    """All living processes below `root`, whatever session or group they made themselves."""
    stats = {pid: stat for pid in _pids() if (stat := _stat(pid))}
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    below = list(children.get(root, []))
    for pid in below:  # which grows meanwhile
        below += children.get(pid, [])
    return [Process(pid, stats[pid][2], boot_id()) for pid in below if stats[pid][0] not in _ENDED]


def carriers(name: str) -> dict[str, list[Process]]:
    """All living processes that were started with the variable `name` in their environment, by its value.

    Those of other users cannot be read, nor seen.
    """
    found: dict[str, list[Process]] = {}
    key = f"\0{name}=".encode()
    for pid in _pids():
        try:
            _, has, rest = (b"\0" + _read(pid, "environ")).partition(key)
        except OSError:
            continue
        process = of(pid) if has else None
        if process is not None and process.alive:
            found.setdefault(rest.partition(b"\0")[0].decode(errors="replace"), []).append(process)
    return found


def carrying(entry: str) -> list[Process]:
    """All living processes but this one that have `NAME=value` in the environment they were started with."""
    name, _, value = entry.partition("=")
    return [process for process in carriers(name).get(value, []) if process.pid != os.getpid()]


def kill_all(
    find: Callable[[], list[Process]], deadline_s: float, *, reap: Callable[[], object] = lambda: None
) -> bool:
    """SIGKILL to all that `find` finds until it finds nothing; False: something is left, in uninterruptible I/O or
    another user's (what was started by `sudo`), which is not waited for.

    `reap` takes leave of those that are children of this process.
    """
    end = time.monotonic() + deadline_s
    others: list[Process] = []
    while processes := [each for each in find() if each not in others]:
        if time.monotonic() > end:
            return False
        for process in processes:
            try:
                process.send(signal.SIGKILL)
            except PermissionError:
                others.append(process)
        time.sleep(0.01)
        reap()
    return not others


def reap(orphans_of: int, spare: int) -> None:
    """Takes leave of ended children of this process other than `spare`, whose status its own owner collects."""
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None and stat[0] == "Z" and stat[1] == orphans_of and pid != spare:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def reap_adopted(spare: int) -> None:
    """Takes leave of ended processes that this one is the subreaper of, other than `spare`: those of other sessions.
    What its own threads have started is in its own, and theirs to wait for. Costs next to nothing while none has ended.
    """
    with suppress(ChildProcessError, ProcessLookupError):  # there is no child, or it is gone meanwhile
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        own = os.getsid(0)
        for pid in _pids():
            stat = _stat(pid)
            ended = stat is not None and stat[0] == "Z" and stat[1] == os.getpid()
            if ended and pid != spare and os.getsid(pid) != own:
                os.waitpid(pid, os.WNOHANG)


def open_many_files() -> None:
    """This process, and what it starts, may open as many files as it is allowed to: shells give 1,024, and each tensor
    that a loader's worker hands over is one. Not more than MOST_FILES: some programs close all that there may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in os.scandir(_PROC) if entry.name.isdigit())


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start time of a process."""
    try:
        # the second field is the program's name in brackets and may hold anything: read behind its last bracket
        fields = _read(pid, "stat").rpartition(b")")[2].split()
    except OSError:
        return None
    return (fields[0].decode(), int(fields[1]), int(fields[19])) if len(fields) > 19 else None


def _read(pid: int, name: str) -> bytes:
    """A file of a process, by as few calls as can be: all of a machine's are read, again and again."""
    file = os.open(f"{_PROC}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = list(iter(lambda: os.read(file, 1 << 16), b""))
    finally:
        os.close(file)
    return b"".join(parts)
