"""`agent start`, and what else asks for models: one agent a node and attempt, however often it is asked for.

The starter takes the run's lock and forks: the agent goes on in a session of its own, with the lock, the job, the
secrets, which never touch a disk, and all that was imported, which takes longer than the rest of a start. The starter
returns when the agent's first status file stands. The lock is the agent's for life; the kernel gives it back when the
agent ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mgpu_train.agent import renewal
from mgpu_train.agent.host import python_env
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import identity
from mgpu_train.agent.status import report
from mgpu_train.agent.status.log import Log
from mgpu_train.agent.status.status import AgentStatus, Fault, Phase
from mgpu_train.config import Job, Secrets
from mgpu_train.errors import Refused


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
        until, slots = time.monotonic() + job.timeouts.command_s, job.share.slots if job.share else ()
        with python_env.claimed(Path(layout.home), job.run_id, until, slots) as claim:
            return _started(claim, job, secrets, layout)
    except python_env.Problem as problem:
        if problem.kind is python_env.ProblemKind.USED:
            raise
        raise Refused(str(problem)) from problem


def _started(claim: int, job: Job, secrets: Secrets, layout: RunLayout) -> dict[str, Any]:
    Path(layout.root).mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        known = _take(lock, job, layout) or _over(job, layout)
        if known is not None:
            return {"pid": known, "already": True}
        return {"pid": _spawn(claim, job, secrets, layout), "already": False}
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
        holder = identity.read(layout)
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


def _spawn(claim: int, job: Job, secrets: Secrets, layout: RunLayout) -> int:
    """Forks the agent, and waits until its first status file stands. The claim is the starter's alone."""
    log = Log(Path(layout.log))
    ready, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become((claim, ready), theirs, log, job, secrets, layout)
    os.close(theirs)
    try:
        if _answers(ready, job.timeouts.command_s):
            return pid
    finally:
        os.close(ready)
        os.close(log.fd)
    os.kill(pid, signal.SIGKILL)  # it is this process's child: nobody else has its number yet
    raise Refused(f"the agent did not come up within {job.timeouts.command_s:g} s, or failed at once: see {layout.log}")


def _become(others: tuple[int, ...], ready: int, log: Log, job: Job, secrets: Secrets, layout: RunLayout) -> NoReturn:
    """The agent's own process, which keeps the run's lock that is open; `others` are the starter's own."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for theirs, ours in ((null, 0), (log.fd, 1), (log.fd, 2)):
            os.dup2(theirs, ours)
        for number in (*others, null, log.fd):
            os.close(number)
        # the folders of programs that it starts may be others
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(str(Path.cwd() / path) for path in paths if path)
        from mgpu_train.agent import serve  # only the agent needs all of it

        serve.serve(job, secrets, layout, ready)
        code = 0
    except BaseException:  # noqa: BLE001 - to go on would be to do the starter's work twice
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads that were given up must not hold the end up


def _answers(ready: int, deadline_s: float) -> bool:
    """True when the agent wrote to the pipe; an agent that ended has closed it without a word."""
    readable, _, _ = select.select([ready], [], [], deadline_s)
    return bool(readable and os.read(ready, 1))


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
    agent = identity.read(layout)
    alive = agent is not None and agent.attempt == said.attempt and agent.process.alive
    return {**json.loads(said.model_dump_json()), "alive": alive}
