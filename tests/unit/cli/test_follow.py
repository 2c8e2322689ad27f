"""I6, I7: a command that follows a run never waits for a supervisor that is dead, and says how it ended."""

from __future__ import annotations

import json
import threading
import time

import pytest
from click.testing import CliRunner
from mgpu_train.agent.status.status import Phase
from mgpu_train.timeouts import Timeouts

from mgpu.cli import cli
from mgpu.cli.common import closing, wiring
from mgpu.errors import InputError, TeardownIncomplete
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State

RUN_FILE = "name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [train.py]\ncheckpoint: none\n"


def mgpu(*args):
    return CliRunner().invoke(cli, list(args), standalone_mode=False)


@pytest.fixture
def running(world):
    """A run that nobody supervises; its program has just ended well."""
    (world.folder / "train.py").write_text("pass\n")
    world.stacks["run-1"] = output = world.output(world.cloud.rent("mine-run-1"))
    made = world.record("run-1", state=State.RUNNING, attempt=1, fleet=output.model_dump(mode="json"))
    Folder("run-1").run_file.write_text(RUN_FILE)
    world.nodes[0].says(Phase.DONE)
    return made


@pytest.fixture
def dies_soon(running):
    """The same, with a supervisor that is killed while the command runs."""
    held, killed = threading.Event(), threading.Event()

    def supervise():
        with record.supervising("run-1") as mine:
            assert mine
            held.set()
            killed.wait(10)

    thread = threading.Thread(target=supervise)
    thread.start()
    assert held.wait(5)
    threading.Timer(0.3, killed.set).start()
    yield running
    killed.set()
    thread.join()


@pytest.mark.timeout(30)
def test_stop_does_not_wait_for_a_supervisor_that_is_suspended(running, suspended):
    old = suspended("run-1")
    told = mgpu("stop").exception
    assert isinstance(told, TeardownIncomplete)
    assert f"process {old.pid} " in told.what
    assert "mgpu attach run-1 --take-over" in told.next_step
    assert told.exit_code == 7
    assert Folder("run-1").stop.exists(), "who takes it over ends it"


@pytest.mark.timeout(30)
def test_stop_does_not_wait_for_ever_for_a_supervisor_that_lives(running, monkeypatch):
    monkeypatch.setattr(wiring, "timeouts", lambda: Timeouts().scaled(1e-4))
    with record.supervising("run-1"):
        assert isinstance(mgpu("stop").exception, TeardownIncomplete)


def test_status_says_that_a_supervisor_is_suspended(running, suspended):
    old = suspended("run-1")
    done = mgpu("status")
    assert f"suspended: process {old.pid}" in done.output
    assert "mgpu attach run-1 --take-over" in done.output


@pytest.mark.timeout(30)
@pytest.mark.parametrize("as_json", [True, False])
def test_attach_takes_over_when_the_supervisor_dies_meanwhile(dies_soon, world, as_json):
    done = mgpu("attach", *(["--json"] if as_json else []))
    assert done.return_value == 0
    assert "taking over" in done.stderr
    assert record.load("run-1").state is State.SUCCEEDED
    assert world.cloud.billed == set()
    if as_json:
        assert json.loads(done.stdout)["state"] == "succeeded"


@pytest.mark.timeout(30)
def test_following_to_the_end_gives_one_json_and_the_exit_code(running):
    def end():
        ended = record.load("run-1")
        ended.to(State.FAILED)
        ended.exit_code = 6
        record.save(ended)

    with record.supervising("run-1") as mine:
        assert mine
        timer = threading.Timer(0.3, end)
        timer.start()
        done = mgpu("attach", "--json")
        timer.join()
    assert json.loads(done.stdout)["state"] == "failed"
    assert done.return_value == 6


@pytest.mark.timeout(30)
def test_following_shows_all_that_is_written_until_the_end(running, monkeypatch):
    """However much came since the last look, and whichever machine it is of."""
    first, second = Folder("run-1").log(0, "first"), Folder("run-1").root / "logs" / "node-0.0001.second.log"
    first.write_text("long ago\n" * 10_000)
    looks = iter(range(10))

    def watched(run_id: str) -> bool:
        if next(looks) == 2:
            with first.open("a") as log:
                log.writelines(f"a{number} {'x' * 990}\n" for number in range(3000))
            second.write_text("".join(f"b{number}\n" for number in range(2000)))
            ended = record.load(run_id)
            ended.to(State.FAILED)
            record.save(ended)
        return True

    monkeypatch.setattr("mgpu.cli.attach.supervised", watched)
    monkeypatch.setattr("mgpu.cli.attach.FOLLOW_EVERY_S", 0)
    with record.supervising("run-1"):
        lines = mgpu("attach").stderr.splitlines()
    assert lines.count("[0] long ago") < 1000, "of what was there before, the end"
    shown = [line.split()[1] for line in lines if line.startswith(("[0] a", "[0] b"))]
    assert shown == [f"a{number}" for number in range(3000)] + [f"b{number}" for number in range(2000)]


def test_attach_to_a_run_that_failed_has_its_exit_code(world):
    world.record("run-1", state=State.FAILED, exit_code=6)
    assert mgpu("attach").return_value == 6


@pytest.mark.timeout(30)
def test_logs_are_not_followed_where_nobody_receives_any(dies_soon):
    Folder("run-1").log(0, "machine").write_bytes(b"line\n")
    done = mgpu("logs", "--follow")
    assert done.return_value in (None, 0)
    assert "[0] line" in done.stdout
    assert "mgpu attach run-1" in done.stderr


def test_logs_of_a_node_that_the_run_has_not_is_bad_input(running):
    assert isinstance(mgpu("logs", "--node", "1").exception, InputError)


def test_gc_ends_the_others_when_one_cannot_be_ended(world):
    for name in ("mine-a", "mine-b", "mine-c"):
        world.cloud.rent(name)
    world.cloud.stuck.add("mine-a-0")
    done = mgpu("gc", "--yes")
    assert isinstance(done.exception, TeardownIncomplete)
    assert world.cloud.billed == {"mine-a-0"}


def test_a_kept_fleet_is_not_said_to_cost_money_after_its_lease(world):
    kept = world.record("run-1", state=State.SUCCEEDED, teardown="kept", price_usd_per_hour=0.06)
    kept.lease_until = time.time() + 600
    assert "$0.06 per hour" in closing.machines(kept)
    kept.lease_until = time.time() - 600
    assert "per hour" not in closing.machines(kept)
    assert "ended" in closing.machines(kept)
