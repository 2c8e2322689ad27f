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

from mgpu.events import Emit, Event, MetricsSampled, RunEvent, ScheduleMissed, Warned
from mgpu.run.record.files import RUN_FILE
from mgpu.run.record.folder import Folder, runs
from mgpu.run.record.record import load
from mgpu.sinks import telling
from mgpu.sinks.base import Heard, Sink
from mgpu.spec.block import Block
from mgpu.spec.load import loads
from mgpu.spec.sink import installed
from mgpu.words import count

QUEUED = 10_000  # events that wait for one sink; what comes then is lost
CLOSE_S = 5.0  # for all sinks together to take what waits, when the command is done


Makers = Mapping[str, Callable[[], Sink]]  # by the sink's name


def of_record(run_id: str) -> Makers:
    """What makes the sinks of a run: by its run file as it ran, and the folder that it stood in.

    Raises:
        MgpuError, OSError, UnicodeDecodeError: there is no such run, or its run file cannot be read.
    """
    folder = Folder(run_id)
    return _makers(folder.run_file, Heard(run_id, Path(load(run_id).project_base), folder.root))


def of_submission(submission: Path, folder: Path) -> Makers:
    """What makes the sinks that hear of a schedule: by the run file that it submits, which stood in `folder`.

    Raises:
        MgpuError, OSError, UnicodeDecodeError: the run file cannot be read.
    """
    makers = _makers(submission / RUN_FILE, Heard("", folder, submission))
    hears = {name: _class(name).schedule_missed is not Sink.schedule_missed for name in makers}
    return {name: make for name, make in makers.items() if hears[name]}


def _makers(run_file: Path, heard: Heard) -> Makers:
    sinks = loads(run_file.read_text(), str(run_file)).sinks
    blocks = {name: getattr(sinks, name) for name in type(sinks).model_fields}
    return {name: functools.partial(_make, name, block, heard) for name, block in blocks.items() if block is not None}


def _make(name: str, options: Block, heard: Heard) -> Sink:
    return _class(name)(options, heard)


def _class(name: str) -> type[Sink]:
    return resolve_name(installed().found[name].sink)


def tell_again(emit: Emit) -> None:
    """Tries once more, for all runs of this machine, what could not be delivered when it happened; says what fails."""
    for run_id in telling.waiting(runs()):
        again(f"run {run_id}", functools.partial(of_record, run_id), emit)


def again(whom: str, makers: Callable[[], Makers], emit: Emit) -> None:
    """Tries once more what could not be delivered of a run or a schedule; says what fails."""
    try:
        for make in makers().values():
            make().close()
    except Exception as error:  # noqa: BLE001  no sink is worth a pass
        emit(Warned(f"{whom}: somebody is still to be told of it: {type(error).__name__}: {error}"))


class Delivery:
    """An `Emit` that passes everything on, and the events of runs to their sinks as well."""

    def __init__(
        self,
        emit: Emit,
        sinks_of: Callable[[str], Makers] = of_record,
        *,
        queued: int = QUEUED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sinks_of` is asked once for each run."""
        self._emit, self._sinks_of, self._queued, self._clock = emit, sinks_of, queued, clock
        self._threads: dict[str, list[_Thread]] = {}  # by run, or schedule

    def emit(self, event: Event) -> None:
        """Passes an event on; returns at once."""
        self._emit(event)
        if isinstance(event, RunEvent):
            self.tell(f"run {event.run_id}", lambda: self._sinks_of(event.run_id), event)

    def tell(self, whose: str, sinks: Callable[[], Makers], event: RunEvent | ScheduleMissed) -> None:
        """Hands an event to sinks alone; returns at once. `sinks` is called for the first event of `whose`."""
        if whose not in self._threads:
            self._threads[whose] = self._started(whose, sinks)
        for thread in self._threads[whose]:
            thread.put(event)

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
        self._threads.clear()

    def _started(self, whose: str, sinks: Callable[[], Makers]) -> list[_Thread]:
        try:
            makers = sinks()
        except Exception as error:  # noqa: BLE001  no sink is worth a run
            self._emit(Warned(f"{whose} has no sinks from here on: {error}"))
            return []
        return [_Thread(name, make, self._emit, self._queued) for name, make in makers.items()]


class _Thread:
    """One sink's thread, with what it has not taken yet."""

    def __init__(self, name: str, make: Callable[[], Sink], emit: Emit, queued: int) -> None:
        self.name = name
        self._make, self._emit, self._queued = make, emit, queued
        self._queue: queue.SimpleQueue[RunEvent | ScheduleMissed | None] = queue.SimpleQueue()
        self._given = self._taken = 0
        self._told = False
        self._newest: MetricsSampled | None = None
        self._thread = threading.Thread(target=self._run, name=f"mgpu-sink-{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events that it has not taken."""
        return self._given - self._taken

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
                self._failed(error)
            self._taken += 1
        if sink is not None:
            try:
                sink.close()
            except BaseException as error:  # noqa: BLE001
                self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """Told once: a service that is down fails for every event."""
        if not self._told:
            self._told = True
            self._emit(Warned(f"sink {self.name}: {type(error).__name__}: {error}; the run goes on without it"))


def _method(event: RunEvent | ScheduleMissed) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type(event).__name__).lower()
