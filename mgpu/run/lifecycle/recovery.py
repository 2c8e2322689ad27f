"""Attempt after attempt: while the machines are at fault and the run file allows it, on a fleet that was repaired.

Each goes on from the newest checkpoint that verifies. A program that fails by itself would fail again: no retry. One
that a machine had no memory for is tried once more: what leaks is small again after a start, and what took the memory
beside it may be over. The second time it is the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mgpu_train.agent.status.status import Fault

from mgpu.errors import ConnectionFailed, NoOffer, QuotaExceeded, RateLimited, Transient
from mgpu.events import Warned
from mgpu.iac.outputs import StackOutput
from mgpu.run.lifecycle.capacity_wait import SOLD_OUT, CapacityWait
from mgpu.run.record import files, interruptions
from mgpu.run.record.record import Interruption, Record, State
from mgpu.run.record.session import Session
from mgpu.run.supervision.supervisor import Ended
from mgpu.spec.model import Recovery

MOVE_AFTER_S = 300.0  # of refusals, or half of `wait_minutes` if that is less: the fleet's own place is sold out
WITHOUT_PROGRESS = 3  # attempts in a row that committed nothing new
MENDED = (Fault.INFRASTRUCTURE, Fault.PROVIDER)  # by another machine, perhaps


@dataclass(frozen=True)
class Attempts:
    """The attempts of one run. `conduct` makes one on a fleet; `repair` brings the fleet back to what was asked for,
    with new machines for the ranks that it is given, like the others and beside them. `move` gives all machines back
    and makes the fleet anew, wherever the run file allows; None: nothing else is on offer."""

    session: Session
    recovery: Recovery
    conduct: Callable[[StackOutput], Ended]
    repair: Callable[[tuple[int, ...]], StackOutput]
    move: Callable[[], Callable[[], StackOutput] | None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self, first: Callable[[], Ended]) -> Ended:
        """`first` makes, or goes on with, the attempt that begins it. Returns how the last one ended.

        Raises:
            MgpuError: an attempt could not be started, or the fleet not be repaired, for a cause of their own.
        """
        ended, record, damaged = self.once(first), self.session.record, 0
        while self.goes_on(ended):
            if len(record.damaged) != damaged:  # the next one begins elsewhere, and is counted from there
                damaged, record.idle, record.idle_step = len(record.damaged), 0, -1
            else:
                moved = record.checkpoint_step > record.idle_step
                record.idle = 0 if moved else record.idle + 1
                record.idle_step = max(record.idle_step, record.checkpoint_step)
            if record.idle >= WITHOUT_PROGRESS:
                return replace(ended, reason=f"{ended.reason}; {record.idle} attempts in a row without progress")
            ended = self._again(ended)
        return ended

    def goes_on(self, ended: Ended) -> bool:
        """Whether another attempt follows this one."""
        if ended.succeeded or ended.left or ended.stopped_by:
            return False
        if ended.fault not in MENDED and not self._starved_first(ended):
            return False
        return self.session.record.recoveries < self._allowed and not self.session.asked_to_end

    @property
    def _allowed(self) -> int:
        """Attempts after the first: those of the run file, and one for each checkpoint that nodes have found damaged.
        That is no machine's fault, and the next one begins from an older checkpoint."""
        return self.recovery.attempts - 1 + len(self.session.record.damaged)

    def _starved_first(self, ended: Ended) -> bool:
        return ended.starved and not any(each.starved for each in self.session.record.interruptions)

    def interrupted(self, ended: Ended) -> None:
        """Writes down that the attempt has ended, and that another one follows."""
        record = self.session.record
        record.recoveries += 1
        record.interruptions.append(ended.interruption or _unwatched(ended, record))
        self.session.emit(Warned(f"attempt {record.attempt} ended: {ended.reason}"))

    def _again(self, ended: Ended) -> Ended:
        record = self.session.record
        self.interrupted(ended)
        self.session.to(State.REPAIRING)
        files.send_soon(record.run_id)  # what led to it, for whoever looks from elsewhere
        return self.mended(ended.lost)

    def mended(self, lost: tuple[int, ...]) -> Ended:
        """The fleet repaired, with new machines for these ranks, and the attempt that follows: what `run` does after an
        interruption, and who takes over from a supervisor that died in it."""
        record = self.session.record
        with self.session.phase("repairing", f"recovery {record.recoveries} of {self._allowed}"):
            fleet = self._repaired(lost)
        interruptions.repaired(record)
        self.session.check()
        return self.once(lambda: self.conduct(fleet))

    def _repaired(self, lost: tuple[int, ...]) -> StackOutput:
        """The fleet as asked for; where there is no capacity now, it is asked again until `wait_minutes`. A quota is
        full for a while only, too: machines that have just ended count against it.

        One machine is replaced by one of its type in its zone. After a reclaim that pool is the likeliest to be empty:
        after a while the whole fleet moves. The next attempt begins from its checkpoint all the same.
        """
        minutes, refusals = self.recovery.wait_minutes, (*SOLD_OUT, NoOffer, QuotaExceeded, RateLimited, Transient)
        capacity_wait = CapacityWait(self.session, minutes, refusals, self.clock, self.sleep)
        stay_until = self.clock() + min(MOVE_AFTER_S, minutes * 30)
        refused = False

        def ask() -> StackOutput:
            nonlocal refused
            if not refused or self.clock() < stay_until:
                try:
                    return self.repair(lost)
                except refusals:
                    refused = True
                    if self.clock() < stay_until:
                        raise  # else the fleet moves at once: this may have been the last time that is asked
            move = self.move()
            return move() if move else self.repair(lost)

        return capacity_wait.granted(ask)

    def once(self, attempt: Callable[[], Ended]) -> Ended:
        """One attempt. A node that is lost before anything was started is a lost node too, where another attempt is
        allowed."""
        try:
            return attempt()
        except ConnectionFailed as error:
            lost = Ended(False, error.what, Fault.INFRASTRUCTURE, lost=error.ranks)
            if not self.goes_on(lost):
                raise
            self.session.save()
            return lost


def _unwatched(ended: Ended, record: Record) -> Interruption:
    """An end that no supervisor saw coming: it is noticed now, and when it was is not known."""
    now = time.time()
    fault = str(ended.fault) if ended.fault else None
    step = max(record.step, record.checkpoint_step)
    return Interruption(
        record.attempt, ended.reason, fault, list(ended.lost), step, now, now, now, starved=ended.starved
    )
