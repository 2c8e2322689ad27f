"""The beginning of an attempt: its entry in the commit log, the checkpoint that all nodes start from, the agents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mgpu_train.config import CheckpointTarget, Resume, Secrets, Share

from mgpu.acquire.pauses import patiently
from mgpu.errors import InputError, MgpuError, RemoteError, TakenOver, TrainingFailed
from mgpu.events import Emit, Note, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job import operator_store
from mgpu.run.job.request import Request, writer_token
from mgpu.run.lifecycle.capacity_wait import paused
from mgpu.run.lifecycle.post_mortem import forgotten
from mgpu.run.nodes import agent_client
from mgpu.run.record import interruptions
from mgpu.run.record.session import Session

if TYPE_CHECKING:
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.checkpoint.log.lines import Commit


PORTS = 3  # for the launchers, the agents, and what is measured before


def start(session: Session, request: Request, fleet: StackOutput, nodes: NodeSet, secrets: Secrets) -> None:
    """Starts the next attempt on all nodes.

    Raises:
        RemoteError: a node could not be started; those that were are asked to stop.
        TrainingFailed: the store, or what is in it, allows no attempt.
        TakenOver: another process supervises the run now.
    """
    record = session.record
    store = request.checkpoint.to if request.checkpoint else None
    if record.store != store:  # a resumed run remembers its newest checkpoint, but not that of another store
        record.store, record.checkpoint_id, record.checkpoint_step = store, None, -1
    record.attempt, record.writer, resume = _begin(session, request, partial(_paused, session, nodes))
    session.save()
    ports = agent_client.free_ports(nodes.nodes[0], PORTS, session.timeouts)
    share = None
    if record.slots:
        share = Share(slots=tuple(record.slots), of=record.slots_of, gpus=request.spec.gpus_per_node > 0)
    session.require_mine()  # what came before may have waited for a store for long
    known = {"attempt": record.attempt, "writer": record.writer, "ports": ports, "resume": resume}
    jobs = request.jobs(fleet, share=share, **known)
    session.journal.append("start", attempt=record.attempt, resume=resume.checkpoint_id if resume else None)

    def begin(node: Node) -> None:
        agent_client.send_job(node, jobs[node.target.rank])
        agent_client.start(node, request.run_id, secrets, session.timeouts)

    try:
        nodes.each(begin)
    except RemoteError:
        nodes.each(lambda node: _undo(session, node))
        raise
    interruptions.started(record, record.checkpoint_step if resume else -1)


def require_store(request: Request) -> None:
    """Looks where the run's checkpoints will be, before anything is rented.

    Raises:
        InputError: the store is not there, or cannot be read.
    """
    if request.checkpoint is None:
        return
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.store import StoreError

    try:
        CommitLog(operator_store.for_spec(request.checkpoint.to, request.spec), request.run_id).newest_attempt()
    except StoreError as error:
        cure = "Mend the address or the credentials; nothing was rented."
        raise InputError(_unusable(request.checkpoint), str(error), cure) from error


def require_data(request: Request, emit: Emit) -> None:
    """Looks whether there is anything under each address of `data:`, before anything is rented. What cannot be looked
    at from here, as the nodes' role alone may, is told.

    Raises:
        InputError: an address leads nowhere; all of them are named.
    """
    if not request.spec.data:
        return
    from mgpu_train.store import NoStore, NotFound, StoreError

    problems = list[str]()
    for index, item in enumerate(request.spec.data):
        where = f"data[{index}].from: {item.source}"
        try:
            store = operator_store.for_spec(item.source, request.spec)
            if not any(not stat.key.endswith("/") for stat in store.list("")):
                problems.append(f"{where}: there is nothing")
        except (NoStore, NotFound) as error:
            problems.append(f"{where}: {error}")
        except StoreError as error:
            emit(Warned(f"{where} could not be looked at from here: {error}"))
    if problems:
        cure = "Mend the address, or bring the data there; nothing was rented."
        raise InputError("the run's data is not there", "\n".join(problems), cure)


def _unusable(target: CheckpointTarget) -> str:
    return f"checkpoint.to: {target.to} cannot be used"


def _undo(session: Session, node: Node) -> None:
    if node.closed:  # it is lost: nobody waits for it
        return
    try:
        agent_client.stop(node, session.record.run_id, session.timeouts, now=True)
    except RemoteError as error:
        session.emit(Warned(f"node {node.target.rank} could not be asked to stop: {error.what}"))


def _paused(session: Session, nodes: NodeSet, seconds: float) -> bool:
    """Waits for the store: the machines live on meanwhile. Raises as `Session.check`."""
    agent_client.hold(nodes, session.timeouts)
    return paused(session, seconds)


def _begin(session: Session, request: Request, pause: Callable[[float], bool]) -> tuple[int, str, Resume | None]:
    """The attempt's number, its writer token, and the one checkpoint that all nodes start from. `pause` waits for so
    many seconds where the store does not answer."""
    record, target = session.record, request.checkpoint
    attempt = record.attempt + 1
    writer = writer_token(request.run_id, attempt)
    if target is None:
        return attempt, writer, _nothing(session, attempt)
    from mgpu_train.checkpoint.log.commit_log import CommitLog, Fenced
    from mgpu_train.checkpoint.newest import newest_verified
    from mgpu_train.store import Damaged, StoreError

    number = 0

    def begin() -> Commit | None:
        nonlocal number
        store = operator_store.for_spec(target.to, request.spec)  # credentials may be new
        log = CommitLog(store, request.run_id)
        _check_remembered(session, log)
        session.claim(log)
        number = number or max(attempt, log.newest_attempt() + 1)  # its entry may stand already
        log.begin_attempt(number, writer, supervisor=record.supervisor or None)
        return newest_verified(
            store, request.run_id, damaged=record.damaged, report=lambda text: session.emit(Warned(text))
        )

    limit_s = request.spec.recovery.wait_minutes * 60
    try:
        newest = patiently(begin, limit_s, pause, session.emit, operator_store.passing())
    except Fenced as error:
        raise _fenced(session, str(error)) from error
    except Damaged as error:
        raise TrainingFailed(
            f"no committed checkpoint of run {request.run_id} verifies",
            str(error),
            "To begin again from nothing, launch without `--resume`: that is a run of its own.",
        ) from error
    except StoreError as error:
        cure = "Mend the address or the credentials"
        cure += f"; attempt {attempt} was not begun." if record.attempt else "; nothing was trained."
        raise TrainingFailed(_unusable(target), str(error), cure) from error
    if newest is None:
        return number, writer, _nothing(session, number)
    # the last commit before a loss may not have been seen
    record.checkpoint_id, record.checkpoint_step = newest.checkpoint_id, newest.step
    session.emit(Note(f"resuming from step {newest.step} ({newest.checkpoint_id})"))
    return number, writer, Resume(checkpoint_id=newest.checkpoint_id, seq=newest.seq)


def _nothing(session: Session, attempt: int) -> None:
    """There is no checkpoint to go on from: no later attempt begins from zero silently."""
    if attempt > 1:
        session.emit(Note(f"attempt {attempt} begins from zero: no checkpoint was committed"))


def _check_remembered(session: Session, log: CommitLog) -> None:
    """Raises TrainingFailed where the attempt would begin from nothing, though the record knows of a checkpoint."""
    lost = forgotten(session.record, log)
    if lost and not log.checkpoints():
        raise TrainingFailed(
            lost,
            "No checkpoint is left in it.",
            "Bring them back. To begin again from nothing, launch without `--resume`: that is a run of its own.",
        )
    if lost:
        session.emit(Warned(lost))


def _fenced(session: Session, why: str) -> MgpuError:
    run_id = session.record.run_id
    go_on = f"Follow it with `mgpu attach {run_id}`."
    if session.record.supervisor:
        return TakenOver(f"run {run_id} was taken over by another process", why, go_on)
    return TrainingFailed(f"run {run_id} was begun by somebody else at the same moment", why, go_on)


def catch_up(session: Session, request: Request) -> None:
    """The newest commit, which the supervisor may not have seen: it says whether the attempt made progress."""
    if request.checkpoint is None:
        return
    from mgpu_train.checkpoint.log.commit_log import CommitLog
    from mgpu_train.store import StoreError

    try:
        log = CommitLog(operator_store.for_spec(request.checkpoint.to, request.spec), request.run_id)
        newest = [] if forgotten(session.record, log) else log.checkpoints()
    except StoreError as error:
        session.emit(Warned(f"the commit log could not be read: {error}"))
        return
    for entry in [each for each in newest if each.checkpoint_id not in session.record.damaged][:1]:
        session.record.checkpoint_id = entry.checkpoint_id
        session.record.checkpoint_step = entry.step
