"""An attempt begins where the commit log says, and only while this process supervises the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mgpu_train.agent.host.layout import LEASE
from mgpu_train.agent.status.status import Phase
from mgpu_train.checkpoint import newest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.config import Secrets
from mgpu_train.store import Denied, Expired, StoreError, Unavailable, open_store
from mgpu_train.store.file import FileStore

from mgpu.errors import ConnectionFailed, RemoteError, TakenOver, TrainingFailed
from mgpu.events import Note, Warned
from mgpu.run.job.request import resolve
from mgpu.run.lifecycle import attempt_start
from mgpu.run.lifecycle.post_mortem import of_the_store
from mgpu.run.record import shared
from mgpu.run.record.record import Interruption, load, save
from mgpu.run.record.session import Session
from mgpu.spec.model import Recovery, RunSpec

BASE = {"name": "a", "provider": "local", "max_hours": 1, "max_price_usd_per_hour": 1, "nodes": 2, "train": {}}


class Beginning:
    """A run whose attempts begin on two nodes of the world."""

    def __init__(self, world, tmp_path):
        self.world, self.nodes = world, world.has_nodes(2)
        self.url = f"file://{tmp_path}/store"
        self.store = open_store(self.url)
        spec = RunSpec.model_validate(BASE | {"checkpoint": {"to": self.url}})
        self.request = resolve(spec, "run-1", tmp_path, timeouts=world.timeouts)
        world.record("run-1", nodes=2)
        self.fleet = world.output(world.cloud.rent("mine-run-1", 2))
        self.jobs = []
        world.program = lambda node, job: (self.jobs.append(job), node.says(Phase.TRAINING, attempt=job.attempt))

    @property
    def log(self):
        return CommitLog(self.store, "run-1")

    def start(self, supervisor="mine"):
        session = Session(load("run-1"), self.world.events.append, self.world.timeouts)
        session.record.supervisor = supervisor
        attempt_start.start(session, self.request, self.fleet, self.nodes, Secrets())
        return session.record

    def commit(self, record, step):
        self.world.commit(self.url, "run-1", attempt=record.attempt, writer=record.writer, step=step)

    def loses(self, checkpoint_id):
        """The end of the log is gone, from this checkpoint's entry on."""
        (commit,) = [each for each in self.log.checkpoints() if each.checkpoint_id == checkpoint_id]
        for line in self.log.read()[commit.seq :]:
            self.store.delete(f"run-1/commits/{line.seq:08d}.json")


@pytest.fixture
def run(world, tmp_path):
    return Beginning(world, tmp_path)


def test_the_next_attempt_begins_at_the_newest_commit_which_may_not_have_been_seen(run):
    first = run.start()
    assert (first.attempt, first.checkpoint_step) == (1, -1)
    run.commit(first, 40)
    second = run.start()
    assert (second.attempt, second.checkpoint_id, second.checkpoint_step) == (2, "a001-step-40", 40)
    assert {job.resume.checkpoint_id for job in run.jobs[2:]} == {"a001-step-40"}
    assert load("run-1").checkpoint_step == 40


def test_no_node_is_started_while_another_machine_may_have_the_run(run, monkeypatch):
    """The store was waited for so long that the lock in the backend is too old."""
    run.world.timeouts = run.world.timeouts.model_copy(update={"lease_s": 0.0})
    monkeypatch.setattr(shared, "unsure_s", lambda _run: 1.0)
    with pytest.raises(TakenOver, match="left to whoever reaches the backend"):
        run.start()
    assert run.jobs == []


def test_a_later_attempt_that_begins_from_zero_says_so(run):
    run.start()
    assert not any("from zero" in note.text for note in run.world.of(Note))
    run.start()
    assert [note.text for note in run.world.of(Note) if "from zero" in note.text] == [
        "attempt 2 begins from zero: no checkpoint was committed"
    ]


def test_what_is_gone_from_the_end_of_the_log_is_told_by_the_record(run):
    """No number is missing then: the log alone would lead to the older checkpoint, or to none, without a word."""
    first = run.start()
    run.commit(first, 40)
    run.commit(first, 50)
    assert run.start().checkpoint_id == "a001-step-50"
    run.loses("a001-step-50")
    assert run.start().checkpoint_id == "a001-step-40"
    (told,) = run.world.of(Warned)
    assert "a001-step-50 was committed, and is not in the commit log of run run-1 any more" in told.text


def test_nothing_begins_from_zero_where_the_record_knows_better(run):
    run.commit(run.start(), 40)
    run.start()
    run.loses("a001-step-40")
    with pytest.raises(TrainingFailed, match="a001-step-40 was committed"):
        run.start()
    assert load("run-1").checkpoint_id == "a001-step-40"


def test_catching_up_keeps_what_the_log_has_lost(run):
    first = run.start()
    run.commit(first, 40)
    run.commit(first, 50)
    session = Session(run.start(), run.world.events.append, run.world.timeouts)
    run.loses("a001-step-50")
    attempt_start.catch_up(session, run.request)
    assert session.record.checkpoint_id == "a001-step-50"


def test_the_way_back_goes_on_from_there(run):
    run.commit(run.start(), 40)
    record = load("run-1")
    record.interruptions = [Interruption(1, "node 1 is gone", "provider", [1], 47, 1.0, 2.0, 3.0, 4.0)]
    session = Session(record, run.world.events.append, run.world.timeouts)
    attempt_start.start(session, run.request, run.fleet, run.nodes, Secrets())
    (interruption,) = record.interruptions
    assert (interruption.resumed_step, interruption.steps_lost) == (40, 7)
    assert interruption.started_at


def test_what_nodes_have_found_damaged_is_no_newest_checkpoint(run):
    first = run.start()
    run.commit(first, 40)
    run.commit(first, 50)
    record = load("run-1")
    record.damaged = {"a001-step-50": "node 1: resume: its checksum is 1, not 2"}
    save(record)
    assert run.start().checkpoint_id == "a001-step-40"
    session = Session(load("run-1"), run.world.events.append, run.world.timeouts)
    attempt_start.catch_up(session, run.request)
    assert session.record.checkpoint_id == "a001-step-40"
    session.record.damaged["a001-step-40"] = "node 0: the same"
    session.save()
    with pytest.raises(TrainingFailed, match="no committed checkpoint of run run-1 verifies"):
        run.start()


@pytest.mark.parametrize("damaged", [True, False])
def test_a_last_checkpoint_that_nodes_have_found_damaged_is_no_success(run, damaged):
    """Nobody saw the end of the attempt that was to go on from it."""
    record = run.start()
    run.commit(record, run.request.spec.train.steps)
    session = Session(record, run.world.events.append, run.world.timeouts)
    record.damaged = {run.log.checkpoints()[0].checkpoint_id: "node 0: its checksum is 1, not 2"} if damaged else {}
    ended = of_the_store(session, run.request, needed=True)
    assert ended.succeeded is not damaged


def test_whoever_is_taken_over_begins_no_attempt(run):
    run.start("first")
    run.log.take_over("second", host="elsewhere", pid=7)
    session = Session(load("run-1"), run.world.events.append, run.world.timeouts)
    session.record.supervisor, session._claimed = "first", True
    with pytest.raises(TakenOver, match="taken over"):
        attempt_start.start(session, run.request, run.fleet, run.nodes, Secrets())
    assert run.log.newest_attempt() == 1
    assert len(run.jobs) == 2, "no agent was started"


class Away:
    """A call that fails so many times before it does what it did; and how often somebody waited for it."""

    def __init__(self, monkeypatch, owner, name, error, times):
        self.error, self.left, self.waits = error, times, 0
        real = getattr(owner, name)

        def call(*args, **named):
            if self.left:
                self.left -= 1
                raise self.error
            return real(*args, **named)

        def paused(_session, seconds):
            assert 0 < seconds < 60
            self.waits += 1
            return False

        monkeypatch.setattr(owner, name, call)
        monkeypatch.setattr(attempt_start, "paused", paused)


@pytest.mark.parametrize(
    ("owner", "name"), [(FileStore, "list"), (newest, "newest_verified")], ids=["before its entry", "after it"]
)
@pytest.mark.parametrize("error", [Unavailable("503"), Expired("the token has expired")], ids=str)
def test_a_store_that_is_away_for_a_while_is_waited_for_and_the_machines_live_on(run, monkeypatch, owner, name, error):
    run.commit(run.start(), 40)
    run.world.nodes[1].faults["write"] = [RemoteError("one that cannot be written to now")]
    away = Away(monkeypatch, owner, name, error, times=2)
    record = run.start()
    assert (record.attempt, record.checkpoint_id, away.waits) == (2, "a001-step-40", 2)
    assert [each.attempt for each in run.log.entries() if each.kind == "attempt"] == [1, 2], "no number is passed over"
    assert all(node.files[str(LEASE)] == b"1900\n" for node in run.world.nodes)
    assert [f"{error}: it is asked again, for up to 600 s" in each.text for each in run.world.of(Note)].count(True) == 1


@pytest.mark.parametrize(
    ("error", "minutes"), [(Unavailable("503"), 0), (Denied("not yours"), 10), (StoreError("odd"), 10)], ids=str
)
def test_a_store_that_stays_away_or_refuses_ends_it(run, monkeypatch, error, minutes):
    run.commit(run.start(), 40)
    recovery = Recovery(attempts=5, wait_minutes=minutes)
    run.request = replace(run.request, spec=run.request.spec.model_copy(update={"recovery": recovery}))
    away = Away(monkeypatch, FileStore, "list", error, times=99)
    with pytest.raises(TrainingFailed, match=str(error)) as failed:
        run.start()
    assert "attempt 2 was not begun" in failed.value.next_step
    assert (away.waits, len(run.jobs)) == (0, 2)


def test_nodes_that_were_started_beside_a_lost_one_are_stopped(run):
    run.world.nodes[1].faults["write"] = [ConnectionFailed("lost")]
    with pytest.raises(ConnectionFailed):
        run.start()
    assert [node.stops for node in run.world.nodes] == [1, 1]


def test_a_lost_node_is_not_asked_to_undo_anything(run):
    real = run.world.nodes[1].write

    def lost(*args, **more):
        run.world.nodes[1].close()
        return real(*args, **more)

    run.world.nodes[1].write = lost
    with pytest.raises(ConnectionFailed):
        run.start()
    assert [node.stops for node in run.world.nodes] == [1, 0]
    assert run.world.of(Warned) == []


def test_catching_up_learns_of_a_commit_and_survives_a_store_that_is_away(run, monkeypatch):
    record = run.start()
    run.commit(record, 40)
    session = Session(load("run-1"), run.world.events.append, run.world.timeouts)
    attempt_start.catch_up(session, run.request)
    assert (session.record.checkpoint_id, session.record.checkpoint_step) == ("a001-step-40", 40)

    def away(_log):
        raise Unavailable("503")

    monkeypatch.setattr(CommitLog, "read", away)
    attempt_start.catch_up(session, run.request)
    assert ["503" in event.text for event in run.world.of(Warned)] == [True]
    assert session.record.checkpoint_step == 40
