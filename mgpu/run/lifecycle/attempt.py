"""One run on a fleet that stands: connect, send, start, watch, judge. Rents nothing and gives nothing back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mgpu_train.agent.status.status import Fault
from mgpu_train.config import CheckpointTarget, Secrets

from mgpu.acquire.pauses import patiently
from mgpu.errors import Interrupted, MgpuError, ProviderError, RemoteError, TakenOver
from mgpu.events import AttemptEnded, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.providers.base import Provider
from mgpu.remote.nodeset import NodeSet
from mgpu.run.fleet.stack import InUse
from mgpu.run.job import images, operator_store
from mgpu.run.job.images import Settled
from mgpu.run.job.request import Request
from mgpu.run.job.saving import Saving
from mgpu.run.job.stack_output import handle_of, provider_for, provider_of, targets
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.run.lifecycle.attempt_start import catch_up, start
from mgpu.run.lifecycle.capacity_wait import paused
from mgpu.run.lifecycle.post_mortem import stalled, vouched
from mgpu.run.nodes import agent_client, code_upload, container_setup, leftovers, outputs, python_setup
from mgpu.run.record.record import State, known
from mgpu.run.record.session import Session
from mgpu.run.supervision import damage, metrics
from mgpu.run.supervision.health import NodeView
from mgpu.run.supervision.limits import limits
from mgpu.run.supervision.remote_tail import values
from mgpu.run.supervision.supervisor import Ended, Supervisor
from mgpu.spec.provider import starts_from_image
from mgpu.words import count

ASKED = 6  # times that a provider is asked whether a node that cannot be started is still there


def conduct(
    session: Session,
    request: Request,
    fleet: StackOutput,
    provider: Provider | None,
    secrets: Secrets,
    keys: StoreKeys | None = None,
) -> Ended:
    """Runs one attempt from the first connection to its judged end. `keys` has fresh credentials of the store.

    Raises:
        InUse: another run, which may be another operator's, has a node.
        RemoteError: a node could not be reached, or refused, and no machine is gone.
        TrainingFailed: the attempt could not be started.
        Interrupted: the end was asked for before the start.
        TakenOver: another process supervises the run now.
    """
    return _told(session, lambda: _conducted(session, request, fleet, provider, secrets, keys), begins=True)


def _told(session: Session, attempt: Callable[[], Ended], *, begins: bool) -> Ended:
    """Tells how the attempt has ended; `begins`: one that has no number yet."""
    number = session.record.attempt + begins
    try:
        ended = attempt()
    except TakenOver:
        raise
    except MgpuError as error:
        _tell(session, number, Ended(False, error.what))
        raise
    if not ended.left:
        _tell(session, number, ended)
    return ended


def _tell(session: Session, number: int, ended: Ended) -> None:
    record, fault = session.record, str(ended.fault) if ended.fault else None
    how = {"succeeded": ended.succeeded, "reason": ended.reason, "fault": fault, "lost": ended.lost}
    event = AttemptEnded(record.run_id, max(number, record.attempt), time.time(), step=known(record.step), **how)
    session.emit(event)


def _conducted(
    session: Session,
    request: Request,
    fleet: StackOutput,
    provider: Provider | None,
    secrets: Secrets,
    keys: StoreKeys | None,
) -> Ended:
    if (lost := _lost(session, provider, fleet, times=1)) is not None:  # SSH would wait a minute for it
        return lost
    try:
        nodes = _begun(session, request, fleet, secrets)
    except agent_client.Used as error:  # no fault of the machines: another attempt would end there too
        raise InUse(error.what, error.why, error.next_step) from error
    except RemoteError as error:
        lost = _lost(session, provider, fleet, times=ASKED)
        if lost is None:
            raise
        session.emit(Warned(error.what))
        return lost
    with nodes:
        if session.may_leave:
            return Ended(False, left=True)
        return watch(session, nodes, fleet, provider, request, keys, sent=secrets.store)


def _begun(session: Session, request: Request, fleet: StackOutput, secrets: Secrets) -> NodeSet:
    """The nodes, connected, with an attempt that has begun on all of them."""
    with session.phase("connecting", count(len(fleet.nodes), "node")):
        nodes = NodeSet.connect(targets(fleet), Path(fleet.private_key_file).expanduser(), session.timeouts)
    try:
        session.check()
        image = images.remembered(session.record)
        with session.phase("sending"):
            agent_client.send_library(nodes)
            if image is None or starts_from_image(fleet.provider):
                claim = agent_client.claim(request.run_id, fleet, session.record.slots)
                python_setup.equip(nodes, request.spec, session.timeouts, session.emit, claim)
            code_upload.send(session, request, nodes)
        if image is not None and not starts_from_image(fleet.provider):
            _pull(session, request, fleet, nodes, image)
        session.check()  # nothing trains yet: there is nothing to save, and nobody to ask
        with session.phase("starting"):
            start(session, request, fleet, nodes, secrets)
        session.record.begun_at = session.record.begun_at or time.time()  # whoever takes over goes by it
        session.to(State.RUNNING)
    except BaseException:
        nodes.close()
        raise
    return nodes


def _pull(session: Session, request: Request, fleet: StackOutput, nodes: NodeSet, image: Settled) -> None:
    """Every node runs the agent in a container of the run's image."""
    with session.phase("pulling", image.reference):
        to_run = image.to_run(provider_of(fleet) or provider_for(request.spec))
        times, emit = session.timeouts, session.emit
        container_setup.up(nodes, to_run, request.spec, fleet, request.run_id, times, emit, request.folders)


def _lost(session: Session, provider: Provider | None, fleet: StackOutput, times: int) -> Ended | None:
    """The end of an attempt that cannot begin because a machine is gone; None: their provider has them all, each of so
    many times that it is asked, or cannot be asked."""
    if provider is None:
        return None
    for again in range(times):
        if again:
            time.sleep(session.timeouts.describe_every_s)
        try:
            state = provider.describe(handle_of(fleet))
        except ProviderError:
            return None
        if state.lost:
            views = [NodeView(node.rank, None, gone=True, why=node.reason) for node in state.nodes]
            reason = "; ".join(view.absence for view in views if view.rank in state.lost)
            return Ended(False, reason, Fault.PROVIDER, lost=state.lost)
    return None


def watch_again(
    session: Session, fleet: StackOutput, provider: Provider | None, request: Request, keys: StoreKeys | None = None
) -> Ended:
    """Takes an attempt over that another supervisor started. A node that does not answer now may do so later; where
    none does, the run is left as it is, unless it is to end or its store shows that it has stalled: nothing is known of
    it from here. The agents are given `keys` anew.

    Raises:
        InputError: the key cannot be used.
        HostKeyMismatch: a node shows another key than the pinned one.
    """
    with session.phase("connecting", count(len(fleet.nodes), "node")):
        nodes = NodeSet.reach(targets(fleet), Path(fleet.private_key_file).expanduser(), session.timeouts)
    with nodes:
        if all(node.closed for node in nodes.nodes) and not session.asked_to_end:
            if not stalled(session, request):
                session.emit(Warned("no node answers over SSH from here: the run is left as it is"))
                return Ended(False, "no node answers over SSH", left=True)
            session.emit(Warned("no node answers over SSH, and the run has stopped saving: waiting for them no longer"))
        return _told(session, lambda: watch(session, nodes, fleet, provider, request, keys), begins=False)


def watch(
    session: Session,
    nodes: NodeSet,
    fleet: StackOutput,
    provider: Provider | None,
    request: Request,
    keys: StoreKeys | None = None,
    *,
    sent: Mapping[str, str] | None = None,
) -> Ended:
    """Watches an attempt that runs, and judges its end: success needs a checkpoint that verifies. `sent`: with which
    credentials of the store the agents were started, where that is known."""
    session.hidden = values(request.spec.secrets, os.environ)
    if unknown := [name for name in request.spec.secrets if name not in os.environ]:
        session.emit(Warned(f"{', '.join(unknown)} not set here: a log that shows the value is not masked"))
    if not session.record.begun_at:  # by an earlier mgpu
        session.record.begun_at = time.time()
        session.save()
    ends = limits(session.record, session.timeouts)
    with session.phase("training"):
        supervisor = Supervisor(
            session,
            nodes,
            provider=provider,
            handle=handle_of(fleet),
            limits=ends,
            processes_per_node=request.spec.processes,
            keys=keys,
            sent=sent,
            saving=Saving.of(request),
        )
        ended = supervisor.watch()
    if ended.left:
        return ended
    if request.spec.outputs:  # they may take longer than a lease, and the agents have ended
        agent_client.hold(nodes, session.timeouts, ended.lost, busy_s=session.timeouts.outputs_s)
        outputs.collect(session, request, nodes, ended.lost)
        agent_client.hold(nodes, session.timeouts, ended.lost)
    metrics.collect(session, nodes, handle_of(fleet), request.spec.processes, ended.lost)
    if ended.damaged:
        ended = damage.judge(session, fleet, nodes, ended, ends)
    if not ended.succeeded:
        catch_up(session, request)
    borrowed = bool(session.record.kept_by)  # it is kept as it was, whatever the run file says
    kept = borrowed or request.spec.teardown == "keep"
    stays = kept or not fleet.owner
    if stays:
        _leave_clean(session, nodes, fleet)
    if session.record.slots:
        # the copies are its own, and would fill the machines' disks one run after the other
        code_upload.take_away(session, request, nodes, ended.lost)
    if kept:
        _keep(session, nodes, fleet.lease_minutes if borrowed else request.spec.lease_minutes)
    if ended.succeeded and request.checkpoint is not None:
        ended = _judge(session, request.checkpoint, ended)
    if stays and ended.succeeded:  # one that was stopped may go on there, and a failed one's tells the cause
        leftovers.clear(session, request, nodes)
    return ended


def _keep(session: Session, nodes: NodeSet, minutes: float) -> None:
    """The run is over and the fleet stays: from the run's short lease back to the fleet's own."""
    try:
        nodes.each(lambda node: agent_client.renew_lease(node, minutes, session.timeouts))
        session.record.lease_until = min(time.time() + minutes * 60, session.record.hard_cap_at or float("inf"))
    except RemoteError as error:
        session.emit(Warned(f"the lease of the fleet could not be renewed, it ends soon: {error.what}"))


def _leave_clean(session: Session, nodes: NodeSet, fleet: StackOutput) -> None:
    """The run is over and its machines stay: they have no container of it any more."""
    if session.record.image is None or starts_from_image(fleet.provider):
        return
    try:
        container_setup.down(nodes, fleet, session.record.run_id, session.timeouts)
    except RemoteError as error:
        session.emit(Warned(f"a container of the run may be left, the next run removes it: {error.what}"))


def _leaving(session: Session, seconds: float) -> bool:
    """Waits for the store, unless this supervisor is to leave, or the end is asked for."""
    try:
        return session.may_leave or paused(session, seconds)
    except Interrupted:
        return True


def _judge(session: Session, checkpoint: CheckpointTarget, ended: Ended) -> Ended:
    """What the store makes of an end that all agents call a success. One that does not answer is waited for as long as
    the machines last by themselves. Then the run is left, to be judged by whoever comes back to it; but where a limit
    has stopped it, it ends without a verdict, because its machines have to go."""
    from mgpu_train.store import StoreError

    record = session.record

    def look() -> Ended:
        return vouched(record, operator_store.for_record(checkpoint.to, record))  # credentials may be new

    passing, limit_s = operator_store.passing(), 0.0 if ended.stopped_by else session.timeouts.lease_s
    with session.phase("verifying"):
        try:
            found = patiently(look, limit_s, partial(_leaving, session), session.emit, passing)
        except StoreError as error:
            why = f"the final checkpoint could not be verified: {error}"
            if not isinstance(error, passing):
                return _failed(session, ended, Ended(False, why, Fault.INFRASTRUCTURE))
            if ended.stopped_by:
                return _failed(session, ended, Ended(False, why, Fault.STOPPED))
            what = f"run {record.run_id} cannot be judged now, though all its nodes say that they are done"
            session.emit(Warned(f"{what}: {why}. `mgpu attach {record.run_id}` does it once {checkpoint.to} answers"))
            return Ended(False, why, left=True)
    return ended if found.succeeded else _failed(session, ended, found)


def _failed(session: Session, ended: Ended, found: Ended) -> Ended:
    """An end that the store does not bear out. A run that was stopped ends as such, and its end says nothing of it."""
    if ended.stopped_by:
        session.emit(Warned(found.reason))
    return replace(ended, succeeded=False, reason=found.reason, fault=found.fault)
