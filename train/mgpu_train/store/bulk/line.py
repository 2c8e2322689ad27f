"""The line of tasks of the process that moves bytes."""

from __future__ import annotations

import threading
from collections import Counter

from mgpu_train.store.bulk.message import Task


class Line:
    """First come, first served, but whoever comes for a task gets one of the file that the fewest write to.

    A file system lets one at a time write to a file; those who wait for it take processor time and move nothing.
    """

    def __init__(self) -> None:
        self._waiting: list[Task] = []
        self._writers: Counter[str] = Counter()
        self._changed = threading.Condition()

    def put(self, task: Task) -> None:
        """One more task, at the end."""
        with self._changed:
            self._waiting.append(task)
            self._changed.notify()

    def get(self) -> Task:
        """Takes a task out of the line; waits for one. `done` has to be told of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            task = min(self._waiting, key=lambda each: self._writers[_written(each)])
            self._waiting.remove(task)
            self._writers[_written(task)] += bool(_written(task))
        return task

    def done(self, task: Task) -> None:
        """Nobody works on this one any more."""
        with self._changed:
            self._writers -= Counter([_written(task)])


def _written(task: Task) -> str:
    """The file that a task writes to; empty: to none."""
    return task.file or "" if task.method == "GET" else ""
