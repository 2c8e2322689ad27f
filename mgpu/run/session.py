"""What every step of a run shares: its record, its journal, its phases with their seconds, and whether to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from mgpu_train.timeouts import Timeouts

from mgpu.errors import Interrupted
from mgpu.events import Emit, Event, Note, PhaseFinished, PhaseStarted, Progress
from mgpu.journal import Journal
from mgpu.run.record import Folder, Record, State, save


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP. The handler calls what has to know at once (the engine's cancel).

    `told` is set when one of them came from somebody who cannot be asked: SIGTERM; `hung_up` when the terminal is gone.
    """

    def __init__(self) -> None:
        self.count = 0
        self.told = self.hung_up = False
        self._leaving = False
        self.cancelled = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Takes the process's handlers over while the block runs."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` means it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls `callback` on every signal while the block runs."""
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """While the block runs, which may take long, a second signal raises KeyboardInterrupt."""
        before, self._leaving = self._leaving, True
        try:
            yield
        finally:
            self._leaving = before

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.told |= number == signal.SIGTERM
        self.hung_up |= number == signal.SIGHUP
        self.cancelled.set()
        for callback in self._callbacks:
            callback()
        if self._leaving and self.count > 1 and number != signal.SIGHUP:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raises `Interrupted` when a signal came."""
        if self.count:
            raise Interrupted("interrupted", "A signal asked for the end before the training began.")


@dataclass
class Session:
    """One supervising process's hold on one run."""

    record: Record
    emit: Emit
    timeouts: Timeouts
    interrupts: Interrupts = field(default_factory=Interrupts)
    ask: Callable[[], bool | None] | None = None  # on a terminal: True = stop, False = leave it running, None = neither

    def __post_init__(self) -> None:
        folder = Folder(self.record.run_id)
        folder.make()
        self.journal = Journal(folder.journal / f"{int(time.time() * 1000)}-{os.getpid()}.jsonl")
        self.record.supervisor_pid = os.getpid()

    @property
    def folder(self) -> Folder:
        """Where the record lies."""
        return Folder(self.record.run_id)

    @property
    def asked_to_end(self) -> bool:
        """True when a signal came, or `mgpu stop` was called."""
        return self.interrupts.count > 0 or self.folder.stop.exists()

    def check(self) -> None:
        """Raises `Interrupted` when the end was asked for; between steps that have nothing to save yet."""
        self.interrupts.check()
        if self.asked_to_end:
            raise Interrupted("interrupted", "`mgpu stop` asked for the end before the training began.")

    @contextmanager
    def undoing(self, undo: Callable[[], None]) -> Iterator[None]:
        """While the block runs, a signal calls `undo`, and so does `mgpu stop`."""
        self.check()
        over = threading.Event()

        def told() -> None:
            self.emit(Note("interrupted: undoing what was begun"))
            undo()

        def look() -> None:
            while not over.wait(self.timeouts.poll_s):
                if self.folder.stop.exists():
                    told()
                    return

        watcher = threading.Thread(target=look, name="mgpu-stop", daemon=True)
        with self.interrupts.calling(told), self.interrupts.leaving():
            watcher.start()
            try:
                yield
            finally:
                over.set()
                watcher.join()

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Announces a phase, journals it, and remembers how long it took."""
        self.journal.append("phase", name=name)
        self.emit(PhaseStarted(name, detail))
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            spent = self.record.phase_seconds
            spent[name] = round(spent.get(name, 0.0) + seconds, 3)
            save(self.record)
            self.emit(PhaseFinished(name, seconds))

    def to(self, state: State) -> None:
        """Moves the record on, on disk first."""
        self.record.to(state)
        self.journal.append("state", state=str(state))
        save(self.record)

    def note(self, event: Event) -> None:
        """Keeps what a progress event says in the record, and passes the event on."""
        if isinstance(event, Progress):
            self.record.step, self.record.steps = event.step, event.steps or None
            self.record.loss, self.record.tokens_per_s = event.loss or None, event.tokens_per_s or None
        self.emit(event)
