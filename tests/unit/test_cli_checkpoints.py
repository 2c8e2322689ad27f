"""`mgpu checkpoints`: what each command shows, what it refuses; a damaged checkpoint is never taken quietly."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.store import open_store

from mgpu import paths
from mgpu.run.record import State


@pytest.fixture
def url(tmp_path):
    """Where the run's checkpoints are."""
    return f"file://{tmp_path}/store"


@pytest.fixture
def committed(world, tmp_path, url):
    """A run with two committed checkpoints in a folder store; the folder of its objects."""
    world.record("run-1", state=State.SUCCEEDED, store=url, teardown="confirmed")
    CommitLog(open_store(url), "run-1").begin_attempt(1, "secret-token")
    for step in (10, 20):
        world.commit(url, "run-1", attempt=1, writer="secret-token", step=step)
    return tmp_path / "store" / "run-1"


@pytest.fixture
def elsewhere(committed):
    """The same, on a machine that has no record of the run."""
    shutil.rmtree(paths.state_dir() / "runs")
    return committed


def object_of(store: Path, step: int) -> Path:
    """The one object with a checkpoint's bytes."""
    every = (store / "checkpoints" / f"a001-step-{step}").rglob("*")
    (found,) = (path for path in every if path.is_file() and path.suffix != ".json")
    return found


def flip(store: Path, step: int) -> None:
    path = object_of(store, step)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def entry(store: Path, seq: int) -> Path:
    return store / "commits" / f"{seq:08d}.json"


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_is_newest_first_and_shows_no_writer_token(mgpu, committed):
    done = mgpu("checkpoints", "ls", "--json")
    assert [each["step"] for each in done.json] == [20, 10]
    assert done.json[0]["checkpoint_id"] == "a001-step-20"
    assert done.json[0]["bytes"] == len("weights of step 20")
    assert "secret-token" not in done.out
    table = mgpu("checkpoints", "ls")
    assert table.out.index("a001-step-20") < table.out.index("a001-step-10")
    assert "18 B" in table.out
    assert "mgpu checkpoints verify run-1" in table.err


def test_ls_warns_of_an_entry_that_cannot_be_read(mgpu, committed):
    entry(committed, 1).unlink()
    done = mgpu("checkpoints", "ls")
    assert done.code == 0
    assert "a001-step-10" not in done.out
    assert "entry 1 of the commit log is missing" in done.err


def test_a_log_that_is_gone_for_the_most_part_is_exit_code_6(mgpu, committed):
    entry(committed, 2).rename(entry(committed, 5000))
    for command in ("ls", "verify", "pull"):
        done = mgpu("checkpoints", command)
        assert (done.code, "entries missing" in done.err) == (6, True), done.err


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [(), ("--deep",)], ids=["plain", "deep"])
def test_checkpoints_that_are_whole_verify(mgpu, committed, deep):
    done = mgpu("checkpoints", "verify", "--json", *deep)
    whole = {"a001-step-20": [], "a001-step-10": []}
    assert (done.code, done.json) == (0, {"deep": bool(deep), "checkpoints": whole, "log": []})


def test_a_flipped_bit_is_found_by_reading_every_byte_and_is_exit_code_6(mgpu, committed):
    flip(committed, 20)
    assert mgpu("checkpoints", "verify").code == 0, "the store keeps no checksum of its own here"
    done = mgpu("checkpoints", "verify", "--deep")
    assert done.code == 6
    assert "a001-step-20" in done.err
    assert "a001-step-10" not in done.err
    as_json = mgpu("checkpoints", "verify", "--deep", "--json")
    assert as_json.code == 6
    assert as_json.json["checkpoints"]["a001-step-10"] == []
    assert len(as_json.json["checkpoints"]["a001-step-20"]) == 1
    only = mgpu("checkpoints", "verify", "--deep", "--step", "10", "--json")
    assert (only.code, list(only.json["checkpoints"])) == (0, ["a001-step-10"])


def test_a_missing_object_is_found_without_reading_any(mgpu, committed):
    object_of(committed, 10).unlink()
    done = mgpu("checkpoints", "verify")
    assert done.code == 6
    assert "is missing" in done.out
    assert "left as it is" in done.err


def test_a_damaged_entry_of_the_log_is_damage(mgpu, committed):
    entry(committed, 1).write_bytes(b"{}")
    done = mgpu("checkpoints", "verify")
    assert done.code == 6
    assert "commit log" in done.err
    assert "entry 1" in done.out
    assert mgpu("checkpoints", "verify", "--json").json["log"]


# --- pull -------------------------------------------------------------------------------------------------------------


def test_pull_takes_the_newest_and_checks_every_byte(mgpu, committed, world):
    done = mgpu("checkpoints", "pull")
    assert done.code == 0
    assert done.out.strip() == "mgpu-runs/run-1/step-20"
    assert (world.folder / "mgpu-runs/run-1/step-20/weights").read_text() == "weights of step 20"


def test_pull_takes_an_older_one_where_the_newest_is_damaged_and_says_so(mgpu, committed, world):
    flip(committed, 20)
    done = mgpu("checkpoints", "pull", "--to", "out")
    assert (done.code, done.out.strip()) == (0, "out/step-10")
    assert "a001-step-20 does not verify" in done.err
    assert "10 steps before" in done.err
    assert not (world.folder / "out/step-20").exists()
    wanted = mgpu("checkpoints", "pull", "--to", "out", "--step", "20")
    assert wanted.code == 6
    assert not (world.folder / "out/step-20").exists()
    assert object_of(committed, 20).exists(), "the bad one is left in place"


def test_pull_says_as_json_what_it_took_and_what_it_passed_over(mgpu, committed):
    flip(committed, 20)
    found = mgpu("checkpoints", "pull", "--json").json
    assert (found["checkpoint_id"], found["folder"]) == ("a001-step-10", "mgpu-runs/run-1/step-10")
    assert (found["files"], found["bytes"], found["reused"]) == (1, 18, 0)
    assert list(found["passed_over"]) == ["a001-step-20"]
    assert mgpu("checkpoints", "pull", "--json").json["reused"] == 1, "what is there already is not fetched again"


def test_where_none_verifies_pull_leaves_nothing(mgpu, committed, world):
    for step in (10, 20):
        flip(committed, step)
    done = mgpu("checkpoints", "pull", "--to", "out")
    assert done.code == 6
    assert "a001-step-20, a001-step-10" in done.err
    assert not list((world.folder / "out").iterdir())


def test_a_disk_without_room_is_not_called_a_damaged_checkpoint(mgpu, committed, monkeypatch, world):
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 10, 0))
    done = mgpu("checkpoints", "pull", "--to", "out")
    assert done.code == 2
    assert "free space" in done.err
    assert "does not verify" not in done.err
    assert not list((world.folder / "out").iterdir())


@pytest.mark.parametrize("command", ["verify", "pull"])
def test_a_step_that_is_not_there_is_bad_input(mgpu, committed, command):
    done = mgpu("checkpoints", command, "--step", "15")
    assert done.code == 2
    assert "15" in done.err
    assert "20, 10" in done.err, "what there is"


# --- export -----------------------------------------------------------------------------------------------------------


def safetensors(*values: int) -> bytes:
    """A file of that format with one tensor of bytes, `w`."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(values)], "data_offsets": [0, len(values)]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(values)


@pytest.fixture
def portable(world, url, committed):
    """The same run with two more checkpoints, which hold safetensors."""
    for step in (30, 40):
        files = {"model.safetensors": safetensors(step, 2, 3), "optimizer.pt": b"a pickle"}
        world.commit(url, "run-1", attempt=1, writer="secret-token", step=step, files=files)
    return committed


def test_export_writes_the_newest_into_a_new_folder(mgpu, portable, world):
    done = mgpu("checkpoints", "export", "--to", "out/model")
    assert (done.code, done.out.strip()) == (0, "out/model")
    folder = world.folder / "out/model"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == safetensors(40, 2, 3)
    assert json.loads((folder / "config.json").read_text())["provenance"]["checkpoint_id"] == "a001-step-40"
    assert [path.name for path in (world.folder / "out").iterdir()] == ["model"], "nothing is left beside it"


def test_export_takes_an_older_one_loudly_and_says_so_in_json(mgpu, portable, world):
    flip(portable, 40)
    done = mgpu("checkpoints", "export", "--to", "out", "--json")
    assert (done.code, done.json["step"], list(done.json["passed_over"])) == (0, 30, ["a001-step-40"])
    assert "a001-step-40 does not verify" in done.err
    assert (world.folder / "out/model.safetensors").read_bytes() == safetensors(30, 2, 3)
    assert (done.json["folder"], done.json["tensors"], done.json["bytes"]) == ("out", 1, 3)


def test_what_cannot_be_exported_is_refused_before_a_byte_of_it_is_read(mgpu, committed, world):
    object_of(committed, 20).unlink()
    done = mgpu("checkpoints", "export", "--to", "out/model")
    assert done.code == 2
    assert "a001-step-20 cannot be exported: it holds weights" in done.err
    assert "pull" in done.err
    assert not list((world.folder / "out").iterdir())


def test_export_writes_over_nothing(mgpu, portable, world):
    for name in ("full", "link"):
        (world.folder / name).mkdir() if name == "full" else (world.folder / name).symlink_to("nowhere")
        (world.folder / "full/mine").write_text("mine")
        done = mgpu("checkpoints", "export", "--to", name)
        assert (done.code, "there already" in done.err) == (2, True)
    assert [path.name for path in (world.folder / "full").iterdir()] == ["mine"]


def test_safetensors_that_contradict_themselves_are_no_export(mgpu, portable, world, url):
    broken = {"model.safetensors": safetensors(1, 2, 3)[:-1]}
    world.commit(url, "run-1", attempt=1, writer="secret-token", step=50, files=broken)
    done = mgpu("checkpoints", "export", "--to", "out")
    assert done.code == 2, "it is what the program wrote"
    assert "a001-step-50 was not exported" in done.err
    assert not (world.folder / "out").exists()


# --- which run --------------------------------------------------------------------------------------------------------


def test_a_run_without_checkpoints_says_so(mgpu, world):
    world.record("run-1", state=State.RUNNING)
    for command in ("ls", "verify", "pull"):
        done = mgpu("checkpoints", command)
        assert done.code == 2
        assert "no checkpoints" in done.err


def test_from_another_machine_a_store_is_enough(mgpu, elsewhere, url, world):
    assert [each["step"] for each in mgpu("checkpoints", "ls", "--store", url, "run-1", "--json").json] == [20, 10]
    assert mgpu("checkpoints", "verify", "--deep", "--store", url, "run-1").code == 0
    done = mgpu("checkpoints", "pull", "--store", f"{url}/", "run-1")
    assert (world.folder / done.out.strip() / "weights").read_text() == "weights of step 20"
    assert f"--store {url} run-1" in mgpu("checkpoints", "ls", "--store", url).err, "what to type next works here too"


def test_a_run_without_a_record_is_told_of_stores(mgpu, elsewhere):
    done = mgpu("checkpoints", "ls", "run-1")
    assert done.code == 2
    assert "--store" in done.err


def test_the_beginning_of_an_id_is_enough_in_a_store_too(mgpu, elsewhere, url, world):
    for name in ("run-2", "run-1-more"):
        CommitLog(open_store(url), name).begin_attempt(1, "w")
    (elsewhere.parent / "pulumi" / "deep").mkdir(parents=True)
    (elsewhere.parent / "pulumi" / "deep" / "state.json").write_text("{}")
    assert mgpu("checkpoints", "ls", "--store", url, "run-2", "--json").json == []
    assert len(mgpu("checkpoints", "ls", "--store", url, "run-1", "--json").json) == 2, "exactly this one"
    assert mgpu("checkpoints", "ls", "--store", url, "run-1-", "--json").json == []
    several = mgpu("checkpoints", "ls", "--store", url, "run")
    assert several.code == 2
    assert "run-1, run-1-more, run-2" in several.err
    every = mgpu("checkpoints", "ls", "--store", url)
    assert (every.code, "pulumi" in every.err, "run-1, run-1-more, run-2" in every.err) == (2, False, True)
    none = mgpu("checkpoints", "ls", "--store", url, "nothing")
    assert (none.code, "no run `nothing`" in none.err, "run-2" in none.err) == (2, True, True)


@pytest.mark.parametrize("address", ["/a/folder", "s3://", "s3://user:pass@bucket/x", "http://x/y"])
def test_an_address_that_is_none_is_bad_input(mgpu, world, address):
    done = mgpu("checkpoints", "ls", "--store", address, "run-1")
    assert done.code == 2
    assert "s3://" in done.err


def test_a_store_that_cannot_be_read_is_not_called_damaged(mgpu, world, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    world.record("run-1", state=State.SUCCEEDED, store="s3://bucket-of-nobody/runs", teardown="confirmed")
    for command in ("ls", "verify", "pull"):
        done = mgpu("checkpoints", command)
        assert (done.code, "cannot be read" in done.err) == (2, True), done.err
