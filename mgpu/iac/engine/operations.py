"""The processes of an engine at work on a stack, known by a mark that they inherit; what dead operators left of them.

`kill -9` of an operator leaves the CLI at work, in a session of its own: it saves the state when it ends. `kill -9` of
the CLI leaves Pulumi's language host, and the program in it, for ever. Both would stand in the next operation's way.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.agent.machine import procs
from mgpu_train.agent.machine.procs import Process

from mgpu.errors import StackError
from mgpu.events import Emit, Note

MARK = "MGPU_STACK"
_TERM_S, _KILL_S = 2.0, 10.0
_LOOK_S = 0.05


@dataclass(frozen=True)
class Operation:
    """What lives of the operations that one driver began on one stack: of which `clis` are the Pulumi CLI."""

    driver: Process
    processes: tuple[Process, ...]
    clis: tuple[Process, ...]
    orphaned: bool  # its driver is dead, or has lost the stack to another one

    @property
    def unwanted(self) -> tuple[Process, ...]:
        """An orphan's CLI; where the CLI is gone, all that no other operator is about to look after."""
        if self.clis:
            return self.clis if self.orphaned else ()
        return self.processes if self.orphaned or self.driver == procs.me() else ()


def mark(place: str) -> dict[str, str]:
    """The environment variable by which an engine started now for the stack at `place` is known, and all below it."""
    me = procs.me()
    return {MARK: f"{me.pid}:{me.start_ticks}:{me.boot_id}:{place}"}


def at_work(place: str, ousted: Process | None = None) -> tuple[Operation, ...]:
    """All living operations on the stack at `place`, on this machine and by this user. `ousted`: a driver whose
    operations count as a dead one's, though it lives."""
    found = []
    for value, processes in procs.carriers(MARK).items():
        driver = _driver(value, place)
        if driver is not None:
            living = tuple(process for process in processes if process != procs.me())
            clis = tuple(process for process in living if is_cli(process.pid))
            found.append(Operation(driver, living, clis, orphaned=driver == ousted or not driver.alive))
    return tuple(operation for operation in found if operation.processes)


def is_cli(pid: int) -> bool:
    """Whether the process is the Pulumi CLI; False for one that is gone."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return Path(argv[0].decode(errors="replace")).name == "pulumi"


def end_orphans(
    place: str,
    *,
    emit: Emit,
    save_s: float,
    ousted: Process | None = None,
    given_up: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Ends what dead operators left at work on a stack, and what one that lives but was `ousted` has there. Others'
    processes, and those of other living ones, are not touched.

    A CLI is cancelled as its user would: what it has under way is undone, and the state is saved, for which it has
    `save_s` seconds. Returns early once `given_up` says so.

    Raises:
        StackError: a process does not end.
    """
    orphans = _orphans(place, ousted)
    if orphans:
        whose = "is stuck has" if ousted else "died left"
        emit(Note(f"cancelling `pulumi` (process {_pids(orphans)}), which a process that {whose} at work"))
        for cli in orphans:
            cli.send(
                signal.SIGINT
            )  # first: one that is stopped finds it when it wakes, before it goes on with anything
            cli.send(signal.SIGCONT)
        deadline = clock() + save_s
        while _orphans(place, ousted) and clock() < deadline and not given_up():
            sleep(_LOOK_S)
        if given_up():
            return
    _end(lambda: [process for each in at_work(place, ousted) for process in each.unwanted], clock, sleep)


def abandon(place: str) -> None:
    """Ends what this process has at work on a stack as a machine does that loses power: nothing is undone or saved."""
    for operation in at_work(place):
        if operation.driver == procs.me():
            for process in (*operation.clis, *operation.processes):  # the CLIs first: they see nothing of it die
                process.send(signal.SIGKILL)


def _orphans(place: str, ousted: Process | None) -> tuple[Process, ...]:
    return tuple(cli for operation in at_work(place, ousted) if operation.orphaned for cli in operation.clis)


def _end(find: Callable[[], list[Process]], clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """SIGTERM, and SIGKILL for what is left after that."""
    start = clock()
    while processes := find():
        late = clock() - start
        if late > _TERM_S + _KILL_S:
            raise StackError(
                f"processes {_pids(processes)} of an earlier operation on this stack do not end",
                "They did not obey SIGKILL: they may hang in the kernel, on a disk or a network share.",
                "Run the same command again once they are gone.",
            )
        for process in processes:
            process.send(signal.SIGTERM if late < _TERM_S and not is_cli(process.pid) else signal.SIGKILL)
        sleep(_LOOK_S)


def names(value: str, place: str) -> bool:
    """Whether a mark's value is that of an operation on the stack at `place`."""
    return _driver(value, place) is not None


def _driver(value: str, place: str) -> Process | None:
    """Who wrote the mark; None when it names another stack, or is none of ours."""
    pid, ticks, boot, stack = (*value.split(":", 3), "", "", "")[:4]
    if stack != place or not pid.isdigit() or not ticks.isdigit():
        return None
    return Process(int(pid), int(ticks), boot)


def _pids(processes: tuple[Process, ...] | list[Process]) -> str:
    return ", ".join(str(process.pid) for process in processes)
