"""One order for attempts and commits, whoever races, whatever answers get lost, whoever wakes up too late."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from mgpu_train.checkpoint.log import commit_log
from mgpu_train.checkpoint.log.commit_log import CommitLog, Fenced, StepBack
from mgpu_train.checkpoint.log.lines import Commit, Unreadable, in_short, standing
from mgpu_train.checkpoint.log.manifest import (
    AttemptEntry,
    CheckpointEntry,
    FileEntry,
    Manifest,
    PrunedEntry,
    SupervisorEntry,
    checkpoint_id,
    to_bytes,
)
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import plan_prune, prune
from mgpu_train.config import Retention
from mgpu_train.store import Ambiguous, Damaged, StoreError, Unavailable


def manifest(step: int, attempt: int = 1, run_id: str = "run-1", crc: str = "0" * 16) -> Manifest:
    return Manifest(
        run_id=run_id,
        checkpoint_id=checkpoint_id(attempt, step),
        attempt=attempt,
        step=step,
        nodes=1,
        world_size=1,
        writers=(0,),
        files=(FileEntry(path="f", size=1, crc64nvme=crc, node=0),),
        created_at=1.0,
    )


def kinds(log: CommitLog) -> list[tuple[str, int]]:
    return [(entry.kind, entry.attempt) for entry in log.entries()]


def test_what_nobody_could_read_is_not_written(run, monkeypatch):
    """It would look like damage, and damage fences whoever comes after."""
    log = run.log
    log.commit(manifest(1), "writer-1")
    with monkeypatch.context() as patch:
        patch.setattr(commit_log, "MAX_DOCUMENT_BYTES", 200)
        with pytest.raises(StoreError, match=r"list of files is too long\. Write fewer"):
            log.commit(manifest(2), "writer-1")
    assert log.commit(manifest(3), "writer-1").seq == 2


def test_an_empty_log(tmp_path, run):
    log = CommitLog(run.store, "nobody")
    assert log.read() == log.checkpoints() == []
    assert log.newest_attempt() == 0


def test_entries_are_numbered_without_gap(run):
    log = run.log
    first = log.commit(manifest(1), "writer-1")
    second = log.commit(manifest(2), "writer-1")
    assert [entry.seq for entry in log.entries()] == [0, 1, 2]
    assert log.checkpoints() == [second, first]
    assert log.newest_attempt() == 1
    assert CommitLog(run.store, "run-1").checkpoints() == [second, first]
    assert run.commit_path(2).is_file()


def test_attempts_only_grow(run):
    log = run.log
    log.begin_attempt(3, "other")
    for attempt in (1, 2, 3):
        with pytest.raises(Fenced, match="attempt 3 of run run-1 has begun"):
            log.begin_attempt(attempt, "mine")
    assert kinds(log) == [("attempt", 1), ("attempt", 3)]


def test_to_begin_again_with_the_same_writer_changes_nothing(run):
    first = run.log.begin_attempt(2, "mine")
    assert run.log.begin_attempt(2, "mine") == first
    assert len(run.log.entries()) == 2


def test_to_commit_again_changes_nothing(run):
    first = run.log.commit(manifest(1), "writer-1")
    assert run.log.commit(manifest(1), "writer-1") == first
    run.log.commit(manifest(2), "writer-1")
    assert run.log.commit(manifest(1), "writer-1") == first
    with pytest.raises(Damaged, match="with other files"):
        run.log.commit(manifest(1, crc="1" * 16), "writer-1")
    assert len(run.log.entries()) == 3


def test_a_step_never_goes_back(run):
    """I5"""
    run.log.commit(manifest(10), "writer-1")
    with pytest.raises(StepBack, match="step 9 cannot be committed: attempt 1 is at step 10"):
        run.log.commit(manifest(9), "writer-1")
    run.begin(2)
    run.log.commit(manifest(5, attempt=2), "writer-2")  # it started from an older one: that was said loudly
    assert [entry.step for entry in run.log.checkpoints()] == [5, 10]


def test_a_manifest_of_another_run_is_refused(run):
    with pytest.raises(StoreError, match="does not belong"):
        run.log.commit(manifest(1, run_id="run-2"), "writer-1")


# --- F31: the zombie --------------------------------------------------------------------------------------------------


def test_a_zombie_is_fenced(run):
    zombie = run.log
    zombie.commit(manifest(1), "writer-1")
    run.begin(2)
    with pytest.raises(Fenced, match="attempt 2 of run run-1 has begun; attempt 1 is over"):
        zombie.commit(manifest(2), "writer-1")
    with pytest.raises(Fenced):
        zombie.commit(manifest(1), "writer-1")  # not even what is committed already
    assert [entry.step for entry in run.log.checkpoints()] == [1]


def test_a_zombie_that_slept_between_its_look_and_its_write_is_fenced(run):
    """SIGSTOP at the worst moment: the log was read, the entry is ready; the new attempt begins, then SIGCONT."""

    def new_attempt_begins(operation, _key):
        if operation == "put_if_absent":
            run.store.before = lambda *_: None
            CommitLog(run.plain, "run-1").begin_attempt(2, "writer-2")

    run.store.before = new_attempt_begins
    with pytest.raises(Fenced, match="attempt 1 is over"):
        run.log.commit(manifest(1), "writer-1")
    assert kinds(run.log) == [("attempt", 1), ("attempt", 2)]


def test_a_writer_whose_attempt_never_began_is_fenced(run):
    with pytest.raises(Fenced, match="did not begin with this writer's token"):
        run.log.commit(manifest(1), "another supervisor's")
    with pytest.raises(Fenced):
        run.log.commit(manifest(1, attempt=2), "writer-1")


def test_a_stale_commit_that_got_in_all_the_same_does_not_count(run):
    stale = manifest(50)
    run.begin(2)
    entry = CheckpointEntry(seq=2, attempt=1, writer="writer-1", at=1.0, manifest=stale, manifest_sha256=stale.sha256())
    run.plain.put("run-1/commits/00000002.json", to_bytes(entry))
    assert run.log.checkpoints() == []
    assert standing([in_short(entry)]) == [in_short(entry)]


# --- who supervises ---------------------------------------------------------------------------------------------------


def take(run, who: str, **changes) -> SupervisorEntry:
    return run.log.take_over(who, **{"host": "laptop", "pid": 7, **changes})


def test_nobody_supervises_a_run_of_which_nobody_has_said_so(run):
    assert run.log.supervisor() is None
    assert run.log.begin_attempt(2, "writer-2", supervisor="anybody").attempt == 2


def test_the_newest_to_take_over_supervises(run):
    first = take(run, "first")
    assert (first.host, first.pid, first.attempt) == ("laptop", 7, 1)
    assert run.log.supervisor() == take(run, "first") == first  # again: nothing new
    second = take(run, "second", host="x" * 1000, pid=8)
    assert len(second.host) == 255
    assert run.log.supervisor() == second
    third = take(run, "first")  # an earlier one may come back, and says so anew
    assert [entry.seq for entry in run.log.entries()] == [0, first.seq, second.seq, third.seq]


def test_a_supervisor_may_be_there_before_any_attempt(tmp_path, run):
    log = CommitLog(run.store, "new")
    assert log.take_over("first", host="laptop", pid=7).attempt == 0
    assert log.newest_attempt() == 0
    assert log.give_up(["a001-step-1"], "pruner").attempt == 1
    assert CommitLog(run.store, "new").read() == log.read()
    other = CommitLog(run.store, "newer")
    other.take_over("first", host="laptop", pid=7)
    assert other.begin_attempt(1, "writer-1", supervisor="first").seq == 1


def test_who_was_relieved_begins_no_attempt(run):
    take(run, "first")
    run.log.begin_attempt(2, "writer-2", supervisor="first")
    take(run, "second", pid=8, host="desk")
    with pytest.raises(Fenced, match="run run-1 is supervised by process 8 on desk now"):
        run.log.begin_attempt(3, "writer-3", supervisor="first")
    with pytest.raises(Fenced):
        run.log.begin_attempt(2, "writer-2", supervisor="first")  # not even the one that it has begun
    assert run.log.begin_attempt(3, "writer-3", supervisor="second").attempt == 3
    assert kinds(run.log)[-1] == ("attempt", 3)


def test_a_supervisor_that_slept_between_its_look_and_its_write_begins_nothing(run):
    """SIGSTOP at the worst moment: the log was read, the entry is ready; another takes over, then SIGCONT."""
    take(run, "first")

    def another_takes_over(operation, _key):
        if operation == "put_if_absent":
            run.store.before = lambda *_: None
            CommitLog(run.plain, "run-1").take_over("second", host="desk", pid=8)

    run.store.before = another_takes_over
    with pytest.raises(Fenced, match="process 8 on desk"):
        run.log.begin_attempt(2, "writer-2", supervisor="first")
    assert kinds(run.log) == [("attempt", 1), ("supervisor", 1), ("supervisor", 1)]


@pytest.mark.parametrize("how", ["missing", "truncated"])
def test_a_takeover_that_one_of_two_cannot_read_leaves_one_supervisor(run, damage, how):
    """As by another version of mgpu, or a disk: who goes on says so anew, and the other one begins nothing."""
    take(run, "first")
    log = run.log
    second = log.take_over("second", host="desk", pid=8)  # it knows its own entry, whatever becomes of it
    log.give_up(["a001-step-1"], "pruner")  # so that there is a number behind it
    damage[how](run.commit_path(second.seq))
    assert run.log.begin_attempt(2, "writer-2", supervisor="first").attempt == 2
    assert run.log.begin_attempt(2, "writer-2", supervisor="first").attempt == 2
    assert kinds(run.log)[-2:] == [("supervisor", 1), ("attempt", 2)]
    with pytest.raises(Fenced, match="process 7 on laptop"):
        log.begin_attempt(3, "writer-3", supervisor="second")


def test_a_takeover_touches_neither_the_attempt_that_runs_nor_its_checkpoints(run):
    run.save(5)
    take(run, "first")
    run.save(10)
    take(run, "second")
    assert run.save(15).step == 15
    assert [entry.step for entry in run.log.checkpoints()] == [15, 10, 5]
    assert [entry.step for entry in standing(run.log.read())] == [15, 10, 5]
    assert newest_verified(run.store, "run-1", report=pytest.fail).step == 15
    gone = prune(run.store, "run-1", plan_prune(run.store, "run-1", Retention(keep_last=1)))
    assert gone == ["a001-step-10", "a001-step-5"]
    take(run, "third")
    run.log.end(1, "writer-1", succeeded=True)
    assert plan_prune(run.store, "run-1", Retention(keep_last=1)).drop == ()
    assert newest_verified(run.store, "run-1", deep=True, report=pytest.fail).step == 15
    assert run.log.newest_attempt() == 1


# --- how an attempt ended ---------------------------------------------------------------------------------------------


def test_an_attempt_says_its_end_once(run):
    assert run.log.ended(1) is None
    end = run.log.end(1, "writer-1", succeeded=False, fault="provider", reason="taken")
    assert run.log.end(1, "writer-1", succeeded=True) == run.log.ended(1) == end  # the first word stands
    assert (end.succeeded, end.fault, end.reason) == (False, "provider", "taken")
    run.begin(2)
    assert run.log.ended(2) is None
    assert run.log.ended(1) == end
    assert run.log.end(2, "writer-2", succeeded=True).fault is None


def test_an_attempt_that_is_over_has_no_say(run):
    run.begin(2)
    with pytest.raises(Fenced, match="attempt 2 of run run-1 has begun"):
        run.log.end(1, "writer-1", succeeded=True)
    with pytest.raises(Fenced, match="did not begin with this writer's token"):
        run.log.end(2, "writer-1", succeeded=True)
    assert kinds(run.log) == [("attempt", 1), ("attempt", 2)]


def test_after_its_end_an_attempt_commits_nothing_and_the_next_one_begins(run):
    """Whoever prunes may have removed what was not committed."""
    stands = run.save(5)
    run.log.end(1, "writer-1", succeeded=False, fault="infrastructure")
    with pytest.raises(Fenced, match="attempt 1 of run run-1 has written its end"):
        run.save(6)
    assert run.commit(5) == stands, "whose answer was lost"
    run.begin(2)
    assert run.save(7, attempt=2).step == 7
    assert [entry.step for entry in run.log.checkpoints()] == [7, 5]


# --- races ------------------------------------------------------------------------------------------------------------


def race(count: int, work) -> list:
    gate = threading.Barrier(count)

    def one(number: int):
        gate.wait()
        try:
            return work(number)
        except (Fenced, StepBack) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_of_twenty_supervisors_one_begins_the_attempt(run):
    results = race(20, lambda n: CommitLog(run.plain, "run-1").begin_attempt(2, f"supervisor-{n}"))
    assert sum(isinstance(result, AttemptEntry) for result in results) == 1
    assert kinds(run.log) == [("attempt", 1), ("attempt", 2)]


def test_twenty_writers_get_twenty_numbers(run):
    results = race(20, lambda n: CommitLog(run.plain, "run-1").give_up([f"a001-step-{n}"], f"pruner-{n}"))
    assert sorted(entry.seq for entry in results) == list(range(1, 21))
    for entry in results:  # each number holds what its winner wrote
        assert run.log.entries()[entry.seq] == entry


def test_of_racing_commits_those_count_that_go_forward(run):
    results = race(20, lambda n: CommitLog(run.plain, "run-1").commit(manifest(n), "writer-1"))
    won = [result for result in results if isinstance(result, Commit)]
    steps = [entry.step for entry in run.log.entries() if isinstance(entry, Commit)]
    assert steps == sorted(steps)
    assert sorted(entry.step for entry in won) == steps
    assert 19 in steps


def test_of_an_old_and_a_new_attempt_the_old_one_stops(run):
    def work(number: int):
        if number == 0:
            return CommitLog(run.plain, "run-1").begin_attempt(2, "writer-2")
        return CommitLog(run.plain, "run-1").commit(manifest(number), "writer-1")

    race(10, work)
    after = [entry for entry in run.log.entries() if entry.seq > run.log.begin_attempt(2, "writer-2").seq]
    assert after == []


def test_of_twenty_that_take_over_at_once_the_last_one_supervises_and_alone_begins(run):
    def work(number: int):
        log = CommitLog(run.plain, "run-1")
        log.take_over(f"supervisor-{number}", host="laptop", pid=number + 1)
        return log.begin_attempt(2, f"writer-{number}", supervisor=f"supervisor-{number}")

    results = race(20, work)
    log = run.log.entries()
    took = [entry for entry in log if isinstance(entry, SupervisorEntry)]
    assert len(took) == 20  # one order, seen by everybody
    begun = [entry for entry in log if isinstance(entry, AttemptEntry) and entry.attempt == 2]
    assert [result for result in results if not isinstance(result, Fenced)] == begun
    assert len(begun) <= 1
    for entry in begun:  # by the one that supervised when it wrote
        before = [each for each in took if each.seq < entry.seq]
        assert before[-1].writer.removeprefix("supervisor-") == entry.writer.removeprefix("writer-")
    # whoever supervises now can go on
    supervisor = run.log.supervisor().writer
    assert run.log.begin_attempt(3, "writer-x", supervisor=supervisor).attempt == 3


@pytest.mark.drawn("seeds of races", "train/mgpu_train/checkpoint")
@pytest.mark.parametrize("seed", range(10))
def test_a_zombie_and_its_successor_never_both_begin(run, seed):
    """The zombie's twenty threads begin attempt 2 while another takes over and begins it as well."""
    take(run, "zombie")
    late = random.Random(seed).randrange(20)

    def work(number: int):
        log = CommitLog(run.plain, "run-1")
        if number != late:
            return log.begin_attempt(2, f"zombie-{number}", supervisor="zombie")
        log.take_over("successor", host="desk", pid=8)
        return log.begin_attempt(2, "successor", supervisor="successor")

    results = race(20, work)
    begun = [result for result in results if isinstance(result, AttemptEntry)]
    assert len(begun) == 1  # of all, also where the zombie was first: its successor then knows of its attempt
    log = run.log.entries()
    assert [entry for entry in log if isinstance(entry, AttemptEntry)][1:] == begun
    taken = next(entry.seq for entry in log if entry.kind == "supervisor" and entry.writer == "successor")
    assert all(entry.seq < taken or entry.writer == "successor" for entry in begun)
    with pytest.raises(Fenced):
        run.log.begin_attempt(3, "zombie", supervisor="zombie")


# --- F30: answers that get lost ---------------------------------------------------------------------------------------


def done_but_refused(run):
    """The create is done, its answer lost, its repetition refused: what S3 clients make of it."""
    plain, inner = run.plain, run.store.inner

    class Store(type(inner)):
        def put_if_absent(self, key, data):
            plain.put_if_absent(key, data)
            return plain.put_if_absent(key, data)

    run.store.inner = Store(run.root)


def test_a_412_is_no_proof_of_losing(run):
    done_but_refused(run)
    assert run.log.commit(manifest(1), "writer-1").seq == 1
    assert run.log.begin_attempt(2, "writer-2").seq == 2
    assert take(run, "first").seq == 3
    assert run.log.begin_attempt(3, "writer-3", supervisor="first").seq == 4
    assert run.log.end(3, "writer-3", succeeded=True).seq == 5
    assert len(run.log.entries()) == 6


@pytest.mark.parametrize("executed", [True, False])
def test_a_lost_answer_is_read_back(run, executed):
    lost = []

    def lose(operation, key):
        if operation == "put_if_absent" and len(lost) < 3:
            lost.append(key)
            raise Ambiguous("lost")

    setattr(run.store, "after" if executed else "before", lose)
    assert run.log.commit(manifest(1), "writer-1").seq == 1
    assert len(run.log.entries()) == 2
    assert len(lost) == (1 if executed else 3)


WRITES = [
    lambda log: log.take_over("first", host="laptop", pid=7),
    lambda log: log.begin_attempt(2, "writer-2", supervisor="first"),
    lambda log: log.end(1, "writer-1", succeeded=False, fault="user", reason="its own"),
]


def give_up(log: CommitLog) -> PrunedEntry:
    return log.give_up(["a001-step-0"], "pruner")


@pytest.mark.parametrize("executed", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_lost_answer_writes_nothing_twice(run, executed, write):
    lost = []

    def lose(operation, key):
        if operation == "put_if_absent" and len(lost) < 3:
            lost.append(key)
            raise Ambiguous("lost")

    setattr(run.store, "after" if executed else "before", lose)
    entry = write(run.log)
    assert run.log.entries()[1:] == [entry]
    assert write(run.log) == entry  # a caller that gave up asks again
    assert len(run.log.entries()) == 2


def test_many_commits_with_half_of_the_answers_lost(run):
    dice = random.Random(30)

    def lose(operation, _key):
        if operation == "put_if_absent" and dice.random() < 0.5:
            raise Ambiguous("lost")

    run.store.after = lose
    for step in range(40):
        run.log.commit(manifest(step), "writer-1")
    assert [entry.step for entry in run.log.checkpoints()] == list(range(39, -1, -1))


def test_a_store_that_never_answers_clearly_ends_the_try(run):
    def lose(operation, _key):
        if operation == "put_if_absent":
            raise Ambiguous("lost")

    run.store.before = lose
    with pytest.raises(Unavailable, match="no clear answer"):
        run.log.commit(manifest(1), "writer-1")
    with pytest.raises(Unavailable, match="no clear answer"):
        run.log.take_over("first", host="laptop", pid=7)
    run.store.before = lambda *_: None
    assert run.log.commit(manifest(1), "writer-1").seq == 1


@pytest.mark.parametrize("write", [*WRITES, lambda log: log.commit(manifest(1), "writer-1"), give_up])
def test_whoever_loses_every_number_to_others_gives_up(run, monkeypatch, write):
    def other_first(operation, _key):
        if operation == "put_if_absent":
            give_up(CommitLog(run.plain, "run-1"))

    monkeypatch.setattr(commit_log, "_TRIES", 3)
    run.store.before = other_first
    with pytest.raises(Unavailable, match=r"log of run run-1 is too busy: 3 tries in vain\. Try again later"):
        write(run.log)
    assert [type(entry) for entry in run.log.entries()] == [AttemptEntry, *3 * [PrunedEntry]]


def test_the_loser_of_a_number_that_another_took_goes_on(run):
    """The other's entry stands under the number: the answer 'it exists' is true this time."""

    def other_first(operation, _key):
        if operation == "put_if_absent":
            run.store.before = lambda *_: None
            give_up(CommitLog(run.plain, "run-1"))

    run.store.before = other_first
    assert run.log.commit(manifest(1), "writer-1").seq == 2
    assert [type(entry) for entry in run.log.entries()] == [AttemptEntry, PrunedEntry, Commit]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped", "zero-filled"])
def test_an_entry_that_cannot_be_read_stops_the_attempt_but_not_the_run(run, damage, how):
    for step in (1, 2, 3):
        run.log.commit(manifest(step), "writer-1")
    path = run.commit_path(2)
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"step":4')) if how == "flipped" else damage[how](path)
    log = run.log
    assert [type(entry) for entry in log.read()] == [AttemptEntry, Commit, Unreadable, Commit]
    assert [entry.step for entry in log.checkpoints()] == [3, 1]
    with pytest.raises(Fenced, match="entry 2"):  # it may have been the beginning of a newer attempt
        log.commit(manifest(5), "writer-1")
    run.begin(2)
    assert run.log.commit(manifest(5, attempt=2), "writer-2").seq == 5


@pytest.mark.parametrize("how", ["missing", "truncated", "old format"])
def test_where_no_commit_can_be_read_nobody_begins_at_zero(run, damage, how):
    """I3, F52"""
    path = run.commit_path(run.save(1).seq)
    run.begin(2)
    if how == "old format":
        path.write_bytes(path.read_bytes().replace(b'"manifest":{"version":2', b'"manifest":{"version":1'))
    else:
        damage[how](path)
    said: list[str] = []
    with pytest.raises(Damaged, match="and 1 entries of its commit log cannot be read"):
        newest_verified(run.store, "run-1", report=said.append)
    assert len(said) == 1
    assert ("describes a checkpoint in format 1" in said[0]) == (how == "old format")


def test_a_number_far_away_is_no_log(run):
    run.plain.put("run-1/commits/99999999.json", b"{}")
    with pytest.raises(Damaged, match="missing"):
        run.log.read()


def test_foreign_objects_beside_the_log_are_passed_over(run):
    for name in ("readme.txt", "1.json", "000000001.json", "00000001.json.bak", "00000001.json2", "x/00000007.json"):
        run.plain.put(f"run-1/commits/{name}", b"?")
    assert len(run.log.read()) == 1


def test_an_entry_of_another_place_is_refused(run):
    run.log.commit(manifest(1), "writer-1")
    run.plain.put("run-1/commits/00000002.json", run.commit_path(1).read_bytes())
    other = manifest(1, run_id="run-2")
    foreign = CheckpointEntry(seq=3, attempt=1, writer="w", at=1.0, manifest=other, manifest_sha256=other.sha256())
    run.plain.put("run-1/commits/00000003.json", to_bytes(foreign))
    assert [type(entry) for entry in run.log.read()[2:]] == [Unreadable, Unreadable]


def test_a_store_that_is_away_is_no_damage(run):
    def away(operation, _key):
        if operation == "get":
            raise Unavailable("away")

    run.store.before = away
    with pytest.raises(Unavailable):
        run.log.read()


def test_an_entry_is_read_once(run):
    log = run.log
    for step in range(5):
        log.commit(manifest(step), "writer-1")
    log.checkpoints()
    assert [call for call in run.store.calls if call[0] == "get"].count(("get", "run-1/commits/00000000.json")) <= 2
    assert len([call for call in run.store.calls if call[0] == "get"]) <= 3


def test_times_are_the_given_clocks(run):
    log = CommitLog(run.store, "run-1", clock=lambda: 1234.5)
    assert log.commit(manifest(1), "writer-1").at == 1234.5
