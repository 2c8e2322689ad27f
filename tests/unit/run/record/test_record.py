"""The record: written whole, found by the beginning of an id, supervised by one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from mgpu.errors import InputError, TakenOver
from mgpu.run.record import record as records
from mgpu.run.record.record import Interruption, Record, Spent, State


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def make(run_id: str, created_at: float = 1.0) -> Record:
    record = Record(
        run_id=run_id,
        name="a",
        project="/p",
        project_base="/p",
        run_file="/p/mgpu.yaml",
        stack=run_id,
        own_stack=True,
        fleet_name=run_id,
        provider="local",
        nodes=1,
        created_at=created_at,
        state=State.PROVISIONING,
    )
    records.save(record)
    return record


def test_what_was_saved_is_read_back():
    record = make("a-1")
    record.to(State.RUNNING)
    record.phase_seconds["training"] = 1.5
    records.save(record)
    again = records.load("a-1")
    assert again.state is State.RUNNING
    assert again.phase_seconds == {"training": 1.5}


def test_the_metrics_of_a_record_of_an_older_version_are_read():
    make("a-1")
    path = records.Folder("a-1").record
    older = {key: value for key, value in json.loads(path.read_text()).items() if "metrics" not in key}
    older |= {"loss": 2.5, "tokens_per_s": None, "first_validation_loss": 5.5, "validation_loss": 3.0}
    path.write_text(json.dumps(older))
    record = records.load("a-1")
    assert record.metrics == {"loss": 2.5, "validation_loss": 3.0}
    assert record.first_metrics == {"validation_loss": 5.5}


def test_a_run_without_machines_has_no_stack_output():
    with pytest.raises(InputError, match="run a-1 has no machines"):
        make("a-1").fleet_output()


def test_what_machines_have_cost_is_kept_by_generation():
    record = make("a-1")
    assert record.spent_usd(1e9) == 0
    record.costs(1, 3.0, since=1000)
    record.costs(1, 3.0, since=2000)  # another attempt on the same machines
    assert record.spent_usd(1000 + 3600) == 3.0
    record.costs(2, 1.0, since=1000 + 7200)  # repaired, and cheaper
    records.save(record)
    again = records.load("a-1")
    again.costs_no_more(1000 + 7200 + 1800)
    again.costs_no_more(1e9)
    assert [(each.generation, each.usd(1e9)) for each in again.spending] == [(1, 6.0), (2, 0.5)]
    assert again.spent_usd(1e9) == 6.5
    again.costs(1, 2.0, since=20_000)  # resumed, on a fleet of its own
    assert again.spent_usd(20_000 + 3600) == 8.5


def test_the_folder_is_for_this_user_alone():
    make("a-1")
    assert records.Folder("a-1").root.stat().st_mode & 0o077 == 0


def test_a_key_of_a_newer_version_is_passed_over():
    make("a-1")
    path = records.Folder("a-1").record
    path.write_text(path.read_text().replace("{", '{"of_tomorrow": 1,', 1))
    assert records.load("a-1").name == "a"


def test_the_beginning_of_an_id_is_enough_where_it_is_the_only_one():
    make("alpha-1"), make("beta-1", 2.0), make("beta-2", 3.0)
    assert records.load("al").run_id == "alpha-1"
    assert records.load("last").run_id == "beta-2"
    with pytest.raises(InputError, match="fits 2 runs"):
        records.load("beta")
    with pytest.raises(InputError, match="no run"):
        records.load("gamma")


def test_a_run_begins_queued_and_trains_only_after_it_was_provisioned():
    record = replace(make("a-1"), state=State.QUEUED)
    with pytest.raises(ValueError, match="cannot go from queued to running"):
        record.to(State.RUNNING)
    record.to(State.PROVISIONING)
    record.to(State.RUNNING)


def test_states_move_forward_only():
    record = make("a-1")
    record.to(State.RUNNING)
    record.to(State.TEARDOWN)
    record.to(State.SUCCEEDED)
    assert record.ended_at
    with pytest.raises(ValueError, match="cannot go"):
        record.to(State.RUNNING)


def test_one_supervisor_at_a_time_and_a_dead_one_holds_nothing(tmp_path):
    make("a-1")
    code = """
import time
from mgpu.run.record import record
with record.supervising("a-1") as free:
    print(bool(free), flush=True)
    time.sleep(60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert other.stdout is not None
    try:
        assert other.stdout.readline().strip() == "True"
        assert records.supervised("a-1")
        with records.supervising("a-1") as free:
            assert not free
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert not records.supervised("a-1")
    with records.supervising("a-1") as free:
        assert free


@pytest.mark.parametrize("text", ["", '{"run_id": "bad-1", "sta', "[]", '{"state": "of tomorrow"}', "{}"])
def test_a_damaged_record_hides_no_other_and_is_named(text):
    make("good-1")
    make("bad-1", 2.0)
    records.Folder("bad-1").record.write_text(text)
    assert [record.run_id for record in records.every()] == ["good-1"]
    assert set(records.ids()) == {"good-1", "bad-1"}
    assert records.load("good-1").run_id == "good-1"
    with pytest.raises(InputError, match="bad-1 cannot be read"):
        records.load("bad-1")


def test_who_was_dispossessed_writes_nothing_more():
    """A supervisor that was stopped (SIGSTOP) wakes up and knows nothing of the new one."""
    old = make("a-1")
    with records.supervising("a-1") as token:
        old.supervisor = token
        records.save(old)
        with records.supervising("a-1", force=True) as new:
            fresh = records.load("a-1")
            fresh.supervisor, fresh.step = new, 7
            records.save(fresh)
            with pytest.raises(TakenOver, match=str(os.getpid())):
                records.save(old)
            assert records.load("a-1").step == 7
        with pytest.raises(TakenOver):
            records.save(old)
    assert records.load("a-1").step == 7


def test_what_is_true_whoever_supervised_is_written_all_the_same():
    over = make("a-1")
    over.supervisor = "of-the-one-that-ended-it"
    with records.supervising("a-1"):
        pass
    over.teardown = "confirmed"
    records.write(over)
    assert records.load("a-1").teardown == "confirmed"


def test_a_write_that_fails_leaves_the_record_and_nothing_else(monkeypatch):
    known = make("a-1")
    known.step = 5

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            records.save(known)
    folder = records.Folder("a-1").root
    assert records.load("a-1").step == -1
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "record.json"]


def test_a_folder_that_was_deleted_under_this_process_hinders_nothing(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert make("a-1").file_argument == " /p/mgpu.yaml"


def test_what_a_newer_mgpu_writes_an_older_one_carries_through():
    lost = Interruption(1, "node 0 is gone", "provider", [0], 7, 1.0, 2.0)
    run = make("a-1-bbbbb")
    records.save(replace(run, interruptions=[lost], spending=[Spent(1, 2.0, 3.0)]))
    path = records.Folder(run.run_id).record
    whole = json.loads(path.read_text())
    assert "newer" not in whole, "it has no key of its own"
    for each in (whole, whole["interruptions"][0], whole["spending"][0]):
        each["of_tomorrow"] = {"and": ["more"]}
    path.write_text(json.dumps(whole))
    again = records.load(run.run_id)
    assert replace(again.interruptions[0], newer={}) == lost
    records.save(again)
    assert json.loads(path.read_text()) == whole | {"updated_at": again.updated_at}
