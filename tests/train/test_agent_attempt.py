"""What runs beside the agent's main thread, its lease and its status, without any process being started."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from mgpu_train.agent.attempt.attempt import Attempt, StopRequests
from mgpu_train.agent.attempt.decide import AttemptFailed, Cause
from mgpu_train.agent.attempt.save_budget import NOTHING, Need, going
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine.imds import Imds
from mgpu_train.agent.machine.notices import NoticeFile, Notices
from mgpu_train.agent.phases import life
from mgpu_train.agent.phases.watch import Watch
from mgpu_train.agent.status import report
from mgpu_train.agent.status.status import CheckpointStatus, Fault, Phase
from mgpu_train.agent.uploads.checkpoint_store import AttemptStore
from mgpu_train.agent.uploads.uploads import Announced, CheckpointStoreError
from mgpu_train.config import CheckpointTarget, Job, Secrets
from mgpu_train.errors import TrainError

AWS = "mgpu_train.agent.machine.imds:Imds"  # as provider `aws` names it


def make(home: Path, more: dict[str, Any] | None = None, **times: float) -> Attempt:
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
            "notice_file": "notice",
            "timeouts": {"poll_s": 0.01, **times},
            **(more or {}),
        }
    )
    layout = RunLayout("r", PurePosixPath(home))
    Path(layout.root).mkdir(parents=True)
    return Attempt(job, Secrets(env={"A": "hush-hush"}), layout, StopRequests())


@pytest.fixture(autouse=True)
def kills_nothing(monkeypatch) -> None:
    """Below this process is not an agent's launcher, but what other tests share: servers, engines."""
    monkeypatch.setattr(life.launcher_process, "kill_below", lambda _deadline_s: True)


@pytest.fixture
def never():
    """Work that does not end by itself."""
    event = threading.Event()
    yield lambda: event.wait(30)
    event.set()


def no_room(path: Path, *_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def failure(attempt: Attempt, work: Any, deadline_s: float) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as caught:
        life.aside(attempt, work, deadline_s, "it took more than {:g} s")
    return caught.value


def test_work_beside_has_a_deadline_and_the_agent_beats_on(tmp_path, never):
    attempt = make(tmp_path)
    failed = failure(attempt, never, 0.1)
    assert (failed.fault, failed.reason) == (Fault.INFRASTRUCTURE, "it took more than 0.1 s")
    assert attempt.report.status.beat > 0
    assert (tmp_path / "lease").exists()


def test_a_stop_is_heard_while_something_is_prepared(tmp_path, never):
    attempt = make(tmp_path)
    attempt.stop.ask()
    assert failure(attempt, never, 60).fault is Fault.STOPPED


def test_a_notice_is_heard_while_something_is_prepared(tmp_path, never):
    attempt = make(tmp_path)
    moment = datetime.fromtimestamp(time.time() + 60, UTC).isoformat()
    (tmp_path / "notice").write_text(json.dumps({"action": "terminate", "time": moment}))
    failed = failure(attempt, never, 60)
    assert failed.fault is Fault.PROVIDER
    assert failed.reason.startswith("the provider takes this machine in ")


class Stuck:
    """Uploads of which one is in flight and does not end."""

    status = CheckpointStatus()

    def __init__(self, least_s: float = 0.0) -> None:
        self.patience_s = -1.0
        self.hurried = 0
        self.least_s = least_s

    def drain_s(self) -> float:
        return self.least_s

    def note(self, **changes: Any) -> None:
        self.status = self.status.model_copy(update=changes)

    def drain(self, patience_s: float) -> None:
        self.patience_s = patience_s

    def hurry(self) -> None:
        self.hurried += 1

    def ended(self, wait_s: float) -> bool:
        return threading.Event().wait(wait_s)


def test_in_haste_an_upload_in_flight_gets_no_more_than_the_grace(tmp_path):
    attempt, uploads = make(tmp_path, stop_grace_s=0.1), Stuck(900)
    attempt.stop.ask(now=True)
    life._finish(attempt, uploads, None)
    assert (uploads.patience_s, uploads.hurried, uploads.status.problem) == (900, 1, None)


def test_a_machine_that_goes_bounds_the_drain_of_what_it_ended_and_of_nothing_else(tmp_path):
    attempt, uploads = make(tmp_path, drain_s=0.2), Stuck(0.2)
    attempt.going = going(Fault.PROVIDER, "gone", now=time.monotonic(), left_s=0.1, wanted=NOTHING, grace_s=60)
    life._finish(attempt, uploads, AttemptFailed(Fault.PROVIDER, "gone"))
    assert 0 < uploads.patience_s <= 0.1
    life._finish(attempt, uploads, None)
    assert uploads.patience_s == 0.2
    assert uploads.status.problem == "what was left to upload took more than 0.2 s (drain_s)"


def test_uploads_that_are_known_to_take_longer_get_longer_and_the_status_says_it(tmp_path):
    class Slow(Stuck):
        looks = 0

        def ended(self, wait_s: float) -> bool:
            self.looks += 1
            return self.looks == 4 or super().ended(wait_s)

    attempt, uploads = make(tmp_path, drain_s=1e-6), Slow(3600)
    life._finish(attempt, uploads, None)
    assert (uploads.looks, uploads.patience_s, uploads.status.problem) == (4, 3600, None)
    assert attempt.report.status.drain_s == 3600


def test_a_store_that_is_silent_does_not_keep_the_agent(tmp_path, never, monkeypatch):
    attempt = make(tmp_path, store_retry_s=0.1)
    monkeypatch.setattr(life.AttemptStore, "end", lambda *_: never())
    life._last_word(attempt, CheckpointTarget(to="file:///x", writers="all"), None)
    assert "the store did not answer within 0.1 s" in Path(attempt.layout.log).read_text()


def test_a_disk_that_fails_under_the_watch_is_not_the_programs_fault(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise OSError(5, "Input/output error")

    attempt = make(tmp_path)
    monkeypatch.setattr("mgpu_train.agent.phases.watch.finished", fails)
    life.live(attempt)
    status = attempt.report.status
    assert (status.phase, status.fault) == (Phase.FAILED, Fault.INFRASTRUCTURE)
    assert status.reason == "the agent failed: OSError: [Errno 5] Input/output error"


def test_no_thread_for_the_work_is_an_error_like_others(tmp_path, monkeypatch):
    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    attempt = make(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(RuntimeError, match="new thread"):
        life.aside(attempt, lambda: 7, 60, "")
    life._last_word(attempt, CheckpointTarget(to="file:///x", writers="all"), None)
    assert "the end is not in the commit log: can't start new thread" in Path(attempt.layout.log).read_text()


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


@pytest.mark.parametrize("why", ["it hangs", "it is being ended"])
def test_a_launcher_that_no_signal_ends_keeps_its_machine_no_longer_than_the_lease(tmp_path, why):
    """What waits in the kernel obeys none, and its agent waits for it."""
    attempt = make(tmp_path, lease_renew_s=0)
    watch, lease = Watch(attempt, None), tmp_path / "lease"
    watch._pass()
    assert lease.exists(), "it may be quiet for a while"
    lease.unlink()
    if why == "it hangs":
        watch._liveness._sign -= attempt.times.first_step_s
    else:
        watch._cause = Cause(Fault.STOPPED, why, time.monotonic(), 0)
    watch._pass()
    assert not lease.exists()


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


def test_a_full_disk_ends_no_lease(tmp_path, monkeypatch):
    attempt = make(tmp_path, lease_renew_s=0, lease_s=100)
    for full, uptime_s, until in ((False, 99_900, "100000\n"), (True, 99_950, "100050\n"), (True, 20, "120\n")):
        attempt._lease._uptime, attempt._lease._renewed = lambda uptime_s=uptime_s: uptime_s, None
        if full:
            monkeypatch.setattr(Path, "write_text", no_room)
        attempt.tick()
        assert (tmp_path / "lease").read_text() == until, "the last one is after a reboot, and shorter"
    assert [path.name for path in tmp_path.glob("lease*")] == ["lease"]
    assert "cannot be renewed" not in Path(attempt.layout.log).read_text()


def test_a_lease_that_runs_out_is_a_notice_in_time_for_a_save(tmp_path):
    """F50"""
    attempt = make(tmp_path, lease_renew_s=0, lease_s=100)
    uptime = [1000.0]
    attempt._lease._uptime = lambda: uptime[0]
    attempt.need = lambda: Need(20, 5)
    attempt.tick()
    attempt._lease._path = tmp_path / "gone" / "lease"
    uptime[0] = 1069.0  # 31 s are left, 30 are wanted: the save and 5 s
    attempt.tick()
    assert attempt.going is None
    uptime[0] = 1071.0
    attempt.tick()
    assert attempt.going is not None
    assert (attempt.going.fault, attempt.going.fits) == (Fault.INFRASTRUCTURE, True)
    assert "the lease cannot be renewed" in attempt.going.reason
    assert attempt.report.status.notice is not None
    assert attempt.report.status.notice.at == pytest.approx(time.time() + 29, abs=5)


def test_a_lease_that_can_be_renewed_again_ends_nothing(tmp_path):
    attempt = make(tmp_path, lease_renew_s=0, lease_s=100)
    uptime = [1000.0]
    attempt._lease._uptime = lambda: uptime[0]
    attempt.tick()
    path, attempt._lease._path = attempt._lease._path, tmp_path / "gone" / "lease"
    uptime[0] = 1090.0
    attempt.tick()
    attempt._lease._path = path
    attempt.tick()
    uptime[0] = 1189.0
    attempt.tick()
    assert attempt.going is None


def test_the_nearer_end_of_a_machine_counts(tmp_path):
    attempt = make(tmp_path)
    attempt._goes(Fault.INFRASTRUCTURE, "lease", "terminate", 50)
    attempt._goes(Fault.PROVIDER, "provider", "terminate", 100)
    assert attempt.going is not None
    assert attempt.going.reason == "lease in 50 s"
    attempt._goes(Fault.PROVIDER, "provider", "stop", 20)
    assert attempt.going.reason == "provider in 20 s"


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


@pytest.mark.parametrize("full", [True, False])
def test_how_an_attempt_ended_is_told_whatever_has_filled_the_disk(tmp_path, monkeypatch, full):
    attempt = make(tmp_path)
    attempt.enter(Phase.DRAINING)
    if full:
        monkeypatch.setattr(Path, "write_bytes", no_room)
    attempt.tick()
    attempt.enter(Phase.FAILED, fault=Fault.USER, reason="the disk is full")
    assert report.read(Path(attempt.layout.status)) == attempt.report.status
    assert not list(Path(attempt.layout.root).glob(".status*")), "what was kept for it is given back"


def test_a_bug_of_the_agent_ends_the_attempt_visibly(tmp_path, monkeypatch):
    attempt = make(tmp_path)
    monkeypatch.setattr(life, "_phases", lambda _attempt: 1 / 0)
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
    checkpoint_store = AttemptStore(make(tmp_path), target)
    monkeypatch.setattr("mgpu_train.agent.uploads.checkpoint_store.upload_part", bug)
    with pytest.raises(CheckpointStoreError, match=r"RuntimeError: can't start new thread \*\*\*$") as caught:
        checkpoint_store.upload(1, tmp_path)
    assert not caught.value.passing
    checkpoint_store.announce(Announced(1, final=False))
    assert checkpoint_store.announced() == Announced(1, final=False)
    (tmp_path / "store/r/attempts/1/announced.json").write_text("{}")
    with pytest.raises(CheckpointStoreError, match="holds no announcement"):
        checkpoint_store.announced()


# --- the provider's hints ---------------------------------------------------------------------------------------------


class Hinting:
    """A source that hints, and warns when it is told to."""

    def __init__(self) -> None:
        self.hints: bytes | None = None
        self.warns: bytes | None = None

    def read(self) -> bytes | None:
        return self.warns

    def hint(self) -> bytes | None:
        return self.hints


@pytest.fixture
def hinting(tmp_path):
    attempt = make(tmp_path, {"checkpoint": {"to": "file:///x", "writers": "all"}})
    source = Hinting()
    attempt._notices = Notices(source, attempt.say)
    return attempt, source, Path(attempt.layout.save_request(1))


def in_two_minutes() -> bytes:
    return json.dumps(
        {"action": "terminate", "time": datetime.fromtimestamp(time.time() + 120, UTC).isoformat()}
    ).encode()


def test_a_hint_asks_for_one_early_save_and_training_goes_on(hinting):
    """F21"""
    attempt, source, request = hinting
    attempt.enter(Phase.TRAINING)
    attempt.tick()
    assert not request.exists()
    source.hints = b'{"noticeTime": "2026-01-01T00:00:00Z"}'
    attempt.tick()
    assert request.exists()
    assert attempt.report.status.at_risk_since == 1_767_225_600.0
    assert (attempt.going, attempt.report.status.notice) == (None, None)
    request.unlink()
    for source.hints in (None, b"{", b'{"noticeTime": "2026-01-02T00:00:00Z"}'):
        attempt.tick()
    assert not request.exists(), "it is asked for once, however the hint flaps"
    assert Path(attempt.layout.log).read_text().count("may take this machine soon") == 1


@pytest.mark.parametrize("phase", [Phase.PREPARING, Phase.LAUNCHING, Phase.DRAINING])
def test_with_nothing_to_save_a_hint_asks_for_nothing(hinting, phase):
    attempt, source, request = hinting
    attempt.enter(phase)
    source.hints = b'{"noticeTime": "2026-01-01T00:00:00Z"}'
    attempt.tick()
    assert attempt.report.status.at_risk_since == 1_767_225_600.0
    assert not request.exists()


def test_a_hint_together_with_a_notice_changes_nothing(hinting):
    attempt, source, request = hinting
    attempt.enter(Phase.TRAINING)
    source.hints, source.warns = b'{"noticeTime": "2026-01-01T00:00:00Z"}', in_two_minutes()
    attempt.tick()
    assert attempt.going is not None
    assert attempt.going.fault is Fault.PROVIDER
    assert not request.exists()


@pytest.mark.parametrize(("notices", "kind"), [("file", NoticeFile), (AWS, Imds), ("none", type(None))])
def test_notices_stand_where_the_job_says(tmp_path, notices, kind):
    attempt = make(tmp_path, {"notices": notices})
    assert isinstance(attempt._notices._source, kind)


def test_a_source_of_notices_that_the_node_does_not_have_is_named(tmp_path):
    with pytest.raises(TrainError, match=r"`notices`: yard\.notices:Asked cannot be imported"):
        make(tmp_path, {"notices": "yard.notices:Asked"})
