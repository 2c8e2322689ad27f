"""A process for each connection: in one process their threads would hand the interpreter's lock to and fro.

TLS gives 16 KiB a call, and each call gives the lock away. The processes are forked, so they share the memory of what
is imported.

    queue  <--->  Connection (a thread)  <== pipe ==>  Remote  <--->  Worker (a process of its own)
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from mmap import mmap
from multiprocessing import Pipe
from typing import Any, Protocol

from mgpu_train.store.bulk.message import Keys, Settings, Task
from mgpu_train.store.bulk.wire import Trouble
from mgpu_train.store.bulk.worker import Worker
from mgpu_train.store.pace import Pace
from mgpu_train.system.prctl import die_with_parent

_COUNT = 8  # bytes of one connection's number
_TURNS = 16


class Queue(Protocol):
    """Where connections get their tasks, and whom they tell; see child.TaskQueue."""

    settings: Settings
    pace: Pace
    keys: Keys

    def next(self) -> Task:
        """The next task that is still wanted; waits for it."""
        ...

    def wanted(self, task: Task) -> bool:
        """True: somebody waits for this task."""
        ...

    def answer(self, task: Task, **told: Any) -> None:
        """A task is over."""
        ...

    def stumbled(self, words: str) -> None:
        """A try failed, and there will be another."""
        ...


class Shared:
    """What processes share that are forked from the one that made it."""

    def __init__(self, connections: int) -> None:
        self._moved = memoryview(mmap(-1, connections * _COUNT)).cast("q")
        self._turns = [os.eventfd(1, os.EFD_SEMAPHORE | os.EFD_CLOEXEC) for _ in range(_TURNS)]

    def add(self, connection: int, count: int) -> None:
        """So many bytes more; only the process of this connection may."""
        self._moved[connection] += count

    @property
    def moved(self) -> int:
        """Bytes of all connections; those that have to go again do not count."""
        return sum(self._moved)

    @contextmanager
    def turn(self, file: str | None) -> Iterator[None]:
        """One process at a time is inside it for a file. Whoever is killed in there keeps it: all have to end then."""
        turn = self._turns[hash(file) % _TURNS]
        os.eventfd_read(turn)
        try:
            yield
        finally:
            os.eventfd_write(turn, 1)


class Connection:
    """A forked process that works on one task after the other, and what the process that forked it knows of it.

    It has to be made before this process has a second thread, and by the first: it dies with the thread that made it.
    """

    def __init__(self, queue: Queue, shared: Shared, number: int) -> None:
        self._queue = queue
        self._pipe, theirs = Pipe()
        self._lock = threading.Lock()
        self._task: Task | None = None
        self._ending = False
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self._pipe.close()
            _work(Remote(theirs, queue, shared, number), parent)
        theirs.close()  # the next one must not have it: it is to close when this one ends

    def start(self) -> None:
        """Begins to hand out tasks, from a thread."""
        threading.Thread(target=self._serve, daemon=True).start()

    def look(self) -> None:
        """Tells the process where nobody waits for its task any more."""
        with self._lock:
            if self._task and not self._queue.wanted(self._task):
                self._task = None
                self._pipe.send(None)

    def end(self) -> None:
        """Ends the process and takes leave of it: there is not always somebody who does so for orphans."""
        self._ending = True
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):  # it had ended by itself
            os.waitpid(self.pid, 0)

    def _serve(self) -> None:
        try:
            while True:
                self._do(self._queue.next())
        except (EOFError, OSError):  # it has ended: whoever uses this process starts another, as if this had died so
            if not self._ending:
                end_like(self.pid)

    def _do(self, task: Task) -> None:
        with self._lock:
            self._task = task
            self._pipe.send((task, self._queue.keys))
        self.look()  # it may have been forgotten meanwhile
        while isinstance(told := self._pipe.recv(), str):
            self._queue.stumbled(told)
        with self._lock:
            self._task = None
        self._queue.answer(task, **told)


class Remote:
    """The queue, as the process of a connection sees it; see worker.Tasks.

    Between two tasks nothing but `None` comes, and only while there is a task: it is not wanted any more.
    """

    def __init__(self, pipe: Any, queue: Queue, shared: Shared, number: int) -> None:
        self.settings, self.pace, self.keys = queue.settings, queue.pace, queue.keys
        self._pipe, self._shared, self._number = pipe, shared, number
        self._heard = select.poll()  # the pipe's own `poll` takes ten times as long, and each piece asks
        self._heard.register(pipe, select.POLLIN)

    def next(self) -> Task:
        """The next task; waits for it. Raises EOFError when there can be none."""
        while (told := self._pipe.recv()) is None:
            pass  # it was over before it was forgotten
        task, self.keys = told
        return task

    def answer(self, task: Task, **told: Any) -> None:
        """A task is over."""
        del task  # there is one at a time
        self._pipe.send(told)

    def moved(self, count: int) -> None:
        """So many bytes went through a socket; negative ones have to go again."""
        self._shared.add(self._number, count)

    def stumbled(self, trouble: Trouble) -> None:
        """A try failed, and there will be another."""
        self._pipe.send(f"{trouble.told['code']} {trouble}".strip())

    def unwanted(self, task: Task, within_s: float = 0) -> bool:
        """True: nobody waits for this task any more, or not after some time."""
        del task
        return bool(self._heard.poll(1000 * within_s))

    def turn(self, task: Task) -> AbstractContextManager[None]:
        """Inside it no other connection writes to the file of this task."""
        return self._shared.turn(task.file)


def end_like(pid: int) -> None:
    """Ends this process as a child of it has ended."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code) or 1)


def _work(remote: Remote, parent: int) -> None:
    """What a forked process does until it ends."""
    try:
        die_with_parent(signal.SIGKILL, parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # the engine's: they are to close when the process ends that it knows
            os.dup2(nothing, stream)
        Worker(remote).run()
    finally:
        os._exit(1)
