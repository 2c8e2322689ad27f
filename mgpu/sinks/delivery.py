"""Hands a run's events to its sinks: each has a thread and a queue of its own, and nobody waits for it.

Which sinks a run has its record says, by the run file as it ran: whichever command the events come from, a launch, an
`attach` on another day or a `down`, they go to the same ones.
"""

from __future__ import annotations

import functools
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from mgpu.backend import outbox
from mgpu.errors import InputError, MgpuError, StackError
from mgpu.events import Emit, Event, MetricsSampled, RunEnded, RunEvent, ScheduleMissed, Warned
from mgpu.run.record import files
from mgpu.run.record.files import RUN_FILE
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import find, note_end_told
from mgpu.sinks import telling
from mgpu.sinks.base import Heard, Sink
from mgpu.spec.block import Block
from mgpu.spec.load import accepted
from mgpu.spec.sink import installed
from mgpu.words import count

QUEUED = 10_000  # events that wait for one sink; what comes then is lost
CLOSE_S = 5.0  # for all sinks together to take what waits, when the command is done


Makers = Mapping[str, Callable[[], Sink]]  # by the sink's name


def of_record(run_id: str, *, once: bool = False) -> Makers:
    """What makes the sinks of a run: by its run file as it ran, and the folder that it stood in; `once`: only those
    that tell an event once, however often they hear it.

    Raises:
        MgpuError, OSError, UnicodeDecodeError: there is no such run, or its run file cannot be read.
    """
    record = find(run_id)
    if record is None:
        raise InputError(f"no run `{run_id}` any more", "Its record was removed.", "See `mgpu ls`.")
    folder = Folder(run_id)
    if not folder.run_file.exists():
        files.bring_run_file(folder.root, f"runs/{run_id}/")
    makers = _makers(folder.run_file, Heard(run_id, Path(record.project_base), f"runs/{run_id}"))
    return {name: make for name, make in makers.items() if not once or issubclass(_class(name), telling.Telling)}


def of_submission(submission: Path, whose: str, folder: Path) -> Makers:
    """What makes the sinks that hear of a schedule: by the run file in `submission`, which stood in `folder`; `whose`:
    what it submits is there in the backend.

    Raises:
        MgpuError, OSError, UnicodeDecodeError: the run file cannot be read.
    """
    makers = _makers(submission / RUN_FILE, Heard("", folder, whose))
    hears = {name: _class(name).schedule_missed is not Sink.schedule_missed for name in makers}
    return {name: make for name, make in makers.items() if hears[name]}


def _makers(run_file: Path, heard: Heard) -> Makers:
    sinks = accepted(run_file.read_text(encoding="utf-8"), str(run_file)).sinks
    blocks = {name: getattr(sinks, name) for name in type(sinks).model_fields}
    return {name: functools.partial(_make, name, block, heard) for name, block in blocks.items() if block is not None}


def _make(name: str, options: Block, heard: Heard) -> Sink:
    return _class(name)(options, heard)


def _class(name: str) -> type[Sink]:
    return resolve_name(installed().found[name].sink)


def tell_again(emit: Emit, of_schedule: Callable[[str], Makers]) -> None:
    """Tries once more what could not be delivered when it happened, on whichever machine that was; says what fails.
    `of_schedule` has the sinks of a schedule, by `Heard.whose`."""
    try:
        waiting = outbox.waiting()
    except StackError as error:
        emit(Warned(f"{error.what} ({error.why})"))
        return
    for whose in waiting:
        kind, _, name = whose.partition("/")
        if kind == "runs":
            again(f"run {name}", functools.partial(of_record, name, once=True), emit)
        else:
            again(f"schedule {name.rpartition('.')[0]}", functools.partial(of_schedule, whose), emit)


def again(whom: str, makers: Callable[[], Makers], emit: Emit) -> None:
    """Tries once more what could not be delivered of a run or a schedule; says what fails."""
    try:
        found = makers()
    except Exception as error:  # noqa: BLE001  no sink is worth a pass
        emit(Warned(f"{whom}: somebody is still to be told of it: {type(error).__name__}: {error}"))
        return
    for name, make in found.items():
        try:
            if issubclass(_class(name), telling.Telling):  # others have nothing that waits, and may begin something
                make().close()
        except Exception as error:  # noqa: BLE001  nor is one another's
            emit(Warned(f"{whom}: somebody is still to be told of it: sink {name}: {type(error).__name__}: {error}"))


class Delivery:
    """An `Emit` that passes everything on, and the events of runs to their sinks as well."""

    def __init__(
        self,
        emit: Emit,
        sinks_of: Callable[[str], Makers] = of_record,
        *,
        queued: int = QUEUED,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[str], None] = note_end_told,
    ) -> None:
        """`sinks_of` is asked once for each run; `ended` is told a run whose end its sinks have taken."""
        self._emit, self._sinks_of, self._queued, self._clock, self._ended = emit, sinks_of, queued, clock, ended
        self._threads: dict[str, list[_Thread]] = {}  # by run, or schedule
        self._without: set[str] = set()  # those whose sinks could not be told from here: somebody else may know them
        self._done: list[tuple[str, Callable[[], None]]] = []  # by that, what is to be called once all is taken

    def emit(self, event: Event) -> None:
        """Passes an event on; returns at once."""
        self._emit(event)
        if isinstance(event, RunEvent):
            self.tell(f"run {event.run_id}", lambda: self._sinks_of(event.run_id), event)

    def tell(
        self,
        whose: str,
        sinks: Callable[[], Makers],
        event: RunEvent | ScheduleMissed,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Hands an event to sinks alone; returns at once. `sinks` is called for the first event of `whose`; `done` once
        all sinks have taken it, when this is settled or closed."""
        if whose not in self._threads:
            self._threads[whose] = self._started(whose, sinks)
        for thread in self._threads[whose]:
            thread.put(event)
        if isinstance(event, RunEnded):
            done = functools.partial(self._ended, event.run_id)
        if done is not None:
            self._done.append((whose, done))

    def close(self, within_s: float = CLOSE_S) -> None:
        """Waits for the sinks to take what they were given, but not for long."""
        threads = [thread for started in self._threads.values() for thread in started]
        for thread in threads:
            thread.end()
        until = self._clock() + within_s
        with suppress(KeyboardInterrupt):  # whoever cannot wait still gets the run's own result
            for thread in threads:
                thread.join(max(0.0, until - self._clock()))
        for thread in threads:
            if lost := thread.lost:
                self._emit(Warned(f"sink {thread.name}: {count(lost, 'event')} did not reach it"))
        self.settle()
        self._threads.clear()
        self._without.clear()
        self._done.clear()

    def settle(self) -> None:
        """Calls `done` of all whose sinks have taken everything that they were given. Those that could not be told
        from here are forgotten: whoever is told of them once more makes their sinks anew."""
        failed = self._without | {whose for whose, threads in self._threads.items() if _failed(threads)}
        waiting = []
        for whose, done in self._done:
            if whose in failed:
                continue
            if not all(thread.whole for thread in self._threads[whose]):
                waiting.append((whose, done))
                continue
            with suppress(MgpuError, OSError):  # the next pass tells it again, and each sink once
                done()
        self._done = waiting
        for whose in failed:
            for thread in self._threads.pop(whose):
                thread.end()
        self._without.clear()

    def _started(self, whose: str, sinks: Callable[[], Makers]) -> list[_Thread]:
        threads = list[_Thread]()
        try:
            for name, make in sinks().items():
                threads.append(_Thread(name, make, self._emit, self._queued))
        except Exception as error:  # noqa: BLE001  no sink is worth a run
            for thread in threads:
                thread.end()
            self._emit(Warned(f"{whose} has no sinks from here on: {error}"))
            self._without.add(whose)
            return []
        return threads


def _failed(threads: list[_Thread]) -> bool:
    """Whether nothing is on its way, and something was lost that is to be said again."""
    return not any(thread.lost for thread in threads) and not all(thread.whole for thread in threads)


class _Thread:
    """One sink's thread, with what it has not taken yet."""

    def __init__(self, name: str, make: Callable[[], Sink], emit: Emit, queued: int) -> None:
        self.name = name
        self._make, self._emit, self._queued = make, emit, queued
        self._queue: queue.SimpleQueue[RunEvent | ScheduleMissed | None] = queue.SimpleQueue()
        self._given = self._taken = 0
        self._told = self._unkept = False
        self._newest: MetricsSampled | None = None
        self._thread = threading.Thread(target=self._run, name=f"mgpu-sink-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events that it has not taken."""
        return self._given - self._taken

    @property
    def whole(self) -> bool:
        """True when it has taken everything, and nothing of it is lost with this process."""
        return not self.lost and not self._unkept

    def put(self, event: RunEvent | ScheduleMissed) -> None:
        """Hands an event over, or leaves it out where too many wait; metrics that have not changed are no news."""
        if isinstance(event, MetricsSampled):
            if self._newest is not None and replace(event, at=self._newest.at) == self._newest:
                return
            self._newest = event
        self._given += 1
        if self._queue.qsize() < self._queued:
            self._queue.put(event)

    def end(self) -> None:
        """Nothing follows."""
        self._queue.put(None)

    def join(self, seconds: float) -> None:
        """Waits until it has taken everything."""
        self._thread.join(seconds)

    def _run(self) -> None:
        sink: Sink | None = None
        while (event := self._queue.get()) is not None:
            try:
                sink = self._make() if sink is None else sink
                name = _method(event)
                getattr(sink, name if hasattr(sink, name) else "event")(event)
            except BaseException as error:  # noqa: BLE001  whatever somebody else's program does, sys.exit too
                self._failed(error, made=sink is not None)
            self._taken += 1
        if sink is not None:
            try:
                sink.close()
            except BaseException as error:  # noqa: BLE001
                self._failed(error, made=True)

    def _failed(self, error: BaseException, *, made: bool) -> None:
        """Told once: a service that is down fails for every event. `made`: there is a sink, which failed; one that
        refuses to be made says ValueError, and what else was in the way of making it may not be elsewhere."""
        lost = isinstance(error, outbox.NotKept) if made else not isinstance(error, ValueError)
        self._unkept = self._unkept or lost
        if not self._told:
            self._told = True
            self._emit(Warned(f"sink {self.name}: {type(error).__name__}: {error}; the run goes on without it"))


def _method(event: RunEvent | ScheduleMissed) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type(event).__name__).lower()
