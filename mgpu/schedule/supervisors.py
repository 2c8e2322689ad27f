"""A process of its own for each run that is looked after: what one dies of is no other's end, nor that of who began it.

mgpu attach RUN --for SECONDS --json     does what the run needs, and leaves it
mgpu down RUN --json                     gives back what a run that is over has left
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from mgpu.backend import location
from mgpu.errors import StackError
from mgpu.events import Emit, Note, Warned
from mgpu.schedule.decide import Need
from mgpu.words import duration

_AT_ONCE = 8  # each takes about 100 MiB, and an engine of 200 while it works
_LEAVE_S = 20.0  # to save what is known, before it is killed: which a run survives, too
# More than to rent, to boot and to start takes, beside queues: who comes after one that was ended in a queue asks anew.
# One that waits for capacity may take longer: it leaves the run as it is, and the next pass goes on waiting. What hangs
# must not hold up all passes that come.
_LONGEST_S = 2 * 3600.0


@dataclass(frozen=True)
class Looked:
    """What became of a run while it was looked after. `said`: as the command's own result, or its error."""

    need: Need
    exit_code: int
    said: dict[str, Any]

    @property
    def state(self) -> str | None:
        """The run's, then; None: it could not be looked after."""
        return self.said.get("state")

    @property
    def error(self) -> dict[str, Any] | None:
        """Why it could not be looked after; None: it was, whatever became of it."""
        if self.state is not None:
            return None
        words = {"what": f"run {self.need.run_id}: its supervisor ended with exit code {self.exit_code}"}
        return self.said.get("error") or {**words, "exit_code": max(self.exit_code, 1)}  # below 0: a signal's


@dataclass
class _AtWork:
    process: subprocess.Popen[str]
    longest_s: float
    ends_at: float  # by the clock of who has begun it
    told_at: float | None = None  # that it is to leave its run


class Supervisors:
    """The runs that processes of this one look after. The clock is in seconds."""

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit, self._clock = emit, clock
        self._waiting = deque[tuple[Need, float]]()
        self._at_work: dict[str, _AtWork] = {}
        self._over = SimpleQueue[Looked]()

    @property
    def busy(self) -> bool:
        """True while one is at work, or waits, or has ended and was not asked for yet."""
        return bool(self._at_work or self._waiting) or not self._over.empty()

    def begin(self, need: Need, watch_s: float) -> None:
        """Looks after a run for so long, now or when there is room; not twice at a time."""
        if need.run_id not in self._at_work and all(each.run_id != need.run_id for each, _ in self._waiting):
            self._waiting.append((need, watch_s))
            self._fill()

    def ended(self, wait_s: float) -> Looked | None:
        """One that has ended; waits so long for it. One that takes too long is ended."""
        for run_id, work in self._at_work.items():
            self._end_late(run_id, work)
        try:
            looked = self._over.get(timeout=wait_s)
        except Empty:
            return None
        self._at_work.pop(looked.need.run_id, None)  # one that could not be started is not there
        self._fill()
        return looked

    def leave(self) -> None:
        """Has all of them leave their runs as these are."""
        self._waiting.clear()
        for work in self._at_work.values():
            work.process.send_signal(signal.SIGTERM)
        for work in self._at_work.values():
            try:
                work.process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                work.process.kill()

    def _end_late(self, run_id: str, work: _AtWork) -> None:
        now = self._clock()
        if work.told_at is None and now >= work.ends_at:
            self._emit(Warned(f"{run_id}: it takes more than {duration(work.longest_s)}: left to the next pass"))
            work.told_at = now
            work.process.send_signal(signal.SIGTERM)
        elif work.told_at is not None and now >= work.told_at + _LEAVE_S:
            work.process.kill()

    def _fill(self) -> None:
        # one that watches has its run for all the time: none waits for it
        while self._waiting and (len(self._at_work) < _AT_ONCE or self._waiting[0][1]):
            need, watch_s = self._waiting.popleft()
            try:
                self._start(need, watch_s)
            except (OSError, RuntimeError) as error:  # no memory for one more process, or thread, say
                self._at_work.pop(need.run_id, None)
                what = f"run {need.run_id}: no process could be started to look after it"
                failed = StackError(what, str(error), "The next pass tries again.")
                self._over.put(Looked(need, failed.exit_code, {"error": failed.to_json()}))

    def _start(self, need: Need, watch_s: float) -> None:
        """Raises OSError, RuntimeError: it cannot be, and nothing runs."""
        process = self._started(need, watch_s)
        longest_s = _LONGEST_S + need.queue_s
        self._at_work[need.run_id] = _AtWork(process, longest_s, self._clock() + watch_s + longest_s)
        try:
            for work in (self._tell, self._wait):
                threading.Thread(target=work, args=(need, process), name="mgpu-supervisor", daemon=True).start()
        except RuntimeError:  # nobody would hear of its end; it has only begun
            process.kill()
            process.wait()
            raise

    def _started(self, need: Need, watch_s: float) -> subprocess.Popen[str]:
        return subprocess.Popen(
            _command(need, watch_s),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, location.VARIABLE: location.current().url},
            start_new_session=True,  # Ctrl-C is for who has begun it
        )

    def _tell(self, need: Need, process: subprocess.Popen[str]) -> None:
        for line in process.stderr or ():
            self._emit(Note(f"{need.run_id}: {line.rstrip()}"))

    def _wait(self, need: Need, process: subprocess.Popen[str]) -> None:
        said = process.stdout.read() if process.stdout else ""
        code = process.wait()
        try:
            result = json.loads(said)
        except ValueError:  # it was killed, or a bug ended it
            result = {}
        self._over.put(Looked(need, code, result))


def _command(need: Need, watch_s: float) -> list[str]:
    doing = ["down", need.run_id] if need.give_back else ["attach", need.run_id, "--for", f"{watch_s:.0f}s"]
    return [sys.executable, "-m", "mgpu", *doing, "--json"]
