"""What all phases of an attempt share: its job and paths, its log, its status, its lease, and the request to stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.lease import Lease
from mgpu_train.agent.log import Log, clean, hide
from mgpu_train.agent.report import Report
from mgpu_train.agent.status import Phase
from mgpu_train.config import Job, Secrets


class StopRequests:
    """Set by signals and read at every pass."""

    def __init__(self) -> None:
        self.asked: float | None = None  # monotonic seconds of the first one
        self.now = False  # without grace

    def ask(self, *, now: bool = False) -> None:
        """Notes a request; one without grace may follow one with it."""
        self.asked = self.asked or time.monotonic()
        self.now = self.now or now


class Attempt:
    """One attempt on one node, as its agent holds it."""

    def __init__(self, job: Job, secrets: Secrets, layout: RunLayout, stop: StopRequests) -> None:
        """`layout` has the node's home; the run's folder exists."""
        self.job, self.layout, self.secrets, self.stop = job, layout, secrets, stop
        self.times = job.timeouts
        self.log = Log(Path(layout.log))
        self.report = Report(job, layout)
        lease = Path(layout.home) / job.lease_file if job.lease_file else None
        self._lease = Lease(lease, lease_s=self.times.lease_s, renew_s=self.times.lease_renew_s)
        self._lease_problem = ""
        self._alive = False

    @property
    def work(self) -> Path:
        """The user's code: where the launcher runs."""
        return Path(self.layout.work)

    @property
    def checkpoints(self) -> Path:
        """Where the program leaves its checkpoints."""
        return Path(self.layout.checkpoints)

    def say(self, text: str) -> None:
        """Writes one line to the log, without secrets."""
        self.log.say(self.public(text))

    def enter(self, phase: Phase, **changes: Any) -> None:
        """Begins a phase. A `reason` is made one line without secrets."""
        if reason := changes.get("reason"):
            changes["reason"] = clean(self.public(reason), 500)
        words = f": {changes['fault']}: {changes['reason']}" if changes.get("fault") else ""
        self.say(f"attempt {self.job.attempt}: {phase}{words}")
        self.report.enter(phase, **changes)

    def tick(self, *, alive: bool = True, **changes: Any) -> None:
        """One pass: beats, and renews the lease if there was a sign of life since it was renewed last.

        Phases that have a deadline of their own are alive until then; training lives by its progress alone.
        """
        self.report.beat(**changes)
        self._alive = self._alive or alive
        try:
            if self._alive and self._lease.renew():
                self._alive = False
        except OSError as error:
            if str(error) != self._lease_problem:
                self._lease_problem = str(error)
                self.say(f"the lease cannot be renewed: {error}")

    def public(self, text: str) -> str:
        """The text without the secrets of the run and of the store."""
        return hide(text, [*self.secrets.env.values(), *self.secrets.store.values()])
