"""`agent start` and `agent stop`: one agent a node and attempt, however often it is asked for.

The starter takes the run's lock, starts the agent in a session of its own, hands it the lock, the job and the secrets
(by a pipe: they never touch a disk), and returns when the agent's first status file stands. The lock is the agent's for
life; the kernel gives it back when the agent ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mgpu_train.agent import equip, procs, renewal, report
from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.log import Log
from mgpu_train.agent.status import AgentStatus, Fault, Phase
from mgpu_train.config import Job, Model, Secrets


class Refused(Exception):
    """The command cannot be carried out; the message is one line that says why."""


class Identity(Model):
    """`agent.json`: which process the newest agent of a run is."""

    attempt: int
    process: procs.Process


class Handover(Model):
    """What the starter writes to the agent's standard input, once."""

    job: Job
    secrets: Secrets
    lock_fd: int
    ready_fd: int


def identity(layout: RunLayout) -> Identity | None:
    """The newest agent of a run; it may have ended."""
    try:
        return Identity.model_validate_json(Path(layout.agent).read_bytes())
    except (OSError, ValueError):
        return None


def start(job: Job, secrets: Secrets, layout: RunLayout) -> dict[str, Any]:
    """Starts the agent of an attempt unless it was started before; returns its pid and whether it was.

    Raises:
        Refused: another attempt's agent lives, the attempt is over or older, or the agent did not come up.
        Problem: used: another run has claimed the node.
    """
    missing = sorted(set(job.secrets) - set(secrets.env))
    if missing:
        raise Refused(f"no value came for the secrets {', '.join(missing)}; set them where `mgpu` runs")
    try:
        with equip.claimed(Path(layout.home), job.run_id, time.monotonic() + job.timeouts.command_s):
            return _started(job, secrets, layout)
    except equip.Problem as problem:
        if problem.kind == "used":
            raise
        raise Refused(str(problem)) from problem


def _started(job: Job, secrets: Secrets, layout: RunLayout) -> dict[str, Any]:
    Path(layout.root).mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        known = _take(lock, job, layout) or _over(job, layout)
        if known is not None:
            return {"pid": known, "already": True}
        return {"pid": _spawn(lock, job, secrets, layout), "already": False}
    finally:
        os.close(lock)


def _take(lock: int, job: Job, layout: RunLayout) -> int | None:
    """Takes the lock; or, where the attempt's agent holds it and has a status, returns that agent's pid."""
    end = time.monotonic() + job.timeouts.command_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            return None
        # someone starts an agent, or an agent lives; who it is stands there as soon as it lives
        holder = identity(layout)
        if holder is not None and holder.process.alive:
            status = report.read(Path(layout.status))
            ending = status is not None and status.phase.final and holder.attempt < job.attempt
            if holder.attempt != job.attempt and not ending:
                raise Refused(
                    f"the agent of attempt {holder.attempt} (pid {holder.process.pid}) still runs: stop it before "
                    f"attempt {job.attempt} starts"
                )
            if status is not None and status.attempt == job.attempt:
                return holder.process.pid
        if time.monotonic() > end:
            raise Refused(f"another `agent start` has held {layout.lock} for {job.timeouts.command_s:g} s")
        time.sleep(0.05)


def _over(job: Job, layout: RunLayout) -> int | None:
    """With the lock held: the pid of the agent that this attempt had; None when it had none.

    Raises:
        Refused: a newer attempt was here.
    """
    status = report.read(Path(layout.status))
    if status is None or status.attempt < job.attempt:
        return None
    if status.attempt > job.attempt:
        raise Refused(f"attempt {job.attempt} is over: attempt {status.attempt} was started on this node")
    if not status.phase.final:
        report.write(Path(layout.status), _died(status))
    return status.agent_pid


def _died(status: AgentStatus) -> AgentStatus:
    """The status of an attempt whose agent ended without a word: the launcher died with it."""
    reason = f"the agent died in phase {status.phase}"
    change = {"phase": Phase.FAILED, "fault": Fault.INFRASTRUCTURE, "reason": reason, "updated_at": time.time()}
    return status.model_copy(update=change)


def _spawn(lock: int, job: Job, secrets: Secrets, layout: RunLayout) -> int:
    """Starts the agent's process and waits until its first status file stands."""
    log = Log(Path(layout.log))
    (ready, theirs), (ours, given) = os.pipe(), os.pipe()
    here = Path.cwd()
    paths = [str(here / path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        process = subprocess.Popen(
            # run id and attempt are for people who look at the list of processes
            [sys.executable, "-m", "mgpu_train.agent.serve", job.run_id, str(job.attempt)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=ours,
            stdout=log.fd,
            stderr=log.fd,
            start_new_session=True,
            pass_fds=(lock, theirs),
        )
    finally:
        os.close(theirs)
        os.close(ours)
    handover = Handover(job=job, secrets=secrets, lock_fd=lock, ready_fd=theirs)
    try:
        with suppress(BrokenPipeError), os.fdopen(given, "wb") as stdin:
            stdin.write(handover.model_dump_json(by_alias=True).encode())
        if _answers(ready, job.timeouts.command_s):
            return process.pid
    finally:
        os.close(ready)
    process.kill()
    raise Refused(f"the agent did not come up within {job.timeouts.command_s:g} s, or failed at once: see {layout.log}")


def _answers(ready: int, deadline_s: float) -> bool:
    """True when the agent wrote to the pipe; an agent that ended has closed it without a word."""
    readable, _, _ = select.select([ready], [], [], deadline_s)
    return bool(readable and os.read(ready, 1))


def stop(layout: RunLayout, *, now: bool) -> bool:
    """Asks the living agent to stop, `now` without grace; False: there is none to ask."""
    agent = identity(layout)
    return agent is not None and agent.process.send(signal.SIGUSR1 if now else signal.SIGTERM)


def renew(layout: RunLayout, secrets: Secrets) -> bool:
    """Gives the living agent fresh credentials of the store.

    Raises:
        Refused: no agent has taken them.
    """
    if not renewal.hand_over(Path(layout.renewal), secrets):
        raise Refused(f"no agent of run {layout.run_id} took the credentials on this node")
    return True


def status(layout: RunLayout) -> dict[str, Any]:
    """The status file, and whether its agent lives.

    Raises:
        Refused: no agent was started for this run on this node.
    """
    said = report.read(Path(layout.status))
    if said is None:
        raise Refused(f"no agent was started for run {layout.run_id} on this node")
    agent = identity(layout)
    alive = agent is not None and agent.attempt == said.attempt and agent.process.alive
    return {**json.loads(said.model_dump_json()), "alive": alive}
