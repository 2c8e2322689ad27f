"""A node's word that a checkpoint is damaged: believed where another has read the same, or nobody else can."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
from mgpu_train.agent.status.status import Fault
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import Unavailable, open_store
from mgpu_train.store.file import FileStore

from mgpu.errors import InputError
from mgpu.events import Warned
from mgpu.run.job import operator_store
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Interruption, State
from mgpu.run.record.session import Session
from mgpu.run.supervision import damage
from mgpu.run.supervision.limits import StopReason
from mgpu.run.supervision.supervisor import Damage, Ended

X, Y = "a001-step-10", "a001-step-20"


class Judged:
    """A run on two nodes with the checkpoints X and Y."""

    def __init__(self, world, tmp_path):
        self.world, self.nodes = world, world.has_nodes(2)
        self.store = tmp_path / "store"
        url = f"file://{self.store}"
        CommitLog(open_store(url), "run-1").begin_attempt(1, "w")
        for step in (10, 20):
            world.commit(url, "run-1", attempt=1, writer="w", step=step)
        made = world.record("run-1", state=State.RUNNING, attempt=2, store=url)
        self.session = Session(made, world.events.append, world.timeouts)
        self.fleet = world.output(world.cloud.rent("mine-run-1", 2))

    def flip(self, checkpoint_id):
        (pack,) = (self.store / "run-1" / "checkpoints" / checkpoint_id).glob("*.pack-0")
        pack.write_bytes(bytes([pack.read_bytes()[0] ^ 1]) + pack.read_bytes()[1:])

    def of(self, checkpoint_id, *ranks, limits=(), clock=lambda: 0.0):
        told = tuple(Damage(rank, checkpoint_id, "resume: its checksum is 1, not 2") for rank in ranks)
        interruption = Interruption(2, "node", "infrastructure", [], 0, 0.0, 0.0, 0.0)
        ended = Ended(False, "node", Fault.INFRASTRUCTURE, damaged=told, interruption=interruption)
        ended = damage.judge(self.session, self.fleet, self.nodes, ended, limits, clock)
        assert ended.interruption is not None
        assert (ended.interruption.nodes, ended.interruption.reason) == ([*ended.lost], ended.reason)
        return ended

    @property
    def damaged(self):
        return [*record.load("run-1").damaged]


@pytest.fixture
def judged(world, tmp_path):
    return Judged(world, tmp_path)


@pytest.fixture
def away(monkeypatch):
    """The operator cannot read the objects of checkpoints."""

    def read(*_given):
        raise Unavailable("it is away")

    monkeypatch.setattr("mgpu_train.checkpoint.transfer.pack.surely", read)


def test_a_machine_that_misreads_what_is_whole_is_at_fault(judged):
    ended = judged.of(X, 1)
    assert (ended.lost, judged.damaged) == ((1,), [])
    assert ended.reason == f"node; read from here {X} is whole"
    (told,) = judged.world.of(Warned)
    assert "its machine is at fault, not the checkpoint" in told.text


def test_what_the_operator_reads_as_damaged_is(judged):
    judged.flip(X)
    assert (judged.of(X, 1).lost, judged.damaged) == ((), [X])


def test_two_machines_are_believed_whatever_is_read_here(judged, monkeypatch):
    """The way from where they are to the store may be damaged."""
    assert judged.of(X, 0).lost == (0,)
    monkeypatch.setattr(damage, "_whole", lambda *_: pytest.fail("it is known"))
    assert (judged.of(X, 1).lost, judged.damaged) == ((), [X])
    assert (judged.of(Y, 0, 1).lost, judged.damaged) == ((), [X, Y])


def test_where_nobody_else_can_read_it_a_machine_is_believed_once(judged, away):
    assert (judged.of(X, 1).lost, judged.damaged) == ((), [X])
    ended = judged.of(Y, 1)
    assert (ended.lost, judged.damaged) == ((1,), [])
    assert ended.reason == f"node; it has called {X} damaged before, and nobody else has"


def test_another_machines_second_checkpoint_is_no_fault_of_the_first_ones(judged, away):
    judged.of(X, 1)
    assert (judged.of(Y, 0).lost, judged.damaged) == ((), [X, Y])


def test_who_was_right_before_is_not_suspected(judged, monkeypatch):
    judged.flip(X)
    judged.of(X, 1)
    monkeypatch.setattr(damage, "_whole", lambda *_: None)
    assert (judged.of(Y, 1).lost, judged.damaged) == ((), [X, Y])


@pytest.fixture
def silent(monkeypatch):
    """Set once the store is asked for an object, and says nothing as long as the test lasts."""
    asked, over = threading.Event(), threading.Event()

    def read(*_given):
        asked.set()
        assert over.wait(60)

    monkeypatch.setattr("mgpu_train.checkpoint.transfer.pack.surely", read)
    yield asked
    over.set()


@pytest.mark.parametrize("why", [None, StopReason.USER, StopReason.BUDGET])
def test_the_machines_wait_for_the_operators_reading_for_a_while_only(judged, silent, why):
    """And for none of it once the run is to end: no attempt follows."""

    class Near:
        def check(self, _now, _record):
            return StopReason.BUDGET if why is StopReason.BUDGET and silent.is_set() else None

    if why is StopReason.USER:
        Folder("run-1").stop.touch()
    late = why is None
    ended = judged.of(X, 1, limits=[Near()], clock=lambda: late and silent.is_set() and damage.READ_S + 1)
    assert (judged.damaged, ended.stopped_by) == ([X], why)
    assert any("could not be read here" in each.text for each in judged.world.of(Warned))


def test_machines_of_a_run_that_a_limit_has_stopped_wait_for_no_reading(judged, monkeypatch):
    monkeypatch.setattr(damage, "_whole", lambda *_: pytest.fail("its machines are billed beyond the limit"))
    stopped = Ended(False, "x", Fault.STOPPED, StopReason.BUDGET, damaged=(Damage(1, X, "resume: it is damaged"),))
    assert damage.judge(judged.session, judged.fleet, judged.nodes, stopped, ()) == stopped


def test_an_operator_that_cannot_open_the_store_believes_the_machine(judged, monkeypatch):
    """A candidate's package that is missing here ends no run."""
    monkeypatch.setattr(operator_store, "_opened", Mock(side_effect=InputError("x does not work", "no module")))
    assert (judged.of(X, 1).lost, judged.damaged) == ((), [X])


def test_one_bad_read_of_the_operators_own_says_nothing(judged, monkeypatch):
    real, times = FileStore.get, iter([b"x"])
    monkeypatch.setattr(
        FileStore, "get", lambda *given: next(times, None) or real(*given) if "pack" in given[1] else real(*given)
    )
    assert (judged.of(X, 1).lost, judged.damaged) == ((1,), [])
