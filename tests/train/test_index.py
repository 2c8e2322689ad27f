"""The index makes reading fast and decides nothing: without it, with a damaged or a lying one, the log is the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from mgpu_train.checkpoint.log import index, keys
from mgpu_train.checkpoint.log.commit_log import CommitLog, Fenced
from mgpu_train.checkpoint.log.lines import Unreadable
from mgpu_train.checkpoint.log.manifest import AttemptEntry, FileEntry, Manifest, checkpoint_id, to_bytes
from mgpu_train.store import Damaged, Denied, NotFound, Unavailable

EVERY = 8


def manifest(step: int, attempt: int = 1) -> Manifest:
    return Manifest(
        run_id="run-1",
        checkpoint_id=checkpoint_id(attempt, step),
        attempt=attempt,
        step=step,
        nodes=1,
        world_size=1,
        writers=(0,),
        files=tuple(FileEntry(path=f"f{i}", size=i, crc64nvme="0" * 16, node=0) for i in range(3)),
        created_at=1.0,
        meta={"validation_loss": 1 / step, "by": "test"},
    )


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(index, "EVERY", EVERY)


@pytest.fixture
def long(run):
    """A run with 29 commits: entries 0 to 29, and indexes of the first of them."""
    log = run.log
    for step in range(1, 30):
        log.commit(manifest(step), "writer-1")
    return run


def indexes(run) -> list[str]:
    return [stat.key for stat in run.plain.list("run-1/index/")]


def uptos(run) -> list[int]:
    return [int(key.rpartition("/")[2][:8]) for key in indexes(run)]


def calls(run, operation: str, part: str) -> list[str]:
    return [key for done, key in run.store.calls if done == operation and f"/{part}/" in key]


def truth(run) -> list:
    """The log without any index."""
    for key in indexes(run):
        run.plain.delete(key)
    return CommitLog(run.plain, "run-1").read()


def put(run, found: index.Index) -> str:
    """An index that somebody else has written, with the right name."""
    data = to_bytes(found)
    key = keys.index("run-1", found.upto, hashlib.sha256(data).hexdigest()[:16])
    run.plain.put(key, data)
    return key


def test_the_two_newest_stay(long):
    assert uptos(long) == [15, 23]


def test_a_short_log_has_none(run):
    for step in range(1, EVERY - 1):
        run.log.commit(manifest(step), "writer-1")
    assert indexes(run) == []
    run.log.commit(manifest(EVERY), "writer-1")
    assert uptos(run) == [EVERY - 1]


def test_with_an_index_and_without_one_the_log_is_the_same(long):
    with_index = long.log.read()
    assert calls(long, "get", "index")
    assert with_index == truth(long)
    assert [commit.step for commit in CommitLog(long.plain, "run-1").checkpoints()] == list(range(29, 0, -1))


def test_a_commit_in_short_says_what_its_entry_says(long):
    commit = long.log.checkpoints()[5]
    found = long.log.manifest(commit)
    assert found == manifest(24)
    assert (commit.files, commit.bytes, commit.meta, commit.at > 0) == (3, 3, found.meta, True)
    assert (commit.manifest_sha256, commit.writer, commit.attempt) == (found.sha256(), "writer-1", 1)


def test_reading_takes_the_tail_alone(long):
    long.store.calls.clear()
    long.log.read()
    assert len(calls(long, "get", "index")) == 1
    read = sorted(int(key[-13:-5]) for key in calls(long, "get", "commits"))
    assert read == [23, *range(24, 30)]  # the last one of the index, and what came after it


def test_the_list_of_the_store_begins_behind_the_index(long, monkeypatch):
    asked = []
    plain = long.plain.list
    monkeypatch.setattr(
        long.plain, "list", lambda prefix, after="": asked.append((prefix, after)) or plain(prefix, after)
    )
    long.log.read()
    assert asked == [("run-1/index/", ""), ("run-1/commits/", "run-1/commits/00000023.json")]


def test_a_commit_reads_the_tail_alone(long):
    long.store.calls.clear()
    long.log.commit(manifest(30), "writer-1")
    assert len(long.store.calls) == 3 + 7 + 1  # index: list, get; list; entries 23 to 29; the create
    log = long.log
    log.read()
    long.store.calls.clear()
    log.commit(manifest(31), "writer-1")  # and who has read it before asks only for what is new
    assert [operation for operation, _ in long.store.calls[:2]] == ["list", "put_if_absent"]


def test_a_log_that_is_open_reads_what_others_wrote_meanwhile(long):
    log = long.log
    log.read()
    long.log.commit(manifest(30), "writer-1")
    long.store.calls.clear()
    assert log.checkpoints()[0].step == 30
    assert calls(long, "get", "commits") == ["run-1/commits/00000030.json"]


def test_who_writes_another_one_looks_how_old_the_newest_is(long):
    for step in (30, 31):
        long.log.commit(manifest(step), "writer-1")  # each with a log of its own
    assert uptos(long) == [23, 31]


# --- an index that is wrong, or gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "flipped", "truncated", "longer", "zero-filled"])
@pytest.mark.parametrize("which", [slice(1, 2), slice(0, 2)], ids=["newest", "all"])
def test_a_damaged_index_costs_time_alone(long, damage, how, which):
    for key in indexes(long)[which]:
        damage[how](long.root / key)
    read = long.log.read()
    assert read == truth(long)
    assert not any(isinstance(line, Unreadable) for line in read)


def test_a_damaged_index_is_written_anew_by_the_next_who_commits(long, damage):
    damage["flipped"](long.root / indexes(long)[-1])
    long.log.commit(manifest(30), "writer-1")
    assert uptos(long) == [23, 30]


@pytest.mark.parametrize("count", [1, 2])
def test_an_index_that_goes_while_it_is_read_is_not_missed(long, count):
    gone = []

    def tidy(operation, key):
        if operation == "get" and "/index/" in key and len(gone) < count:
            gone.append(key)
            long.plain.delete(key)

    long.store.before = tidy
    read = long.log.read()
    assert len(gone) == count
    assert read == truth(long)


@pytest.mark.parametrize("error", [Unavailable, Denied])
def test_a_commit_stands_though_its_index_cannot_be_written(long, error):
    def refuse(operation, key):
        if operation in ("put", "delete"):
            raise error("no")

    long.store.before = refuse
    long.store.calls.clear()
    log = long.log
    for step in range(30, 50):
        assert log.commit(manifest(step), "writer-1").step == step
    assert uptos(long) == [15, 23]
    tries = [call for call in long.store.calls if call[0] == "put"]
    assert len(tries) == 3  # of 20 commits: who fails does not try at every one


def test_an_index_of_another_run_is_none(long):
    real = long.log.read()
    key = put(long, index.Index(run_id="run-2", upto=25, lines=tuple(real[:26])))
    long.store.calls.clear()
    assert long.log.read() == real
    assert calls(long, "get", "index")[0] == key  # and then the one of before
    assert len(calls(long, "get", "index")) == 2


def test_an_index_with_a_gap_is_none(long):
    real = tuple(long.log.read()[:26])
    for lines in (real[1:], real[:5] + real[6:], real[::-1], ()):
        put(long, index.Index.model_construct(run_id="run-1", upto=25, lines=lines))
    long.store.calls.clear()
    assert index.load(long.store, "run-1") is None  # the four that are tried
    assert long.log.read() == truth(long)


def test_foreign_objects_beside_it_are_passed_over_and_stay(long):
    for name in ("readme.txt", "99999999-x.json", "x/00000001-0123456789abcdef.json", "1-0123456789abcdef.json"):
        long.plain.put(f"run-1/index/{name}", b"?")
    assert long.log.read()[29].step == 29
    log = long.log
    for step in range(30, 40):
        log.commit(manifest(step), "writer-1")
    assert len(indexes(long)) == 2 + 4


def test_behind_a_hole_nothing_is_indexed(long, damage):
    """What cannot be read must be seen as such by everybody, above all by who wants to commit."""
    damage["truncated"](long.commit_path(26))
    long.begin(2)
    log = long.log
    for step in range(40, 60):
        log.commit(manifest(step, attempt=2), "writer-2")
    assert max(uptos(long)) < 26
    assert isinstance(long.log.read()[26], Unreadable)


def test_an_entry_that_was_damaged_after_it_was_indexed_is_found_when_it_is_used(long, damage):
    commit = long.log.checkpoints()[-1]
    damage["missing"](long.commit_path(commit.seq))
    assert commit in long.log.checkpoints()
    with pytest.raises(NotFound, match="entry 1 of the commit log is missing"):
        long.log.manifest(commit)


def test_only_the_manifest_that_was_committed_is_given_out(long):
    commit = long.log.checkpoints()[0]
    with pytest.raises(Damaged, match="another manifest than the index says"):
        long.log.manifest(replace(commit, manifest_sha256="0" * 64))
    with pytest.raises(Damaged, match="entry 29 of the commit log is not the checkpoint a001-step-28"):
        long.log.manifest_at(29, "a001-step-28")
    with pytest.raises(Damaged, match="entry 0 of the commit log is not"):
        long.log.manifest_at(0, "a001-step-29")


# --- an index that lies -----------------------------------------------------------------------------------------------


def lie(run, upto: int, **changes: dict[int, object]) -> index.Index:
    """The true lines, but for those that are given."""
    lines = list(truth(run)[: upto + 1])
    for number, line in changes.get("lines", {}).items():
        lines[number] = line
    return index.Index(run_id="run-1", upto=upto, lines=tuple(lines))


def test_one_that_is_ahead_of_the_log_is_not_believed(long):
    real = truth(long)
    ahead = replace(real[29], seq=30, step=30, checkpoint_id="a001-step-30")
    put(long, index.Index(run_id="run-1", upto=30, lines=(*real, ahead)))
    assert long.log.read() == real
    assert long.log.commit(manifest(31), "writer-1").seq == 30  # the true next number, no gap


def test_one_whose_last_line_is_not_the_logs_is_not_believed(long):
    real = truth(long)
    put(long, lie(long, 20, lines={20: replace(real[20], files=7)}))
    assert long.log.read() == real


def test_one_that_hides_a_newer_attempt_lets_no_zombie_commit(long):
    """The lie is in the middle, where nobody looks; the last line is the newer attempt's own work, and true."""
    long.begin(2)
    for step in (50, 51):
        long.log.commit(manifest(step, attempt=2), "writer-2")
    real = truth(long)
    assert isinstance(real[30], AttemptEntry)
    hidden = replace(real[29], seq=30, step=30, checkpoint_id="a001-step-30")
    put(long, lie(long, 32, lines={30: hidden}))
    zombie = CommitLog(long.store, "run-1")
    assert zombie.read()[30] == hidden  # it is lied to
    with pytest.raises(Fenced, match="attempt 2 of run run-1 has begun"):
        zombie.commit(manifest(60), "writer-1")


def test_one_that_knows_the_future_is_not_believed(long):
    """Else it would stand for a number that is written later, and nobody would read the true entry."""
    real = truth(long)
    future = replace(real[29], seq=30, step=30, checkpoint_id="a001-step-30")
    put(long, index.Index.model_construct(run_id="run-1", upto=20, lines=(*real[:20], future, real[20])))
    long.begin(2)
    with pytest.raises(Fenced, match="attempt 2 of run run-1 has begun"):
        CommitLog(long.store, "run-1").commit(manifest(60), "writer-1")


def test_one_that_hides_commits_gives_no_number_twice(long):
    real = truth(long)
    given_up = real[0].model_copy(update={"seq": 5})
    put(long, lie(long, 28, lines={5: given_up}))
    assert 5 not in [commit.step for commit in long.log.checkpoints()]
    assert long.log.commit(manifest(30), "writer-1").seq == 30
    assert truth(long)[:30] == real
