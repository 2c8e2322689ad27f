"""One attempt from its first connection to its judged end: machines go before it begins, and after its last step."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from mgpu_train.agent.host.layout import LEASE
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.checkpoint import newest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.config import Secrets
from mgpu_train.store import Denied, Expired, Unavailable, open_store

from mgpu.errors import CommandFailed, ConnectionFailed, Interrupted, Transient
from mgpu.events import AttemptEnded, Warned
from mgpu.providers.base import NodePhase
from mgpu.remote.targets import SyncReport
from mgpu.run.job.request import resolve
from mgpu.run.lifecycle import attempt
from mgpu.run.lifecycle.attempt import conduct, watch_again
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State, load
from mgpu.run.record.session import Session
from mgpu.spec.model import RunSpec

BASE = {"name": "a", "provider": "local", "max_hours": 1, "max_price_usd_per_hour": 1, "nodes": 2}


class Run:
    """A run on two nodes of the world."""

    def __init__(self, world, tmp_path):
        self.world = world
        world.has_nodes(2)
        url = f"file://{tmp_path}/store"
        self.folder = tmp_path / "mine"
        self.folder.mkdir()
        spec = RunSpec.model_validate(BASE | {"command": ["t.py"], "checkpoint": {"to": url}})
        self.request = resolve(spec, "run-1", self.folder, timeouts=world.timeouts)
        self.record = world.record("run-1", nodes=2)
        self.handle = world.cloud.rent("mine-run-1", 2)
        self.fleet = world.output(self.handle)

    @property
    def session(self):
        return Session(self.record, self.world.events.append, self.world.timeouts)

    def conduct(self):
        return conduct(self.session, self.request, self.fleet, self.world.cloud, Secrets())

    def watch_again(self):
        self.record.state, self.record.attempt = State.RUNNING, 1
        return watch_again(self.session, self.fleet, self.world.cloud, self.request)

    def loses(self, rank):
        self.world.cloud.phases[self.handle.ids[rank]] = NodePhase.TERMINATED

    @property
    def told(self):
        """What others hear of the ends of attempts: number, success, fault, nodes."""
        return [(each.attempt, each.succeeded, each.fault, each.lost) for each in self.world.of(AttemptEnded)]


@pytest.fixture
def run(world, tmp_path):
    return Run(world, tmp_path)


@pytest.mark.parametrize("error", [ConnectionFailed("lost"), CommandFailed("was ended by a signal", status=-1)])
def test_a_machine_that_goes_before_the_attempt_has_begun_is_the_cause(run, error, monkeypatch):
    def start(_stdin):
        run.loses(1)
        raise error

    monkeypatch.setattr(run.world.nodes[1], "_start", start)
    ended = run.conduct()
    assert (ended.succeeded, ended.fault, ended.lost) == (False, Fault.PROVIDER, (1,))
    assert ended.reason == "node 1 is gone"
    assert all(node.closed for node in run.world.nodes)


def test_a_machine_that_is_gone_already_is_not_waited_for(run, monkeypatch):
    """Of a stack that was kept, say: SSH tries for `connect_s` to reach a machine that boots."""
    asked = []
    monkeypatch.setattr("mgpu.run.lifecycle.attempt.NodeSet.connect", lambda *_: asked.append(1))
    run.loses(1)
    ended = run.conduct()
    assert (ended.fault, ended.lost, ended.reason) == (Fault.PROVIDER, (1,), "node 1 is gone")
    assert asked == []
    assert run.told == [(1, False, "provider", (1,))]


@pytest.mark.parametrize("answer", [[], [Transient("502")]], ids=["all there", "no answer"])
def test_a_start_that_fails_while_all_machines_are_there_is_its_own_cause(run, answer):
    run.world.nodes[1].faults["start"] = [CommandFailed("`agent start` failed", status=1)]
    run.world.cloud.refuses["describe"] = answer
    with pytest.raises(CommandFailed):
        run.conduct()
    assert all(node.closed for node in run.world.nodes)
    assert run.told == [(1, False, None, ())]


def test_machines_live_on_while_outputs_come_home(run, monkeypatch):
    """They may take `outputs_s`, which may be longer than a lease lasts, and metrics come after them."""
    leases = list[list[bytes | None]]()

    def take(*_):
        leases.append([node.files.pop(str(LEASE), None) for node in run.world.nodes])

    monkeypatch.setattr(attempt.outputs, "collect", take)
    monkeypatch.setattr(attempt.metrics, "collect", take)
    run.request = replace(run.request, spec=run.request.spec.model_copy(update={"outputs": ["*.png"]}))
    timeouts = run.world.timeouts.model_copy(update={"outputs_s": 3600.0})
    session = Session(run.record, run.world.events.append, timeouts)
    assert conduct(session, run.request, run.fleet, run.world.cloud, Secrets()).succeeded
    assert leases == [[b"5500\n"] * 2, [b"1900\n"] * 2], "a lease from the end of the fetch on"


def nothing_left(node, job):
    node.says(Phase.DONE, attempt=job.attempt)


def test_an_attempt_that_goes_on_from_the_last_step_has_nothing_left_to_save(run):
    """The first one's machine went after its last commit, and before it could say that it was done."""
    assert run.conduct().succeeded
    run.record.state, run.record.recoveries = State.REPAIRING, 1
    run.world.program = nothing_left
    assert run.conduct().succeeded
    assert (load("run-1").attempt, run.record.checkpoint_id) == (2, "a001-step-10")
    assert run.told == [(1, True, None, ()), (2, True, None, ())]


def test_a_run_that_was_begun_again_saves_something_itself(run):
    assert run.conduct().succeeded
    run.world.program = nothing_left
    again = run.conduct()
    assert (again.succeeded, again.fault) == (False, Fault.USER)  # other machines would change nothing
    assert "went on from step 10 and ended without a newer checkpoint" in again.reason


@pytest.fixture
def damaged(run, request):
    """After the first attempt: its newest checkpoint, step 20, is damaged, as the store or a node says."""
    assert run.conduct().succeeded
    url, store = run.request.checkpoint.to, Path(run.request.checkpoint.to.removeprefix("file://"))
    run.world.commit(url, "run-1", attempt=1, writer=run.record.writer, step=20)
    if request.param == "it is missing":
        assert [path.unlink() for path in store.rglob("*") if path.is_file() and "a001-step-20" in str(path)]
    else:
        run.record.damaged = {"a001-step-20": "node 0: params.bin differs"}
    run.record.state, run.world.program = State.REPAIRING, nothing_left


@pytest.mark.parametrize("recoveries", [0, 1])
@pytest.mark.parametrize("damaged", ["it is missing", "a node has read it"], indirect=True)
def test_an_attempt_after_a_damaged_checkpoint_has_something_to_save(run, damaged, recoveries):
    run.record.recoveries = recoveries
    ended = run.conduct()
    assert (ended.succeeded, ended.fault, load("run-1").attempt) == (False, Fault.USER, 2)
    assert "went on from step 10 and ended without a newer checkpoint" in ended.reason
    assert run.record.checkpoint_id == "a001-step-10"


@pytest.mark.parametrize("damaged", ["it is missing", "a node has read it"], indirect=True)
def test_of_a_stopped_run_whose_last_checkpoint_is_damaged_the_one_before_is_safe(run, damaged):
    run.record.checkpoint_id, run.record.checkpoint_step = "a001-step-20", 20  # its node has told of it
    run.record.state = State.RUNNING
    Folder("run-1").stop.touch()
    ended = run.watch_again()
    assert (ended.fault, ended.stopped_by) == (Fault.INFRASTRUCTURE, "user")
    assert (run.record.checkpoint_id, run.record.checkpoint_step) == ("a001-step-10", 10)


class Away:
    """The commit log, which cannot be read so many times; and how often somebody waited for it."""

    def __init__(self, monkeypatch, times, error):
        self.left, self.waits = times, 0
        real = CommitLog.checkpoints

        def checkpoints(log):
            if self.left:
                self.left -= 1
                raise error
            return real(log)

        def paused(session, _seconds):
            self.waits += 1
            session.check()
            return False

        monkeypatch.setattr(CommitLog, "checkpoints", checkpoints)
        monkeypatch.setattr(attempt, "paused", paused)


def stopped(*_):
    raise Interrupted("interrupted")


@pytest.mark.parametrize("error", [Unavailable("503"), Expired("the token has expired")], ids=str)
def test_a_store_that_is_away_when_all_is_done_is_waited_for(run, monkeypatch, error):
    away = Away(monkeypatch, 2, error)
    assert run.conduct().succeeded
    assert (away.waits, run.record.checkpoint_id) == (2, "a001-step-10")


@pytest.mark.parametrize("why", ["the lease is over", "it is to leave", "the end is asked for"])
def test_a_run_that_cannot_be_judged_now_is_left_to_who_comes_back(run, monkeypatch, why):
    """All agents say that they are done: neither a failure nor a reason for another attempt."""
    assert run.conduct().succeeded  # what they have committed
    run.world.events.clear()
    away = Away(monkeypatch, 9, Unavailable("503"))
    if why == "the lease is over":
        run.world.timeouts = run.world.timeouts.model_copy(update={"lease_s": 0.0})
    session = run.session
    session.watch_s = 0.0 if why == "it is to leave" else None
    if why == "the end is asked for":
        monkeypatch.setattr(attempt, "paused", stopped)
    run.record.state = State.RUNNING
    ended = watch_again(session, run.fleet, run.world.cloud, run.request)
    assert (ended.left, ended.succeeded, ended.fault) == (True, False, None)
    assert (run.told, away.waits) == ([], 0)
    (warned,) = [each.text for each in run.world.of(Warned) if "cannot be judged now" in each.text]
    assert "503" in warned
    assert "`mgpu attach run-1`" in warned
    away.left = 0
    assert run.watch_again().succeeded
    assert run.told == [(1, True, None, ())]


def test_machines_of_a_stopped_run_do_not_wait_for_its_store(run, monkeypatch):
    assert run.conduct().succeeded
    away = Away(monkeypatch, 9, Unavailable("503"))
    Folder("run-1").stop.touch()
    ended = run.watch_again()
    assert (ended.left, ended.succeeded, ended.fault, ended.stopped_by) == (False, False, Fault.STOPPED, "user")
    assert (away.left, away.waits) == (8, 0)


def test_a_store_that_refuses_is_not_waited_for_when_all_is_done(run, monkeypatch):
    away = Away(monkeypatch, 9, Denied("not yours"))
    ended = run.conduct()
    assert (ended.left, ended.fault, away.left) == (False, Fault.INFRASTRUCTURE, 8)
    assert "could not be verified: not yours" in ended.reason


@pytest.mark.parametrize("why", ["it refuses", "it has nothing newer"])
def test_a_run_that_a_limit_has_stopped_is_stopped_whatever_the_store_says(run, monkeypatch, why):
    """Else another attempt would begin, after the end was asked for."""
    assert run.conduct().succeeded
    if why == "it refuses":
        Away(monkeypatch, 9, Denied("not yours"))
    else:
        run.record.damaged = {"a001-step-10": "node 0: params.bin differs"}
    Folder("run-1").stop.touch()
    ended = run.watch_again()
    assert (ended.succeeded, ended.fault, ended.stopped_by) == (False, Fault.INFRASTRUCTURE, "user")
    assert ended.reason in [each.text for each in run.world.of(Warned)], "for it is told as stopped, and no more"
    safe = "a001-step-10" if why == "it refuses" else None
    assert run.record.checkpoint_id == safe, "what is damaged is not called safe"


@pytest.fixture
def code(run):
    """How many files of the run's code each node has."""
    (run.folder / "t.py").write_text("pass")
    has = dict[int, int]()

    def sync(rank, snapshot, dest, **_):
        if dest == str(run.world.nodes[rank].layout.work):
            has[rank] = len(snapshot.entries)
        return SyncReport(len(snapshot.entries), 0, 0, 0)

    for rank, node in enumerate(run.world.nodes):
        node.sync = partial(sync, rank)
    run.record.kept_by, run.record.slots_of = "another", 2
    return has


@pytest.mark.parametrize(("slots", "left"), [([], 1), ([1], 0)])
def test_a_run_that_shared_its_machines_leaves_no_code_on_them(run, code, slots, left):
    """Its copies are its own, and those of many runs fill a disk; what others link to takes no room."""
    run.record.slots = slots
    assert run.conduct().succeeded
    assert code == {0: left, 1: left}


def test_a_machine_that_is_lost_is_not_asked_for_its_code_again(run, code):
    def lost(node, job):
        run.world.train_on(node, job)
        if node.target.rank == 1:
            node.reachable, node.closed = False, True
            run.loses(1)

    run.record.slots, run.world.program = [1], lost
    assert run.conduct().lost == (1,)
    assert code == {0: 0, 1: 1}
    assert not [each for each in run.world.of(Warned) if "code" in each.text]


def test_a_node_that_is_stuck_holds_up_no_end_and_what_it_keeps_is_told(run, code):
    """The lease of the run would be over meanwhile, and the kept fleet gone."""
    asked = dict[int, float | None]()

    def stuck(rank, taken, *given, within_s=None, **how):
        if code.get(rank):  # it has been sent
            asked[rank] = within_s
            raise ConnectionFailed(f"node {rank}: no end of `python3`", "No answer in time.")
        return taken(*given, **how)

    for rank, node in enumerate(run.world.nodes):
        node.sync = partial(stuck, rank, node.sync)
    run.record.slots = [1]
    assert run.conduct().succeeded
    assert asked == dict.fromkeys((0, 1), run.world.timeouts.command_s)
    told = sorted(each.text for each in run.world.of(Warned) if "code" in each.text)
    where = run.world.nodes[0].layout.work
    assert told == [
        f"the run's code may be left on the fleet, in {where}: node {rank}: no end of `python3`" for rank in (0, 1)
    ]
    assert run.record.lease_until, "the fleet is kept all the same"


@pytest.fixture
def cleared(run):
    """At the end of the run on a fleet that stays: what each node is told that the store has; None: it is not asked."""
    run.record.kept_by = "another"
    return lambda: [node.cleared[-1][3:] if node.cleared else None for node in run.world.nodes]


FOUR, TEN = f"4:1:{len('weights of step 4')}", f"10:1:{len('weights of step 10')}"  # of node 0, who alone saves


def saves(run, *steps, gives_up=()):
    """What the run's program does: it saves these steps, and the keep rule gives some up."""

    def program(node, job):
        if not job.node_rank:
            url, known = run.request.checkpoint.to, {"attempt": job.attempt, "writer": job.writer}
            for step in steps:
                run.world.commit(url, "run-1", step=step, **known)
            for step in gives_up:
                CommitLog(open_store(url), "run-1").give_up([f"a001-step-{step}"], job.writer)
        node.says(Phase.DONE, attempt=job.attempt)

    run.world.program = program


def test_machines_that_stay_are_told_their_parts_of_what_the_store_has_of_a_run_that_has_succeeded(run, cleared):
    saves(run, 4, 10)
    assert run.conduct().succeeded
    assert cleared() == [[FOUR, TEN], []]
    assert [node.cleared[-1][:2] for node in run.world.nodes] == [["run-1", "1"]] * 2


def test_a_checkpoint_that_is_damaged_in_the_store_is_not_taken_from_machines_that_stay(run, monkeypatch, cleared):
    """They may have the only good copy."""
    saves(run, 4, 10)
    monkeypatch.setattr(
        newest, "problems_of", lambda _store, _log, commit, deep: ("is missing",) if commit.step == 4 else ()
    )
    assert run.conduct().succeeded
    assert cleared() == [[TEN], []]


def test_a_checkpoint_that_the_keep_rule_gave_up_is_taken_from_machines_that_stay(run, cleared):
    saves(run, 4, 10, gives_up=[4])
    assert run.conduct().succeeded
    assert cleared() == [[FOUR, TEN], []]


def test_of_an_older_attempt_no_checkpoint_is_taken_from_machines_that_stay(run, cleared):
    """The newer one may have made the same step anew, and not committed it."""
    assert run.conduct().succeeded
    run.record.state, run.record.recoveries = State.REPAIRING, 1
    run.world.program = nothing_left
    assert run.conduct().succeeded
    assert cleared() == [[], []]
    assert [node.cleared[-1][:2] for node in run.world.nodes] == [["run-1", "2"]] * 2


def test_where_the_store_is_away_after_the_verdict_no_checkpoint_is_taken_from_machines_that_stay(
    run, monkeypatch, cleared
):
    def away(*_):
        raise Unavailable("503")

    monkeypatch.setattr("mgpu.run.nodes.leftovers.operator_store", SimpleNamespace(for_record=away))
    assert run.conduct().succeeded
    assert cleared() == [[], []]
    assert [each for each in run.world.of(Warned) if "503" in each.text and "left on the fleet" in each.text]


def fails(node, _job):
    node.says(Phase.FAILED, attempt=1, fault=Fault.USER, reason="exit code 1")


def is_stopped(node, _job):
    node.says(Phase.TRAINING, attempt=1)
    Folder("run-1").stop.touch()


@pytest.mark.parametrize(
    "why", ["it has failed", "its last checkpoint is damaged", "it was stopped", "its machines go"]
)
def test_a_run_that_has_not_succeeded_or_whose_machines_go_clears_nothing(run, monkeypatch, cleared, why):
    """One that was stopped may go on there, and would fetch all of it again."""
    if why == "its machines go":
        run.record.kept_by = None
    elif why == "it has failed":
        run.world.program = fails
    elif why == "its last checkpoint is damaged":
        monkeypatch.setattr(newest, "problems_of", lambda *_, **__: ("is missing",))
    else:
        run.world.program = is_stopped
    ended = run.conduct()
    assert (ended.succeeded, bool(ended.stopped_by)) == (why == "its machines go", why == "it was stopped")
    assert cleared() == [None, None]


def test_a_machine_that_cannot_clear_up_ends_no_run(run, cleared):
    run.world.nodes[1].faults["leftovers"] = [CommandFailed("no room", status=1)]
    assert run.conduct().succeeded
    (told,) = run.world.of(Warned)
    assert told.text == "what the run leaves behind may still be on the fleet: no room"


def test_a_machine_that_is_stuck_when_it_is_to_clear_up_holds_up_no_end(run, monkeypatch, cleared):
    """The lease of the kept fleet runs meanwhile, and the next run waits."""
    waited = []
    for node in run.world.nodes:

        def stuck(argv, *, timeout, taken=node.run, **how):
            if any(word.endswith("/leftovers.py") for word in argv):
                waited.append(timeout)
                raise ConnectionFailed("no end of `python3`")
            return taken(argv, timeout=timeout, **how)

        monkeypatch.setattr(node, "run", stuck)
    assert run.conduct().succeeded
    assert [each <= run.world.timeouts.command_s + 10 for each in waited] == [True, True]


def test_a_run_is_taken_over_though_one_of_its_nodes_does_not_answer(run):
    run.world.program = run.world.train_on
    run.world.nodes[1].reachable = False
    for node in run.world.nodes:
        node.says(Phase.TRAINING, attempt=1)
    run.loses(1)
    ended = run.watch_again()
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (1,))
    assert run.told == [(1, False, "provider", (1,))]


def test_max_hours_count_from_the_first_attempt_whoever_watches_the_later_ones(run):
    """On machines that live longer, as a kept fleet's; each pass of cron has a supervisor of its own."""
    run.record.max_hours, before = 1.0, time.time()
    assert run.conduct().succeeded
    assert before <= load("run-1").begun_at <= time.time()
    run.world.program = run.world.train_on
    for node in run.world.nodes:
        node.says(Phase.TRAINING, attempt=1)
    run.record.begun_at = begun_at = before - 3600
    ended = run.watch_again()
    assert ended.stopped_by == "deadline"
    assert load("run-1").begun_at == begun_at


def test_where_no_node_answers_the_run_is_left_as_it_is(run):
    for node in run.world.nodes:
        node.reachable = False
    ended = run.watch_again()
    assert ended.left
    assert [node.stops for node in run.world.nodes] == [0, 0]
    assert run.told == []


@pytest.mark.parametrize(
    ("commits", "newest_s", "left"), [(3, 1200, False), (3, 800, True), (2, 9e5, True), (0, 0, True)]
)
def test_where_no_node_answers_and_the_store_shows_that_nothing_is_saved_any_more_they_are_lost(
    run, tmp_path, commits, newest_s, left
):
    """Machines that hang are billed on; but a run that nobody reaches from here may train."""
    store = tmp_path / "store"
    writer = CommitLog(open_store(f"file://{store}"), "run-1").begin_attempt(1, "w").writer
    for step in range(1, commits + 1):
        run.world.commit(f"file://{store}", "run-1", attempt=1, writer=writer, step=step)
    for entry in (store / "run-1" / "commits").iterdir():
        os.utime(entry, (time.time() - newest_s,) * 2)
    for node in run.world.nodes:
        node.reachable = False
    run.world.timeouts = run.world.timeouts.model_copy(update={"silence_s": 0.2})
    ended = run.watch_again()
    assert (ended.left, ended.lost) == ((True, ()) if left else (False, (0, 1)))


def test_where_no_node_answers_a_run_that_is_to_end_ends_all_the_same(run):
    """`mgpu stop` from where no node can be reached: the machines go when the grace is over."""
    for node in run.world.nodes:
        node.reachable = False
    Folder("run-1").stop.touch()
    ended = run.watch_again()
    assert (ended.left, ended.stopped_by) == (False, "user")
