"""Recovery: another attempt for lost machines, none for a program that fails by itself, and an end to it (I2, I6)."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from mgpu_train.agent.status.status import Fault

from mgpu.errors import (
    AuthError,
    ConnectionFailed,
    HostKeyMismatch,
    Interrupted,
    NoCapacity,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from mgpu.run.lifecycle.capacity_wait import JITTER, PAUSE_MOST
from mgpu.run.lifecycle.recovery import WITHOUT_PROGRESS, Attempts
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Interruption, State
from mgpu.run.record.session import Session
from mgpu.run.supervision.supervisor import Ended
from mgpu.spec.model import Recovery

DONE = Ended(True)
LOST = Ended(False, "node 1 is gone", Fault.PROVIDER, lost=(1,))
SICK = Ended(False, "node 1: disk full", Fault.INFRASTRUCTURE)
CRASHED = Ended(False, "the program ended with exit code 1", Fault.USER)


STARVED = Ended(False, "SIGKILL: out of memory, the kernel says", Fault.USER, starved=True)


class Script:
    """What each attempt comes to, and what each repair does, in order; the last one goes on for ever."""

    def __init__(self, world, attempts, repairs=(None,), *, allowed=10, wait_minutes=1.0, left=None):
        world.has_nodes(1)
        if left is None:
            world.record("run-1", state=State.RUNNING, attempt=1)
        self.session = Session(left or record.load("run-1"), world.events.append, world.timeouts)
        self.events = {}
        self.attempts, self.repairs = list(attempts), list(repairs)
        self.moves = []  # what each move does; empty: nothing else is on offer
        self.made = self.repaired = self.moved = 0
        self.slow_s = 0.0  # how long a repair takes
        self.lost = ()
        self.now = 0.0
        self.plan = Attempts(
            self.session,
            Recovery(attempts=allowed, wait_minutes=wait_minutes),
            conduct=lambda fleet: self._attempt(),
            repair=self._repair,
            move=lambda: self._move if self.moves else None,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    def run(self):
        return self.plan.run(self._attempt)

    def _attempt(self):
        self.made += 1
        if self.session.record.state is State.REPAIRING:
            self.session.to(State.RUNNING)
        result = self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, tuple):  # an attempt that committed a step first
            result, self.session.record.checkpoint_step = result
        return result

    def _repair(self, lost):
        self.repaired += 1
        self.now += self.slow_s
        self.lost = lost
        result = self.repairs.pop(0) if len(self.repairs) > 1 else self.repairs[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _move(self):
        self.moved += 1
        result = self.moves.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def _sleep(self, seconds):
        self.now += seconds
        self.events.pop(self.now, lambda: None)()
        assert self.now < 3600, "it would ask for ever"


def test_a_run_without_a_loss_repairs_nothing(world):
    script = Script(world, [DONE])
    assert script.run().succeeded
    assert (script.made, script.repaired) == (1, 0)


def test_a_lost_machine_is_replaced_and_the_run_goes_on(world):
    script = Script(world, [LOST, DONE])
    assert script.run().succeeded
    assert (script.made, script.repaired, script.lost) == (2, 1, (1,))
    assert record.load("run-1").recoveries == 1


def test_a_node_that_failed_by_itself_keeps_its_machine(world):
    script = Script(world, [SICK, DONE])
    assert script.run().succeeded
    assert (script.made, script.repaired, script.lost) == (2, 1, ())


def test_the_way_back_is_remembered_with_its_times(world):
    interruption = Interruption(1, "node 1 is gone", "provider", [1], 37, 10.0, 11.0, 12.0)
    script = Script(world, [replace(LOST, interruption=interruption), LOST, DONE])
    assert script.run().succeeded
    first, second = record.load("run-1").interruptions
    assert (first.step, first.nodes, first.heard_at, first.ended_at) == (37, [1], 10.0, 12.0)
    assert (second.reason, second.fault, second.nodes) == ("node 1 is gone", "provider", [1])
    assert first.repaired_at
    assert second.repaired_at


def test_without_another_attempt_the_end_is_no_interruption(world):
    Script(world, [LOST], allowed=1).run()
    assert record.load("run-1").interruptions == []


@pytest.mark.parametrize(
    "ended",
    [CRASHED, Ended(False, "x", Fault.INFRASTRUCTURE, stopped_by="user"), Ended(False, left=True), Ended(False, "?")],
    ids=["the program", "stopped", "left", "unknown"],
)
def test_what_is_not_the_machines_fault_gets_no_other_attempt(world, ended):
    script = Script(world, [ended])
    assert script.run() == ended
    assert (script.made, script.repaired) == (1, 0)


def test_a_program_that_a_machine_had_no_memory_for_is_tried_once_more_in_a_run(world):
    script = Script(world, [(STARVED, 5), (LOST, 9), (STARVED, 12)])
    ended = script.run()
    assert ended == STARVED
    assert (ended.fault, script.made) == (Fault.USER, 3)
    assert [each.starved for each in record.load("run-1").interruptions] == [True, False]
    alone = Script(world, [STARVED], allowed=1)
    assert (alone.run(), alone.made) == (STARVED, 1), "where the run file allows no other attempt there is none"


def test_attempts_is_the_number_of_starts_in_all(world):
    script = Script(world, [(LOST, 1), (LOST, 2), (LOST, 3), (LOST, 4)], allowed=3)
    assert not script.run().succeeded
    assert (script.made, script.repaired) == (3, 2)


def test_a_damaged_checkpoint_takes_no_attempt_from_those_for_lost_machines(world):
    script = Script(world, [(LOST, 1), (SICK, 1), (LOST, 2), DONE], allowed=3)
    script.session.record.damaged = {"a001-step-1": "node 0: its checksum is 1, not 2"}
    assert script.run().succeeded
    script = Script(world, [(LOST, 1), (SICK, 1), (LOST, 2), DONE], allowed=3)
    assert not script.run().succeeded
    assert script.made == 3


def test_one_damaged_checkpoint_after_the_other_is_no_want_of_progress(world):
    """Four in a row: the fifth attempt begins from a good one."""
    script = Script(world, [SICK, SICK, SICK, SICK, DONE], allowed=1)
    one, damaged = script._attempt, script.session.record.damaged

    def attempt():
        if script.made < 4:
            damaged[f"a001-step-{9 - script.made}"] = "node 0: its checksum is 1, not 2"
        return one()

    script._attempt = attempt
    assert script.run().succeeded
    assert script.made == 5


def test_three_attempts_without_a_new_checkpoint_are_enough(world):
    script = Script(world, [(LOST, 5), (LOST, 5)])
    ended = script.run()
    assert "without progress" in ended.reason
    assert script.made == 1 + WITHOUT_PROGRESS, "one that committed, then three that did not"


def test_progress_starts_the_count_anew(world):
    steps = [(LOST, 5), (LOST, 5), (LOST, 5), (LOST, 9), (LOST, 9), (LOST, 9), DONE]
    assert Script(world, steps).run().succeeded


def test_the_count_goes_on_with_another_supervisor(world):
    first = Script(world, [LOST, LOST, KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        first.run()
    left = record.load("run-1")
    assert (left.idle, left.recoveries) == (2, 2)
    script = Script(world, [LOST], left=left)
    assert "3 attempts in a row without progress" in script.run().reason
    assert script.made == 1


def test_whoever_asks_for_the_end_does_not_wait_for_capacity(world):
    script = Script(world, [LOST, DONE], [NoCapacity("none today")], wait_minutes=60)
    script.events = {3.0: Folder("run-1").stop.touch}
    with pytest.raises(Interrupted):
        script.run()
    assert script.now == 3


def test_no_capacity_is_asked_for_again_until_wait_minutes(world):
    pause_s = world.timeouts.sold_out_s
    script = Script(world, [LOST, DONE], [NoCapacity("none today"), NoCapacity("none today"), None])
    assert script.run().succeeded
    assert JITTER[0] * 3 * pause_s <= script.now <= JITTER[1] * 3 * pause_s
    hopeless = Script(world, [LOST, DONE], [NoCapacity("none today")], wait_minutes=1)
    with pytest.raises(NoCapacity):
        hopeless.run()
    assert hopeless.now == pytest.approx(60)
    assert hopeless.session.record.sold_out_since > script.session.record.sold_out_since == 0.0


def test_whoever_goes_on_waiting_for_capacity_does_not_begin_anew(world):
    script = Script(world, [LOST, DONE], [NoCapacity("none today")], wait_minutes=120)
    script.session.record.sold_out_since = time.time() - 3600
    with pytest.raises(NoCapacity):
        script.run()
    assert 3500 < script.now <= 3600


def test_who_asks_to_wait_is_not_asked_before(world):
    script = Script(world, [LOST, DONE], repairs=[RateLimited("slow down", retry_after=50), None])
    assert script.run().succeeded
    assert (script.repaired, script.now >= 50) == (2, True)
    hasty = Script(world, [LOST], repairs=[RateLimited("slow down", retry_after=500)], left=script.session.record)
    with pytest.raises(RateLimited):
        hasty.run()
    assert hasty.now == pytest.approx(60), "and not for longer than the run file waits"


@pytest.mark.parametrize(("wait_minutes", "stays_s"), [(60, 300), (4, 120)])
def test_where_the_place_is_sold_out_the_fleet_moves_after_a_while(world, wait_minutes, stays_s):
    script = Script(world, [LOST, DONE], [NoCapacity("none here")], wait_minutes=wait_minutes)
    script.moves = [None]
    assert script.run().succeeded
    assert script.moved == 1
    longest_s = PAUSE_MOST * world.timeouts.sold_out_s * JITTER[1]
    assert stays_s <= script.now < stays_s + longest_s, "at the first time that it asks after that"
    assert script.repaired >= 3, "before, its own place was asked for one machine"


def test_its_own_place_is_asked_first_also_where_nobody_waits(world):
    script = Script(world, [LOST, DONE], wait_minutes=0)
    script.moves = [None]
    assert script.run().succeeded
    assert (script.moved, script.repaired) == (0, 1)


def test_a_fleet_moves_although_its_own_place_was_asked_until_the_wait_was_over(world):
    script = Script(world, [LOST, DONE], [NoCapacity("none here")], wait_minutes=0.2)
    script.slow_s, script.moves = 20, [None]
    assert script.run().succeeded
    assert (script.moved, script.repaired) == (1, 1)


def test_a_fleet_that_can_move_nowhere_now_asks_again(world):
    script = Script(world, [LOST, DONE], [NoCapacity("none here")], wait_minutes=60)
    script.moves = [NoCapacity("none anywhere"), QuotaExceeded("L-1 is full"), None]
    assert script.run().succeeded
    assert script.moved == 3


def test_where_nothing_else_is_on_offer_the_fleet_stays(world):
    script = Script(world, [LOST, DONE], [NoCapacity("none here")] * 9 + [None], wait_minutes=60)
    assert script.run().succeeded
    assert (script.moved, script.repaired) == (0, 10)


@pytest.mark.parametrize(
    "refusal", [QuotaExceeded("L-1 is full"), RateLimited("too many calls"), Transient("503")], ids=lambda r: r.what
)
def test_what_a_moment_mends_is_asked_again(world, refusal):
    """Machines that have just ended fill a quota, too."""
    script = Script(world, [LOST, DONE], [refusal, None])
    assert script.run().succeeded


def test_another_refusal_is_not_asked_again(world):
    script = Script(world, [LOST, DONE], [AuthError("expired")])
    with pytest.raises(AuthError):
        script.run()
    assert script.now == 0


def test_a_node_that_cannot_be_reached_at_the_start_is_a_lost_one(world):
    error = ConnectionFailed("node 1")
    error.ranks = (1,)
    script = Script(world, [error, DONE])
    assert script.run().succeeded
    assert script.lost == (1,)
    with pytest.raises(ConnectionFailed):
        Script(world, [ConnectionFailed("node 1")], allowed=1).run()
    with pytest.raises(HostKeyMismatch):
        Script(world, [HostKeyMismatch("node 1"), DONE]).run()


def test_a_stop_that_was_asked_for_meanwhile_ends_it(world):
    script = Script(world, [LOST, DONE])
    script.session.interrupts.count = 1
    assert not script.run().succeeded
    assert script.made == 1
