"""What runs beside the agent's main thread, its lease and its status, without any process being started."""

from __future__ import annotations

import threading
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from mgpu_train.agent import life, report
from mgpu_train.agent.attempt import Attempt, StopRequests
from mgpu_train.agent.decide import AttemptFailed
from mgpu_train.agent.depot import StoreDepot
from mgpu_train.agent.layout import RunLayout
from mgpu_train.agent.status import Fault, Phase
from mgpu_train.agent.uploads import Announced, DepotError
from mgpu_train.config import CheckpointTarget, Job, Secrets


def make(home: Path, **times: float) -> Attempt:
    job = Job.model_validate(
        {
            "run_id": "r",
            "attempt": 1,
            "writer": "w",
            "node_rank": 0,
            "nodes": 1,
            "processes_per_node": 1,
            "master_addr": "127.0.0.1",
            "master_port": 1,
            "command": ["x.py"],
            "lease_file": "lease",
            "timeouts": {"poll_s": 0.01, **times},
        }
    )
    layout = RunLayout("r", PurePosixPath(home))
    Path(layout.root).mkdir(parents=True)
    return Attempt(job, Secrets(env={"A": "hush-hush"}), layout, StopRequests())


@pytest.fixture
def never():
    """Work that does not end by itself."""
    event = threading.Event()
    yield lambda: event.wait(30)
    event.set()


def failure(attempt: Attempt, work: Any, deadline_s: float) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as caught:
        life.aside(attempt, work, deadline_s, "it took more than {:g} s")
    return caught.value


def test_work_beside_has_a_deadline_and_the_agent_beats_on(tmp_path, never):
    attempt = make(tmp_path)
    failed = failure(attempt, never, 0.1)
    assert (failed.fault, failed.reason) == (Fault.INFRASTRUCTURE, "it took more than 0.1 s")
    assert attempt.report.status.beat > 2
    assert (tmp_path / "lease").exists()


def test_a_stop_is_heard_while_something_is_prepared(tmp_path, never):
    attempt = make(tmp_path)
    attempt.stop.ask()
    assert failure(attempt, never, 60).fault is Fault.STOPPED


def test_what_the_work_returns_or_raises_comes_back(tmp_path):
    attempt = make(tmp_path)
    assert life.aside(attempt, lambda: 7, 60, "") == 7

    def fail() -> None:
        raise AttemptFailed(Fault.USER, "its fault")

    assert failure(attempt, fail, 60).reason == "its fault"


def test_the_lease_waits_for_a_sign_of_life(tmp_path):
    attempt = make(tmp_path, lease_renew_s=0)
    attempt.tick(alive=False)
    assert not (tmp_path / "lease").exists()
    attempt.tick(alive=True)
    assert (tmp_path / "lease").exists()
    (tmp_path / "lease").unlink()
    attempt.tick(alive=False)
    assert not (tmp_path / "lease").exists()


def test_progress_between_two_renewals_is_not_forgotten(tmp_path):
    attempt = make(tmp_path, lease_renew_s=3600)
    attempt.tick(alive=True)
    attempt._lease._renewed = None  # an hour later
    (tmp_path / "lease").unlink()
    attempt.tick(alive=False)
    assert not (tmp_path / "lease").exists()  # that sign was used up
    attempt._lease._renewed = attempt._lease._uptime()
    attempt.tick(alive=True)  # too early to renew
    attempt._lease._renewed = None
    attempt.tick(alive=False)
    assert (tmp_path / "lease").exists()


def test_a_lease_that_cannot_be_renewed_is_told_once_and_ends_nothing(tmp_path):
    attempt = make(tmp_path, lease_renew_s=0)
    (tmp_path / "lease").mkdir()
    attempt.tick()
    attempt.tick()
    assert Path(attempt.layout.log).read_text().count("the lease cannot be renewed") == 1


def test_the_status_counts_its_phases_and_says_the_end_in_one_line(tmp_path):
    attempt = make(tmp_path)
    attempt.enter(Phase.PREPARING)
    attempt.enter(Phase.FAILED, fault=Fault.USER, reason="a\nreason with hush-hush \x1b[31m in it")
    status = report.read(Path(attempt.layout.status))
    assert status == attempt.report.status
    assert (status.phase, status.reason) == (Phase.FAILED, "a reason with *** in it")
    assert list(status.phase_seconds) == ["preparing"]
    assert "hush" not in Path(attempt.layout.log).read_text()


def test_a_full_disk_does_not_end_the_agent(tmp_path):
    attempt = make(tmp_path)
    attempt.enter(Phase.PREPARING)
    Path(attempt.layout.root).rename(tmp_path / "away")
    attempt.enter(Phase.LAUNCHING)
    attempt.tick()
    assert attempt.report.status.phase is Phase.LAUNCHING


def test_a_bug_of_the_agent_ends_the_attempt_visibly(tmp_path, monkeypatch):
    attempt = make(tmp_path)
    monkeypatch.setattr(life, "_phases", lambda _attempt: 1 / 0)
    monkeypatch.setattr(life.launcher, "kill_below", lambda _deadline_s: True)
    life.live(attempt)
    status = report.read(Path(attempt.layout.status))
    assert status is not None
    assert (status.phase, status.fault) == (Phase.FAILED, Fault.INFRASTRUCTURE)
    assert status.reason == "the agent failed: ZeroDivisionError: division by zero"
    assert "[agent] ZeroDivisionError: division by zero" in Path(attempt.layout.log).read_text()


def test_a_bug_in_the_store_costs_one_save_and_not_the_uploads(tmp_path, monkeypatch):
    def bug(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread hush-hush")

    target = CheckpointTarget(to=f"file://{tmp_path}/store", writers="all")
    depot = StoreDepot(make(tmp_path), target)
    monkeypatch.setattr("mgpu_train.agent.depot.upload_part", bug)
    with pytest.raises(DepotError, match=r"RuntimeError: can't start new thread \*\*\*$") as caught:
        depot.upload(1, tmp_path)
    assert not caught.value.passing
    depot.announce(Announced(1, final=False))
    assert depot.announced() == Announced(1, final=False)
    (tmp_path / "store/r/attempts/1/announced.json").write_text("{}")
    with pytest.raises(DepotError, match="holds no announcement"):
        depot.announced()
