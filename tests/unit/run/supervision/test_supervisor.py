"""I6 and I7: what the supervisor reads is not lost, what it cannot read ends nothing, and every end has a deadline."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from mgpu_train.agent.status.status import AgentStatus, CheckpointStatus, Fault, Notice, Phase

from mgpu import console, writer
from mgpu.errors import ConnectionFailed, RemoteError, Transient
from mgpu.events import CheckpointCommitted, LogChunk, MetricsSampled, Note, Recovered, SpendChanged, Warned
from mgpu.journal import read
from mgpu.providers.base import NodePhase
from mgpu.remote.nodeset import NodeSet
from mgpu.run.nodes import agent_client
from mgpu.run.record import record, shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.logs import NodeLog
from mgpu.run.record.record import Interruption, Spent, State
from mgpu.run.record.session import Session
from mgpu.run.supervision import remote_tail
from mgpu.run.supervision.fleet_monitor import FleetMonitor
from mgpu.run.supervision.limits import Asked, Budget, Deadline, HardCap, drain_s
from mgpu.run.supervision.metrics import collect
from mgpu.run.supervision.node_monitor import BEAT_S, NodeMonitor
from mgpu.run.supervision.supervisor import SETTLE_S, Damage, Supervisor
from mgpu.spec.provider import entry

BEGIN = 1000.0


class Watch:
    """A supervisor on a clock of its own: a pass a second, and what a test does between two passes."""

    def __init__(self, world, nodes=2, **timeouts):
        self.world = world
        self.nodeset = world.has_nodes(nodes)
        self.handle = world.cloud.rent("mine-run-1", nodes)
        world.record("run-1", state=State.RUNNING, attempt=1)
        defaults = {"poll_s": 1, "silence_s": 20, "stop_grace_s": 5, "drain_s": 5}
        self.timeouts = world.timeouts.model_copy(update=defaults | timeouts)
        for node in world.nodes:
            node.says(Phase.TRAINING)
        self.now, self.script = BEGIN, {}
        self.session = self.new_session()

    def new_session(self, ask=None):
        return Session(record.load("run-1"), self.world.events.append, self.timeouts, ask=ask)

    def at(self, second, act):
        """Does this after the pass of that second."""
        self.script.setdefault(BEGIN + second, []).append(act)
        return self

    def done_at(self, second):
        return self.at(second, lambda: [node.says(Phase.DONE) for node in self.world.nodes])

    def run(self, deadline_s=10_000.0, cloud=True, handle=None):
        supervisor = Supervisor(
            self.session,
            self.nodeset,
            provider=self.world.cloud if cloud else None,
            handle=handle or self.handle,
            # a budget that is told of, and ends nothing
            limits=[Asked(Folder("run-1").stop), Budget(-math.inf), HardCap(0), Deadline(BEGIN + deadline_s)],
            clock=lambda: self.now,
            wall=lambda: self.now,
            sleep=self._sleep,
        )
        return supervisor.watch()

    def _sleep(self, seconds):
        for act in self.script.pop(self.now, []):
            act()
        self.now += seconds
        assert self.now < BEGIN + 500, "it would go on for ever"

    def raises(self, rank, method, *errors):
        return lambda: self.world.nodes[rank].faults.update({method: list(errors)})

    def signal(self):
        self.session.interrupts.count += 1

    @property
    def elapsed(self):
        return self.now - BEGIN

    @property
    def stops(self):
        return [node.stops for node in self.world.nodes]

    @property
    def saved(self):
        return record.load("run-1")

    def local_log(self, rank):
        return b"".join(path.read_bytes() for path in Folder("run-1").logs(rank))

    def shown(self, rank):
        return b"".join(e.data for e in self.world.of(LogChunk) if e.node_rank == rank)


@pytest.fixture
def watch(world):
    return Watch(world)


# --- logs -------------------------------------------------------------------------------------------------------------


def test_log_bytes_are_neither_lost_nor_doubled_over_errors_and_reconnects(watch, monkeypatch):
    monkeypatch.setattr(remote_tail, "PIECE", 7)
    lost, odd = ConnectionFailed("lost"), OSError("a short read")
    for second in range(30):
        watch.at(second, lambda n=second: [node.prints(b"line %d \xff\x00\n" % n) for node in watch.world.nodes])
    watch.at(3, watch.raises(0, "read", lost)).at(5, watch.raises(0, "read_from", odd, lost))
    watch.at(9, lambda: watch.world.nodes[1].close())
    watch.at(12, lambda: setattr(watch.world.nodes[1], "reachable", False))
    watch.at(15, lambda: setattr(watch.world.nodes[1], "reachable", True))
    assert watch.done_at(30).run().succeeded
    for rank, node in enumerate(watch.world.nodes):
        assert node.log.count(b"\n") == 30
        assert watch.local_log(rank) == node.log
        assert watch.shown(rank) == node.log
        chunks = [event for event in watch.world.of(LogChunk) if event.node_rank == rank]
        assert [c.offset for c in chunks] == [sum(len(d.data) for d in chunks[:n]) for n in range(len(chunks))]


def test_a_read_that_fails_between_two_pieces_keeps_the_first_one(watch, monkeypatch):
    monkeypatch.setattr(remote_tail, "PIECE", 4)
    node = watch.world.nodes[0]
    node.prints(b"0123456789")
    real, calls = node.read_from, []

    def second_piece_fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise ConnectionFailed("lost")
        return real(*args)

    node.read_from = second_piece_fails
    assert watch.done_at(2).run().succeeded
    assert watch.local_log(0) == b"0123456789"
    assert [args[1] for args in calls[:3]] == [0, 4, 4], "it goes on where it was"


def test_what_is_printed_at_the_very_end_is_read(watch):
    """The status file can say DONE in the same pass in which the last bytes were not there yet."""
    node = watch.world.nodes[0]
    real = node.read_from

    def last_words(path, offset, limit):
        data = real(path, offset, limit)
        log = path == str(node.layout.log)
        if log and b"done" in node.files[str(node.layout.status)] and b"last" not in node.files.get(path, b""):
            node.prints(b"last words\n")
        return data

    node.read_from = last_words
    assert watch.done_at(1).run().succeeded
    assert watch.local_log(0) == b"last words\n"


def test_what_arrives_between_a_pass_and_its_verdict_is_in_the_record(watch, monkeypatch):
    """On a busy machine a look may end after the pass that has begun it."""
    views = FleetMonitor.views

    def late(fleet):
        for monitor, node in zip(fleet.monitors, watch.world.nodes, strict=True):
            node.says(Phase.DONE, step=20)
            monitor.status = AgentStatus.model_validate_json(node.files[str(node.layout.status)])
            monitor.copied_at, monitor.seen = float("inf"), monitor.seen - 0.1
        monkeypatch.setattr(NodeMonitor, "look", lambda *_: None)  # no later one is needed
        return views(fleet)

    monkeypatch.setattr(FleetMonitor, "views", late)
    assert watch.run().succeeded
    assert watch.saved.step == 20


def test_a_second_supervisor_goes_on_where_the_first_one_was_killed(watch):
    watch.world.nodes[0].prints(b"first\nhalf a li")

    class Killed(BaseException):
        pass

    def kill():
        raise Killed

    with pytest.raises(Killed):
        watch.at(2, kill).run()
    assert watch.local_log(0) == b"first\nhalf a li"
    watch.world.events.clear()
    watch.world.nodes[0].prints(b"ne\nthird\n")
    watch.session = watch.new_session()
    assert watch.done_at(4).run().succeeded
    assert watch.local_log(0) == b"first\nhalf a line\nthird\n"
    assert watch.shown(0) == b"ne\nthird\n", "what the first one showed is not shown again"


def test_a_log_that_is_emptied_on_its_node_loses_nothing_here(watch):
    node = watch.world.nodes[0]
    node.prints(b"step 1, which is long\n")
    watch.at(2, lambda: node.files.update({str(node.layout.log): b""})).at(3, lambda: node.prints(b"2\n"))
    watch.at(5, lambda: node.prints(b"3\n"))
    assert watch.done_at(6).run().succeeded
    assert watch.local_log(0) == watch.shown(0) == b"step 1, which is long\n2\n3\n"
    lines = b"".join(data for *_, data in NodeLog(Folder("run-1"), 0).new())
    assert lines == watch.local_log(0)
    assert len([event for event in watch.world.of(Warned) if "was emptied on the node" in str(event)]) == 1


def test_a_replaced_instance_has_a_log_of_its_own(watch):
    for node in watch.world.nodes:
        node.prints(b"of the old machine\n")
    watch.done_at(1).run()
    watch.nodeset = watch.world.has_nodes(2)
    for node in watch.world.nodes:
        node.says(Phase.DONE)
    watch.world.nodes[0].prints(b"new\n")
    watch.session = watch.new_session()
    watch.run(handle=watch.handle.model_copy(update={"ids": ("another", "mine-run-1-1")}))
    assert [path.read_bytes() for path in Folder("run-1").logs(0)] == [b"of the old machine\n", b"new\n"]
    assert len(Folder("run-1").logs(1)) == 1, "the machine that stayed goes on in its own"


# --- silence and loss -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider_answers", [True, False])
def test_a_node_silent_for_less_than_its_deadline_ends_nothing(watch, provider_answers):
    node = watch.world.nodes[1]
    watch.at(2, lambda: setattr(node, "reachable", False)).at(21, lambda: setattr(node, "reachable", True))
    assert watch.done_at(40).run(cloud=provider_answers).succeeded
    assert watch.stops == [0, 0]
    assert watch.saved.state is State.RUNNING


def test_a_node_silent_for_longer_stops_its_peers_and_the_machines_are_blamed(watch):
    watch.at(2, lambda: setattr(watch.world.nodes[1], "reachable", False))
    ended = watch.run()
    assert not ended.succeeded
    assert ended.fault is Fault.INFRASTRUCTURE
    assert "node 1 has not answered" in ended.reason
    assert ended.stopped_by is None
    assert watch.stops == [1, 0]
    assert 20 < watch.elapsed < 30


def test_an_agent_that_died_is_found_out_by_asking_its_node(watch):
    watch.world.nodes[1].agent_lives = False
    node = watch.world.nodes[0]
    for second in range(28):
        watch.at(second, lambda second=second: node.stops or node.says(Phase.TRAINING, beat=second))
    ended = watch.run()
    assert (ended.succeeded, ended.fault, ended.lost) == (False, Fault.INFRASTRUCTURE, ())
    assert "node 1: its agent died" in ended.reason
    assert BEAT_S <= watch.elapsed < BEAT_S + 5, "the deadline of silence was not waited for"


def test_a_status_that_stands_still_ends_nothing_while_the_agent_lives(watch):
    """A full disk on the node stops the status file, not the training."""
    assert watch.done_at(60).run().succeeded
    assert watch.stops == [0, 0]
    asked = [argv[0] for argv in watch.world.nodes[0].agent]
    assert 2 <= asked.count("status") <= 7, "it is asked now and then, not at every pass"


def test_an_agent_that_names_a_phase_of_its_own_lives(watch, monkeypatch):
    """A newer one: its node shipped it."""
    monkeypatch.setattr(agent_client, "status", lambda *_given: {"phase": "compiling", "attempt": 1, "alive": True})
    assert watch.done_at(60).run().succeeded
    assert watch.stops == [0, 0]


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b'{"version": 2}', b"\xff\xfe", b"null"], ids=["empty", "torn", "newer", "bytes", "null"]
)
def test_a_status_that_cannot_be_read_is_silence_and_no_crash(watch, garbage):
    node = watch.world.nodes[0]
    watch.at(1, lambda: node.files.update({str(node.layout.status): garbage}))
    assert watch.done_at(10).run().succeeded
    assert watch.stops == [0, 0]


@pytest.mark.parametrize("phase", [NodePhase.STOPPING, NodePhase.TERMINATED])
def test_a_loss_by_the_providers_word_ends_the_attempt(watch, phase):
    watch.at(5, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: phase}))
    ended = watch.run()
    assert (ended.succeeded, ended.fault, ended.lost) == (False, Fault.PROVIDER, (1,))
    assert "node 1 is gone" in ended.reason
    assert watch.elapsed < 12, "the deadline of silence was not waited for"
    assert watch.stops[0] == 1


@pytest.mark.parametrize(("lost", "told"), [(0, ["gone", "failed"]), (1, ["failed", "gone"])])
def test_while_the_fleet_is_repaired_the_nodes_are_not_said_to_train(watch, lost, told):
    watch.at(5, lambda: watch.world.cloud.phases.update({watch.handle.ids[lost]: NodePhase.TERMINATED}))
    watch.run()
    watch.session.to(State.REPAIRING)
    assert watch.saved.node_phases == told


def test_a_provider_that_does_not_answer_is_told_once_and_ends_nothing(watch):
    watch.world.cloud.refuses["describe"] = [Transient("502 from the API")]
    assert watch.done_at(60).run().succeeded
    assert watch.world.cloud.described > 10
    assert [event.text for event in watch.world.of(Warned)] == ["the provider does not answer: 502 from the API"]
    assert watch.stops == [0, 0]


@pytest.mark.parametrize(("provider", "looks"), [("hosts", 3), ("slurm", 1)])  # a log-in each
def test_a_provider_whose_looks_are_dear_is_asked_as_often_as_it_says_and_soon_where_something_is_amiss(
    watch, provider, looks
):
    cloud, asked = watch.world.cloud, []
    every_s = entry(provider).capabilities.look_every_s
    cloud.capabilities = cloud.capabilities.model_copy(update={"look_every_s": every_s})
    count = lambda: asked.append(cloud.described)  # noqa: E731
    watch.at(50, count).at(50, lambda: setattr(watch.world.nodes[1], "reachable", False)).at(52, count)
    assert watch.at(54, lambda: setattr(watch.world.nodes[1], "reachable", True)).done_at(60).run().succeeded
    assert asked[0] == looks
    assert asked[1] > asked[0]


def test_machines_that_are_not_ours_are_not_described(watch):
    watch.world.cloud.refuses["describe"] = [Transient("nobody should ask")]
    assert watch.done_at(9).run(cloud=False).succeeded
    assert watch.world.cloud.described == 0


def test_an_old_attempts_done_is_not_this_ones(watch):
    watch.session.record.attempt = 2
    watch.done_at(0).at(9, lambda: [node.says(Phase.DONE, attempt=2) for node in watch.world.nodes])
    assert watch.run().succeeded
    assert watch.elapsed == 10


def test_a_connection_that_closes_has_the_provider_asked_at_once(watch):
    node, asked = watch.world.nodes[1], []
    watch.timeouts = watch.timeouts.model_copy(update={"poll_s": 0.125})
    watch.session = watch.new_session()
    count = lambda: asked.append(watch.world.cloud.described)  # noqa: E731
    watch.at(3, count).at(3, lambda: setattr(node, "reachable", False)).at(3.125, count).at(5.125, count)
    watch.at(6, lambda: setattr(node, "reachable", True)).done_at(9).run()
    before, at_once, two_seconds = asked
    assert before == 1, "every two seconds"
    assert at_once == before + 1
    assert two_seconds == at_once + 4, "and not more often than every half second"


def test_a_loss_of_touch_is_told_once_and_so_is_its_end(watch):
    node = watch.world.nodes[1]
    watch.at(2, lambda: setattr(node, "reachable", False)).at(15, lambda: setattr(node, "reachable", True))
    assert watch.done_at(30).run().succeeded
    texts = [event.text for event in watch.world.events if isinstance(event, Warned | Note)]
    assert texts == ["node 1 does not answer over SSH; the run goes on", "node 1 answers again"]


def test_an_unreachable_node_is_tried_again_with_growing_pauses(watch):
    node, tries = watch.world.nodes[1], []
    watch.timeouts = watch.timeouts.model_copy(update={"poll_s": 0.25, "silence_s": 100})
    watch.session = watch.new_session()

    def refuse():
        tries.append(watch.now)
        raise ConnectionFailed("refused")

    node.close()
    node.reconnect = refuse
    watch.done_at(30).at(30, lambda: setattr(node, "reconnect", lambda: setattr(node, "closed", False))).run()
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert pauses[:5] == [0.5, 1, 2, 4, 5]
    assert set(pauses[5:]) == {5}


class Stuck:
    """A call on a node that does not come back until it is let go."""

    def __init__(self, node, method):
        self.calls, self.free = 0, threading.Event()
        self._real = getattr(node, method)
        setattr(node, method, self)

    def __call__(self, *args, **more):
        self.calls += 1
        assert self.free.wait(10)
        return self._real(*args, **more)


def test_a_node_that_hangs_holds_up_nothing_but_itself(watch):
    watch.timeouts = watch.timeouts.model_copy(update={"look_s": 0.02})
    watch.session = watch.new_session()
    stuck, other = Stuck(watch.world.nodes[1], "read"), watch.world.nodes[0]
    for second in range(3, 6):
        watch.at(second, lambda second=second: other.prints(b"line %d\n" % second))
    copied = []
    watch.at(8, lambda: copied.append(watch.local_log(0))).at(8, Folder("run-1").stop.touch)
    watch.at(10, stuck.free.set).at(11, lambda: time.sleep(0.1))
    ended = watch.run()
    assert (ended.succeeded, ended.stopped_by) == (False, "user")
    assert copied == [b"line 3\nline 4\nline 5\n"]
    assert watch.stops == [1, 1]
    assert stuck.calls < 5, "a look that is under way is not started again"


@pytest.fixture
def halted(monkeypatch):
    """Standard error is a pipe that nobody reads, and full."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with suppress(BlockingIOError):
        while os.write(writes, b"." * 512):
            pass
    os.set_blocking(writes, True)
    monkeypatch.setattr(sys, "stderr", stream := os.fdopen(writes, "w"))
    yield
    os.close(reads)
    writer.of(stream).drain()
    stream.close()


def test_whatever_nobody_reads_of_it_a_supervisor_hears_its_nodes_and_ends_what_is_to_end(watch, halted, monkeypatch):
    """`mgpu launch 2>&1 | less`, Ctrl-S: its own lines, those of its nodes, and its bar."""
    monkeypatch.setattr(console, "ROOM_S", 0.0)
    shown = console.Console(show_logs=True)
    watch.session.emit = shown.emit
    for second in range(3, 8):
        watch.at(second, lambda: watch.world.nodes[0].prints(b"step\n" * 80_000))
    watch.at(35, lambda: setattr(watch.world.nodes[1], "reachable", False))
    assert "node 1 has not answered" in watch.run().reason
    assert 55 <= watch.elapsed < 70
    assert watch.local_log(0) == watch.world.nodes[0].log, "on disk it is whole"


def test_a_terminal_that_halts_the_supervisor_itself_makes_no_node_silent(watch):
    def emit(event):
        watch.now += 100 * isinstance(event, CheckpointCommitted)

    watch.session.emit = emit
    committed = CheckpointStatus(committed_step=7, committed_id="a001-step-7")
    watch.at(3, lambda: watch.world.nodes[0].says(Phase.TRAINING, checkpoint=committed))
    assert watch.done_at(110).run().succeeded
    assert watch.stops == [0, 0]
    assert watch.session.emit is emit


def test_a_terminal_that_is_slow_now_and_then_puts_off_a_silent_node_no_longer_than_it_took(watch):
    def emit(event):
        watch.now += 2 * (isinstance(event, MetricsSampled) and watch.elapsed % 10 == 0)

    watch.session.emit = emit
    watch.at(2, lambda: setattr(watch.world.nodes[1], "reachable", False))
    assert "node 1 has not answered" in watch.run().reason
    assert watch.elapsed < 40


def test_a_supervisor_that_was_halted_hears_its_nodes_before_it_judges(watch):
    """Ctrl-Z and `fg`: a node that is slow to answer then has been asked for a moment, not for as long as that took."""
    free = threading.Event()
    watch.timeouts = watch.timeouts.model_copy(update={"look_s": 0.02})
    watch.session = watch.new_session()
    node = watch.world.nodes[1]
    read = node.read

    def halted():
        watch.now += 100
        node.read = lambda path: (free.wait(), read(path))[1]

    watch.at(3, halted).at(105, halted).at(208, free.set)
    assert watch.done_at(212).run().succeeded
    assert watch.stops == [0, 0]


def test_a_provider_that_hangs_holds_up_nothing(watch):
    watch.timeouts = watch.timeouts.model_copy(update={"look_s": 0.02})
    watch.session = watch.new_session()
    stuck = Stuck(watch.world.cloud, "describe")
    assert watch.at(9, lambda: watch.world.nodes[0].says(Phase.DONE)).done_at(10).run().succeeded
    assert stuck.calls == 1
    stuck.free.set()


def test_whose_run_was_taken_over_touches_nothing_and_leaves(watch):
    watch.at(3, lambda: setattr(watch.session, "still_mine", lambda: False))
    watch.at(3, lambda: watch.world.nodes[0].says(Phase.FAILED, fault=Fault.USER, reason="exit code 3"))
    before = watch.saved
    ended = watch.run()
    assert (ended.left, ended.reason) == (True, "another supervisor has taken over")
    assert watch.stops == [0, 0]
    assert watch.saved.state is before.state


def how_stopped(node):
    """The option of each time that a node's agent was told to stop."""
    return ["".join(argv[3:]) for argv in node.agent if argv[0] == "stop"]


# --- whose fault it is, and since when -------------------------------------------------------------------------------


def cut_off(node):
    """The program of a survivor says what it sees of a peer that is gone, and says so before anybody else does."""
    node.says(Phase.FAILED, fault=Fault.USER, reason="connection closed by peer", step=37)


def test_a_program_is_not_blamed_before_the_provider_was_asked(watch):
    first, second = watch.world.nodes
    watch.at(3, lambda: (cut_off(first), cut_off(second)))
    watch.at(3, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: NodePhase.TERMINATED}))
    ended = watch.run()
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (1,))


def test_while_a_node_does_not_answer_the_providers_word_is_waited_for(watch):
    first, second = watch.world.nodes
    watch.at(4, lambda: (cut_off(first), cut_off(second))).at(5, lambda: setattr(second, "reachable", False))
    watch.at(6, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: NodePhase.TERMINATED}))
    ended = watch.run()
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (1,))


def test_a_supervisor_that_was_halted_asks_the_provider_before_it_blames_a_program(watch, monkeypatch):
    """Ctrl-Z and `fg`: the time in which nobody asked is none in which the provider said nothing."""
    describe = watch.world.cloud.describe

    def slow_to_answer(handle):
        if watch.elapsed < 107:
            raise Transient("503 from the API")
        return describe(handle)

    monkeypatch.setattr(watch.world.cloud, "describe", slow_to_answer)
    watch.at(3, lambda: [cut_off(node) for node in watch.world.nodes])
    watch.at(3, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: NodePhase.TERMINATED}))
    watch.at(4, lambda: setattr(watch, "now", watch.now + 100))
    ended = watch.run()
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (1,))


def test_a_provider_that_says_nothing_of_it_does_not_hold_up_the_end(watch):
    watch.timeouts = watch.timeouts.model_copy(update={"connect_s": 10})
    watch.session = watch.new_session()
    first, second = watch.world.nodes
    second.faults["read_from"] = [ConnectionFailed("cut")] * 999
    watch.world.cloud.refuses["describe"] = [Transient("502 from the API")]
    watch.at(4, lambda: (cut_off(first), cut_off(second)))
    ended = watch.run()
    assert (ended.fault, ended.lost) == (Fault.USER, ())
    assert 4 + SETTLE_S <= watch.elapsed < 4 + SETTLE_S + 10, "nor does what cannot be read any more"


def test_an_interruption_has_its_times(watch):
    first, second = watch.world.nodes
    first.ends_when_stopped = False
    first.says(Phase.TRAINING, step=37)
    watch.at(1, watch.raises(0, "read", *[RemoteError("no answer")] * 6))  # one that is not lost was heard even earlier
    watch.at(3, lambda: setattr(second, "reachable", False))
    watch.at(6, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: NodePhase.TERMINATED}))
    watch.at(9, lambda: first.says(Phase.FAILED, fault=Fault.STOPPED, reason="stopped", step=38))
    interruption = watch.run().interruption
    assert interruption is not None
    assert (interruption.attempt, interruption.nodes, interruption.fault, interruption.reason) == (
        1,
        [1],
        "provider",
        "node 1 is gone",
    )
    assert interruption.step == 38
    assert (interruption.heard_at, interruption.noticed_at, interruption.ended_at) == (BEGIN + 3, BEGIN + 7, BEGIN + 10)
    assert how_stopped(first) == ["--now"]


@pytest.mark.parametrize("starved", [True, False])
def test_an_end_says_whether_a_machine_was_out_of_memory(watch, starved):
    first, second = watch.world.nodes
    watch.at(4, lambda: first.says(Phase.FAILED, fault=Fault.USER, reason="SIGKILL", starved=starved))
    watch.at(4, lambda: second.says(Phase.FAILED, fault=Fault.INFRASTRUCTURE, reason="gloo"))
    ended = watch.run()
    assert ended.interruption is not None
    assert (ended.fault, ended.starved, ended.interruption.starved) == (Fault.USER, starved, starved)


def test_a_checkpoint_that_a_node_found_damaged_is_told(watch):
    first, second = watch.world.nodes
    first.says(Phase.RESUMING)
    second.says(Phase.RESUMING)
    fault = {"fault": Fault.INFRASTRUCTURE, "reason": "resume: its checksum is 1, not 2", "damaged": "a001-step-20"}
    watch.at(4, lambda: second.says(Phase.FAILED, **fault))
    ended = watch.run()
    assert (ended.fault, ended.lost) == (Fault.INFRASTRUCTURE, ())
    assert ended.damaged == (Damage(1, "a001-step-20", "resume: its checksum is 1, not 2"),)


def test_who_asked_for_the_end_interrupted_nothing(watch):
    assert watch.at(3, Folder("run-1").stop.touch).run().interruption is None


@pytest.mark.parametrize("says_steps", [True, False])
def test_the_first_new_step_is_the_end_of_an_interruption(watch, says_steps):
    interruption = Interruption(1, "node 1 is gone", "provider", [1], 37, 10.0, 11.0, 12.0, 18.0, 20.0, None, 30)
    watch.session.record.interruptions.append(interruption)
    watch.session.record.attempt = 2
    node = watch.world.nodes[0]
    for each in watch.world.nodes:
        each.says(Phase.LAUNCHING, attempt=2)
    watch.at(2, lambda: node.says(Phase.LAUNCHING, attempt=2, phase_seconds={"resuming": 1.0, "launching": 20.0}))
    spent = {"preparing": 0.5, "resuming": 1.5, "launching": 20.0, "training": 9.0}  # seen 9 s after its first step
    step = 40 if says_steps else -1
    watch.at(4, lambda: node.says(Phase.TRAINING, attempt=2, step=step, progress_at=31.0, phase_seconds=spent))
    watch.at(8, lambda: [each.says(Phase.DONE, attempt=2) for each in watch.world.nodes]).run()
    assert watch.world.of(Recovered) == [Recovered(7, 1.0, 1.0, 6.0, 4.0)]
    assert watch.saved.interruptions[0].resumed_at == 22.0


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_peers_of_a_failed_node_are_asked_to_stop_once(watch):
    first, second = watch.world.nodes
    second.ends_when_stopped = False
    watch.at(2, lambda: first.says(Phase.FAILED, fault=Fault.USER, reason="exit code 3"))
    watch.at(8, lambda: second.says(Phase.FAILED, fault=Fault.STOPPED, reason="stopped"))
    ended = watch.run()
    assert (ended.fault, ended.stopped_by) == (Fault.USER, None)
    assert "exit code 3" in ended.reason
    assert watch.stops == [0, 1]
    assert watch.saved.state is State.STOPPING


def test_a_cause_that_has_passed_stays_the_cause(watch):
    """A node comes back from a long silence, and is stopped with its peers, which were stopped because of it."""
    first, second = watch.world.nodes
    first.ends_when_stopped = False
    watch.at(2, lambda: setattr(second, "reachable", False))
    watch.at(34, lambda: setattr(second, "reachable", True))
    watch.at(36, lambda: first.says(Phase.FAILED, fault=Fault.STOPPED, reason="this node was asked to stop"))
    ended = watch.run()
    assert watch.stops == [1, 1]
    assert (ended.fault, ended.stopped_by, ended.lost) == (Fault.INFRASTRUCTURE, None, ())
    assert "node 1 has not answered" in ended.reason


def test_a_stop_that_nobody_owns_is_no_fault_of_the_program(watch):
    """Its supervisor died before the nodes had ended, and this one sees no cause any more."""
    for node in watch.world.nodes:
        node.says(Phase.FAILED, fault=Fault.STOPPED, reason="this node was asked to stop")
    ended = watch.run()
    assert (ended.fault, ended.stopped_by) == (Fault.INFRASTRUCTURE, None)


@pytest.mark.parametrize("limit", ["deadline", "hard_cap"])
def test_a_limit_of_time_stops_the_nodes_once(watch, limit):
    watch.session.record.hard_cap_at = BEGIN + 7 if limit == "hard_cap" else 0
    ended = watch.run(deadline_s=7 if limit == "deadline" else 10_000)
    assert ended.stopped_by == limit
    assert not ended.succeeded
    assert watch.stops == [1, 1]
    assert 7 < watch.elapsed < 12


def test_the_stop_file_stops_the_nodes(watch):
    ended = watch.at(3, Folder("run-1").stop.touch).run()
    assert (ended.succeeded, ended.stopped_by) == (False, "user")
    assert watch.stops == [1, 1]
    (stop,) = (e for path in Folder("run-1").journal.iterdir() for e in read(path) if e["kind"] == "stop")
    assert stop["by"] == "user"


def test_nodes_that_do_not_stop_in_time_are_not_waited_for(watch):
    for node in watch.world.nodes:
        node.ends_when_stopped = False
    ended = watch.at(3, Folder("run-1").stop.touch).run()
    assert (ended.succeeded, ended.stopped_by) == (False, "user")
    assert "did not stop in time" in ended.reason
    assert 13 < watch.elapsed < 17, "grace and drain, 10 s together"


def test_a_supervisor_that_was_halted_hears_who_has_stopped_meanwhile(watch):
    """Ctrl-Z and `fg` in the middle of a stop: a node is late when it has been listened to, and still trains."""
    _, second = watch.world.nodes
    second.ends_when_stopped = False
    watch.at(3, Folder("run-1").stop.touch).at(5, lambda: setattr(watch, "now", watch.now + 400))
    watch.at(5, lambda: second.says(Phase.FAILED, fault=Fault.STOPPED, reason="stopped"))
    watch.at(5, watch.raises(1, "read", *[RemoteError("no answer yet")] * 3))
    ended = watch.run()
    assert (ended.stopped_by, ended.lost) == ("user", ())
    assert "in time" not in ended.reason


def test_a_node_that_cannot_be_asked_is_told_and_asked_again(watch):
    watch.raises(0, "stop", RemoteError("no answer to `stop`"), RemoteError("no answer to `stop`"))()
    watch.at(1, Folder("run-1").stop.touch).run()
    assert watch.stops == [1, 1]
    assert ["node 0 could not be asked" in event.text for event in watch.world.of(Warned)] == [True]


@pytest.mark.parametrize("fits", [True, False])
def test_a_notice_stops_the_others_too_and_the_machine_is_replaced(watch, fits):
    first, second = watch.world.nodes
    second.ends_when_stopped = False
    notice = Notice(action="terminate", at=9.0, fits=fits)
    watch.at(2, lambda: second.says(Phase.TRAINING, notice=notice, step=7))
    last = lambda: second.says(Phase.FAILED, fault=Fault.PROVIDER, reason="it goes", notice=notice, step=8)  # noqa: E731
    ended = watch.at(6, last).run()
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (1,))
    assert ended.reason == "node 1: the provider takes the machine"
    assert how_stopped(first) == ["" if fits else "--now"]


def test_on_a_loss_a_survivor_that_only_uploads_is_hurried_too(watch):
    first, second = watch.world.nodes
    first.ends_when_stopped = False
    failing = {"fault": Fault.INFRASTRUCTURE, "reason": "a peer was lost"}
    watch.at(2, lambda: first.says(Phase.DRAINING, **failing))
    stops = []
    watch.at(4, lambda: stops.append(first.stops))
    watch.at(4, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: NodePhase.TERMINATED}))
    watch.at(8, lambda: first.says(Phase.FAILED, **failing))
    second.ends_when_stopped = False
    ended = watch.run()
    assert stops == [0], "its own failure lets it upload"
    assert how_stopped(first) == ["--now"]
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (1,))


def test_a_survivor_that_does_not_stop_is_replaced_as_well(watch):
    watch.timeouts = watch.timeouts.model_copy(update={"stop_grace_s": 5, "kill_s": 3, "drain_s": 100})
    watch.session = watch.new_session()
    watch.world.nodes[0].ends_when_stopped = False
    watch.at(3, lambda: watch.world.cloud.phases.update({watch.handle.ids[1]: NodePhase.TERMINATED}))
    ended = watch.run()
    assert (ended.fault, ended.lost) == (Fault.PROVIDER, (0, 1))
    assert ended.reason == "node 1 is gone; node 0 did not stop in time"
    assert watch.elapsed < 3 + 2 + 5 + 3 + 3, "no upload is waited for"


@pytest.mark.parametrize(("save_s", "most_s"), [(0.0, 30), (100.0, 175)])
def test_a_stop_waits_for_what_the_last_save_took(watch, save_s, most_s):
    watch.timeouts = watch.timeouts.model_copy(update={"stop_grace_s": 5, "drain_s": 10})
    watch.session = watch.new_session()
    for node in watch.world.nodes:
        node.ends_when_stopped = False
    watch.world.nodes[0].says(Phase.TRAINING, checkpoint=CheckpointStatus(save_s=save_s))
    watch.at(3, watch.signal).run()
    assert most_s - 20 < watch.elapsed < most_s


def test_a_stop_waits_for_uploads_that_are_known_to_take_longer(watch):
    for node in watch.world.nodes:
        node.ends_when_stopped = False
    first, _ = watch.world.nodes
    watch.at(2, lambda: first.says(Phase.TRAINING, drain_s=15.0))
    watch.at(3, watch.signal).run()
    assert 3 + 5 + 15 <= watch.elapsed < 3 + 5 + 15 + 20
    assert drain_s(watch.session.record, watch.timeouts) == 15, "`mgpu stop` knows it, too"


def test_a_signal_without_a_terminal_stops(watch):
    ended = watch.at(2, watch.signal).run()
    assert ended.stopped_by == "user"
    assert not ended.left
    assert watch.stops == [1, 1]


def test_on_a_terminal_the_answer_leave_leaves_it_running(watch):
    watch.session = watch.new_session(ask=lambda _first: False)
    ended = watch.at(2, watch.signal).run()
    assert ended.left
    assert watch.stops == [0, 0]
    assert watch.saved.state is State.RUNNING


def test_on_a_terminal_the_answer_stop_stops_and_asks_no_more(watch):
    asked = []
    watch.session = watch.new_session(ask=lambda _first: asked.append(1) or True)
    for node in watch.world.nodes:
        node.ends_when_stopped = False
    watch.at(2, watch.signal).at(6, lambda: [node.says(Phase.DONE) for node in watch.world.nodes])
    assert watch.run().stopped_by == "user"
    assert asked == [1]
    assert watch.stops == [1, 1]


def stop_by_user(watch):
    watch.signal()


def stop_by_file(watch):
    Folder("run-1").stop.touch()


def stop_by_peers(watch):
    watch.world.nodes[0].says(Phase.FAILED, fault=Fault.USER, reason="exit code 3")


@pytest.mark.parametrize("why", [stop_by_user, stop_by_file, stop_by_peers, None])
def test_a_second_signal_leaves_whatever_the_first_was_for(watch, why):
    """DESIGN section 9: a second one leaves; a node that does not stop may take drain_s, which is long."""
    for node in watch.world.nodes:
        node.ends_when_stopped = False
    if why:
        watch.at(2, lambda: why(watch))
    watch.at(4, watch.signal).at(6, watch.signal)
    ended = watch.run(deadline_s=10_000 if why else 2)
    assert ended.left
    assert watch.elapsed < 8


def test_a_signal_while_the_peers_are_stopped_asks_at_most_once(watch):
    asked = []
    watch.session = watch.new_session(ask=lambda _first: asked.append(1) or True)
    watch.world.nodes[1].ends_when_stopped = False
    watch.at(2, lambda: stop_by_peers(watch)).at(4, watch.signal)
    watch.run()
    assert len(asked) <= 1


# --- what reaches the record ------------------------------------------------------------------------------------------


def test_progress_validation_and_commits_reach_the_record_and_are_told_once(watch):
    node = watch.world.nodes[0]
    committed = CheckpointStatus(committed_id="a001-step-20", committed_step=20)
    values = {"loss": 2.5, "theirs/bleu": 31.0, "validation_loss": 3.0}
    said = {"step": 21, "steps": 40, "metrics": values, "first_metrics": {"validation_loss": 5.0}}
    watch.at(
        2,
        lambda: node.says(
            Phase.TRAINING,
            **said,
            checkpoint=committed,
            phase_seconds={"training": 1.26},
        ),
    )
    seen = []
    watch.at(5, lambda: seen.append(watch.saved)).done_at(6).run()
    (on_disk,) = seen
    assert (on_disk.step, on_disk.steps, on_disk.metrics) == (21, 40, values)
    assert (on_disk.checkpoint_id, on_disk.checkpoint_step) == ("a001-step-20", 20)
    assert on_disk.agent_seconds == {"training": 1.3}
    assert on_disk.node_phases == ["training", "training"]
    (told,) = watch.world.of(CheckpointCommitted)
    assert (told.run_id, told.attempt, told.checkpoint_id, told.step) == ("run-1", 1, "a001-step-20", 20)
    sample = next(event for event in watch.world.of(MetricsSampled) if event.step == 21)
    assert (sample.steps, sample.values, sample.phase) == (40, values, "training")


def test_the_first_validation_of_a_run_is_that_of_its_first_attempt(watch):
    node = watch.world.nodes[0]
    watch.session.record.metrics, watch.session.record.first_metrics = {"loss": 9.0}, {"validation_loss": 5.5}
    later = {"metrics": {"validation_loss": 2.0, "first_token_ms": 90.0}, "first_metrics": {"validation_loss": 2.0}}
    watch.at(1, lambda: node.says(Phase.TRAINING, step=21, **later))
    watch.done_at(3).run()
    assert watch.saved.metrics == {"validation_loss": 2.0, "loss": 9.0, "first_token_ms": 90.0}
    assert watch.saved.first_metrics == {"validation_loss": 5.5}


def test_the_record_of_a_silent_node_ages(watch):
    """I7: `mgpu status` prints what is remembered with its age, which is that of the last answer."""
    node, ages = watch.world.nodes[0], []
    watch.at(2, lambda: setattr(node, "reachable", False))
    for second in (3, 9):
        watch.at(second, lambda: ages.append(watch.saved.updated_at))
    watch.at(9, lambda: setattr(node, "reachable", True)).done_at(12).run()
    assert ages[0] == ages[1]
    assert watch.saved.updated_at > ages[1]


def test_another_attempts_numbers_are_not_this_ones(watch):
    node = watch.world.nodes[0]
    committed = CheckpointStatus(committed_id="a009-step-9", committed_step=9)
    node.says(Phase.TRAINING, attempt=9, step=9, metrics={"validation_loss": 1.0}, checkpoint=committed)
    watch.done_at(3).at(2, lambda: node.says(Phase.TRAINING)).run()
    assert (watch.saved.checkpoint_id, watch.saved.metrics) == (None, {})
    assert watch.world.of(CheckpointCommitted) == []


def test_a_problem_with_checkpoints_is_told_once(watch):
    watch.world.nodes[0].says(Phase.TRAINING, checkpoint=CheckpointStatus(problem="403 from the store", failed=1))
    watch.done_at(9).run()
    assert [event.text for event in watch.world.of(Warned)] == ["checkpoint: 403 from the store"]


def test_silence_is_told_at_half_of_its_time_and_again_after_the_next_sign(watch):
    for second, left_s in ((0, 7200), (2, 3700), (4, 3500), (6, 100), (8, 7200), (10, 3000)):
        said = {"quiet_s": 7200.0, "quiet_until": 1.0 + left_s}  # it was updated at 1
        watch.at(second, lambda said=said: watch.world.nodes[0].says(Phase.TRAINING, **said))
    watch.done_at(12).run()
    told = [event.text for event in watch.world.of(Warned)]
    assert [text.partition(";")[0] for text in told] == [
        "no sign of progress from any node for 1.03 h",
        "no sign of progress from any node for 1.17 h",
    ]
    assert "after 2 h the attempt counts as hung (`timeouts` in the run file)" in told[0]


def test_the_node_whose_upload_failed_says_why(watch):
    watch.world.nodes[1].says(Phase.TRAINING, checkpoint=CheckpointStatus(problem="403 from the store", failed=1))
    watch.done_at(9).run()
    assert [event.text for event in watch.world.of(Warned)] == ["node 1: checkpoint: 403 from the store"]


def test_how_saves_went_is_remembered(watch):
    said = CheckpointStatus(stall_s=0.02, save_s=1.5, failed=1, save_failed=2, save_skipped=4)
    watch.world.nodes[0].says(Phase.TRAINING, checkpoint=said)
    remembered = []
    watch.at(5, lambda: remembered.append(watch.saved.saves)).done_at(9).run()
    assert remembered[0] == {"stall_s": 0.02, "save_s": 1.5, "failed": 3, "skipped": 4}


def test_a_save_that_failed_is_told_once_and_the_next_one_anew(watch):
    for second, step in ((0, 5), (3, 5), (6, 10)):
        said = CheckpointStatus(save_failed=step // 5, save_problem=f"step-{step} was not saved: disk full")
        watch.at(second, lambda said=said: watch.world.nodes[0].says(Phase.TRAINING, checkpoint=said))
    watch.done_at(9).run()
    told = [f"checkpoint: step-{step} was not saved: disk full; the training goes on" for step in (5, 10)]
    assert [event.text for event in watch.world.of(Warned)] == told


# --- metrics ----------------------------------------------------------------------------------------------------------


def metrics(watch, rank, data, node=None):
    node = watch.world.nodes[rank] if node is None else node
    node.files[str(node.layout.metrics / f"rank-{rank}.jsonl")] = data


def test_metrics_of_every_rank_are_copied_and_what_is_missing_is_left_out(watch):
    metrics(watch, 0, b'{"kind": "start"}\n{}\n')
    collect(watch.session, watch.nodeset, watch.handle, 1)
    folder = Folder("run-1").root / "metrics"
    assert [path.name for path in folder.glob("*.jsonl")] == ["rank-0.jsonl"]
    assert watch.world.of(Warned) == []


def test_every_process_of_a_node_has_metrics(watch):
    for rank in range(4):
        metrics(watch, rank, b"of rank %d\n" % rank, watch.world.nodes[rank // 2])
    collect(watch.session, watch.nodeset, watch.handle, 2)
    folder = Folder("run-1").root / "metrics"
    assert [(folder / f"rank-{rank}.jsonl").read_bytes() for rank in range(4)] == [
        b"of rank %d\n" % rank for rank in range(4)
    ]


def test_a_machine_that_is_lost_leaves_no_hole_in_the_metrics(watch):
    """Followed while they are written, like the log: nothing can be fetched from a machine that is gone."""
    metrics(watch, 0, b"1\n2\ntor")
    metrics(watch, 1, b"a\n")
    watch.at(2, lambda: watch.world.cloud.phases.update({watch.handle.ids[0]: NodePhase.TERMINATED}))
    watch.at(2, lambda: setattr(watch.world.nodes[0], "reachable", False))
    ended = watch.run()
    collect(watch.session, watch.nodeset, watch.handle, 1, ended.lost)
    watch.world.nodes[0] = type(watch.world.nodes[0])(watch.world, 0)
    watch.nodeset = NodeSet(watch.world.nodes)
    metrics(watch, 0, b"2\n3\n")
    metrics(watch, 1, b"a\nb\n")
    handle = watch.handle.model_copy(update={"ids": ("another", watch.handle.ids[1])})
    collect(watch.session, watch.nodeset, handle, 1)
    folder = Folder("run-1").root / "metrics"
    assert (folder / "rank-0.jsonl").read_bytes() == b"1\n2\n2\n3\n", "no half line has anything glued to it"
    assert (folder / "rank-1.jsonl").read_bytes() == b"a\nb\n"
    assert watch.world.of(Warned) == []


def test_metrics_that_cannot_be_read_are_told_and_no_error(watch):
    watch.raises(1, "read_from", ConnectionFailed("lost"))()
    collect(watch.session, watch.nodeset, watch.handle, 1)
    assert ["node 1" in event.text for event in watch.world.of(Warned)] == [True]


def test_metrics_that_never_end_are_not_waited_for_while_machines_are_paid(watch):
    node = watch.world.nodes[1]
    watch.session.timeouts = watch.timeouts.model_copy(update={"sync_s": 0.05})
    node.read_from = lambda _path, _offset, _limit: b"{}\n"
    collect(watch.session, watch.nodeset, watch.handle, 1)
    assert ["node 1" in event.text and "sync_s" in event.text for event in watch.world.of(Warned)] == [True]
    assert (Folder("run-1").root / "metrics" / "rank-1.jsonl").read_bytes().startswith(b"{}\n"), "what came is kept"


def test_a_hint_of_the_provider_is_told_once_and_ends_nothing(watch):
    watch.at(2, lambda: watch.world.nodes[1].says(Phase.TRAINING, at_risk_since=5.0)).done_at(30)
    assert watch.run().succeeded
    told = [event.text for event in watch.world.of(Warned) if "may take it soon" in event.text]
    assert len(told) == 1
    assert told[0].startswith("node 1")
    assert watch.world.nodes[1].stops == 0


def test_a_stop_by_a_signal_is_said_to_whoever_goes_on_from_elsewhere(watch, monkeypatch):
    asked = []
    monkeypatch.setattr(shared, "ask_to_stop", asked.append)
    watch.at(2, watch.signal).at(
        4, lambda: [node.says(Phase.FAILED, fault=Fault.STOPPED) for node in watch.world.nodes]
    )
    watch.run()
    assert asked == ["run-1"]


# --- what is spent ----------------------------------------------------------------------------------------------------


def test_each_part_of_the_budget_is_told_of_once_whoever_supervises(watch):
    spending = [Spent(1, 3600.0, BEGIN)]  # a dollar a second
    record.write(replace(record.load("run-1"), max_usd=40.0, spending=spending))
    watch.session = watch.new_session()
    watch.at(25, lambda: (setattr(watch.session.interrupts, "hung_up", True), watch.signal()))
    assert watch.run().left
    watch.session = watch.new_session()
    watch.done_at(60).run()
    told = [event.spent_usd for event in watch.world.of(SpendChanged)]
    assert told == [20.0, 32.0, 40.0]


# --- left, as was asked for -------------------------------------------------------------------------------------------


def passing(watch, watch_s=0.0):
    """A supervisor that leaves as soon as nothing needs it; its agents are seen to live."""
    watch.session = Session(record.load("run-1"), watch.world.events.append, watch.timeouts, watch_s=watch_s)
    for second in range(1, 40):
        watch.at(second, lambda n=second: [node.says(Phase.TRAINING, beat=n) for node in watch.world.nodes])
    return watch


def test_who_passes_by_leaves_a_run_that_trains_with_all_that_it_has_written(watch):
    for node in watch.world.nodes:
        node.prints(b"so far\n")
    ended = passing(watch).run()
    assert (ended.left, watch.stops) == (True, [0, 0])
    assert [watch.local_log(rank) for rank in (0, 1)] == [b"so far\n"] * 2
    assert watch.elapsed < BEAT_S


def test_who_passes_by_stays_while_an_agent_is_not_seen_to_live(watch):
    """Its status alone says nothing: one that was killed leaves it as it is."""
    passing(watch)
    watch.script.clear()
    for second in range(1, 40):
        watch.at(second, lambda n=second: watch.world.nodes[0].says(Phase.TRAINING, beat=n))
    watch.world.nodes[1].agent_lives = False
    ended = watch.run()
    assert not ended.left
    assert "its agent died" in ended.reason


def test_who_passes_by_stays_while_a_node_does_not_answer(watch):
    passing(watch)
    watch.world.nodes[1].reachable = False
    watch.at(9, lambda: setattr(watch.world.nodes[1], "reachable", True))
    assert watch.run().left
    assert watch.elapsed > 9


def test_who_passes_by_stays_until_the_run_that_was_to_stop_has(watch):
    passing(watch)
    Folder("run-1").stop.touch()
    watch.at(3, lambda: [node.says(Phase.FAILED, fault=Fault.STOPPED) for node in watch.world.nodes])
    ended = watch.run()
    assert not ended.left
    assert ended.stopped_by is not None
