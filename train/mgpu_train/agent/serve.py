"""The agent's own process: `python -m mgpu_train.agent.serve RUN ATTEMPT`. Only `agent start` starts it.

It reads job and secrets from standard input, once; standard output and error are the run's log.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path, PurePosixPath

from mgpu_train.agent import procs, renewal, report
from mgpu_train.agent.attempt import Attempt, StopRequests
from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.life import live
from mgpu_train.agent.start import Handover, Identity
from mgpu_train.agent.status import Phase


def main() -> None:
    """Lives one attempt. The working directory is the node's home."""
    handover = Handover.model_validate_json(sys.stdin.buffer.read())
    job, layout = handover.job, RunLayout(handover.job.run_id, PurePosixPath(Path.cwd()))
    for descriptor in (handover.lock_fd, handover.ready_fd):
        os.set_inheritable(descriptor, False)  # an outliving process must not hold the lock
    stop = StopRequests()
    signal.signal(signal.SIGTERM, lambda *_: stop.ask())
    signal.signal(signal.SIGUSR1, lambda *_: stop.ask(now=True))
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: programs that it starts would inherit that
    procs.become_subreaper()
    _identify(layout, job.attempt)
    attempt = Attempt(job, handover.secrets, layout, stop)
    _listen(attempt, layout)
    attempt.enter(Phase.PREPARING)
    if report.read(Path(layout.status)) == attempt.report.status:
        os.write(handover.ready_fd, b"1")
    os.close(handover.ready_fd)
    live(attempt)
    sys.stdout.flush()
    os._exit(0)  # threads that were given up must not hold the end up


def _listen(attempt: Attempt, layout: RunLayout) -> None:
    try:
        renewal.listen(Path(layout.renewal), attempt.renewed)
    except (OSError, RuntimeError) as error:
        attempt.say(f"fresh credentials of the store cannot be taken: {error}")


def _identify(layout: RunLayout, attempt: int) -> None:
    path = Path(layout.agent)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(Identity(attempt=attempt, process=procs.me()).model_dump_json() + "\n")
    aside.replace(path)


if __name__ == "__main__":
    main()
