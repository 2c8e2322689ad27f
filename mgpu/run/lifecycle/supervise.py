"""Supervises a run from wherever its record says that it is: `mgpu launch` and `run` right after it was submitted,
`mgpu attach` where an earlier supervisor has left it.

What it goes by is the record, the machines as their provider describes them, and the commit log; never what an earlier
supervisor may have had in mind. All that it needs has an absolute path in the record: it works from any folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from mgpu_train.agent.machine import procs
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import Secrets

from mgpu.acquire import fit
from mgpu.acquire.fit import Machines
from mgpu.acquire.pauses import patiently
from mgpu.context import Context
from mgpu.errors import (
    ConnectionFailed,
    InputError,
    Interrupted,
    MgpuError,
    OverLimit,
    ProviderError,
    RemoteError,
    StackError,
    Stopped,
)
from mgpu.events import Note, Warned
from mgpu.iac.engine.project import project_name
from mgpu.iac.engine.stack import Stack
from mgpu.iac.naming import fleet_name
from mgpu.iac.outputs import StackOutput
from mgpu.plan.rank import Turn, turns
from mgpu.providers.base import Provider
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.budget import account
from mgpu.run.fleet import key, reuse
from mgpu.run.fleet.stack import InUse, bring_up, bring_up_anywhere, move, refuse_used, require_time, stack_of, standing
from mgpu.run.job import images, on_sale, operator_store
from mgpu.run.job.request import Request, env_secrets, require_all_secrets, resolve, secrets_of, store_keys
from mgpu.run.job.stack_output import provider_for, provider_of, targets, usd_per_hour
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.run.lifecycle.attempt import conduct, watch_again
from mgpu.run.lifecycle.capacity_wait import CapacityWait, paused
from mgpu.run.lifecycle.outcome import Outcome, conclude, remembered
from mgpu.run.lifecycle.post_mortem import of_the_store, over
from mgpu.run.lifecycle.recovery import Attempts
from mgpu.run.nodes import agent_client, outputs
from mgpu.run.record import files, interruptions, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State, supervising
from mgpu.run.record.session import Session
from mgpu.run.record.signals import Interrupts
from mgpu.run.record.supervisor_lock import Holder
from mgpu.run.supervision.supervisor import Ended
from mgpu.spec.load import accepted
from mgpu.spec.model import RunSpec
from mgpu.words import count

_GRANT_S = 120.0  # that a provider may take to give machines their rights in the store


@contextmanager
def supervision(
    run_id: str, context: Context, record: Callable[[], Record], *, force: bool = False
) -> Iterator[Session | None]:
    """This process's hold on the run; None: another process has it. `record` is called when nobody else can write."""
    with supervising(run_id, force=force) as token:
        if not token:
            yield None
            return
        interrupts = Interrupts(leave=context.leave)
        with interrupts.installed():
            files.bring(run_id)
            found = record()
            found.supervisor = token
            yield Session(found, context.emit, context.timeouts, interrupts, context.ask_to_stop, context.watch_s)


def supervise(session: Session, context: Context, before: Holder | None = None, *, submitted: bool = False) -> Outcome:
    """Goes on with the run until it is over, is left, or somebody else has it. `before`: who supervised it until now;
    `submitted`: this command has submitted it a moment ago, and the run ends with what it cannot begin with.

    Raises:
        InputError: it cannot be gone on with from here (a secret is missing, the store does not answer); nothing of
            the run was touched.
    """
    return _Run(session, context, before, submitted=submitted).conclude()


class _Run:
    """One run, from wherever its record says that it is."""

    def __init__(self, session: Session, context: Context, before: Holder | None, *, submitted: bool) -> None:
        self.session, self.record, self._submitted = session, session.record, submitted
        self._context, self._queued_again = context, False
        path = Folder(self.record.run_id).run_file
        spec = accepted(
            path.read_text(encoding="utf-8"), str(path)
        )  # as it was; what it names beside itself is on the nodes
        self.spec: RunSpec = spec.model_copy(
            update={"providers": (*self.record.candidates,) or (self.record.provider,)}
        )
        self.stack: Stack = stack_of(self.record, context)
        if before is not None and before.process != procs.me():
            self.stack.oust(before.process, before.host, shared.earlier_hosts(self.record.run_id))
        if self.record.state is not State.TEARDOWN:  # nobody logs in any more, and the stack's key may be gone with it
            key.bring(self.record, context)

    def conclude(self) -> Outcome:
        """Goes on with the run until it is over. One that is queued stays so where nothing is free for it, or a limit
        leaves no room."""
        outcome = self._gone_on_with()
        if self._queued_again:
            self._queued_again = False
            return self.conclude()
        return outcome

    def _gone_on_with(self) -> Outcome:
        state = self.record.state
        self.session.save()  # whose it is from here on
        if state is State.QUEUED:
            late = None if self._submitted else self._out_of_time()
            if late is None and (held_up := self._held_up()):
                self.record.reason = f"waits: {held_up}"
                self.session.save()
                return Outcome(self.record, left=True, detached=True)
            try:
                if self._to_end:
                    body = self._undone
                elif late is not None:
                    body = lambda: late  # noqa: E731
                else:
                    body = self._begin if self._submitted else self._made()
            except BaseException:  # it stays queued: others may begin meanwhile
                account.let_go(self.record.run_id)
                reuse.let_go(self.record.run_id)
                raise
            self.record.reason = ""
            self.session.to(State.PROVISIONING)
            return self._concluded(body)
        if state is State.TEARDOWN:
            return self._concluded(lambda: remembered(self.record))
        if state in (State.PROVISIONING, State.REPAIRING):
            return self._concluded(self._undone if self._to_end else self._made())
        return self._concluded(self._watched())

    def _concluded(self, body: Callable[[], Ended | MgpuError | None]) -> Outcome:
        return conclude(self.session, self.stack, "keep" if self.record.kept_by else self.spec.teardown, body)

    # --- before it begins ---------------------------------------------------------------------------------------

    def _out_of_time(self) -> Stopped | None:
        """Why a run that was at work before, and has waited in the queue since, begins no more; None: it does."""
        try:
            require_time(self.record)
        except Stopped as late:
            return late
        return None

    def _held_up(self) -> str:
        """Why a queued run stays so; empty: it has its place from here on, or is to end. Raises StackError."""
        if self._submitted or self._to_end:
            return ""
        self._take_kept()
        if self.record.machines == "kept" and not self.record.kept_by:
            now = time.time()
            return reuse.waits_for(reuse.standing(now), self.record, now)
        fleet = self.record.fleet_output() if self.record.fleet else None
        found = list[on_sale.Priced]()

        def price() -> float | None:
            if fleet:
                return usd_per_hour(fleet, self.record.part)
            wait, labels = partial(paused, self.session), self.record.image_labels
            found[:] = [on_sale.priced(self.spec, wait, self.session.emit, labels)]
            return found[0].usd_per_hour

        try:
            account.claim(self.record.run_id, price)
        except Interrupted:
            return ""  # it was asked for while a price was: it is to end
        except OverLimit as full:
            if self.record.kept_by:  # others may begin there
                self._leave_kept()
            return "; ".join(full.over)
        for each in found:
            self._do_without(each)
        return ""

    def _do_without(self, priced: on_sale.Priced) -> None:
        """Those of whom nobody knows what they cost; the place that was claimed is one for the others' machines."""
        record = self.record
        if not priced.without:
            return
        priced.warn(self.session.emit)
        record.candidates = {name: record.candidates[name] for name in priced.providers}
        self.spec = self.spec.model_copy(update={"providers": priced.providers})
        self._goes_to(record.provider if record.provider in priced.providers else priced.providers[0])
        self.stack = stack_of(record, self._context)

    def _take_kept(self) -> None:
        """Puts the run on a kept fleet, where one is free that fits."""
        record = self.record
        while (found := reuse.claim(record)) is not None:
            record.kept_by, record.stack, record.own_stack = found.maker.run_id, found.stack, False
            record.fleet, record.fleet_name = dict(found.output), found.newest.fleet_name
            record.slots, record.slots_of = [*found.uses[record.run_id]], found.slots
            self._goes_to(str(found.output["provider"]))
            try:
                self.stack = stack_of(record, self._context)
                key.bring(record, self._context)
            except (InputError, StackError) as error:
                self._leave_kept(error.what)
                continue
            part = f", {len(record.slots)} of {record.slots_of} places on each node" if record.slots else ""
            self.session.emit(Note(f"kept fleet {found.stack} fits{part}: nothing is rented"))
            return

    def _leave_kept(self, why: str = "") -> None:
        """The run is queued as it was before; `why` it could not begin on the kept fleet, which it avoids then."""
        record, fleet = self.record, self.record.fleet or {}
        if why:
            record.avoid.append(str(fleet["fleet"]))
            self.session.emit(Warned(f"kept fleet {record.stack} cannot be begun on, the run goes elsewhere: {why}"))
        record.kept_by, record.stack, record.own_stack, record.fleet = "", record.run_id, True, None
        record.slots, record.price_usd_per_hour = [], 0.0
        self._goes_to(next(iter(record.candidates), record.provider))
        if record.attempt:  # a hard cap is the run's from then on, wherever it goes: its own, and not that fleet's
            record.costs_no_more(time.time())
            record.hard_cap_at = record.deadline_at or record.hard_cap_at
        else:
            record.hard_cap_at, record.spending = 0.0, []
        self.stack = stack_of(record, self._context)
        # that of a stack that has none yet: the backend, which would say so, may be what is away
        record.fleet_name = fleet_name(record.project_name or project_name(self.stack.project), record.stack)
        reuse.let_go(record.run_id)

    def _goes_to(self, provider: str) -> None:
        """Of several that it may have machines of, without that it is asked for any."""
        if self.record.candidates:
            self.record.provider, self.record.options = provider, self.record.candidates[provider]

    def _begin(self) -> Ended:
        return self._made()()

    @property
    def _to_end(self) -> bool:
        return self.session.asked_to_end

    def _undone(self) -> Ended:
        self._know_fleet()
        self.session.check()
        raise AssertionError("the end was asked for")

    def _know_fleet(self) -> StackOutput | None:
        """The fleet of the record; else that of the stack, remembered above all because it says whose it is."""
        if self.record.fleet is None:
            fleet = self.stack.outputs()
            self.record.fleet = fleet.model_dump(mode="json") if fleet else None
            self.session.save()
        return self.record.fleet_output() if self.record.fleet else None

    # --- before the training, and between two attempts ----------------------------------------------------------

    def _made(self) -> Callable[[], Ended]:
        """The fleet made, or repaired, and the next attempt on it. Raises InputError for a secret that is missing."""
        request = self._request(self.record.fleet_output() if self.record.fleet else None)
        secrets = self._secrets(request, self._provider())
        go_on = self._repaired if self.record.state is State.REPAIRING else self._begun

        def made() -> Ended:
            self._end_agents()
            return go_on(request, secrets)

        return made

    def _secrets(self, request: Request, provider: Provider | None) -> Secrets:
        """Where several providers may have the machines, and none has, nobody is given rights in the store yet."""
        if self.record.candidates and self.record.fleet is None:
            require_all_secrets(request, os.environ, self.session.emit)
            return env_secrets(request, os.environ)
        whose = str((self.record.fleet or {}).get("provider", self.record.provider))
        _remember_grants(self.session, store_keys(request, os.environ, provider), whose)
        secrets = secrets_of(request, os.environ, provider)
        self.session.stores[whose] = secrets.store
        return secrets

    def _begun(self, request: Request, secrets: Secrets) -> Ended:
        if self.record.writer:  # an attempt was begun, and its supervisor died before it could say so
            ended = of_the_store(self.session, request, needed=False)
            if ended is not None and (ended.succeeded or ended.fault is Fault.USER):
                return ended
            self.record.recoveries += 1  # it was one of those that the run file allows
        if self.record.own_stack:
            return _rented(self.session, self.stack, request, secrets)
        if self.record.kept_by:
            return self._on_kept(request, secrets)
        fleet = self.record.fleet_output() if self._submitted else self._standing()
        return _used(self.session, self.stack, request, secrets, fleet)

    def _on_kept(self, request: Request, secrets: Secrets) -> Ended:
        """The run on the kept fleet that it was put on. Where that is gone, or somebody has come there, before this
        attempt has begun, it is no failure of the run's: it is queued again, and goes elsewhere."""
        before = self.record.attempt
        try:
            fleet = self._standing()
        except (InputError, StackError) as error:
            return self._not_there(error.what)
        interruptions.repaired(self.record)

        def first() -> Ended:
            try:
                ended = _conducted(self.session, request, fleet, secrets)
            except (InUse, ConnectionFailed) as error:
                if self.record.attempt != before:
                    raise
                return self._not_there(error.what)
            return self._not_there(ended.reason) if ended.lost and self.record.attempt == before else ended

        return self._tried(request, secrets, first)

    def _tried(self, request: Request, secrets: Secrets, first: Callable[[], Ended]) -> Ended:
        """The attempts of the run. A fleet that others may use, too, is not repaired under them: where a machine of it
        is at fault, the run is queued again, and goes on elsewhere from its newest checkpoint."""
        plan = _attempts(self.session, self.stack, request, secrets)
        if not self.record.slots:
            return plan.run(first)
        ended = plan.once(first)
        if not plan.goes_on(ended):
            return ended
        plan.interrupted(ended)
        self.record.writer = ""  # how its attempt has ended is known
        return self._not_there(ended.reason)

    def _not_there(self, why: str) -> Ended:
        self._leave_kept(why)
        self.session.to(State.QUEUED)
        self._queued_again = True
        return Ended(False, why, left=True)

    def _repaired(self, request: Request, secrets: Secrets) -> Ended:
        lost = self.record.under_repair  # what the dead supervisor was about to replace
        plan = _attempts(self.session, self.stack, request, secrets)
        return plan.run(lambda: plan.mended(tuple(lost.nodes) if lost else ()))

    def _provider(self) -> Provider | None:
        if self.record.fleet is None:
            return provider_for(self.spec)
        return provider_of(self.record.fleet_output())

    def _end_agents(self) -> None:
        """Ends agents that the dead supervisor had started already: the next attempt begins on quiet nodes."""
        if self.record.fleet is None or not self.record.writer:
            return
        fleet, times = self.record.fleet_output(), self.session.timeouts
        broken = self.record.under_repair
        there = [target for target in targets(fleet) if broken is None or target.rank not in broken.nodes]
        with suppress(RemoteError), NodeSet.reach(there, Path(fleet.private_key_file).expanduser(), times) as nodes:
            until = time.monotonic() + times.command_s
            while any(nodes.each(self._told_to_end)) and time.monotonic() < until:
                time.sleep(times.poll_s)

    def _told_to_end(self, node: Node) -> bool:
        """True while the node's agent lives. One that cannot be asked is left to the next attempt's own start."""
        if node.closed:
            return False
        try:
            if not agent_client.status(node, self.record.run_id, self.session.timeouts).get("alive"):
                return False
            agent_client.stop(node, self.record.run_id, self.session.timeouts, now=True)
        except RemoteError:  # there was no agent
            return False
        return True

    def _standing(self) -> StackOutput:
        fleet = standing(self.stack, self.spec)
        refuse_used(fleet, self.record.run_id, self.record.slots)
        return fleet

    # --- while it trains ----------------------------------------------------------------------------------------

    def _watched(self) -> Callable[[], Ended]:
        """The attempt watched on, or judged by the store where its machines have ended meanwhile."""
        fleet = self._know_fleet()
        if fleet is None:
            return lambda: Ended(False, "the machines that it trained on are not known", Fault.INFRASTRUCTURE)
        request, secrets, provider = self._request(fleet), None, provider_of(fleet)
        keys = store_keys(request, os.environ, provider)
        try:
            secrets = self._secrets(request, provider)
        except (InputError, ProviderError) as error:  # credentials that have expired end nothing
            self.session.emit(Warned(f"{error.what}: this attempt is watched on, but no other can follow it"))
        self._claim(request)
        ended = over(self.session, fleet, provider, request)
        if ended is not None:  # nobody was there to fetch them
            outputs.from_store(self.session, request)

        def watch() -> Ended:
            return ended or watch_again(self.session, fleet, provider, request, keys)

        if secrets is None:
            return lambda: _last(watch())
        return lambda: self._tried(request, secrets, watch)

    def _claim(self, request: Request) -> None:
        """In the store, too. One that does not answer is no reason to leave a run unwatched: it is said later."""
        if request.checkpoint is None:
            return
        from mgpu_train.checkpoint.log.commit_log import CommitLog
        from mgpu_train.store import StoreError

        try:
            self.session.claim(CommitLog(operator_store.for_spec(request.checkpoint.to, request.spec), request.run_id))
        except StoreError as error:
            self.session.emit(Warned(f"the store does not answer, the takeover is written there later: {error}"))

    def _request(self, fleet: StackOutput | None) -> Request:
        record = self.record
        # a run that was put on a kept fleet has its store where it would have it on any other
        theirs = fleet.store if fleet and not (record.own_stack or record.kept_by) else None
        store = theirs if record.state is State.PROVISIONING else record.store or theirs
        base = Path(record.project_base)
        return resolve(self.spec, record.run_id, base, store=store, timeouts=self.session.timeouts)


def _remember_grants(session: Session, keys: StoreKeys, provider: str) -> None:
    """Before they are made: whoever ends the run takes them away."""
    record = session.record
    if keys.grants and not (record.store_granted and provider in record.granted_by):
        record.store_granted = True
        record.granted_by.append(provider)
        session.save()


def _last(ended: Ended) -> Ended:
    """An attempt after which no other one can begin, because this process lacks a secret."""
    if ended.succeeded or ended.left or ended.stopped_by:
        return ended
    return replace(ended, reason=f"{ended.reason}; no other attempt: secrets are missing where it was supervised")


def _rented(session: Session, stack: Stack, request: Request, secrets: Secrets) -> Ended:
    """The run on a fleet that is made for it; what an earlier process made of it is adopted. Where there is no capacity
    now, it is asked for again until `recovery.wait_minutes`."""
    sellers = " or ".join(request.spec.candidates)
    with session.phase("provisioning", f"{count(request.spec.nodes, 'node')} of {sellers}"):
        ask = partial(_made_anew, request.spec, session, stack)
        fleet = CapacityWait(session, request.spec.recovery.wait_minutes).granted(ask)
    session.check()
    return _used(session, stack, request, secrets, fleet)


def _made_anew(spec: RunSpec, session: Session, stack: Stack) -> StackOutput:
    """A fleet, wherever the run file allows. Raises what `bring_up` raises."""
    if len(spec.candidates) == 1:
        return bring_up(session, stack)
    limit_s, cancelled = session.timeouts.provision_s, partial(paused, session)

    def asked() -> list[Turn]:
        plan = patiently(lambda: on_sale.plan(spec), limit_s, cancelled, session.emit)
        return turns(plan, spec.candidates)

    return bring_up_anywhere(session, stack, asked)


def _used(session: Session, stack: Stack, request: Request, secrets: Secrets, fleet: StackOutput) -> Ended:
    """The run on a fleet that stands."""
    return _attempts(session, stack, request, secrets).run(lambda: _conducted(session, request, fleet, secrets))


def _conducted(session: Session, request: Request, fleet: StackOutput, secrets: Secrets) -> Ended:
    """One attempt on a fleet that stands. Raises what `conduct` raises."""
    record = session.record
    record.price_usd_per_hour, record.hard_cap_at = fleet.price_usd_per_hour, fleet.hard_cap_at
    # where a stack stood already
    machines, other = (each and each * record.part for each in (fleet.machines_usd_per_hour, fleet.other_usd_per_hour))
    record.costs(fleet.generation, machines, time.time(), other)
    provider = provider_of(fleet)
    request = _with_image(session, replace(request, spec=request.spec.of(fleet.provider)), fleet)
    keys = store_keys(request, os.environ, provider)
    _remember_grants(session, keys, fleet.provider)
    return conduct(session, request, fleet, provider, fresh_secrets(session, secrets, keys, fleet.provider), keys)


def _with_image(session: Session, request: Request, fleet: StackOutput) -> Request:
    """The digest of the record is what runs; at a run's first attempt a stack may bring one."""
    if session.record.image is None and fleet.image:
        images.remember(session.record, images.for_stack(request.spec, request.base, fleet))
        session.save()
    image = images.remembered(session.record)
    if image is None:
        return request
    fit.require(image.labels, Machines(tuple(filter(None, [fleet.gpu]))))
    return replace(request, code_folder=image.workdir if images.in_image(request.spec) else "")


def fresh_secrets(session: Session, secrets: Secrets, keys: StoreKeys, provider: str) -> Secrets:
    """With the store's credentials as they are now: a later attempt may begin hours after they were read first. Where
    there are none now, nodes get those that nodes of this provider had before; if none had, the error is raised."""
    try:
        session.stores[provider] = patiently(keys.now, _GRANT_S, partial(paused, session), session.emit)
    except (InputError, ProviderError) as error:
        if provider not in session.stores:
            raise
        session.emit(Warned(f"{error.what}: the nodes get those that this command began with"))
    return secrets.model_copy(update={"store": session.stores[provider]})


def _attempts(session: Session, stack: Stack, request: Request, secrets: Secrets) -> Attempts:
    """What the run file's `recovery` allows; a fleet that is not mgpu's is not ours to repair."""
    recovery, record = request.spec.recovery, session.record
    # a stack that is not the run's own was made by another run file
    spec = request.spec if record.own_stack else request.spec.of(record.provider)
    moved, ours = partial(move, session, stack, partial(_made_anew, spec)), record.fleet_output().owner

    def repair(lost: tuple[int, ...]) -> StackOutput:
        if not ours:
            return record.fleet_output()
        return moved() if record.moves else bring_up(session, stack, lost)  # a supervisor may have died in a move

    return Attempts(
        session,
        recovery if ours else recovery.model_copy(update={"attempts": 1}),
        conduct=lambda fleet: _conducted(session, request, fleet, secrets),
        repair=repair,
        move=lambda: moved if on_sale.elsewhere(spec, record.provider) else None,
    )
