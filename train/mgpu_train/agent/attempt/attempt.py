"""What all phases of an attempt share: its job and paths, its log, its status, its lease, and what may end it early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mgpu_train import entries
from mgpu_train.agent.attempt.save_budget import NOTHING, Going, Need, going
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine.lease import Lease
from mgpu_train.agent.machine.notices import NoticeFile, Notices, Source
from mgpu_train.agent.status.log import Log, LogTimes, clean, hide
from mgpu_train.agent.status.report import StatusReport
from mgpu_train.agent.status.status import LEASE_ENDS, Fault, Notice, Phase
from mgpu_train.config import Job, Secrets

_EARLY_S = 5.0  # before a save would no longer fit into the lease: a pass may come late


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
        self._secret = {*secrets.env.values(), *secrets.store.values()}  # all that ever was
        self.times = job.timeouts
        self.log = Log(Path(layout.log))
        self._log_times = LogTimes(self.log, Path(layout.log_times))
        self.report = StatusReport(job, layout)
        home = Path(layout.home)
        lease = home / job.lease_file if job.lease_file else None
        self._lease = Lease(lease, lease_s=self.times.lease_s, renew_s=self.times.lease_renew_s)
        self._lease_problem = ""
        self._alive = False
        self._notices = Notices(_source(job, home), self.say)
        self.going: Going | None = None  # set when it is known that this machine goes
        self.need: Callable[[], Need] = lambda: NOTHING  # what a save takes, while there is something to save

    @property
    def work(self) -> Path:
        """The user's code: where the launcher runs. It was sent, or is in the image."""
        return Path(self.layout.home, self.job.workdir or self.layout.work)

    @property
    def checkpoints(self) -> Path:
        """Where the program leaves its checkpoints."""
        return Path(self.layout.checkpoints)

    def say(self, text: str) -> None:
        """Writes one line to the log, without secrets."""
        self.log.say(self.public(text))

    def renewed(self, store: dict[str, str]) -> None:
        """Takes fresh credentials of the store; whoever opens it next uses them. From any thread."""
        self._secret = self._secret | set(store.values())
        self.secrets = self.secrets.model_copy(update={"store": store})
        self.say("fresh credentials of the store have come")

    def enter(self, phase: Phase, **changes: Any) -> None:
        """Begins a phase. A `reason` is made one line without secrets."""
        if reason := changes.get("reason"):
            changes["reason"] = clean(self.public(reason), 500)
        fault = changes.get("fault")
        words = f": {fault}: {changes['reason']}" if fault else ""
        # an attempt that was to stop has not failed
        told = words if fault is Fault.STOPPED and phase is Phase.FAILED else f": {phase}{words}"
        self.say(f"attempt {self.job.attempt}{told}")
        self._log_times.mark(at_once=True)
        self.report.enter(phase, **changes)

    def tick(self, *, alive: bool = True, **changes: Any) -> None:
        """One pass: beats, looks for a notice, and renews the lease if there was a sign of life since the last time.

        Phases that have a deadline of their own are alive until then; training lives by its progress alone.
        """
        self._log_times.mark()
        if (warned := self._notices.poll()) is not None:
            self._goes(Fault.PROVIDER, "the provider takes this machine", warned.action, warned.left_s)
        if (since := self._notices.hinted()) is not None:
            self._at_risk(since)
        self._alive = self._alive or alive
        try:
            if self._alive and self._lease.renew():
                self._alive = False
        except OSError as error:
            self._not_renewed(error)
        self.report.beat(**changes)

    def _at_risk(self, since: float) -> None:
        """A hint: training goes on, and where there is something to save the program is asked for it once. Beside a
        notice it changes nothing."""
        self.say("the provider may take this machine soon (a hint, no notice)")
        self.report.beat(at_risk_since=since)
        training = self.report.status.phase is Phase.TRAINING and self.going is None
        if training and self.job.checkpoint is not None:
            try:
                Path(self.layout.save_request(self.job.attempt)).touch()
            except OSError as error:
                self.say(f"the program cannot be asked for an early checkpoint: {error}")

    def _not_renewed(self, error: OSError) -> None:
        """The lease that stands will end the machine: in time for a last save that is a notice like any other."""
        if str(error) != self._lease_problem:
            self._lease_problem = str(error)
            self.say(f"the lease cannot be renewed: {error}")
        left_s, wanted = self._lease.left_s(), self.need()
        enough_s = wanted.save_s + wanted.upload_s + _EARLY_S
        if self.going is None and left_s is not None and left_s <= enough_s:
            why = f"the lease cannot be renewed ({error.strerror or error}), and ends this machine"
            self._goes(Fault.INFRASTRUCTURE, why, LEASE_ENDS, left_s)

    def _goes(self, fault: Fault, why: str, action: str, left_s: float) -> None:
        now, grace_s = time.monotonic(), self.times.grace_s(math.inf)
        if self.going is not None and self.going.at <= now + left_s:
            return
        self.going = going(fault, why, now=now, left_s=left_s, wanted=self.need(), grace_s=grace_s)
        self.say(self.going.reason)
        self.report.beat(notice=Notice(action=action, at=round(time.time() + left_s, 3), fits=self.going.fits))

    def public(self, text: str) -> str:
        """The text without the secrets of the run and of the store."""
        return hide(text, list(self._secret))


def _source(job: Job, home: Path) -> Source | None:
    """Where this machine's notices stand."""
    if job.notices not in ("file", "none"):
        return entries.load(job.notices, object, "notices")()
    return NoticeFile(home / job.notice_file) if job.notices == "file" and job.notice_file else None
