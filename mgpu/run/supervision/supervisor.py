"""Watches one attempt from outside until it is over: status files and logs over SSH, machines from the provider.

Level-triggered: every pass looks at everything again. A read that fails makes a node silent, and nothing else; what
has been read is on this machine's disk before the next pass, so a supervisor that dies loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mgpu_train.agent.status.status import AgentStatus, Fault

from mgpu.errors import StackError
from mgpu.events import CheckpointCommitted, MetricsSampled, Note, SpendChanged, Warned
from mgpu.providers.base import Handle, Provider
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job.saving import Saving
from mgpu.run.job.store_credentials import StoreKeys
from mgpu.run.record import interruptions, shared
from mgpu.run.record.record import Interruption, State, known
from mgpu.run.record.session import Session
from mgpu.run.supervision.credential_renewal import CredentialRenewal
from mgpu.run.supervision.fleet_monitor import HURRY, NOW, SAVE, FleetMonitor
from mgpu.run.supervision.health import Action, Verdict, decide
from mgpu.run.supervision.limits import Budget, Limit, MonthBudget, StopReason, last_save_s
from mgpu.words import duration

SETTLE_S = 5.0  # for the provider's word on a node that does not answer, before a program is blamed; for nodes' own


@dataclass(frozen=True)
class Damage:
    """A node has read the checkpoint that it was to go on from twice, and it was not what was committed."""

    rank: int
    checkpoint_id: str
    problem: str


@dataclass(frozen=True)
class Ended:
    """How an attempt ended; `left`: it did not, the user chose to leave it running, or another process has it now."""

    succeeded: bool
    reason: str = ""
    fault: Fault | None = None
    stopped_by: StopReason | None = None  # the limit that it has come to
    left: bool = False
    lost: tuple[int, ...] = ()  # ranks whose machines are gone, or go: they have to be replaced
    starved: bool = False  # its program was ended for want of memory
    damaged: tuple[Damage, ...] = ()  # as nodes say, see `mgpu.run.supervision.damage`
    interruption: Interruption | None = None  # of an end that nobody asked for: its times so far


class Supervisor:
    """One attempt under watch."""

    def __init__(
        self,
        session: Session,
        nodes: NodeSet,
        *,
        provider: Provider | None,
        handle: Handle,
        limits: Sequence[Limit],
        processes_per_node: int = 1,
        keys: StoreKeys | None = None,
        sent: Mapping[str, str] | None = None,
        saving: Saving | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`wall` is UNIX seconds; `provider` None: the machines are not ours to describe.
        `keys` are credentials of the store, `sent` those that the agents have;
        `saving`: what of the run's work is kept."""
        self._session = session
        self._fleet = FleetMonitor(session, nodes, provider, handle, processes_per_node, clock, wall)
        self._renewal = CredentialRenewal(session, keys, sent, clock, self._fleet.once) if keys else None
        self._asks_provider = provider is not None
        self._limits = limits
        self._outputs_s = session.timeouts.outputs_s if saving and saving.outputs else 0.0
        self._saving = saving or Saving()
        self._clock, self._wall, self._sleep = clock, wall, sleep
        self._began = clock()
        self._stopped_by: StopReason | None = None
        self._stopped_for: Verdict | None = None  # ... or for the peers' sake
        self._quiet = False  # and it was told
        self._stop_by: float | None = None
        self._stop_level = 0
        self._heard = 0  # signals that were acted on
        self._noticed: tuple[float, float] | None = None  # UNIX seconds: when, and when a lost node was last heard
        self._failing: float | None = None  # since when it looks as if the program had ended by itself

    def watch(self) -> Ended:
        """Passes until the attempt is over, was left or taken over, or is stopped and its grace has passed.

        Raises:
            TakenOver: another process has the run.
        """
        try:
            while (ended := self._passed()) is None:
                self._sleep(self._session.timeouts.poll_s)
            return ended
        finally:
            for monitor in self._fleet.monitors:
                monitor.leave()

    def _passed(self) -> Ended | None:
        """One pass, and what follows from it; None: the attempt goes on."""
        if not self._session.still_mine():
            return Ended(False, "another supervisor has taken over", left=True)
        self._pass()
        verdict = decide(
            self._fleet.views(), attempt=self._session.record.attempt, silence_s=self._session.timeouts.silence_s
        )
        if self._fleet.late_s:
            self._wait_longer()
        self._notice(verdict)
        if verdict.action is not Action.END:
            self._failing = None
        elif self._sure(verdict):
            return self._ended(verdict)
        if verdict.action is Action.STOP:
            self._stopped_for = self._stopped_for or verdict
            self._stop(None, verdict.reason, now=verdict.now, lost=bool(verdict.lost))
        if self._wants_to_leave() or self._needs_nothing(verdict):
            return Ended(False, left=True)
        if self._stop_by is not None and self._clock() > self._stop_by + self._longer_s():
            return self._ended(self._late(self._explained(verdict)))
        return None

    def _wait_longer(self) -> None:
        """This process stood still, and nobody was listened to: what is waited for may have come meanwhile. Each pass
        takes longer than it is late, so no wait is for ever."""
        late_s = self._fleet.late_s
        if self._failing is not None:
            self._failing += late_s
        if self._stop_by is not None:
            self._stop_by = min(self._stop_by + late_s, max(self._stop_by, self._clock() + SETTLE_S))

    def _needs_nothing(self, verdict: Verdict) -> bool:
        """Whether it may be left, as was asked for: every node trains, and what it has written until now is here."""
        quiet = verdict.action is Action.WAIT and self._stop_by is None
        return self._session.may_leave and quiet and self._fleet.all_train(self._began)

    def _pass(self) -> None:
        self._look(self._session.timeouts.look_s)
        for limit in self._limits:
            if (reached := limit.check(self._wall(), self._session.record)) is not None:
                self._stop(reached, reached.words)

        self._tell_of_spending()

    def _tell_of_spending(self) -> None:
        """Once, whoever supervises, for each part of a budget that is spent."""
        record, now = self._session.record, self._wall()
        for budget in (limit for limit in self._limits if isinstance(limit, Budget | MonthBudget)):
            if (found := budget.spent(now, record)) is not None and found.news(record):
                spent_usd = round(found.spent_usd, 4)
                self._session.tell(SpendChanged, spent_usd=spent_usd, max_usd=found.max_usd, limit=found.limit)

    def _look(self, logs_s: float) -> None:
        began = self._clock()
        self._fleet.round(logs_s, amiss=self._failing is not None)
        if self._renewal is not None:
            self._renewal.round(self._fleet.monitors, self._fleet.calls)
        if self._fleet.monitors[0].seen >= began:  # else nothing is new, and the record's age goes on growing
            self._report()

    # --- the end ------------------------------------------------------------------------------------------------

    def _notice(self, verdict: Verdict) -> None:
        if not verdict.reason or self._noticed or self._stopped_by:
            return
        now = self._wall()
        self._noticed = (
            now,
            min([now, *(monitor.heard_at for monitor in self._fleet.monitors if monitor.rank in verdict.lost)]),
        )

    def _sure(self, verdict: Verdict) -> bool:
        """A node that is lost takes its peers' programs along, and they may say so before its provider does."""
        if verdict.succeeded or verdict.lost or self._stopped_by or not self._asks_provider:
            return True
        now = self._clock()
        self._failing = now if self._failing is None else self._failing
        asked = self._fleet.described >= self._failing and self._fleet.all_answer
        return asked or now - self._failing >= SETTLE_S

    def _late(self, verdict: Verdict) -> Verdict:
        """The grace is over, and some have not ended."""
        late = tuple(monitor.rank for monitor in self._fleet.monitors if not self._fleet.has_ended(monitor))
        names = ", ".join(f"node {rank}" for rank in late) or "the nodes"
        cause = "" if self._stopped_by else verdict.reason
        return replace(
            verdict,
            reason="; ".join(filter(None, (cause, f"{names} did not stop in time"))),
            fault=verdict.fault or Fault.INFRASTRUCTURE,
            lost=tuple(sorted({*verdict.lost, *late})),
        )

    def _explained(self, verdict: Verdict) -> Verdict:
        """Why nodes were stopped that no limit has stopped. The cause may have passed since: a node comes back from a
        long silence. After a take-over it is not known, and the attempt counts as interrupted."""
        if verdict.fault is not Fault.STOPPED or self._stopped_by:
            return verdict
        first = self._stopped_for or verdict
        fault = Fault.INFRASTRUCTURE if first.fault is Fault.STOPPED else first.fault
        return replace(verdict, reason=first.reason, fault=fault)

    def _ended(self, verdict: Verdict) -> Ended:
        ended_at = self._wall()
        self._last_words(verdict.lost)
        self._report()  # a look may have ended after its pass; it is what the verdict is made of
        self._session.record.node_phases = self._fleet.phases()  # nothing is reported of a node 0 that is gone
        verdict = self._explained(verdict)
        ended = Ended(
            verdict.succeeded,
            verdict.reason,
            verdict.fault,
            self._stopped_by,
            lost=verdict.lost,
            starved=verdict.starved,
            damaged=self._damaged(),
        )
        if ended.succeeded or self._stopped_by:
            return ended
        noticed_at, heard_at = self._noticed or (ended_at, ended_at)
        attempt = self._session.record.attempt
        statuses = [
            monitor.status for monitor in self._fleet.monitors if monitor.status and monitor.status.attempt == attempt
        ]
        interruption = Interruption(
            attempt=attempt,
            reason=ended.reason,
            fault=str(ended.fault) if ended.fault else None,
            nodes=list(ended.lost),
            step=interruptions.newest_step(statuses),
            heard_at=heard_at,
            noticed_at=noticed_at,
            ended_at=ended_at,
            starved=ended.starved,
        )
        return replace(ended, interruption=interruption)

    def _damaged(self) -> tuple[Damage, ...]:
        """Which checkpoint nodes could not go on from, as only who reads every byte finds out."""
        attempt = self._session.record.attempt
        told = [(monitor.rank, monitor.status) for monitor in self._fleet.monitors if monitor.status is not None]
        return tuple(
            Damage(rank, status.damaged, status.reason or "")
            for rank, status in told
            if status.attempt == attempt and status.damaged
        )

    def _last_words(self, lost: tuple[int, ...]) -> None:
        """What was written between the last look and the end. A node that does not come back is not waited for long."""
        began, times = self._clock(), self._session.timeouts
        while True:
            self._look(times.sync_s)
            behind = self._fleet.behind(began, but=lost, wait_s=times.connect_s)
            if not behind or self._clock() - began > times.sync_s or self._session.interrupts.count > self._heard:
                return
            self._sleep(times.poll_s)

    # --- telling ------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        record, monitors = self._session.record, self._fleet.monitors
        for monitor in monitors:
            if monitor.status is None or monitor.status.attempt != record.attempt:
                continue
            if monitor.status.at_risk_since is not None:
                self._fleet.once(f"node {monitor.rank}: its provider may take it soon (a hint); the run goes on")
            if monitor.rank and monitor.status.checkpoint.problem:  # node 0 only knows that a part is missing
                self._fleet.once(f"node {monitor.rank}: checkpoint: {monitor.status.checkpoint.problem}")
        record.node_phases = self._fleet.phases()
        status = monitors[0].status
        if status is None or status.attempt != record.attempt:
            return
        self._tell_of_silence(status)
        phase = "stopping" if self._stop_by is not None else str(status.phase)
        record.step, record.steps = status.step, status.steps
        record.metrics |= status.metrics
        record.first_metrics = status.first_metrics | record.first_metrics  # a later attempt's are not the run's
        sample = {"step": known(status.step), "steps": status.steps, "phase": phase, "values": dict(record.metrics)}
        self._session.tell(MetricsSampled, **sample)
        interruptions.moved(self._session, status)
        record.agent_seconds = {name: round(seconds, 1) for name, seconds in status.phase_seconds.items()}
        done = status.checkpoint
        record.saves = _saves(status)
        if done.committed_id and done.committed_id != record.checkpoint_id:
            record.checkpoint_id, record.checkpoint_step = done.committed_id, done.committed_step
            self._session.tell(CheckpointCommitted, checkpoint_id=done.committed_id, step=done.committed_step)
        if overdue := self._saving.overdue(status):
            self._fleet.once(overdue)
        if done.problem:
            self._fleet.once(f"checkpoint: {done.problem}")
        if done.save_problem:
            self._fleet.once(f"checkpoint: {done.save_problem}; the training goes on")
        self._session.save(soon=True)

    def _tell_of_silence(self, status: AgentStatus) -> None:
        """Once half of the time is over that the program may be quiet; again after its next sign of progress."""
        if status.quiet_s is None or status.quiet_until is None or status.phase.final:
            return
        left_s = status.quiet_until - status.updated_at
        quiet = left_s < status.quiet_s / 2
        if quiet and not self._quiet:
            what = f"no sign of progress from any node for {duration(status.quiet_s - left_s)}"
            why = f"after {duration(status.quiet_s)} the attempt counts as hung (`timeouts` in the run file)"
            self._session.emit(Warned(f"{what}; {why}"))
        self._quiet = quiet

    # --- stopping -----------------------------------------------------------------------------------------------

    def _say_that_it_is_to_stop(self) -> None:
        with suppress(OSError, StackError):
            shared.ask_to_stop(self._session.record.run_id)

    def _longer_s(self) -> float:
        """Seconds beyond `drain_s` that an agent says its last uploads get; none where the others wait for it."""
        if self._stop_level == HURRY:
            return 0.0
        told = [each.status.drain_s or 0.0 for each in self._fleet.monitors if each.status is not None]
        return max(0.0, max(told, default=0.0) - self._session.timeouts.drain_s)

    def _wants_to_leave(self) -> bool:
        """The first signal asks, where there is somebody to ask, and stops; a second one leaves, whatever stops it."""
        interrupts, ask = self._session.interrupts, self._session.ask
        if interrupts.count <= self._heard:
            return False
        self._heard += 1
        if self._heard > 1 or interrupts.hung_up:
            return True
        answer = True if ask is None or interrupts.told else self._asked(ask)
        if answer is None:
            self._heard = interrupts.count = 0
            self._session.emit(Note("no answer: the run goes on"))
        if answer:
            self._stop(StopReason.USER, "interrupted")
        return answer is False

    def _asked(self, ask: Callable[[str], bool | None]) -> bool | None:
        try:
            with self._session.interrupts.leaving():
                return ask(self._saving.promise(self._session.record))
        except KeyboardInterrupt:
            return False

    def _stop(self, by: StopReason | None, why: str, *, now: bool = False, lost: bool = False) -> None:
        """Every agent is to save, stop and upload. `by` None: for the peers' sake; `now`: without the save; `lost`:
        quickly, the others wait for it.

        The first cause counts; a later one can only make it quicker. After the grace the machines go anyway.
        """
        times, level = self._session.timeouts, (HURRY if lost else NOW) if now else SAVE
        if level <= self._stop_level:
            return
        self._stop_level = level
        if self._stop_by is None:
            self._stopped_by = by
            self._session.log("stop", by=by or "peers", why=why)
            if by is StopReason.USER:
                with suppress(OSError):  # whoever takes over in the middle of it goes on with it, from anywhere
                    shared.ask_here_to_stop(self._session.record.run_id)
                self._fleet.calls.begin("stop asked", self._say_that_it_is_to_stop)
            self._session.to(State.STOPPING)
            self._session.emit(Note(f"stopping: {why}"))
        save_s = last_save_s(self._session.record) if level == SAVE else 0.0
        grace_s = times.grace_s(save_s) + (times.kill_s if level == HURRY else times.drain_s + self._outputs_s)
        self._stop_by = min(self._stop_by or float("inf"), self._clock() + grace_s)
        self._fleet.stop(level)


def _saves(status: AgentStatus) -> dict[str, float]:
    """What a record keeps of an attempt's saves."""
    done = status.checkpoint
    newest = {"stall_s": done.stall_s, "save_s": done.save_s, "drain_s": status.drain_s}
    lost = {"failed": done.failed + done.save_failed, "skipped": done.skipped + done.save_skipped}
    return {name: value for name, value in (newest | lost).items() if value}
