"""What a program costs: wall time, CPU of it and of all it started, and the peak memory of each process."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.02
_LIMIT_S = 900.0
_SETTLE_S = 20.0


@dataclass(frozen=True)
class Cost:
    """One program's, or the median of several runs. CPU seconds count every thread and process, user and system."""

    wall_s: float
    cpu_s: float
    process_cpu_s: float  # with its start and its imports, where it tells the two apart
    main_mib: float  # peak resident memory of the program itself
    others_mib: float  # of all processes that it started, together
    server_cpu_s: float  # of the server's processes, meanwhile
    strangers_cpu_s: float  # of everything else on this machine, meanwhile: what disturbs the wall time
    error: str = ""  # why it failed
    says: Mapping[str, Any] = field(default_factory=dict)  # what it reported

    @property
    def reason(self) -> str:
        """The last line of why it failed; empty: it did not."""
        return (self.error.strip().splitlines() or [""])[-1]

    @property
    def mib(self) -> float:
        """Peak memory, all processes together."""
        return self.main_mib + self.others_mib


def run(argv: Sequence[str], env: Mapping[str, str], *, server: int, limit_s: float = _LIMIT_S) -> Cost:
    """Runs a program to its end. It may print one line of JSON: `wall_s` and `cpu_s` of the part that counts, `error`.

    `server` is the process id of the server that it talks to. After `limit_s` the program is killed, which is an error.
    """
    _settle(server)
    with tempfile.TemporaryFile() as complaints:
        begin, served, busy = time.perf_counter(), cpu_s(server), machine_cpu_s()
        process = subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE, stderr=complaints)
        watch = _Watch(process.pid)
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        said = process.stdout.read().decode() if process.stdout else ""  # until its last process has closed it
        _, status, usage = os.wait4(process.pid, 0)
        wall_s, served, busy = time.perf_counter() - begin, cpu_s(server) - served, machine_cpu_s() - busy
        process.returncode = os.waitstatus_to_exitcode(status)
        timer.cancel()
        watch.stop()
        complaints.seek(0)
        says = json.loads(said.strip().splitlines()[-1]) if said.lstrip().startswith("{") else {}
        error = says.get("error", "")
        if process.returncode:
            error = f"exit {process.returncode}: {complaints.read().decode(errors='replace')[-2000:].strip()}"
    whole, peaks = max(usage.ru_utime + usage.ru_stime, sum(watch.cpu.values())), watch.peaks
    return Cost(
        wall_s=says.get("wall_s", wall_s),
        cpu_s=says.get("cpu_s", whole),
        process_cpu_s=whole,
        main_mib=peaks.pop(process.pid, 0.0),
        others_mib=sum(peaks.values()),
        server_cpu_s=served,
        strangers_cpu_s=max(0.0, busy - served - whole),
        error=error,
        says=says,
    )


def touch(size: int) -> None:
    """Writes to so many bytes of memory and gives them back.

    What the host of a virtual machine has taken back of its memory costs whoever is the first to touch it, and that is
    not to be one of the clients.
    """
    mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def median(costs: Sequence[Cost]) -> Cost:
    """Field by field, of what is a number."""
    numbers = [each.name for each in fields(Cost) if each.name not in ("error", "says")]
    return Cost(**{name: statistics.median(getattr(each, name) for each in costs) for name in numbers})


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, of its living descendants, and of those that were waited for."""
    return sum(_cpu(each) for each in descendants(pid))


def descendants(pid: int) -> list[int]:
    """A process and all that stem from it."""
    found = [pid]
    for each in found:
        found += _children(each)
    return found


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                yield from map(int, (task / "children").read_text().split())


def _cpu(pid: int, *, waited_for: bool = True) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11 : 15 if waited_for else 13])) * _TICK_S


def _settle(server: int) -> None:
    """Waits until a server has nothing left to do of what came before: it would count against who comes next."""
    end, used = time.monotonic() + _SETTLE_S, -1.0
    while time.monotonic() < end and cpu_s(server) > used:
        used = cpu_s(server)
        time.sleep(0.3)


def machine_cpu_s() -> float:
    """CPU seconds of everything on this machine since it started: user, nice, system, interrupts."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return sum(int(fields[place]) for place in (1, 2, 3, 6, 7)) * _TICK_S


def _mib(pid: int) -> float:
    """The peak of a process; of one that is a fork of its parent, with the same command line, what it has for itself
    now: the parent's peak has the rest. Raises OSError or KeyError when it is gone."""
    here = Path(f"/proc/{pid}")
    values = dict(line.split(":", 1) for line in (here / "status").read_text().splitlines())
    parent = Path(f"/proc/{int(values['PPid'])}/cmdline")
    if (here / "cmdline").read_bytes() == parent.read_bytes():
        rollup = (here / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1024
    return int(values["VmHWM"].split()[0]) / 1024


class _Watch:
    """Looks at a process and its descendants until it is stopped: peak memory in MiB and CPU seconds, by process id.

    Where one is ended by force nobody waits for it, and what it took shows here alone.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.peaks: dict[int, float] = {}
        self.cpu: dict[int, float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(_LOOK_S):
            for pid in descendants(self._pid):
                with suppress(OSError, KeyError):
                    self.peaks[pid] = max(self.peaks.get(pid, 0.0), _mib(pid))
                    self.cpu[pid] = _cpu(pid, waited_for=False)

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
