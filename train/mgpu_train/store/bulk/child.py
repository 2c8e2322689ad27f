"""The process that has large bodies moved: tasks in by standard input, answers out by standard output.

It ends when its input does, which is when the process that uses it is gone, and when it had nothing to do for a while.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from mgpu_train.store.bulk.connections import Connection, Shared
from mgpu_train.store.bulk.line import Line
from mgpu_train.store.bulk.message import Keys, Settings, Task, task_of
from mgpu_train.store.bulk.wire import Trouble
from mgpu_train.store.pace import Pace

_TELL_EVERY_S = 0.2


class TaskQueue:
    """The line of tasks, and what is known of them; see connections.Queue."""

    def __init__(self, settings: Settings, out: int = 1) -> None:
        self.settings = settings
        self.pace = Pace(settings.bytes_per_s, shared=settings.pace)
        self.keys = Keys("", "")
        self.shared = Shared(settings.connections)
        self._out = out
        self._line = Line()
        self._lock = threading.Lock()
        self._wanted: set[int] = set()  # ids of tasks that are not answered
        self._told = 0
        self._trouble = ""
        self._busy = time.monotonic()

    def hear(self, line: bytes) -> None:
        """One line of the engine's."""
        told = json.loads(line)
        if "keys" in told:
            self.keys = Keys(**told["keys"])
        if "task" in told:
            task = task_of(told["task"])
            with self._lock:
                self._wanted.add(task.id)
            self._line.put(task)
        if "forget" in told:
            with self._lock:
                self._wanted -= set(told["forget"])

    def next(self) -> Task:
        """The next task that is still wanted; waits for it."""
        while True:
            task = self._line.get()
            if self.wanted(task):
                return task
            self.answer(task, error=Trouble("cancelled", "").told)

    def answer(self, task: Task, **told: Any) -> None:
        """A task is over."""
        self._line.done(task)
        with self._lock:
            self._wanted.discard(task.id)
            self._busy = time.monotonic()
            if not self._wanted:
                self._trouble = ""
        self._tell(id=task.id, **told)

    def stumbled(self, words: str) -> None:
        """A try failed, and there will be another."""
        self._trouble = words

    def wanted(self, task: Task) -> bool:
        """True: somebody waits for this task."""
        return task.id in self._wanted

    def idle(self) -> bool:
        """True when there was nothing to do for a while."""
        with self._lock:
            return not self._wanted and time.monotonic() - self._busy > self.settings.idle_s

    def report(self) -> None:
        """Say how much went through, where that changed."""
        moved = self.shared.moved
        if moved != self._told or self._trouble:
            self._told = moved
            self._tell(moved=moved, trouble=self._trouble)

    def _tell(self, **told: Any) -> None:
        line = json.dumps(told).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]


def serve(lines: Iterable[bytes], settings: Settings) -> None:
    """Does what the lines ask for, until there are none."""
    queue = TaskQueue(settings)
    gc.freeze()  # what is shared with forked processes is not to be written to
    connections = [Connection(queue, queue.shared, number) for number in range(settings.connections)]
    for each in connections:
        each.start()
    threading.Thread(target=_keep_telling, args=(queue, connections), daemon=True).start()
    for line in lines:
        queue.hear(line)
        for each in connections:
            each.look()
    _end(connections)


def _keep_telling(queue: TaskQueue, connections: list[Connection]) -> None:
    while not queue.idle():
        time.sleep(_TELL_EVERY_S)
        queue.report()
    _end(connections)


def _end(connections: list[Connection]) -> None:
    for each in connections:
        each.end()
    os._exit(0)


def main() -> None:
    """Runs until the input ends; then nothing that is under way is waited for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the engine decides
    lines = iter(sys.stdin.buffer.readline, b"")
    try:
        serve(lines, Settings(**json.loads(next(lines, b"{}"))))
    finally:
        os._exit(0)
