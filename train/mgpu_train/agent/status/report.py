"""Keeps the node's status file: replaced atomically, about twice a second at most, but at once for a new phase."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.status.status import AgentStatus, Phase
from mgpu_train.config import Job

_EVERY_S = 0.45
_SPARE = 64 << 10  # bytes that are kept for the last word


class StatusReport:
    """The status of one attempt, in memory and on disk."""

    def __init__(self, job: Job, layout: RunLayout, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is written before the first `enter`. `clock` is monotonic."""
        self._path = Path(layout.status)
        self._clock = clock
        self._entered = clock()
        self._seconds: dict[str, float] = {}
        self._written = -_EVERY_S
        self._spare = _reserve(self._path.with_name(f".{self._path.name}.spare"))
        now = time.time()
        self.status = AgentStatus(
            run_id=job.run_id,
            attempt=job.attempt,
            node_rank=job.node_rank,
            phase=Phase.PREPARING,
            agent_pid=os.getpid(),
            started_at=now,
            updated_at=now,
            steps=job.train.steps if job.train else None,
        )

    def enter(self, phase: Phase, **changes: Any) -> None:
        """Begins a phase, and says so at once."""
        before, now = self.status.phase, self._clock()
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._entered
        self._entered = now
        self._set(phase=phase, **changes)
        self._write()

    def beat(self, **changes: Any) -> None:
        """Takes the changes in and grows the beat; writes unless it did so just now."""
        self._set(beat=self.status.beat + 1, **changes)
        if self._clock() - self._written >= _EVERY_S:
            self._write()

    def _set(self, **changes: Any) -> None:
        self.status = self.status.model_copy(update=changes)

    def _write(self) -> None:
        now = self._clock()
        seconds = dict(self._seconds)
        if not self.status.phase.final:
            seconds[self.status.phase] = seconds.get(self.status.phase, 0.0) + now - self._entered
        seconds = {str(phase): round(spent, 3) for phase, spent in seconds.items()}
        self._set(updated_at=time.time(), phase_seconds=seconds)
        # a full disk must not end training; a status that stands still tells the operator enough, until the end
        with suppress(OSError):
            if self._spare is None or not self.status.phase.final:
                write(self._path, self.status)
            else:
                write(self._path, self.status, self._spare)
                self._spare.unlink(missing_ok=True)
        self._written = now


def write(path: Path, status: AgentStatus, spare: Path | None = None) -> None:
    """Replaces the status file atomically. `spare`: a file whose room is taken where the disk has no other.

    Raises:
        OSError: it could not be written; the old one stands.
    """
    aside, data = path.with_name(f".{path.name}.{os.getpid()}"), f"{status.model_dump_json(indent=1)}\n".encode()
    try:
        aside.write_bytes(data)
    except OSError:
        aside.unlink(missing_ok=True)
        if spare is None:
            raise
        with spare.open("r+b") as file:
            file.write(data)
            file.truncate()
        aside = spare
    aside.replace(path)


def _reserve(path: Path) -> Path | None:
    """A file that has room on the disk; None: there is none."""
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _SPARE)
    except OSError:
        return None
    return path


def read(path: Path) -> AgentStatus | None:
    """The status file, or None where there is none that can be read."""
    try:
        return AgentStatus.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
