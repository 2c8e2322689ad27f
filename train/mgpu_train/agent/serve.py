"""The agent's own process, which `agent start` forks; standard output and error are the run's log."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mgpu_train.agent import renewal
from mgpu_train.agent.attempt.attempt import Attempt, StopRequests
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import identity
from mgpu_train.agent.phases.life import live
from mgpu_train.agent.status import report
from mgpu_train.agent.status.status import Phase
from mgpu_train.config import Job, Secrets
from mgpu_train.system.prctl import become_subreaper


def serve(job: Job, secrets: Secrets, layout: RunLayout, ready: int) -> None:
    """Lives one attempt. The working directory is the node's home; `ready` is written to once the status stands."""
    stop = StopRequests()
    signal.signal(signal.SIGTERM, lambda *_: stop.ask())
    signal.signal(signal.SIGUSR1, lambda *_: stop.ask(now=True))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: programs that it starts would inherit that
    become_subreaper()
    identity.write(layout, job.attempt)
    attempt = Attempt(job, secrets, layout, stop)
    _listen(attempt, layout)
    attempt.enter(Phase.PREPARING)
    if report.read(Path(layout.status)) == attempt.report.status:
        os.write(ready, b"1")
    os.close(ready)
    live(attempt)


def _listen(attempt: Attempt, layout: RunLayout) -> None:
    try:
        renewal.listen(Path(layout.renewal), attempt.renewed)
    except (OSError, RuntimeError) as error:
        attempt.say(f"fresh credentials of the store cannot be taken: {error}")
