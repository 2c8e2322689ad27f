"""The side of the store: tasks for the process that moves bytes, their answers, and the process's life."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mgpu_train.health import hardware
from mgpu_train.store.base import Progress
from mgpu_train.store.bulk.message import Keys, Settings, Task
from mgpu_train.store.bulk.minimum_rate import MinimumRate
from mgpu_train.store.pace import Pace
from mgpu_train.timeouts import Timeouts

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
# each is a process, and more of them than cores take turns with each other
_CONNECTIONS = max(3, min(8, hardware.cores() + 1))
_AHEAD = 12  # tasks of one transfer that the process holds: files take turns, and its input never fills up
_STARTS = 3  # of one task; it may be the task that kills the process
_IDLE_S = 10.0  # then the process ends; starting another takes a tenth of a second
_LOOK_S = 0.25  # between two looks at how much has moved
_ROOM = 1 << 20  # bytes on their way to the process; Linux gives as much to everybody
_LET_GO_S = 2.0  # for tasks that nobody wants any more to end
_BEGIN = (
    "import sys; sys.path[:0] = [] if sys.argv[1] in sys.path else sys.argv[1:]; "
    "from mgpu_train.store.bulk.child import main; main()"
)
Answer = dict[str, Any]


class Failed(Exception):
    """A task that could not be done. `told`: what the process said, see wire.Trouble; kinds `slow`, `died` are ours."""

    def __init__(self, kind: str, text: str, **more: Any) -> None:
        super().__init__(kind, text)
        self.told: Answer = {"status": 0, "code": "", **more, "kind": kind, "text": text}


@dataclass
class _Job:
    """One task on its way. `place`: which of its transfer's tasks it is."""

    task: Task
    place: int
    inbox: queue.SimpleQueue[tuple[_Job, Answer]]
    keys: Keys
    starts: int = field(default=1)


class Engine:
    """Moves bytes for one store, from any number of threads, by one process that lives while there is work.

    `keys` gives the credentials; its argument says whether those that it gave last have expired.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        pace: Pace,
        keys: Callable[[bool], Keys],
        *,
        connections: int = _CONNECTIONS,
        idle_s: float = _IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = Settings(
            connections=connections,
            connect_s=timeouts.store_connect_s,
            read_s=timeouts.store_read_s,
            retry_s=timeouts.store_retry_s,
            idle_s=idle_s,
            bytes_per_s=pace.bytes_per_s,
            pace=pace.shared,
        )
        self._pace, self._provide, self._clock = pace, keys, clock
        self._minimum_rate = MinimumRate(timeouts.store_stall_s, pace.bytes_per_s, clock=clock)
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._jobs: dict[int, _Job] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._keys = Keys("", "")
        self._trouble = ""

    @property
    def pid(self) -> int | None:
        """Of the process; None: it is not running."""
        return self._process.pid if self._process else None

    def run(self, tasks: Sequence[Task], progress: Progress | None = None) -> list[Answer]:
        """Does all tasks and returns their answers in order; `progress` hears of each one's bytes, from this thread.

        Raises Failed for the first that fails; the others are forgotten then.
        """
        self._take_keys(self._provide(False))
        inbox: queue.SimpleQueue[tuple[_Job, Answer]] = queue.SimpleQueue()
        waiting = deque(enumerate(tasks))
        answers: list[Answer] = [{} for _ in tasks]
        mine: set[int] = set()
        try:
            while waiting or mine:
                while waiting and len(mine) < _AHEAD:
                    place, task = waiting.popleft()
                    mine.add(self._submit(place, task, inbox))
                job, answer = self._next(inbox)
                mine.discard(job.task.id)
                if "error" in answer:
                    mine.add(self._again(job, answer["error"], inbox))
                    continue
                answers[job.place] = answer
                if progress:
                    progress(job.task.length)
        finally:
            self._forget(mine, inbox)
        return answers

    def _next(self, inbox: queue.SimpleQueue[tuple[_Job, Answer]]) -> tuple[_Job, Answer]:
        while True:
            with suppress(queue.Empty):
                return inbox.get(timeout=min(_LOOK_S, self._minimum_rate.window_s / 4))
            if little := self._minimum_rate.broken():
                self._give_up(Failed("slow", little + (f"; last trouble: {self._trouble}" if self._trouble else "")))

    def _again(self, job: _Job, error: Answer, inbox: queue.SimpleQueue[tuple[_Job, Answer]]) -> int:
        """The new id of a task whose credentials had expired, where there are others. Raises Failed."""
        if error.get("code") in EXPIRED:
            if job.keys == self._keys:
                self._take_keys(self._provide(True))
            if job.keys != self._keys:
                return self._submit(job.place, job.task, inbox)
        raise Failed(**error)

    def _submit(self, place: int, task: Task, inbox: queue.SimpleQueue[tuple[_Job, Answer]]) -> int:
        with self._lock:
            if not self._jobs:
                self._minimum_rate.begin()
                self._trouble = ""
            job = _Job(replace(task, id=next(self._ids)), place, inbox, self._keys)
            self._jobs[job.task.id] = job
            if self._process is None:
                self._start()
            self._say(task=asdict(job.task))
        return job.task.id

    def _forget(self, ids: set[int], inbox: queue.SimpleQueue[tuple[_Job, Answer]]) -> None:
        """Ends tasks; those that are running may take a moment, and what a silent server holds is not waited for."""
        if not ids:
            return
        with self._lock:
            self._say(forget=sorted(ids))
        end = self._clock() + _LET_GO_S
        while ids & self._jobs.keys() and self._clock() < end:
            with suppress(queue.Empty):
                inbox.get(timeout=_LOOK_S)
        with self._lock:
            for each in ids:
                self._jobs.pop(each, None)

    def _give_up(self, failed: Failed) -> None:
        """Fails all that is under way, and ends the process: what hangs in it hangs no more."""
        if hung := self._process:
            hung.kill()  # before all else: whoever has the lock may be waiting for it to read
        with self._lock:
            jobs, self._jobs = self._jobs, {}
            process, self._process = self._process, None
        if process:  # another one, perhaps, that was begun in its place
            process.kill()
        for job in jobs.values():
            job.inbox.put((job, {"error": failed.told}))

    # --- the process --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts the process. What it cannot find or load shows as its end."""
        root = Path(__file__).parents[3]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", _BEGIN, str(root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "MALLOC_ARENA_MAX": "2"},  # its threads hold little, and glibc is generous
                pass_fds=[] if self._pace.shared is None else [self._pace.shared],
            )
        except OSError as error:
            self._give_up(Failed("died", f"it cannot be started: {error.strerror}"))
            return
        self._process = process
        _widen(process)
        threading.Thread(target=self._listen, args=(process,), name="bulk", daemon=True).start()
        self._write(asdict(self.settings))
        self._say(keys=asdict(self._keys))

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            told = json.loads(line)
            if "id" not in told:
                if self._process is process:
                    self._minimum_rate.saw(told["moved"])
                    self._trouble = told["trouble"]
                continue
            with self._lock:
                job = self._jobs.pop(told["id"], None)
            if job:
                job.inbox.put((job, told))
        self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        """Begins again what a process had not done, unless that kills one process after the other."""
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what it did not read any more
                if pipe:
                    pipe.close()
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            if any(job.starts >= _STARTS for job in self._jobs.values()):
                self._give_up(Failed("died", f"it ended {_STARTS} times, the last time with {code}"))
            if not self._jobs:
                return
            self._minimum_rate.restarted()
            self._start()
            for job in self._jobs.values():
                job.starts += 1
                self._say(task=asdict(job.task))

    def _take_keys(self, keys: Keys) -> None:
        with self._lock:
            if keys != self._keys:
                self._keys = keys
                self._say(keys=asdict(keys))

    def _say(self, **told: Any) -> None:
        self._write(told)

    def _write(self, told: Answer) -> None:
        with suppress(OSError, ValueError):  # it is dead: whoever listens to it begins again
            if self._process and self._process.stdin:
                self._process.stdin.write(json.dumps(told).encode() + b"\n")
                self._process.stdin.flush()


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Room for all tasks that a process can be told of, so that nobody waits for it to read; less where that is all."""
    if process.stdin and hasattr(fcntl, "F_SETPIPE_SZ"):
        with suppress(OSError):
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _ROOM)
