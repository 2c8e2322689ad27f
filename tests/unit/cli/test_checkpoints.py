"""`mgpu checkpoints`: what each command shows, what it refuses; a damaged checkpoint is never taken quietly."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import struct
from pathlib import Path

import pytest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.store import open_store

from mgpu import paths
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State


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
    assert [each["step"] for each in done.json["checkpoints"]] == [20, 10]
    assert done.json["checkpoints"][0]["checkpoint_id"] == "a001-step-20"
    assert done.json["checkpoints"][0]["bytes"] == len("weights of step 20")
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
    for command, more in COMMANDS.items():
        done = mgpu("checkpoints", command, *more)
        assert (done.code, "entries missing" in done.err) == (6, True), done.err


def test_before_the_first_commit_there_is_no_empty_table(mgpu, world, url):
    world.record("run-1", state=State.RUNNING, store=url)
    CommitLog(open_store(url), "run-1").begin_attempt(1, "w")
    for command in ("ls", "verify"):
        done = mgpu("checkpoints", command)
        assert (done.code, done.out) == (0, "no checkpoint is committed\n")
    pruned = mgpu("checkpoints", "prune", "--keep-last", "1")
    assert (pruned.code, pruned.out) == (0, "")
    assert mgpu("checkpoints", "pull").code == 2


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [(), ("--deep",)], ids=["plain", "deep"])
def test_checkpoints_that_are_whole_verify(mgpu, committed, deep):
    done = mgpu("checkpoints", "verify", "--json", *deep)
    whole = {"a001-step-20": [], "a001-step-10": []}
    assert (done.code, done.json) == (0, {"version": 1, "deep": bool(deep), "checkpoints": whole, "gaps": []})


def test_a_flipped_bit_is_found_by_reading_every_byte_and_is_exit_code_6(mgpu, committed):
    flip(committed, 20)
    assert mgpu("checkpoints", "verify").code == 0, "the store keeps no checksum of its own here"
    done = mgpu("checkpoints", "verify", "--deep")
    assert done.code == 6
    assert "a001-step-20" in done.err
    assert "a001-step-10" not in done.err
    assert "pull --step 10" in done.err, "what can be taken"
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
    assert "left in place" in done.err


def test_a_damaged_entry_of_the_log_is_damage(mgpu, committed):
    entry(committed, 1).write_bytes(b"{}")
    done = mgpu("checkpoints", "verify")
    assert done.code == 6
    assert "commit log" in done.err
    assert "entry 1" in done.out
    assert mgpu("checkpoints", "verify", "--json").json["gaps"]


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


def test_a_folder_that_cannot_be_written_is_no_damage(mgpu, committed):
    done = mgpu("checkpoints", "pull", "--to", "/proc/x")
    assert done.code == 2
    assert "/proc/x: the folder cannot be made" in done.err
    assert "verif" not in done.err
    done = mgpu("checkpoints", "pull", "--to", "/proc/self")  # which is there, and takes no folders
    assert done.code == 2
    assert "cannot write /proc/self/step-20" in done.err
    assert "verif" not in done.err


def test_pull_says_as_json_what_it_took_and_what_it_passed_over(mgpu, committed):
    flip(committed, 20)
    found = mgpu("checkpoints", "pull", "--json").json
    assert (found["checkpoint_id"], found["folder"]) == ("a001-step-10", "mgpu-runs/run-1/step-10")
    assert (found["files"], found["bytes"], found["reused"]) == (1, 18, 0)
    assert list(found["passed_over"]) == ["a001-step-20"]
    assert mgpu("checkpoints", "pull", "--json").json["reused"] == 1, "what is there already is not fetched again"


def test_pull_replaces_no_folder_that_holds_other_files(mgpu, committed, world):
    folder = world.folder / "out/step-20"
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_text("damaged on this disk")
    (folder / "sub/notes.txt").write_text("mine")
    done = mgpu("checkpoints", "pull", "--to", "out")
    assert (done.code, "sub/notes.txt" in done.err) == (2, True)
    assert (folder / "sub/notes.txt").read_text() == "mine"
    (folder / "sub/notes.txt").unlink()
    assert mgpu("checkpoints", "pull", "--to", "out").code == 0
    assert (folder / "weights").read_text() == "weights of step 20"


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


def test_what_the_trainer_did_not_save_is_not_exported_as_adapters(mgpu, portable, world):
    done = mgpu("checkpoints", "export", "--format", "peft", "--to", "out")
    assert (done.code, "no checkpoint of the bundled trainer" in done.err) == (2, True)
    assert not (world.folder / "out").exists()


def test_export_writes_over_nothing(mgpu, portable, world):
    for name in ("full", "link"):
        (world.folder / name).mkdir() if name == "full" else (world.folder / name).symlink_to("nowhere")
        (world.folder / "full/mine").write_text("mine")
        done = mgpu("checkpoints", "export", "--to", name)
        assert (done.code, "there already" in done.err) == (2, True)
    assert [path.name for path in (world.folder / "full").iterdir()] == ["mine"]


def test_export_does_not_take_the_folder_that_it_was_called_in(mgpu, portable, world, url, monkeypatch):
    (world.folder / "empty").mkdir()
    monkeypatch.chdir(world.folder / "empty")
    done = mgpu("checkpoints", "export", "--store", url, "run-1", "--to", ".")
    assert (done.code, "there already" in done.err) == (2, True)


def test_safetensors_that_contradict_themselves_are_no_export(mgpu, portable, world, url):
    broken = {"model.safetensors": safetensors(1, 2, 3)[:-1]}
    world.commit(url, "run-1", attempt=1, writer="secret-token", step=50, files=broken)
    done = mgpu("checkpoints", "export", "--to", "out")
    assert done.code == 2, "it is what the program wrote"
    assert "a001-step-50 was not exported" in done.err
    assert not (world.folder / "out").exists()


# --- prune, and why what is kept is kept ------------------------------------------------------------------------------

RETENTION = "{keep_last: 2, keep_best: 1, best_metric: accuracy, best_mode: max}"


def given(world, retention: str) -> None:
    """The run file of the run, as it was when it began."""
    Folder("run-1").run_file.write_text(
        "name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [train.py]\n"
        f"checkpoint: {retention}\n"
    )


@pytest.fixture
def many(world, tmp_path, url):
    """A run with five checkpoints, of which the second was the best; the folder of its objects."""
    world.record("run-1", state=State.SUCCEEDED, store=url, teardown="confirmed")
    given(world, RETENTION)
    CommitLog(open_store(url), "run-1").begin_attempt(1, "w")
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.6), (40, 0.7), (50, 0.8)):
        world.commit(url, "run-1", attempt=1, writer="w", step=step, meta={"accuracy": accuracy})
    return tmp_path / "store" / "run-1"


def there(store: Path) -> list[int]:
    """The steps whose bytes are in the store."""
    return sorted(int(path.name.rpartition("-")[2]) for path in (store / "checkpoints").iterdir())


def test_ls_says_why_each_is_kept_and_shows_the_metric(mgpu, many):
    found = {each["step"]: each["kept_because"] for each in mgpu("checkpoints", "ls", "--json").json["checkpoints"]}
    assert [step for step, why in found.items() if why] == [50, 40, 20]
    assert "newest 2" in found[50]
    assert "accuracy 0.9" in found[20]
    lines = mgpu("checkpoints", "ls").out.splitlines()
    assert "accuracy" in lines[0]
    assert "0.9000" in next(line for line in lines if "a001-step-20" in line)
    assert "nothing any more" in next(line for line in lines if "a001-step-30" in line)


def test_a_dry_run_shows_what_goes_and_removes_nothing(mgpu, many):
    done = mgpu("checkpoints", "prune", "--dry-run")
    assert done.code == 0
    verdicts = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("a001")}
    assert [name for name, line in verdicts.items() if line.endswith("goes")] == ["a001-step-30", "a001-step-10"]
    assert "accuracy 0.9" in verdicts["a001-step-20"]
    assert "2 of 5 checkpoints can go: 36 B" in done.err
    assert "next: mgpu checkpoints prune run-1    do it" in done.err
    assert there(many) == [10, 20, 30, 40, 50]
    assert len(mgpu("checkpoints", "ls", "--json").json["checkpoints"]) == 5


def test_prune_by_the_run_file(mgpu, many):
    done = mgpu("checkpoints", "prune", "--yes", "--json")
    assert (done.json["drop"], done.json["gone"]) == (["a001-step-10", "a001-step-30"],) * 2
    assert (list(done.json["keep"]), done.json["bytes"]) == (["a001-step-50", "a001-step-40", "a001-step-20"], 36)
    assert there(many) == [20, 40, 50]
    assert [each["step"] for each in mgpu("checkpoints", "ls", "--json").json["checkpoints"]] == [50, 40, 20]
    assert mgpu("checkpoints", "verify", "--deep").code == 0, "what was given up is no damage"
    again = mgpu("checkpoints", "prune")
    assert (again.code, "0 of 3 checkpoints can go" in again.err) == (0, True), "nothing to ask about"


def test_options_change_the_run_files_rules(mgpu, many, world):
    rules = ("--keep-last", "1", "--keep-best", "0", "--keep-every-hours", "0")
    given(world, "{keep_last: 2, keep_best: 1, best_metric: accuracy, keep_every_hours: 1}")
    assert mgpu("checkpoints", "prune", "--yes", *rules).code == 0
    assert there(many) == [50]


def test_what_is_best_can_be_said_anew(mgpu, many):
    options = ("--keep-last", "1", "--mode", "min", "--metric", "accuracy")
    found = mgpu("checkpoints", "prune", "--dry-run", "--json", *options).json
    assert list(found["keep"]) == ["a001-step-50", "a001-step-10"]


@pytest.mark.parametrize(
    ("said", "options", "mode"),
    [
        ("best_metric: accuracy", (), "max"),
        ("best_metric: loss, best_mode: min", ("--metric", "accuracy"), "max"),
        ("best_metric: accuracy, best_mode: max", ("--metric", "validation_loss"), "min"),
    ],
)
def test_the_worst_is_not_kept_for_the_best_unless_somebody_says_so(mgpu, many, world, said, options, mode):
    """Run files of earlier versions may say nothing of it; and what they say is of their own metric."""
    given(world, f"{{keep_last: 2, keep_best: 1, {said}}}")
    done = mgpu("checkpoints", "prune", "--yes", *options)
    assert (done.code, f"Add `--mode {mode}`" in done.err) == (2, True)
    assert there(many) == [10, 20, 30, 40, 50]
    assert mgpu("checkpoints", "prune", "--yes", *options, "--mode", mode).code == 0


def test_a_mode_of_the_run_file_counts_where_its_metric_is_named_again(mgpu, many, world):
    given(world, "{keep_last: 1, keep_best: 1, best_metric: accuracy, best_mode: min}")
    found = mgpu("checkpoints", "prune", "--dry-run", "--json", "--metric", "accuracy").json
    assert list(found["keep"]) == ["a001-step-50", "a001-step-10"]


def test_what_a_dry_run_says_to_type_does_what_it_has_shown(mgpu, many):
    rules = ("--keep-last", "1", "--keep-best", "1", "--metric", "accuracy", "--mode", "min", "--deep")
    shown = mgpu("checkpoints", "prune", *rules, "--dry-run", "--json").json["drop"]
    (line,) = (line for line in mgpu("checkpoints", "prune", *rules, "--dry-run").err.splitlines() if "next:" in line)
    typed = shlex.split(line.partition("next: ")[2].partition("    ")[0])
    assert mgpu(*typed[1:], "--yes", "--json").json["drop"] == shown == [f"a001-step-{n}" for n in (20, 30, 40)]


def test_nobody_to_ask_removes_nothing(mgpu, many):
    done = mgpu("checkpoints", "prune")
    assert done.code == 2
    assert "--yes" in done.err
    assert there(many) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("y\n", [20, 40, 50]),
        ("n\n", [10, 20, 30, 40, 50]),
        ("\n", [10, 20, 30, 40, 50]),
        ("", [10, 20, 30, 40, 50]),
        ("yess\nyes\n", [20, 40, 50]),
        ("q\nn\n", [10, 20, 30, 40, 50]),
    ],
    ids=["yes", "no", "enter", "closed", "again-yes", "again-no"],
)
def test_on_a_terminal_prune_asks(mgpu, many, monkeypatch, answer, left):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(answer))
    done = mgpu("checkpoints", "prune")
    assert (done.code, there(many)) == (0 if left == [20, 40, 50] else 2, left)
    assert "a001-step-30" in done.out, "what goes is shown before the question"


def test_the_last_that_verifies_is_never_pruned(mgpu, many):
    for step in (40, 50):
        object_of(many, step).unlink()
    done = mgpu("checkpoints", "prune", "--yes", "--keep-last", "1", "--keep-best", "0")
    assert done.code == 0
    assert "a001-step-50 does not verify" in done.err
    assert there(many)[:1] == [30]


def test_a_flipped_newest_is_no_reason_to_lose_the_one_before_it(mgpu, many):
    flip(many, 50)
    options = ("--keep-last", "1", "--keep-best", "0", "--dry-run", "--json")
    assert list(mgpu("checkpoints", "prune", *options).json["keep"]) == ["a001-step-50"], "sizes say nothing of it"
    deep = mgpu("checkpoints", "prune", "--deep", *options).json
    assert list(deep["keep"]) == ["a001-step-50", "a001-step-40"]
    assert list(deep["damaged"]) == ["a001-step-50"]


def test_in_a_run_that_goes_on_a_save_that_is_under_way_stays(mgpu, many, world, url):
    world.record("run-1", state=State.RUNNING, store=url)
    part = many / "checkpoints" / "a001-step-60" / "node-0"
    part.mkdir(parents=True)
    (part / "weights").write_text("half of it")
    done = mgpu("checkpoints", "prune", "--yes")
    assert done.code == 0
    assert "its agent prunes too" in done.err
    assert there(many) == [20, 40, 50, 60]


@pytest.mark.parametrize("step", [45, 60])
def test_what_a_dead_attempt_left_goes_too_and_is_named(mgpu, many, world, url, step):
    """Also what it was at when its machines went, and it wrote no end."""
    world.record("run-1", state=State.FAILED, store=url, teardown="confirmed", attempt=1, writer="w")
    part = many / "checkpoints" / f"a001-step-{step}" / "node-0"
    part.mkdir(parents=True)
    (part / "weights").write_text("half of it")
    done = mgpu("checkpoints", "prune", "--yes")
    assert there(many) == [20, 40, 50]
    assert f"never committed: a001-step-{step}" in done.err


def test_without_a_record_something_has_to_say_what_stays(mgpu, many, url):
    shutil.rmtree(paths.state_dir() / "runs")
    there_only = ("--store", url, "run-1", "--yes")
    done = mgpu("checkpoints", "prune", *there_only)
    assert (done.code, "--keep-last" in done.err) == (2, True)
    listed = mgpu("checkpoints", "ls", "--json", *there_only[:3]).json["checkpoints"]
    assert all(each["kept_because"] is None for each in listed)
    assert mgpu("checkpoints", "prune", "--keep-last", "2", *there_only).code == 0
    assert there(many) == [40, 50]


# --- which run --------------------------------------------------------------------------------------------------------


COMMANDS = {"ls": (), "verify": (), "pull": (), "export": ("--to", "out"), "prune": ("--keep-last", "1")}


def test_a_run_without_checkpoints_says_so(mgpu, world):
    world.record("run-1", state=State.RUNNING)
    for command, more in COMMANDS.items():
        done = mgpu("checkpoints", command, *more)
        assert done.code == 2
        assert "no checkpoints" in done.err


def test_from_another_machine_a_store_is_enough(mgpu, elsewhere, url, world):
    listed = mgpu("checkpoints", "ls", "--store", url, "run-1", "--json").json["checkpoints"]
    assert [each["step"] for each in listed] == [20, 10]
    assert mgpu("checkpoints", "verify", "--deep", "--store", url, "run-1").code == 0
    done = mgpu("checkpoints", "pull", "--store", f"{url}/", "run-1")
    assert (world.folder / done.out.strip() / "weights").read_text() == "weights of step 20"
    assert f"--store {url} run-1" in mgpu("checkpoints", "ls", "--store", url).err, "what to type next works here too"


def test_a_profile_opens_what_store_names_and_is_typed_again(mgpu, elsewhere, url, monkeypatch):
    opened = []

    def opens(address, run_file, profile):
        opened.append((address, str(run_file), profile))
        return open_store(address)

    monkeypatch.setattr("mgpu.run.job.operator_store.for_address", opens)
    done = mgpu("checkpoints", "ls", "--store", url, "--profile", "lab", "run-1")
    assert opened == [(url, "mgpu.yaml", "lab")]
    assert f"--store {url} --profile lab run-1" in done.err
    alone = mgpu("checkpoints", "ls", "--profile", "lab", "run-1")
    assert (alone.code, "--store s3://bucket/prefix" in alone.err) == (2, True)


def test_a_run_without_a_record_is_told_of_stores(mgpu, elsewhere):
    done = mgpu("checkpoints", "ls", "run-1")
    assert done.code == 2
    assert "--store" in done.err


def test_the_beginning_of_an_id_is_enough_in_a_store_too(mgpu, elsewhere, url, world):
    for name in ("run-2", "run-1-more"):
        CommitLog(open_store(url), name).begin_attempt(1, "w")
    (elsewhere.parent / "pulumi" / "deep").mkdir(parents=True)
    (elsewhere.parent / "pulumi" / "deep" / "state.json").write_text("{}")
    assert mgpu("checkpoints", "ls", "--store", url, "run-2", "--json").json["checkpoints"] == []
    listed = mgpu("checkpoints", "ls", "--store", url, "run-1", "--json").json["checkpoints"]
    assert len(listed) == 2, "exactly this one"
    assert mgpu("checkpoints", "ls", "--store", url, "run-1-", "--json").json["checkpoints"] == []
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
    for command, more in COMMANDS.items():
        done = mgpu("checkpoints", command, *more)
        assert (done.code, "cannot be read" in done.err) == (2, True), done.err
