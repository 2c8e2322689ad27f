"""One run on a fleet that stands: connect, send, start, watch, judge. Rents nothing and gives nothing back."""

from __future__ import annotations

import time
from pathlib import Path

from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.status import Fault
from mgpu_train.config import CheckpointTarget, Resume, Secrets

from mgpu.errors import RemoteError, TrainingFailed
from mgpu.events import Note, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.providers.base import Handle, Provider
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.targets import Jump, Target
from mgpu.run import agents
from mgpu.run.record import State, save
from mgpu.run.request import Request, writer_token
from mgpu.run.session import Session
from mgpu.run.supervise import Ended, Supervisor, collect_metrics


def targets(fleet: StackOutput) -> tuple[Target, ...]:
    """The nodes as the remote layer wants them."""
    return tuple(
        Target(
            node.rank,
            node.address,
            node.port,
            node.user,
            node.host_key,
            Jump(node.via.address, node.via.port, node.via.user, node.via.host_key) if node.via else None,
        )
        for node in fleet.nodes
    )


def handle_of(fleet: StackOutput) -> Handle:
    """The provider's handle of the fleet that a stack output names."""
    return Handle(
        provider=fleet.provider,
        region=fleet.region,
        fleet=fleet.fleet,
        generation=fleet.generation,
        token=fleet.token,
        ids=tuple(node.id for node in fleet.nodes),
    )


def conduct(
    session: Session, request: Request, fleet: StackOutput, provider: Provider | None, secrets: Secrets
) -> Ended:
    """Runs one attempt from the first connection to its judged end.

    Raises:
        RemoteError: a node could not be reached, or refused.
        TrainingFailed: the attempt could not be started.
        Interrupted: the end was asked for before the start.
    """
    with session.phase("connecting", f"{len(fleet.nodes)} nodes"):
        nodes = NodeSet.connect(targets(fleet), Path(fleet.private_key_file).expanduser(), session.timeouts)
    try:
        session.check()
        with session.phase("sending"):
            agents.send_library(nodes)
            _send_code(session, request, nodes)
        session.check()  # nothing trains yet: there is nothing to save, and nobody to ask
        with session.phase("starting"):
            _start(session, request, fleet, nodes, secrets)
        session.to(State.RUNNING)
        return watch(session, nodes, fleet, provider, request)
    finally:
        nodes.close()


def watch_again(session: Session, fleet: StackOutput, provider: Provider | None, request: Request) -> Ended:
    """Takes an attempt over that another supervisor started."""
    with session.phase("connecting", f"{len(fleet.nodes)} nodes"):
        nodes = NodeSet.connect(targets(fleet), Path(fleet.private_key_file).expanduser(), session.timeouts)
    try:
        return watch(session, nodes, fleet, provider, request)
    finally:
        nodes.close()


def watch(
    session: Session,
    nodes: NodeSet,
    fleet: StackOutput,
    provider: Provider | None,
    request: Request,
) -> Ended:
    """Watches an attempt that runs, and judges its end: success needs a checkpoint that verifies."""
    with session.phase("training"):
        supervisor = Supervisor(session, nodes, provider=provider, handle=handle_of(fleet), deadline=_deadline(session))
        ended = supervisor.watch()
    if not ended.left:
        collect_metrics(session, nodes, fleet.processes_per_node)
        if request.spec.teardown == "keep":
            _keep(session, nodes, request.spec.lease_minutes)
    if ended.succeeded and request.checkpoint is not None:
        return _judge(session, request.checkpoint, ended)
    return ended


def _keep(session: Session, nodes: NodeSet, minutes: float) -> None:
    """The run is over and the fleet stays: from the run's short lease back to the fleet's own."""
    try:
        nodes.each(lambda node: agents.renew_lease(node, minutes, session.timeouts))
        session.record.lease_until = min(time.time() + minutes * 60, session.record.hard_cap_at or float("inf"))
    except RemoteError as error:
        session.emit(Warned(f"the lease of the fleet could not be renewed, it ends soon: {error.what}"))


def _deadline(session: Session) -> float:
    """When to stop so that a last save and its upload still fit before the machines' hard cap; monotonic clock."""
    record, times = session.record, session.timeouts
    room = min(times.stop_grace_s + 30, record.max_hours * 3600 * 0.1)
    cap = record.hard_cap_at or (time.time() + record.max_hours * 3600)
    return time.monotonic() + max(0.0, min(cap - time.time(), record.max_hours * 3600) - room)


def _send_code(session: Session, request: Request, nodes: NodeSet) -> None:
    folder = request.workdir
    if folder is None:
        return
    reports = nodes.sync(folder, str(RunLayout(request.run_id).work))
    session.emit(Note(f"code: {reports[0].files} files, {reports[0].sent} sent to each of {len(reports)} nodes"))


def _start(session: Session, request: Request, fleet: StackOutput, nodes: NodeSet, secrets: Secrets) -> None:
    record = session.record
    record.attempt, record.writer, resume = _begin(session, request)
    store = request.checkpoint.to if request.checkpoint else None
    if record.store != store:  # a resumed run remembers its newest checkpoint, but not that of another store
        record.store, record.checkpoint_id, record.checkpoint_step = store, None, -1
    save(record)
    port = agents.free_port(nodes.nodes[0], session.timeouts)
    jobs = request.jobs(fleet, attempt=record.attempt, writer=record.writer, port=port, resume=resume)
    session.journal.append("start", attempt=record.attempt, resume=resume.checkpoint_id if resume else None)

    def begin(node: Node) -> None:
        agents.send_job(node, jobs[node.target.rank])
        agents.start(node, request.run_id, secrets, session.timeouts)

    try:
        nodes.each(begin)
    except RemoteError:
        nodes.each(lambda node: _undo_start(session, node))
        raise


def _undo_start(session: Session, node: Node) -> None:
    try:
        agents.stop(node, session.record.run_id, session.timeouts, now=True)
    except RemoteError as error:
        session.emit(Warned(f"node {node.target.rank} could not be asked to stop: {error.what}"))


def _begin(session: Session, request: Request) -> tuple[int, str, Resume | None]:
    """The attempt's number, its writer token, and the one checkpoint that all nodes start from."""
    attempt = session.record.attempt + 1
    writer = writer_token(request.run_id, attempt)
    if request.checkpoint is None:
        return attempt, writer, None
    from mgpu_train.checkpoint.commitlog import CommitLog, Fenced
    from mgpu_train.checkpoint.fetch import newest_verified
    from mgpu_train.store import Damaged, StoreError, open_store

    try:
        store = open_store(request.checkpoint.to)
        log = CommitLog(store, request.run_id)
        attempt = max(attempt, log.newest_attempt() + 1)
        log.begin_attempt(attempt, writer)
        newest = newest_verified(store, request.run_id, report=lambda text: session.emit(Warned(text)))
    except Fenced as error:
        raise TrainingFailed(
            f"run {request.run_id} was begun by somebody else at the same moment",
            str(error),
            f"Follow that attempt: `mgpu attach {request.run_id}`, on the machine where it was started.",
        ) from error
    except Damaged as error:
        raise TrainingFailed(
            f"no committed checkpoint of run {request.run_id} verifies",
            str(error),
            "To begin again from nothing, launch without `--resume`: that is a run of its own.",
        ) from error
    except StoreError as error:
        raise TrainingFailed(
            f"checkpoint.to: {request.checkpoint.to} cannot be used",
            str(error),
            "Mend the address or the credentials; nothing was trained.",
        ) from error
    if newest is None:
        return attempt, writer, None
    session.emit(Note(f"resuming from step {newest.manifest.step} ({newest.manifest.checkpoint_id})"))
    return attempt, writer, Resume(checkpoint_id=newest.manifest.checkpoint_id, seq=newest.seq)


def _judge(session: Session, checkpoint: CheckpointTarget, ended: Ended) -> Ended:
    from mgpu_train.checkpoint.commitlog import CommitLog
    from mgpu_train.checkpoint.verify import verify
    from mgpu_train.store import StoreError, open_store

    record = session.record
    with session.phase("verifying"):
        try:
            store = open_store(checkpoint.to)
            newest = CommitLog(store, record.run_id).checkpoints()[:1]
            problems = [
                problem for entry in newest for problem in verify(store, record.run_id, entry.manifest, deep=False)
            ]
        except StoreError as error:
            return Ended(False, f"the final checkpoint could not be verified: {error}", Fault.INFRASTRUCTURE)
    if not newest or newest[0].attempt != record.attempt:
        return Ended(False, "no checkpoint of this attempt is in the commit log", Fault.INFRASTRUCTURE)
    if problems:
        return Ended(False, f"the final checkpoint is damaged: {problems[0]}", Fault.INFRASTRUCTURE)
    record.checkpoint_id, record.checkpoint_step = newest[0].manifest.checkpoint_id, newest[0].manifest.step
    return ended
