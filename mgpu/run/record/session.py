"""What every step of a run shares: its record, its journal, its phases with their seconds, whether to stop, and whether
it is still this process's run."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mgpu_train.timeouts import Timeouts

from mgpu.errors import Interrupted, MgpuError, StackError, TakenOver
from mgpu.events import Emit, Note, PhaseFinished, PhaseStarted, RunEvent, RunStateChanged, Warned
from mgpu.journal import Journal
from mgpu.run.record import files, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State, out_of_touch, save, taken_over
from mgpu.run.record.signals import Interrupts
from mgpu.run.record.supervisor_lock import Holder, taken_from

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.commit_log import CommitLog


@dataclass
class Session:
    """One supervising process's hold on one run."""

    record: Record
    emit: Emit
    timeouts: Timeouts
    interrupts: Interrupts = field(default_factory=Interrupts)
    # on a terminal, told what becomes of the work: True = stop, False = leave it running, None = neither
    ask: Callable[[str], bool | None] | None = None
    watch_s: float | None = None  # seconds after which a run that trains is left (`Context.watch_s`)
    hidden: Sequence[bytes] = ()  # values that no copy of a log may show
    # by provider, what its nodes were given last to open the run's store: no other one's nodes get it
    stores: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folder = Folder(self.record.run_id)
        folder.make()
        name = f"{int(time.time() * 1000)}-{os.getpid()}-{secrets.token_hex(3)}.jsonl"
        self.journal = Journal(folder.journal / name)
        self.record.supervisor_pid = os.getpid()
        self._began = time.monotonic()
        self._claimed = self._disk_told = self._backend_told = False

    @property
    def folder(self) -> Folder:
        """Where the record lies."""
        return Folder(self.record.run_id)

    # --- whose run it is ----------------------------------------------------------------------------------------

    def still_mine(self) -> bool:
        """False when another process has taken the run over, as far as is known here. Cheap: it asks nobody."""
        return self._taken_by() is None

    def _taken_by(self) -> Holder | None:
        return taken_from(self.folder.lock, self.record.supervisor)

    def _not_mine(self) -> TakenOver:
        """The error of a run that another process has, or may have."""
        other = self._taken_by()
        return taken_over(self.record.run_id, other) if other else out_of_touch(self.record.run_id)

    def require_mine(self) -> None:
        """Returns when this process certainly supervises the run; a backend that does not answer is waited for, as long
        as machines last without anybody.

        Raises:
            TakenOver: another process supervises the run now, or may do so: nothing of it may be touched any more.
        """
        run_id, told, asked = self.record.run_id, False, self.interrupts.count
        until = time.monotonic() + self.timeouts.lease_s
        while True:
            if not self.still_mine():
                raise self._not_mine()
            if not shared.unsure_s(run_id):
                return
            if time.monotonic() > until or self.interrupts.count > asked:
                raise self._not_mine()
            if not told:
                told = True
                why = "the backend does not answer, and another machine may have taken the run over"
                self.emit(Warned(f"{why}: nothing is begun or ended until it answers; the run itself goes on"))
            time.sleep(self.timeouts.poll_s)

    def claim(self, log: CommitLog) -> None:
        """Says in the store, once, that this process supervises the run: an earlier one begins no attempt any more.

        Raises StoreError.
        """
        if not self._claimed and self.record.supervisor:
            log.take_over(self.record.supervisor, host=os.uname().nodename, pid=os.getpid())
            self._claimed = True

    @property
    def may_leave(self) -> bool:
        """True once a run that trains and needs nothing is left, as was asked for from the beginning."""
        return self.watch_s is not None and time.monotonic() - self._began >= self.watch_s

    # --- whether to stop ----------------------------------------------------------------------------------------

    @property
    def asked_to_end(self) -> bool:
        """True when a signal came, or `mgpu stop` was called."""
        return self.interrupts.count > 0 or self.folder.stop.exists()

    def check(self) -> None:
        """Raises `Interrupted` when the end was asked for, `TakenOver` when another process has the run; between steps
        that have nothing to save yet."""
        self.require_mine()
        self.interrupts.check()
        if self.asked_to_end:
            raise Interrupted("interrupted", "`mgpu stop` asked for the end before the training began.")

    @contextmanager
    def undoing(self, undo: Callable[[], None], abandon: Callable[[], None]) -> Iterator[None]:
        """While the block runs, a signal calls `undo`, and so do `mgpu stop` and a process of this machine that takes
        the run over, which waits for it; `abandon` is called where one of another machine has done that, or may have:
        what was begun may be that one's by now."""
        self.check()
        over, left, run_id = threading.Event(), threading.Event(), self.record.run_id

        def told(why: str = "interrupted") -> None:
            self.emit(Note(f"{why}: undoing what was begun"))
            undo()

        def look() -> None:
            while not over.wait(self.timeouts.poll_s):
                if self.folder.stop.exists():
                    return told()
                other = self._taken_by()
                if other is not None and other.lives:  # on this machine
                    return told("taken over")
                if other is not None or shared.unsure_s(run_id):
                    why = f"taken over by {other}" if other else "the backend does not answer"
                    self.emit(Note(f"{why}: what was begun is left to whoever goes on with the run"))
                    left.set()
                    return abandon()
            return None

        watcher = threading.Thread(target=look, name="mgpu-stop", daemon=True)
        with self.interrupts.calling(told), self.interrupts.leaving():
            watcher.start()
            try:
                yield
            except MgpuError as error:
                if not left.is_set():
                    raise
                raise self._not_mine() from error
            finally:
                over.set()
                watcher.join()
        self.require_mine()

    # --- what is remembered -------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Announces a phase, journals it, and remembers how long it took."""
        self.log("phase", name=name)
        self.emit(PhaseStarted(name, detail))
        begin = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            spent = self.record.phase_seconds
            spent[name] = round(spent.get(name, 0.0) + seconds, 3)
            self.save()
            self.emit(PhaseFinished(name, seconds))

    def to(self, state: State) -> None:
        """Moves the record on, on disk first. Raises `TakenOver`."""
        self.require_mine()
        before = self.record.state
        if state.final:  # who sees from elsewhere that it is over is to see all of its logs
            with suppress(OSError, StackError, KeyboardInterrupt), self.interrupts.leaving():
                files.send(self.record.run_id)
        self.record.to(state)
        self.log("state", state=str(state))
        self.save()
        if before is not state:
            self.tell(RunStateChanged, state=str(state), before=str(before))

    def save(self, *, soon: bool = False) -> None:
        """Saves the record. A full disk of this machine ends no run, nor does a backend that does not answer: both are
        told once. `soon`: other machines may see it a few seconds later.

        Raises:
            TakenOver: another process supervises the run now.
        """
        with self._tolerating_full_disk():
            try:
                save(self.record, soon=soon)
            except StackError as error:
                if not self._backend_told:
                    self._backend_told = True
                    self.emit(Warned(f"{error.what} ({error.why}): the run goes on, other machines see it as it was"))
            else:
                self._backend_told = False

    def log(self, kind: str, **fields: Any) -> None:
        """Journals what has happened, as far as there is room; what must be on disk first goes to `journal` itself."""
        with self._tolerating_full_disk():
            self.journal.append(kind, **fields)

    @contextmanager
    def _tolerating_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._disk_told:
                self._disk_told = True
                why = error.strerror or error
                self.emit(
                    Warned(f"{self.folder.root} cannot be written ({why}): the run goes on, `mgpu status` is old")
                )

    def tell(self, kind: Callable[..., RunEvent], **fields: Any) -> None:
        """Emits an event of this run and attempt, which happened now."""
        self.emit(kind(run_id=self.record.run_id, attempt=self.record.attempt, at=time.time(), **fields))
