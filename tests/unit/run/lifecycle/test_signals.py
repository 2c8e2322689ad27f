"""DESIGN section 9: what a signal does while machines come, train and go, and what a prompt may hold up."""

from __future__ import annotations

import errno
import os
import signal

import pytest
from mgpu_train.agent.status.status import Phase

from mgpu.cli.common import closing
from mgpu.console import Console
from mgpu.context import Context
from mgpu.events import Warned
from mgpu.run.lifecycle import down as downs
from mgpu.run.lifecycle import launch as runs
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.run.record.session import Session
from mgpu.run.record.signals import Interrupts
from mgpu.run.supervision.limits import Asked, Deadline
from mgpu.run.supervision.supervisor import Supervisor
from mgpu.spec.load import load

RUN_FILE = "name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [train.py]\ncheckpoint: none\n"


@pytest.fixture(autouse=True)
def _every_signal_counts(monkeypatch):
    """A test's second signal comes at once; what an echo of the first is stands in test_session."""
    monkeypatch.setattr("mgpu.run.record.signals.ECHO_S", 0.0)


class Watch:
    """A supervisor on a clock that a test moves."""

    def __init__(self, world):
        nodes = world.has_nodes(1)
        self.world, self.now, self.script = world, 0.0, {}
        world.record("run-1", state=State.RUNNING, attempt=1)
        world.nodes[0].says(Phase.TRAINING)
        timeouts = world.timeouts.model_copy(update={"poll_s": 1, "stop_grace_s": 50})
        self.session = Session(record.load("run-1"), world.events.append, timeouts)
        self.supervisor = Supervisor(
            self.session, nodes, provider=None, handle=world.cloud.rent("mine-run-1"),
            limits=[Asked(self.session.folder.stop), Deadline(100.0)],
            clock=lambda: self.now, wall=lambda: self.now, sleep=self._sleep,
        )  # fmt: skip

    def _sleep(self, seconds):
        self.script.pop(self.now, lambda: None)()
        self.now += seconds

    def watch(self, **script):
        self.script = {float(at[1:]): act for at, act in script.items()}
        with self.session.interrupts.installed():
            return self.supervisor.watch()


@pytest.fixture
def watch(world):
    return Watch(world)


def test_sigterm_stops_and_asks_nobody(watch):
    watch.session.ask = lambda _first: pytest.fail("whoever sends SIGTERM does not sit at the terminal")
    ended = watch.watch(s2=lambda: signal.raise_signal(signal.SIGTERM))
    assert (ended.left, ended.stopped_by) == (False, "user")


def test_a_terminal_that_is_closed_leaves_the_run(watch):
    ended = watch.watch(s2=lambda: signal.raise_signal(signal.SIGHUP))
    assert ended.left
    assert watch.world.nodes[0].stops == 0


def test_nohup_means_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().installed() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_at_the_prompt_leaves(watch):
    watch.session.ask = lambda _first: signal.raise_signal(signal.SIGINT)
    assert watch.watch(s2=lambda: signal.raise_signal(signal.SIGINT)).left


def test_nobody_answers_and_the_run_goes_on_until_it_is_asked_again(watch):
    answers = [None, True]
    watch.session.ask = lambda _first: answers.pop(0)
    interrupt = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
    ended = watch.watch(s2=interrupt, s5=interrupt)
    assert (ended.left, ended.stopped_by, answers) == (False, "user", [])


def test_a_stop_is_on_disk_for_whoever_takes_over_in_the_middle_of_it(watch):
    watch.watch(s2=lambda: signal.raise_signal(signal.SIGINT))
    assert Folder("run-1").stop.exists()


def test_a_log_that_grows_faster_than_it_is_read_holds_up_nothing(watch, monkeypatch):
    monkeypatch.setattr("mgpu.run.supervision.remote_tail.PIECE", 4)
    node = watch.world.nodes[0]

    def endless(_path, offset, limit):
        watch.now += 0.5
        return b"yes\n" if watch.now < 200 else b""

    node.read_from = endless
    ended = watch.watch()
    assert ended.stopped_by == "deadline"


def test_a_full_disk_here_is_no_fault_of_the_node(watch, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch.world.nodes[0].prints(b"a line\n")
    monkeypatch.setattr("os.pwrite", full)
    assert watch.watch(s40=lambda: watch.world.nodes[0].says(Phase.DONE)).succeeded
    assert [("No space left" in event.text) for event in watch.world.of(Warned)] == [True]


@pytest.mark.parametrize(
    ("call", "state", "final"),
    [("up", State.PROVISIONING, State.STOPPED), ("destroy", State.TEARDOWN, State.SUCCEEDED)],
)
def test_a_second_signal_leaves_what_takes_long_and_says_how_to_end_it(world, capsys, call, state, final):
    (world.folder / "train.py").write_text("pass\n")
    world.run_file.write_text(RUN_FILE)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one leaves")

    world.hooks[call] = twice
    outcome = runs.launch(
        world.run_file, load(world.run_file), Context(world.events.append, world.timeouts, lambda: False)
    )
    assert outcome.left
    assert record.load("last").state is state
    assert closing.finish(Console(), outcome) == 130
    told = capsys.readouterr().err
    assert "at the latest" in told
    assert f"mgpu down {outcome.record.run_id}" in told
    world.hooks.clear()
    ended = downs.down(outcome.record, Context(world.events.append, world.timeouts))
    assert (ended.state, ended.teardown) == (final, "confirmed")
    assert world.cloud.billed == set()


def test_a_signal_while_code_is_sent_starts_nothing(world):
    (world.folder / "train.py").write_text("pass\n")
    world.run_file.write_text(RUN_FILE)
    real = world.nodes[0].sync
    world.nodes[0].sync = lambda *args, **more: (os.kill(os.getpid(), signal.SIGTERM), real(*args, **more))[1]
    outcome = runs.launch(world.run_file, load(world.run_file), Context(world.events.append, world.timeouts))
    assert outcome.exit_code == 130
    assert world.nodes[0].agent == []
    assert world.cloud.billed == set()


def test_one_signal_in_the_teardown_does_not_end_it(world):
    (world.folder / "train.py").write_text("pass\n")
    world.run_file.write_text(RUN_FILE)
    world.hooks["destroy"] = lambda: signal.raise_signal(signal.SIGINT)
    outcome = runs.launch(world.run_file, load(world.run_file), Context(world.events.append, world.timeouts))
    assert outcome.exit_code == 0
    assert record.load("last").teardown == "confirmed"
