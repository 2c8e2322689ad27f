"""Resume: from the newest checkpoint that is what it should be, byte for byte, and loudly when it is not the newest."""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.checkpoint.transfer.verify import verify
from mgpu_train.store import Damaged, Denied, NotFound, StoreError, Unavailable, listed

SEEN_WITHOUT_READING = ("missing", "truncated", "longer")
ALL = (*SEEN_WITHOUT_READING, "flipped", "zero-filled")


def find(run, deep=False):
    said: list[str] = []
    return newest_verified(run.store, "run-1", deep=deep, report=said.append), said


def folder_of(run, step):
    """What all nodes' folders hold together."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for folder in (run.folder(0, step), run.folder(1, step))
        for path in folder.rglob("*")
        if path.is_file()
    }


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize("index", [0, 2, 4])
def test_damage_is_found(run, damage, how, index):
    """F28"""
    entry = run.save(10)
    for deep in (False, True):
        assert verify(run.store, "run-1", run.manifest(entry), deep=deep) == ()
    damage[how](run.path(entry, index))
    (problem,) = verify(run.store, "run-1", run.manifest(entry), deep=True)
    assert run.path(entry, index).relative_to(run.root).as_posix() in problem
    shallow = verify(run.store, "run-1", run.manifest(entry), deep=False)
    assert bool(shallow) == (how in SEEN_WITHOUT_READING)


def test_the_stores_own_checksum_is_compared_without_reading(run, monkeypatch):
    entry = run.save(10)
    stat = type(run.plain).stat
    monkeypatch.setattr(
        run.plain, "stat", lambda key: type(stat(run.plain, key))(key, stat(run.plain, key).size, "f" * 16, 0.0)
    )
    problems = verify(run.store, "run-1", run.manifest(entry), deep=False)
    assert len(problems) == 4  # a pack and a shard of each node
    assert all("checksum is ffffffffffffffff" in problem for problem in problems)


def test_all_problems_are_told(run, damage):
    entry = run.save(10)
    for index in (0, 3):
        damage["missing"](run.path(entry, index))
    assert len(verify(run.store, "run-1", run.manifest(entry), deep=False)) == 2
    assert "of run run-1" in verify(run.store, "run-2", run.manifest(entry), deep=False)[0]


@pytest.mark.parametrize("error", [Unavailable, Denied])
def test_a_store_that_fails_says_nothing_of_the_checkpoint(run, error):
    entry = run.save(10)

    def fail(operation, _key):
        if operation in ("stat", "checksum"):
            raise error("no")

    run.store.before = fail
    for deep in (False, True):
        with pytest.raises(error):
            verify(run.store, "run-1", run.manifest(entry), deep=deep)
        with pytest.raises(error):
            find(run, deep)


# --- newest_verified --------------------------------------------------------------------------------------------------


def test_a_run_without_checkpoints_begins_at_zero_silently(run):
    assert find(run) == (None, [])


def test_the_newest_is_taken(run):
    for step in (1, 2, 3):
        run.save(step)
    entry, said = find(run, deep=True)
    assert (entry.step, said) == (3, [])


@pytest.mark.parametrize("how", [("missing", "truncated", "longer"), ("flipped", "zero-filled", "missing")])
def test_the_newest_three_are_damaged_and_the_fourth_is_used(run, damage, how):
    """F29"""
    entries = [run.save(step) for step in (1, 2, 3, 4)]
    for entry, kind in zip(entries[1:], how, strict=True):
        damage[kind](run.path(entry, 1))
    found, said = find(run, deep=True)
    assert found == entries[0]
    assert len(said) == 3
    for line, step in zip(said, (4, 3, 2), strict=True):
        assert f"a001-step-{step} does not verify" in line


def test_what_somebody_has_found_damaged_is_passed_over_without_a_look(run):
    entries, said = [run.save(step) for step in (1, 2)], []
    damaged = {"a001-step-2": "node 0: its checksum is 1, not 2"}
    assert newest_verified(run.store, "run-1", damaged=damaged, report=said.append) == entries[0]
    assert said == [
        "a001-step-2 does not verify: node 0: its checksum is 1, not 2; looking at what was committed before"
    ]
    damaged["a001-step-1"] = "node 0: the same"
    with pytest.raises(Damaged, match="none of its 2 committed checkpoints verifies"):
        newest_verified(run.store, "run-1", damaged=damaged, report=said.append)


def test_an_entry_of_the_log_that_cannot_be_read_is_told(run, damage):
    first = run.save(1)
    damage["truncated"](run.commit_path(run.save(2).seq))
    found, said = find(run)
    assert found == first
    assert len(said) == 1
    assert said[0].startswith("entry 2 of the commit log is not valid")


def test_it_never_goes_back_to_zero_by_itself(run, damage):
    """I3"""
    for step in (1, 2):
        damage["missing"](run.path(run.save(step)))
    said: list[str] = []
    with pytest.raises(Damaged, match="none of its 2 committed checkpoints verifies"):
        newest_verified(run.store, "run-1", report=said.append)
    assert len(said) == 2


def test_what_older_attempts_committed_is_used_by_newer_ones(run):
    run.save(10)
    run.begin(2)
    assert find(run)[0].step == 10
    run.save(20, attempt=2)
    assert find(run)[0].checkpoint_id == "a002-step-20"


# --- fetch ------------------------------------------------------------------------------------------------------------


def test_a_folder_holds_the_files_of_all_nodes(run, tmp_path):
    entry = run.save(10)
    report = fetch(run.store, "run-1", run.manifest(entry), tmp_path / "new" / "resume")
    assert content(tmp_path / "new" / "resume") == folder_of(run, 10)
    assert (report.files, report.bytes, report.reused) == (5, run.manifest(entry).bytes, 0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["resume"]


def test_progress_counts_every_byte_once(run, tmp_path):
    """Fetched, copied from this disk, or read to verify: in the end it is the size of all files."""
    manifest = run.manifest(run.save(10))
    for local in ([], [run.folder(0, 10)]):
        told: list[int] = []
        fetch(run.store, "run-1", manifest, tmp_path / f"{len(local)}", local=local, progress=told.append)
        assert sum(told) == manifest.bytes
    told = []
    assert verify(run.store, "run-1", manifest, deep=True, progress=told.append) == ()
    assert sum(told) == manifest.bytes


@pytest.mark.parametrize("durable", [True, False])
def test_a_fetch_is_flushed_once_or_not_at_all(run, tmp_path, monkeypatch, durable):
    manifest = run.manifest(run.save(10))
    (tmp_path / "into").mkdir()
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))  # noqa: PTH115
    fetch(run.store, "run-1", manifest, tmp_path / "into" / "resume", durable=durable)
    aside = tmp_path / "into" / ".aside-new-resume"
    files = [str(aside / file.path) for file in manifest.files]
    folders = [str(aside), str(aside / "sub"), str(aside.parent)]
    assert sorted(flushed) == (sorted(files + folders) if durable else [])


@pytest.mark.parametrize("how", ALL)
def test_a_damaged_checkpoint_is_never_put_in_place(run, damage, how, tmp_path):
    """F28, I3: every byte is compared before the folder has its name."""
    entry = run.save(10)
    damage[how](run.path(entry, 3))
    with pytest.raises((NotFound, Damaged)):
        fetch(run.store, "run-1", run.manifest(entry), tmp_path / "new" / "resume")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("index", [0, 3])
def test_what_is_damaged_is_read_again_from_the_store_before_it_is_believed(run, damage, tmp_path, index):
    """The first read came through a bad cache, which is whole once it is asked anew."""
    entry = run.save(10)
    path = run.path(entry, index)
    whole = path.read_bytes()
    run.store.before = lambda operation, _key: path.write_bytes(whole) if operation == "forget" else None
    damage["flipped"](path)
    fetch(run.store, "run-1", run.manifest(entry), tmp_path / "to")
    assert content(tmp_path / "to") == folder_of(run, 10)
    damage["flipped"](path)
    assert verify(run.store, "run-1", run.manifest(entry), deep=True) == ()
    key = path.relative_to(run.root).as_posix()
    assert [called for called in run.store.calls if called[0] == "forget"] == [("forget", key)] * 2


def test_a_folder_drops_what_this_machine_has_of_an_object_in_memory(run, monkeypatch):
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda opened, *how: dropped.append((os.fstat(opened).st_ino, *how)))
    run.plain.put("a", b"x")
    run.plain.forget("a")
    run.plain.forget("absent")
    assert dropped == [((run.root / "a").stat().st_ino, 0, 0, os.POSIX_FADV_DONTNEED)]


def test_a_failed_fetch_leaves_what_was_there(run, damage, tmp_path):
    old, new = run.save(10), run.save(20)
    fetch(run.store, "run-1", run.manifest(old), tmp_path / "resume")
    damage["flipped"](run.path(new, 1))
    with pytest.raises(Damaged):
        fetch(run.store, "run-1", run.manifest(new), tmp_path / "resume")
    assert content(tmp_path / "resume") == folder_of(run, 10)


def test_a_newer_checkpoint_replaces_an_older_one_whole(run, tmp_path):
    for entry in (run.save(10), run.save(20)):
        fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume")
        (tmp_path / "resume" / "stray").touch()
    fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume")
    assert content(tmp_path / "resume") == folder_of(run, 20)


def test_local_copies_come_first(run, tmp_path):
    entry = run.save(10)
    run.store.calls.clear()
    report = fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[run.folder(0, 10)])
    assert report.reused == 3
    fetched = [key.rpartition("/")[2] for operation, key in run.store.calls if operation in ("get", "get_file")]
    assert sorted(fetched) == ["__1_0.distcp", "node-1.pack-0"]
    assert content(tmp_path / "resume") == folder_of(run, 10)
    assert (run.folder(0, 10) / ".metadata").exists()


def test_what_is_already_in_place_is_not_fetched_again(run, tmp_path):
    entry = run.save(10)
    fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume")
    run.store.calls.clear()
    assert fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume").reused == 5
    assert run.store.calls == []


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "zero-filled"])
def test_a_damaged_local_copy_is_not_used(run, damage, how, tmp_path):
    entry = run.save(10)
    damage[how](run.folder(0, 10) / "__0_0.distcp")
    report = fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[run.folder(0, 10)])
    assert report.reused == 2
    assert verify(run.store, "run-1", run.manifest(entry), deep=True) == ()
    assert (tmp_path / "resume" / "__0_0.distcp").read_bytes() == run.path(entry, 1).read_bytes()


def test_local_links_and_folders_in_a_files_place_are_not_used(run, tmp_path):
    entry = run.save(10)
    local = run.folder(0, 10)
    moved = shutil.move(local / ".metadata", tmp_path / "moved")
    (local / ".metadata").symlink_to(moved)
    (local / "__0_0.distcp").unlink()
    (local / "__0_0.distcp").mkdir()
    report = fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[local, tmp_path / "nowhere"])
    assert report.reused == 1


def test_a_copy_is_a_copy(run, tmp_path):
    """A program that writes into its resume folder does not change the local checkpoint."""
    entry = run.save(10)
    fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[run.folder(0, 10)])
    (tmp_path / "resume" / ".metadata").write_bytes(b"changed")
    assert (run.folder(0, 10) / ".metadata").read_bytes() == b"meta 10"


def test_what_is_linked_takes_neither_bytes_nor_room(run, tmp_path, monkeypatch):
    """A machine that has most of a checkpoint resumes from it though its disk has no room for a second one."""
    entry, local = run.save(10), run.folder(0, 10)
    expected = folder_of(run, 10)
    missing = sum(file.size for file in run.manifest(entry).files if not (local / file.path).exists())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=missing))
    report = fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[local], link=True)
    assert report.reused == 3
    assert (tmp_path / "resume" / ".metadata").samefile(local / ".metadata")
    shutil.rmtree(local)
    assert content(tmp_path / "resume") == expected


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing", "zero-filled"])
def test_what_is_damaged_is_not_linked(run, damage, how, tmp_path):
    entry = run.save(10)
    damage[how](run.folder(0, 10) / "__0_0.distcp")
    fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[run.folder(0, 10)], link=True)
    assert (tmp_path / "resume" / "__0_0.distcp").read_bytes() == run.path(entry, 1).read_bytes()


def test_what_is_a_link_itself_is_not_linked(run, tmp_path):
    entry, local = run.save(10), run.folder(0, 10)
    moved = shutil.move(local / ".metadata", tmp_path / "moved")
    (local / ".metadata").symlink_to(moved)
    report = fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume", local=[local], link=True)
    assert report.reused == 2
    assert not (tmp_path / "resume" / ".metadata").is_symlink()


def of_node_1(folder):
    """It is asked when all that is no shard is there."""
    assert sorted(content(folder)) == [".metadata", "sub/0.txt", "sub/1.txt"]
    return {"__1_0.distcp"}


def test_shards_that_nobody_wants_are_not_fetched(run, tmp_path, monkeypatch):
    """Nor is there to be room for them."""
    manifest, told = run.manifest(run.save(10)), []
    expected = folder_of(run, 10)
    expected.pop("__0_0.distcp")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3001))
    report = fetch(run.store, "run-1", manifest, tmp_path / "resume", choose=of_node_1, progress=told.append)
    assert content(tmp_path / "resume") == expected
    assert (report.files, report.bytes, sum(told)) == (4, sum(map(len, expected.values())), report.bytes)
    assert not [key for operation, key in run.store.calls if operation == "get_file" and "__0_0" in key]


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_without_some_shards_is_never_taken_for_a_whole_one(run, tmp_path, link):
    """By a resume with other ranks, by one that wants everything, and in each file by its checksum alone."""
    old, new = run.save(10), run.save(20)
    into, seen = tmp_path / "resume", []
    fetch(run.store, "run-1", run.manifest(old), into, choose=of_node_1, link=link)
    other = fetch(run.store, "run-1", run.manifest(old), into, choose=lambda _: {"__0_0.distcp"}, link=link)
    assert (other.files, other.reused) == (4, 3)
    assert "__1_0.distcp" not in content(into)
    whole = fetch(run.store, "run-1", run.manifest(old), into, link=link)
    assert (whole.files, whole.reused) == (5, 4)
    assert content(into) == folder_of(run, 10)
    fetch(run.store, "run-1", run.manifest(new), into, choose=of_node_1, link=link)
    fetch(run.store, "run-1", run.manifest(new), into, choose=lambda folder: seen.append(folder), link=link)
    assert content(into) == folder_of(run, 20)
    assert seen[0].name != into.name  # it has its name once it is whole


@pytest.mark.parametrize("damaged", [".metadata", "__1_0.distcp"])
def test_of_what_is_chosen_every_byte_is_compared(run, damage, tmp_path, damaged):
    """I3: before the choice what it is made by, and all else before the folder has its name."""
    entry, asked = run.save(10), []
    index = [file.path for file in run.manifest(entry).files].index(damaged)
    damage["flipped"](run.path(entry, index))
    with pytest.raises(Damaged):
        fetch(run.store, "run-1", run.manifest(entry), tmp_path / "new" / "resume",
              choose=lambda folder: asked.append(folder) or {"__1_0.distcp"})  # fmt: skip
    assert len(asked) == (damaged != ".metadata")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(run, tmp_path, monkeypatch):
    entry = run.save(10)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    run.store.calls.clear()
    with pytest.raises(Unavailable, match="Free some"):
        fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume")
    assert run.store.calls == []


def test_another_runs_manifest_is_refused(run, tmp_path):
    """F52"""
    with pytest.raises(Damaged, match="of run run-1, not of run-2"):
        fetch(run.store, "run-2", run.manifest(run.save(10)), tmp_path / "resume")


def test_a_folder_that_cannot_be_made_is_a_store_error(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        fetch(run.store, "run-1", run.manifest(run.save(10)), tmp_path / "file" / "resume")


def test_what_a_killed_fetch_left_is_in_nobodys_way(run, tmp_path):
    entry = run.save(10)
    (tmp_path / ".aside-new-resume").mkdir()
    (tmp_path / ".aside-new-resume" / "stray").write_bytes(os.urandom(10))
    fetch(run.store, "run-1", run.manifest(entry), tmp_path / "resume")
    assert content(tmp_path / "resume") == folder_of(run, 10)
    assert not (tmp_path / ".aside-new-resume").exists()


class Unseen:
    """A store that says of every object, so many times, that there is none, though it lists it: S3 may, for a while."""

    def __init__(self, times: float) -> None:
        self.times = times
        self.told: Counter[tuple[str, str]] = Counter()

    def __call__(self, operation: str, key: str) -> None:
        if operation in ("get", "stat", "get_file", "checksum") and "index" not in key:
            self.told[operation, key] += 1
            if self.told[operation, key] <= self.times:
                raise NotFound(f"{key}: there is no such object")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(listed, "_PAUSE_S", 0.001)
    monkeypatch.setattr(listed, "_ASK_S", 0.01)


@pytest.mark.parametrize("deep", [False, True])
def test_what_the_store_lists_is_asked_for_again(run, tmp_path, quick, deep):
    run.save(1)
    run.store.before = Unseen(3)
    commit = newest_verified(run.store, "run-1", deep=deep, report=pytest.fail)
    assert commit is not None
    fetch(run.store, "run-1", run.log.manifest(commit), tmp_path / "to")
    assert content(tmp_path / "to") == folder_of(run, 1)


def test_what_is_listed_and_not_to_be_had_says_nothing_of_the_checkpoint(run, quick):
    run.save(1)
    run.store.before = Unseen(float("inf"))
    with pytest.raises(Unavailable, match="lists"):
        newest_verified(run.store, "run-1", report=pytest.fail)


def test_what_is_not_listed_is_missing_at_once(run, monkeypatch):
    monkeypatch.setattr(listed, "_PAUSE_S", 60)
    run.save(1)
    for stat in list(run.plain.list("run-1/checkpoints/")):
        run.plain.delete(stat.key)
    with pytest.raises(Damaged):
        newest_verified(run.store, "run-1", report=lambda _: None)
