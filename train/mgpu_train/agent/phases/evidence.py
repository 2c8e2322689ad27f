"""Before a hung launcher is ended its ranks are asked where they are. What they show goes into the log.

Only a rank that has said that it shows its stacks is signalled. torch's flight recorder, where NCCL runs, is asked
through its pipe. All of it takes a few seconds of an attempt that has lost minutes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from mgpu_train import pickles, stacks
from mgpu_train.agent.attempt import hang
from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.hang import Hang, Rank
from mgpu_train.agent.machine import procs
from mgpu_train.agent.phases.launcher_process import FLIGHT

WAIT_S = 5.0  # for all of them to have answered
_EVERY_S = 0.1
_SETTLED = 3  # looks in which nothing grew: what a rank has begun to write is whole
_MAX_BYTES = 64 << 20  # of one dump
_SHOWN = 400  # lines of one rank's stacks


def collect(
    attempt: Attempt,
    done: Mapping[int, tuple[int, ...]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Hang:
    """Asks all ranks of this node and waits for their answers. `done`: how far each of them has said to be."""
    folder = Path(attempt.layout.stacks(attempt.job.attempt))
    asked = {rank: (process, folder / f"rank-{rank}.txt") for rank, process in listening(folder).items()}
    recorders = {pipe: pipe.with_suffix("") for pipe in folder.glob(f"{FLIGHT}*.pipe")}
    before = {path: _written(path) for path in (*(path for _, path in asked.values()), *recorders.values())}
    shown = {rank: path for rank, (process, path) in asked.items() if _ask(process)}
    answers = [*shown.values(), *(dump for pipe, dump in recorders.items() if _ask_recorder(pipe))]
    end, sizes, settled = clock() + WAIT_S, before, 0
    while answers and clock() < end and settled < _SETTLED:
        sleep(_EVERY_S)
        now = {path: _written(path) for path in answers}
        settled = settled + 1 if now == sizes and all(now[path] != before[path] for path in answers) else 0
        sizes = now
    return read(attempt, done, {rank for rank, path in shown.items() if sizes[path] == before[path]})


def read(attempt: Attempt, done: Mapping[int, tuple[int, ...]], silent: Collection[int] = ()) -> Hang:
    """What there is of it, into the log; and what it means. `silent` ranks were asked, and have not answered."""
    folder = Path(attempt.layout.stacks(attempt.job.attempt))
    ranks: dict[int, Rank] = {}
    shown, dumps = _by_rank(folder, "rank-", ".txt"), _by_rank(folder, FLIGHT, "")
    for number in sorted({*shown, *dumps, *silent}):
        text = _text(shown[number]) if number in shown and number not in silent else ""
        collectives = hang.collectives(_plain(dumps[number])) if number in dumps else {}
        ranks[number] = Rank(hang.main_stack(text), collectives, done.get(number, ()), number in silent)
        _tell(attempt, number, text, ranks[number])
    ranks |= {number: Rank(done=far) for number, far in done.items() if number not in ranks}
    return hang.judge(ranks, alone=attempt.job.nodes == 1)


def listening(folder: Path) -> dict[int, procs.Process]:
    """Ranks that can be asked, by their number: they have said so, live, and have a handler for the signal."""
    found: dict[int, procs.Process] = {}
    for path in folder.glob("rank-*.json"):
        try:
            said = json.loads(path.read_bytes())
            process, rank = procs.of(said["pid"]), int(path.stem.removeprefix("rank-"))
        except (OSError, ValueError, TypeError, KeyError):  # half a file, or another program's
            continue
        if process and process.start_ticks == said.get("start_ticks") and procs.catches(process.pid, stacks.SIGNAL):
            found[rank] = process
    return dict(sorted(found.items()))


def _tell(attempt: Attempt, number: int, text: str, rank: Rank) -> None:
    for group, last in sorted(rank.collectives.items()):
        attempt.say(f"rank {number}, group {group}: {last.name}, number {last.number}, is {last.state}")
    lines = [line for line in text.splitlines() if line.strip()]
    if lines:
        attempt.say(f"rank {number}: the stacks of its threads, the newest call first")
    for line in lines[:_SHOWN]:
        attempt.say(f"rank {number}: {line}")


def _by_rank(folder: Path, before: str, after: str) -> dict[int, Path]:
    """Files that are not empty, by the rank in their names."""
    found: dict[int, Path] = {}
    for path in folder.glob(f"{before}*{after}"):
        number = path.name.removeprefix(before).removesuffix(after)
        if number.isdecimal() and path.is_file() and _written(path) != (0, 0):
            found[int(number)] = path
    return found


def _ask(process: procs.Process) -> bool:
    """Has a rank show its stacks; False: it is gone, or another user's (`sudo`)."""
    try:
        return process.send(stacks.SIGNAL)
    except PermissionError:
        return False


def _ask_recorder(pipe: Path) -> bool:
    """Has torch's flight recorder leave what it has; False: nobody reads there."""
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _written(path: Path) -> tuple[int, int]:
    """How much of it there is, and since when; nothing: (0, 0)."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return (stat.st_size, stat.st_mtime_ns) if stat.st_size else (0, 0)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes()[-_MAX_BYTES:].decode(errors="replace")
    return ""


def _plain(path: Path) -> object:
    """A dump as plain values: a pickle that a program wrote is not run."""
    with suppress(OSError, pickles.NotPlain):
        if path.stat().st_size <= _MAX_BYTES:
            return pickles.loads(path.read_bytes())
    return None
