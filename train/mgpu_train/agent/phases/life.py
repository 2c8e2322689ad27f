"""The life of an agent: prepare, resume, launch and watch, drain.

The main thread passes every `poll_s`: it beats, renews the lease and looks at what happened. What may take long runs
beside it, so that a request to stop is heard in every phase, and no phase is without a deadline.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, TypeVar

from mgpu_train.agent.attempt.attempt import Attempt
from mgpu_train.agent.attempt.decide import (
    AttemptFailed,
    Ended,
    asked_to_stop,
    asks_peers,
    gone,
    has_part,
    lost,
    verdict,
)
from mgpu_train.agent.machine import facts, network, procs
from mgpu_train.agent.phases import launcher_process, outputs, preflight
from mgpu_train.agent.phases.folders import clear_local
from mgpu_train.agent.phases.launcher_process import Launch
from mgpu_train.agent.phases.prepare import prepare
from mgpu_train.agent.phases.resume import resume
from mgpu_train.agent.phases.watch import Watch
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.agent.uploads.checkpoint_store import AttemptStore
from mgpu_train.agent.uploads.uploads import CheckpointStoreError, Uploads
from mgpu_train.config import CheckpointTarget
from mgpu_train.health import gpus

T = TypeVar("T")

_HASTE_S = 1.0  # for the last word into the store, where somebody waits for the end and knows it


def live(attempt: Attempt) -> None:
    """From PREPARING, which has been entered, to a final status; raises nothing."""
    try:
        failure = _phases(attempt)
    except AttemptFailed as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - a bug here must end the attempt, and be seen
        for line in traceback.format_exc().splitlines():
            attempt.say(line)
        failure = AttemptFailed(Fault.INFRASTRUCTURE, f"the agent failed: {type(error).__name__}: {error}")
    if not launcher_process.kill_below(attempt.times.kill_s):
        attempt.say("some processes of this attempt could not be killed")
    if attempt.job.checkpoint is not None and (attempt.job.node_rank == 0 or asks_peers(attempt.job)):
        _last_word(attempt, attempt.job.checkpoint, failure)
    if failure is None:
        attempt.enter(Phase.DONE)
    else:
        attempt.enter(Phase.FAILED, **_told(failure))


def _told(failure: AttemptFailed) -> dict[str, Any]:
    """What the status says of it."""
    return {
        "fault": failure.fault, "reason": failure.reason, "suspect": failure.suspect, "starved": failure.starved,
        "damaged": failure.damaged,
    }  # fmt: skip


def _phases(attempt: Attempt) -> AttemptFailed | None:
    job, times = attempt.job, attempt.times
    if job.share is not None:  # what is started from here on counts, and has, only these
        os.sched_setaffinity(0, procs.cores(job.share.slots, job.share.of))
    environment = launcher_process.environment(job, attempt.secrets.env, attempt.layout, os.environ)
    _end_older(attempt)
    _demand_gpus(attempt)
    python = aside(
        attempt, lambda: prepare(attempt, environment), times.prepare_s, "preparing took more than {:g} s (prepare_s)"
    )
    resumed_step = -1
    if job.resume is not None:
        attempt.enter(Phase.RESUMING)
        late = "resume: took more than {:g} s (resume_s)"
        wanted = job.resume
        resumed_step = aside(attempt, lambda: resume(attempt, wanted), times.resume_s, late)
    clear_local(attempt)
    _preflight(attempt, environment, python)
    attempt.tick()
    _check_early_end(attempt)
    attempt.enter(Phase.LAUNCHING)
    _tell_network(attempt, environment)
    uploads = _uploads(attempt, job.checkpoint, resumed_step) if job.checkpoint and has_part(job) else None
    shell = job.launcher.takes == "shell"
    started = Launch(
        launcher_process.argv(job, attempt.layout, python),
        (launcher_process.with_python(environment, python) if shell else environment) | preflight.by_launchers(job),
        attempt.work,
        signal.Signals[job.launcher.orphaned],
    )
    ended = Watch(attempt, uploads, resumed_step).run(started)
    failure = _drain(attempt, uploads, ended)
    _keep_outputs(attempt, fenced=uploads is not None and uploads.fenced is not None)
    return failure


def _end_older(attempt: Attempt) -> None:
    """What a killed agent left of an older attempt must not write beside this one."""
    if not procs.kill_all(lambda: launcher_process.leftovers(attempt.layout), attempt.times.kill_s):
        raise AttemptFailed(Fault.INFRASTRUCTURE, "processes of an older attempt could not be killed")


def _demand_gpus(attempt: Attempt) -> None:
    """Nothing is prepared on a machine that lacks GPUs: whatever is started there, training on the CPU is no use."""
    if (demand := attempt.job.demand) is None:
        return
    late = "the GPUs were not counted within {:g} s"
    if lack := aside(attempt, lambda: _lack(demand), demand.wait_s + 2 * gpus.LOOK_S + facts.SMI_S, late):
        fault = Fault.INFRASTRUCTURE if lack.machine else Fault.USER
        raise AttemptFailed(fault, lack.words, suspect=lack.machine)


def _lack(demand: gpus.Demand) -> gpus.Lack | None:
    """What the node lacks, and the driver's word on why a program sees fewer GPUs than there are."""
    lack = demand.unmet()
    why = preflight.divided() if lack else None
    return replace(lack, words=f"{lack.words}; {why}") if lack and why else lack


def _preflight(attempt: Attempt, environment: Mapping[str, str], python: str) -> None:
    """Raises AttemptFailed where the machine's GPUs are not fit to train on."""
    if not (attempt.job.gpus and attempt.job.preflight):
        return
    aside(
        attempt, lambda: preflight.ask(attempt), preflight.ASK_S, "preflight: the driver did not answer within {:g} s"
    )
    measuring = preflight.Measuring(attempt, environment, python)
    try:
        while not measuring.over():
            _check_early_end(attempt)
            attempt.tick()
            time.sleep(attempt.times.poll_s)
    finally:
        measuring.end()


def _tell_network(attempt: Attempt, environment: Mapping[str, str]) -> None:
    """What is not as mgpu would have it is said where a user looks when the ranks do not find each other."""
    for words in launcher_process.overruled(attempt.job, attempt.layout, environment):
        attempt.say(f"network: {words}")
    taken = environment.get("NCCL_NET", "")
    if taken in network.DIRECT:
        name = network.DIRECT[taken]
        attempt.say(f"network: {name}, or nothing (NCCL_NET={taken}); TCP is `env: {{NCCL_NET: Socket}}`")
    card = environment.get("NCCL_SOCKET_IFNAME" if attempt.job.gpus else "GLOO_SOCKET_IFNAME", "").removeprefix("=")
    if attempt.job.nodes > 1 and card:
        what = "ranks meet" if taken in network.DIRECT else "nodes speak TCP"
        attempt.say(f"network: {what} through {card}")


def aside(attempt: Attempt, work: Callable[[], T], deadline_s: float, late: str) -> T:
    """Runs `work` in a thread of its own while this one passes; a thread that is given up ends with the agent.

    Raises:
        AttemptFailed: a stop was asked for, the machine goes, or the deadline is over; what `work` raises is raised
            again.
    """
    end = time.monotonic() + deadline_s
    future = _begin(work)
    while not wait([future], timeout=attempt.times.poll_s).done:
        _check_early_end(attempt)
        if time.monotonic() > end:
            raise AttemptFailed(Fault.INFRASTRUCTURE, late.format(deadline_s))
        attempt.tick()
    return future.result()


def _begin(work: Callable[[], T]) -> Future[T]:
    """Runs `work` in a thread of its own, which ends with the agent."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again on the thread that waits
            future.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:  # the system has none left
        future.set_exception(error)
    return future


def _check_early_end(attempt: Attempt) -> None:
    """Raises AttemptFailed when the attempt need not launch any more."""
    if attempt.stop.asked is not None:
        raise AttemptFailed(Fault.STOPPED, "this node was asked to stop before the launcher was started")
    if attempt.going is not None:
        raise AttemptFailed(attempt.going.fault, attempt.going.reason)


def _uploads(attempt: Attempt, target: CheckpointTarget, resumed_step: int) -> Uploads:
    job = attempt.job
    return Uploads(
        AttemptStore(attempt, target),
        attempt.checkpoints,
        leads=job.node_rank == 0,
        alone=job.nodes == 1 or target.writers == "rank0",
        times=attempt.times,
        say=attempt.say,
        resumed_step=resumed_step,
    )


def _drain(attempt: Attempt, uploads: Uploads | None, ended: Ended) -> AttemptFailed | None:
    """Waits for the uploads that are left, and says how the attempt ended."""
    # a failure that is certain already is told at once: peers may wait for this node in vain. Not so where ranks were
    # stopped along with a peer's: its own agent knows why, and all parts of the last save are still wanted
    certain = _judge(attempt, ended) if lost(ended) else None
    along = _explained(attempt, ended).cause is None and ended.said == "stopped"
    known = _told(certain) if certain and not along else {}
    attempt.enter(Phase.DRAINING, exit_code=ended.exit_code, **known)
    if uploads is None:
        return _judge(attempt, ended)
    _finish(attempt, uploads, certain)
    status = uploads.status
    attempt.tick(checkpoint=status)
    durable = status.committed_step if attempt.job.node_rank == 0 else status.uploaded_step
    over = replace(ended, durable_step=durable, problem=status.problem, unkept=uploads.unkept)
    failure = _judge(attempt, over)
    if failure is not None and certain is None and attempt.stop.now:
        return AttemptFailed(Fault.STOPPED, f"the operator did not wait for the uploads: {failure.reason}")
    return failure


def _finish(attempt: Attempt, uploads: Uploads, certain: AttemptFailed | None) -> None:
    """Waits until the uploads are through; not longer than the deadline, the machine or an operator in haste allows."""
    times, begin, drain_s = attempt.times, time.monotonic(), uploads.drain_s()
    longer: dict[str, Any] = {"drain_s": drain_s} if drain_s > times.drain_s else {}
    # a peer may be slow: when all went well, nothing is given up before the deadline
    patience_s = times.peers_s if certain else drain_s
    end = begin + drain_s
    if certain is not None and attempt.going is not None:
        end = min(end, attempt.going.at)
        patience_s = min(patience_s, max(0.0, end - begin))
    uploads.drain(patience_s)
    hurried = False
    while True:
        if attempt.stop.now and not hurried:
            hurried, end = True, min(end, time.monotonic() + times.stop_grace_s)
            uploads.hurry()
        if uploads.ended(times.poll_s):
            return
        if time.monotonic() >= end:
            if end == begin + drain_s:
                before = uploads.status.problem
                late = f"what was left to upload took more than {drain_s:.4g} s (drain_s)"
                uploads.note(problem=f"{before}; {late}" if before else late)
            return
        attempt.tick(checkpoint=uploads.status, **longer)


def _keep_outputs(attempt: Attempt, *, fenced: bool) -> None:
    """Brings the outputs to safety, as far as the deadline, the machine or an operator in haste allows. Those of an
    attempt that was `fenced` nobody will ask for in the store."""
    if not attempt.job.outputs:
        return
    target, times = attempt.job.checkpoint, attempt.times
    kept = outputs.Kept(target.to if target and not fenced else None)
    work, end, hurried = _begin(lambda: outputs.keep(attempt, kept)), time.monotonic() + times.outputs_s, False
    while not wait([work], timeout=times.poll_s).done:
        if attempt.stop.now and not hurried:
            hurried, end = True, min(end, time.monotonic() + times.stop_grace_s)
        if time.monotonic() > min(end, attempt.going.at if attempt.going else end):
            kept.cancelled.set()
            attempt.say(f"{kept}; there was no time for more")
            return
        attempt.tick()
    if error := work.exception():
        attempt.say(f"outputs could not be kept: {error}")
    attempt.say(str(kept))


def _judge(attempt: Attempt, ended: Ended) -> AttemptFailed | None:
    return verdict(attempt.job, _explained(attempt, ended))


def _explained(attempt: Attempt, ended: Ended) -> Ended:
    """Ranks agree to stop: those of a peer that was asked first may end this node's before the cause is seen here."""
    if ended.cause is not None or ended.said != "stopped":
        return ended
    if attempt.stop.asked is not None:
        return replace(ended, cause=asked_to_stop(attempt.stop.asked, attempt.times))
    if attempt.going is not None:
        return replace(ended, cause=gone(attempt.going, time.monotonic(), attempt.times))
    return ended


def _last_word(attempt: Attempt, target: CheckpointTarget, failure: AttemptFailed | None) -> None:
    """Into the store: how this node ended. Node 0 writes into the commit log how the attempt did, which is what is left
    to read when the machines are gone."""
    checkpoint_store = AttemptStore(attempt, target)
    if attempt.job.node_rank == 0 and failure is None and asks_peers(attempt.job):
        failure = _of_peers(attempt, checkpoint_store)
    try:
        _in_time(attempt, lambda: checkpoint_store.end(failure))
    except Exception as error:  # noqa: BLE001 - whatever it is, the node has ended as it has
        where = "the end is not in the commit log" if attempt.job.node_rank == 0 else "node 0 does not hear of the end"
        attempt.say(f"{where}: {error}")


def _of_peers(attempt: Attempt, checkpoint_store: AttemptStore) -> AttemptFailed | None:
    """What keeps a good end of this node from being the attempt's; silence does, too."""
    drain_s = attempt.report.status.drain_s or attempt.times.drain_s
    end = time.monotonic() + drain_s + (attempt.times.outputs_s if attempt.job.outputs else 0.0)
    for rank in range(1, attempt.job.nodes):
        while True:
            last = attempt.stop.now or time.monotonic() > end
            try:
                said = _in_time(attempt, lambda rank=rank: checkpoint_store.ended(rank))
            except (CheckpointStoreError, TimeoutError):
                said = None
            if said is not None:
                break
            if last:
                return AttemptFailed(Fault.INFRASTRUCTURE, f"node {rank} has not said how it ended")
            time.sleep(attempt.times.poll_s)
            attempt.tick()
        if said.failure is not None:
            return said.failure
    return None


def _in_time(attempt: Attempt, ask_store: Callable[[], T]) -> T:
    """What the store answers; an operator in haste knows how it ended, and does not wait for it long.

    Raises:
        TimeoutError: it did not answer; what it raises is raised again.
    """
    asked, begin = _begin(ask_store), time.monotonic()
    while not wait([asked], timeout=min(attempt.times.poll_s, _HASTE_S)).done:
        limit_s = _HASTE_S if attempt.stop.now else attempt.times.store_retry_s
        if time.monotonic() > begin + limit_s:
            raise TimeoutError(f"the store did not answer within {limit_s:g} s")
        attempt.tick()
    return asked.result()
