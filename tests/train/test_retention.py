"""What the store keeps: enough, never nothing good, and no litter."""

from __future__ import annotations

import pytest
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.checkpoint.manifest import PrunedEntry
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import prune
from mgpu_train.store import Unavailable


def kept(run) -> list[str]:
    """The checkpoints of which the store has any object."""
    return sorted({stat.key.split("/")[2] for stat in run.plain.list("run-1/checkpoints/")})


def test_the_newest_are_kept(run):
    for step in range(1, 6):
        run.save(step)
    assert prune(run.store, "run-1", 2) == ["a001-step-1", "a001-step-2", "a001-step-3"]
    assert kept(run) == ["a001-step-4", "a001-step-5"]
    assert [entry.step for entry in run.log.checkpoints()] == [5, 4]
    assert newest_verified(run.store, "run-1", deep=True, report=pytest.fail).step == 5
    assert prune(run.store, "run-1", 2) == []


def test_fewer_than_wanted_are_all_kept(run):
    run.save(1)
    before = len(run.log.entries())
    assert prune(run.store, "run-1", 3) == []
    assert len(run.log.entries()) == before
    with pytest.raises(ValueError, match="at least one"):
        prune(run.store, "run-1", 0)


@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_the_last_good_one_stays_whatever_its_age(run, damage, how):
    """F29: the newest three are damaged; the fourth is what resume needs."""
    entries = [run.save(step) for step in range(1, 7)]
    for entry in entries[3:]:
        damage[how](run.path(entry, 1))
    assert prune(run.store, "run-1", 3) == ["a001-step-1", "a001-step-2"]
    said: list[str] = []
    assert newest_verified(run.store, "run-1", deep=True, report=said.append) == entries[2]
    assert len(said) == 3


def test_with_every_byte_read_it_stays_too(run, damage):
    entries = [run.save(step) for step in range(1, 5)]
    for entry in entries[1:]:
        damage["flipped"](run.path(entry, 1))
    assert prune(run.store, "run-1", 1, deep=True) == ["a001-step-2", "a001-step-3"]
    assert kept(run) == ["a001-step-1", "a001-step-4"]


def test_when_nothing_is_good_nothing_goes(run, damage):
    for step in (1, 2, 3):
        damage["missing"](run.path(run.save(step)))
    assert prune(run.store, "run-1", 1) == []
    assert len(kept(run)) == 3


def test_the_log_says_it_before_the_first_file_goes(run):
    for step in (1, 2):
        run.save(step)
    order = []
    run.store.before = lambda operation, key: order.append((operation, key))
    prune(run.store, "run-1", 1)
    doing = [operation for operation, _ in order if operation in ("put_if_absent", "delete")]
    assert doing[0] == "put_if_absent"
    deleted = [key for operation, key in order if operation == "delete"]
    assert {key.rpartition("/")[2] for key in deleted[:2]} == {"node-0.json", "node-1.json"}
    pruned = run.log.entries()[-1]
    assert isinstance(pruned, PrunedEntry)
    assert pruned.checkpoint_ids == ("a001-step-1",)


def test_an_interrupted_prune_alarms_nobody_and_is_finished_later(run):
    for step in (1, 2, 3):
        run.save(step)
    deleted = []

    def stop(operation, key):
        if operation == "delete":
            deleted.append(key)
            if len(deleted) > 3:
                raise Unavailable("cut")

    run.store.before = stop
    with pytest.raises(Unavailable):
        prune(run.store, "run-1", 1)
    run.store.before = lambda *_: None
    assert [entry.step for entry in run.log.checkpoints()] == [3]
    assert newest_verified(run.store, "run-1", report=pytest.fail).step == 3
    assert len(kept(run)) > 1
    before = len(run.log.entries())
    assert prune(run.store, "run-1", 1)
    assert kept(run) == ["a001-step-3"]
    assert len(run.log.entries()) == before  # it was said already


def test_what_can_never_be_committed_goes(run):
    run.upload(0, 5)  # passed over: its other part never came
    run.save(10)
    run.upload(0, 20)
    run.begin(2)
    run.upload(0, 15, attempt=2)
    run.save(30, attempt=2)
    run.upload(0, 40, attempt=2)  # on its way
    assert prune(run.store, "run-1", 5) == ["a001-step-20", "a001-step-5", "a002-step-15"]
    assert kept(run) == ["a001-step-10", "a002-step-30", "a002-step-40"]
    run.upload(1, 40, attempt=2)
    assert run.commit(40, attempt=2).step == 40


def test_unfinished_writes_of_the_dead_are_ended(run):
    run.save(10)
    run.begin(2)
    for name in ("a001-step-11", "a002-step-12"):
        path = run.root / "run-1/checkpoints" / name / "node-0" / ".aside-0123456789ab-x"
        path.parent.mkdir(parents=True)
        path.touch()
    prune(run.store, "run-1", 1)
    assert [path.parts[-3] for path in run.root.rglob(".aside-*")] == ["a002-step-12"]


def test_files_whose_commit_cannot_be_read_are_left_alone(run, damage):
    entry = run.save(10)
    run.begin(2)
    run.save(20, attempt=2)
    damage["truncated"](run.commit_path(entry.seq))
    assert prune(run.store, "run-1", 1) == []
    assert "a001-step-10" in kept(run)


def test_foreign_objects_are_left_alone(run):
    for step in (1, 2):
        run.save(step)
    for key in ("run-1/checkpoints/notes.txt", "run-1/checkpoints/mine/x", "run-2/checkpoints/a001-step-1/x", "other"):
        run.plain.put(key, b"mine")
    prune(run.store, "run-1", 1)
    assert kept(run) == ["a001-step-2", "mine", "notes.txt"]
    assert run.plain.get("run-2/checkpoints/a001-step-1/x", 10) == b"mine"


def test_a_run_that_never_began_has_nothing_to_prune(run):
    run.plain.put("run-9/checkpoints/a001-step-1/node-0/x", b"")
    assert prune(run.store, "run-9", 1) == []
    assert CommitLog(run.plain, "run-9").entries() == []
