"""What the store keeps: enough, never nothing good, and no litter."""

from __future__ import annotations

import pytest
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.manifest import PrunedEntry
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import PrunePlan, plan_prune, prune
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.config import Retention
from mgpu_train.store import Denied, Store, Unavailable


def prune_to(store: Store, run_id: str, keep_last: int, *, deep: bool = False) -> list[str]:
    return prune(store, run_id, plan_prune(store, run_id, Retention(keep_last=keep_last), deep=deep))


def kept(run) -> list[str]:
    """The checkpoints of which the store has any object."""
    return sorted({stat.key.split("/")[2] for stat in run.plain.list("run-1/checkpoints/")})


def test_the_newest_are_kept(run):
    for step in range(1, 6):
        run.save(step)
    assert prune_to(run.store, "run-1", 2) == ["a001-step-1", "a001-step-2", "a001-step-3"]
    assert kept(run) == ["a001-step-4", "a001-step-5"]
    assert [entry.step for entry in run.log.checkpoints()] == [5, 4]
    assert newest_verified(run.store, "run-1", deep=True, report=pytest.fail).step == 5
    assert prune_to(run.store, "run-1", 2) == []


def test_fewer_than_wanted_are_all_kept(run):
    run.save(1)
    before = len(run.log.entries())
    assert prune_to(run.store, "run-1", 3) == []
    assert len(run.log.entries()) == before
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        prune_to(run.store, "run-1", 0)


@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_the_last_good_one_stays_whatever_its_age(run, damage, how):
    """F29: the newest three are damaged; the fourth is what resume needs."""
    entries = [run.save(step) for step in range(1, 7)]
    for entry in entries[3:]:
        damage[how](run.path(entry, 1))
    assert prune_to(run.store, "run-1", 3) == ["a001-step-1", "a001-step-2"]
    said: list[str] = []
    assert newest_verified(run.store, "run-1", deep=True, report=said.append) == entries[2]
    assert len(said) == 3


def test_with_every_byte_read_it_stays_too(run, damage):
    entries = [run.save(step) for step in range(1, 5)]
    for entry in entries[1:]:
        damage["flipped"](run.path(entry, 1))
    assert prune_to(run.store, "run-1", 1, deep=True) == ["a001-step-2", "a001-step-3"]
    assert kept(run) == ["a001-step-1", "a001-step-4"]


def test_when_nothing_is_good_nothing_goes(run, damage):
    for step in (1, 2, 3):
        damage["missing"](run.path(run.save(step)))
    assert prune_to(run.store, "run-1", 1) == []
    assert len(kept(run)) == 3


def test_the_log_says_it_before_the_first_file_goes(run):
    for step in (1, 2):
        run.save(step)
    order = []
    run.store.before = lambda operation, key: order.append((operation, key))
    prune_to(run.store, "run-1", 1)
    doing = [each for each in order if each[0] in ("put_if_absent", "delete", "may_delete")]
    assert doing.pop(0) == ("may_delete", "run-1/checkpoints/a001-step-1/")
    assert doing[0][0] == "put_if_absent"
    deleted = [key for operation, key in doing if operation == "delete"]
    assert {key.rpartition("/")[2] for key in deleted[:2]} == {"node-0.json", "node-1.json"}
    pruned = run.log.entries()[-1]
    assert isinstance(pruned, PrunedEntry)
    assert pruned.checkpoint_ids == ("a001-step-1",)


def test_who_may_not_delete_gives_nothing_up(run):
    for step in (1, 2, 3):
        run.save(step)

    def refuse(operation, key):
        if operation == "may_delete" and "step-2" in key:
            raise Denied(f"cannot delete {key}: not allowed")

    run.store.before = refuse
    with pytest.raises(Denied):
        prune_to(run.store, "run-1", 1)
    assert [entry.step for entry in run.log.checkpoints()] == [3, 2, 1]


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
        prune_to(run.store, "run-1", 1)
    run.store.before = lambda *_: None
    assert [entry.step for entry in run.log.checkpoints()] == [3]
    assert newest_verified(run.store, "run-1", report=pytest.fail).step == 3
    assert len(kept(run)) > 1
    before = len(run.log.entries())
    assert prune_to(run.store, "run-1", 1)
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
    assert prune_to(run.store, "run-1", 5) == ["a001-step-20", "a001-step-5", "a002-step-15"]
    assert kept(run) == ["a001-step-10", "a002-step-30", "a002-step-40"]
    run.upload(1, 40, attempt=2)
    assert run.commit(40, attempt=2).step == 40


def test_what_the_last_attempt_left_goes_once_it_has_written_its_end(run):
    run.save(10)
    run.upload(0, 20)
    aside = run.root / "run-1/checkpoints/a001-step-20/node-1/.aside-0123456789ab-x"
    aside.parent.mkdir(parents=True)
    aside.touch()
    assert prune_to(run.store, "run-1", 1) == []
    run.log.end(1, "writer-1", succeeded=False, fault="infrastructure")
    assert prune_to(run.store, "run-1", 1) == ["a001-step-20"]
    assert (kept(run), aside.exists()) == (["a001-step-10"], False)


def test_unfinished_writes_of_the_dead_are_ended(run):
    run.save(10)
    run.begin(2)
    for name in ("a001-step-11", "a002-step-12"):
        path = run.root / "run-1/checkpoints" / name / "node-0" / ".aside-0123456789ab-x"
        path.parent.mkdir(parents=True)
        path.touch()
    prune_to(run.store, "run-1", 1)
    assert [path.parts[-3] for path in run.root.rglob(".aside-*")] == ["a002-step-12"]


def test_files_whose_commit_cannot_be_read_are_left_alone(run, damage):
    entry = run.save(10)
    run.begin(2)
    run.save(20, attempt=2)
    damage["truncated"](run.commit_path(entry.seq))
    assert prune_to(run.store, "run-1", 1) == []
    assert "a001-step-10" in kept(run)


def test_foreign_objects_are_left_alone(run):
    for step in (1, 2):
        run.save(step)
    for key in ("run-1/checkpoints/notes.txt", "run-1/checkpoints/mine/x", "run-2/checkpoints/a001-step-1/x", "other"):
        run.plain.put(key, b"mine")
    prune_to(run.store, "run-1", 1)
    assert kept(run) == ["a001-step-2", "mine", "notes.txt"]
    assert run.plain.get("run-2/checkpoints/a001-step-1/x", 10) == b"mine"


def test_a_run_that_never_began_has_nothing_to_prune(run):
    run.plain.put("run-9/checkpoints/a001-step-1/node-0/x", b"")
    assert prune_to(run.store, "run-9", 1) == []
    assert CommitLog(run.plain, "run-9").entries() == []


# --- the plan ---------------------------------------------------------------------------------------------------------


def commits(run, *at: float, losses: dict[int, object] | None = None) -> list[str]:
    """Commits of steps 1, 2, 3, ... at these hours, with these validation losses; returns their ids."""
    made = []
    for step, hour in enumerate(at, 1):
        folder = run.folder(0, step)
        name, meta = f"a001-step-{step}", {}
        if losses is not None and step in losses:
            meta = {"validation_loss": losses[step]}
        upload_part(run.store, "run-1", name, folder=folder, attempt=1, node=0, step=step, world_size=1, meta=meta)
        commit_when_complete(
            run.store, "run-1", name, writers=[0], nodes=1, writer="writer-1", clock=lambda hour=hour: hour * 3600.0
        )
        made.append(name)
    return made


def plan(run, keep_last: int = 1, **policy) -> PrunePlan:
    return plan_prune(run.store, "run-1", Retention(keep_last=keep_last, **policy))


def steps(names) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in names]


def test_a_plan_says_what_and_why_and_touches_nothing(run):
    made = [run.save(step) for step in range(1, 5)]
    before = {stat.key for stat in run.plain.list("")}
    found = plan(run, 2)
    assert found.keep == {"a001-step-4": "one of the newest 2", "a001-step-3": "one of the newest 2"}
    assert found.drop == ("a001-step-1", "a001-step-2")
    assert found.bytes == made[0].bytes + made[1].bytes > 0
    assert found.damaged == {}
    assert {stat.key for stat in run.plain.list("")} == before
    prune(run.store, "run-1", found)
    assert kept(run) == ["a001-step-3", "a001-step-4"]
    assert plan(run, 2) == PrunePlan(keep=found.keep, drop=(), bytes=0, damaged={})


def test_one_every_so_many_hours(run):
    commits(run, 0, 1, 5.9, 6, 7, 13, 18.9, 19, 19.5)
    found = plan(run, keep_every_hours=6)
    assert steps(found.keep) == [9, 8, 6, 4, 1]
    assert found.keep["a001-step-4"] == "one every 6 hours"
    assert steps(found.drop) == [2, 3, 5, 7]


def test_what_is_kept_by_the_hour_stays_kept_as_time_goes_on(run):
    """Pruned after each commit, or once at the end: the same ones are there."""
    hours = [0.7 * number for number in range(20)]
    made: list[str] = []
    for number in range(1, len(hours) + 1):
        commits(run, *hours[:number])
        prune(run.store, "run-1", plan(run, 2, keep_every_hours=2))
    made = steps(commit.checkpoint_id for commit in run.log.checkpoints())
    assert made == [20, 19, 16, 13, 10, 7, 4, 1]


def test_a_clock_that_jumps_costs_no_checkpoint(run):
    commits(run, 100, 101, 999999, 103, 104, 107)  # the third's clock was wrong
    assert steps(plan(run, keep_every_hours=4).keep) == [6, 4, 3, 1]


@pytest.mark.parametrize(("mode", "best"), [("min", [4, 2]), ("max", [5, 3])])
def test_the_best_stay(run, mode, best):
    commits(run, *range(6), losses={1: 2.5, 2: 2.0, 3: 3.5, 4: 1, 5: 3.75})
    found = plan(run, keep_best=2, best_mode=mode)
    assert steps(found.keep) == sorted([6, *best], reverse=True)
    assert found.keep["a001-step-4" if mode == "min" else "a001-step-3"].startswith("one of the best 2: ")


def test_only_those_that_have_the_metric_as_a_number_are_compared(run):
    commits(run, *range(5), losses={2: "1.0", 3: 9.0})
    assert steps(plan(run, keep_best=3).keep) == [5, 3]
    assert steps(plan(run, keep_best=3, best_metric="accuracy").keep) == [5]


def test_of_equal_ones_the_newer_is_the_best(run):
    commits(run, *range(5), losses=dict.fromkeys(range(1, 5), 1.0))
    assert steps(plan(run, keep_best=2).keep) == [5, 4, 3]


def test_what_was_never_committed_or_was_given_up_is_not_the_best(run):
    commits(run, *range(4), losses={1: 0.1, 2: 0.2, 3: 0.3})
    upload_part(
        run.store, "run-1", "a001-step-9", folder=run.folder(0, 9), attempt=1, node=0, step=9, world_size=1,
        meta={"validation_loss": 0.01},
    )  # fmt: skip
    run.log.give_up(["a001-step-1"], "somebody")
    assert steps(plan(run, keep_best=1).keep) == [4, 2]


def test_the_rules_add_up_and_the_first_reason_is_given(run):
    commits(run, *range(8), losses={1: 0.5, 3: 0.4, 8: 0.1})
    found = plan(run, 2, keep_every_hours=4, keep_best=2)
    assert {step: found.keep[f"a001-step-{step}"].split(":")[0] for step in steps(found.keep)} == {
        8: "one of the newest 2",
        7: "one of the newest 2",
        5: "one every 4 hours",
        3: "one of the best 2",
        1: "one every 4 hours",
    }


def test_the_alarm_names_the_damaged_and_the_last_good_one_stays(run, damage):
    """F29: by any rule; what is the best, or a round hour's, may be damaged as well."""
    entries = [run.save(step) for step in range(1, 7)]
    for entry in entries[3:]:
        damage["missing"](run.path(entry, 1))
    found = plan(run, 1)
    assert found.keep == {"a001-step-6": "the newest", "a001-step-3": "the newest that verifies"}
    assert steps(found.damaged) == [6, 5, 4]
    assert all("is missing" in problem for problem in found.damaged.values())


def test_where_nothing_verifies_the_plan_drops_nothing_and_says_so(run, damage):
    for step in (1, 2, 3):
        damage["missing"](run.path(run.save(step), 1))
    found = plan(run, 1)
    assert (found.drop, found.bytes, len(found.damaged)) == ((), 0, 3)
    assert set(found.keep.values()) == {"none of them verifies"}


def test_where_nothing_would_go_nothing_is_asked_of_the_store(run):
    run.save(1)
    run.store.calls.clear()
    assert plan(run, 1).drop == ()
    assert "stat" not in {operation for operation, _ in run.store.calls}


def test_an_old_plan_gives_up_nothing_twice(run):
    for step in range(1, 5):
        run.save(step)
    found = plan(run, 1)
    assert prune(run.store, "run-1", found)
    before = len(run.log.entries())
    assert prune(run.store, "run-1", found) == []
    assert len(run.log.entries()) == before


def test_a_commit_whose_manifest_cannot_be_read_is_not_the_last_good_one(run, damage):
    entries = [run.save(step) for step in (1, 2, 3)]
    log = run.log
    log.read()  # as the agent does, which keeps what it has read
    damage["truncated"](run.commit_path(entries[2].seq))
    found = plan_prune(run.store, "run-1", Retention(keep_last=1), log=log)
    assert steps(found.keep) == [3, 2]
    assert steps(found.damaged) == [3]


@pytest.mark.parametrize("hours", [0, -1, float("nan")])
def test_rules_that_keep_nothing_are_refused(hours):
    with pytest.raises(ValueError, match="greater than 0"):
        Retention(keep_last=1, keep_every_hours=hours)
