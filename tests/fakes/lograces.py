"""Twenty threads on one commit log, in any store: what must hold whoever comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from mgpu_train.checkpoint.log import index, keys
from mgpu_train.checkpoint.log.commit_log import CommitLog, Fenced, StepBack
from mgpu_train.checkpoint.log.lines import Commit, Line, in_short
from mgpu_train.checkpoint.log.manifest import (
    MAX_DOCUMENT_BYTES,
    AttemptEntry,
    FileEntry,
    Manifest,
    PrunedEntry,
    checkpoint_id,
    parse_entry,
)
from mgpu_train.store import Store

RUN = "run-1"
THREADS = 20


def manifest(step: int, attempt: int) -> Manifest:
    return Manifest(
        run_id=RUN,
        checkpoint_id=checkpoint_id(attempt, step),
        attempt=attempt,
        step=step,
        nodes=1,
        world_size=1,
        writers=(0,),
        files=(FileEntry(path="f", size=1, crc64nvme="0" * 16, node=0),),
        created_at=1.0,
    )


def race(work: Callable[[int], Any]) -> list[Any]:
    """What each of the threads got, which begin at the same moment; being too late is a result, too."""
    gate = threading.Barrier(THREADS)

    def one(number: int) -> Any:
        gate.wait()
        try:
            return work(number)
        except (Fenced, StepBack) as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


def one_attempt_begins(store: Store) -> None:
    """Two supervisors, ten threads each, begin the same attempt with a token of each thread's own."""
    results = race(lambda number: CommitLog(store, RUN).begin_attempt(1, f"supervisor-{number % 2}-{number}"))
    (won,) = [result for result in results if isinstance(result, AttemptEntry)]
    assert sum(isinstance(result, Fenced) for result in results) == THREADS - 1
    assert _checked(store) == [won]


def every_number_has_one_winner(store: Store) -> None:
    """Twenty threads commit and give up at once: nobody's word is lost, and none stands twice."""
    CommitLog(store, RUN).begin_attempt(1, "writer-1")

    def work(number: int) -> Line:
        log = CommitLog(store, RUN)
        return log.commit(manifest(number, 1), "writer-1") if number % 2 else log.give_up([f"a009-step-{number}"], "p")

    results = race(work)
    won = [result for result in results if isinstance(result, Commit | PrunedEntry)]
    assert sum(isinstance(result, PrunedEntry) for result in results) == THREADS // 2
    assert sorted(won, key=lambda line: line.seq) == _checked(store)[1:]


def a_zombie_commits_nothing_more(store: Store) -> None:
    """Ten threads of attempt 1 commit on and on while the ten of attempt 2 begin it, and commit as well."""
    CommitLog(store, RUN).begin_attempt(1, "writer-1")
    committed, begun = threading.Event(), threading.Event()

    def old(number: int) -> Fenced | None:
        log = CommitLog(store, RUN)
        for count in range(1000):
            if count == 4:  # whoever begins has to win a number against ten: not for minutes
                assert begun.wait(60)
            try:
                log.commit(manifest(10 * count + number, 1), "writer-1")
                committed.set()
            except StepBack:
                continue
            except Fenced as error:
                return error
        return None

    def new(number: int) -> int:
        log = CommitLog(store, RUN)
        if number == THREADS - 1:
            assert committed.wait(60)
            log.begin_attempt(2, "writer-2")
            begun.set()
        assert begun.wait(60)
        done = 0
        for step in range(number, 40, 10):
            try:
                done += log.commit(manifest(step, 2), "writer-2").step > 0
            except StepBack:
                continue
        return done

    results = race(lambda number: old(number) if number < THREADS // 2 else new(number))
    assert all(isinstance(result, Fenced) for result in results[: THREADS // 2])
    assert sum(results[THREADS // 2 :]) > 0
    lines = _checked(store)
    first = next(line.seq for line in lines if isinstance(line, AttemptEntry) and line.attempt == 2)
    assert any(isinstance(line, Commit) for line in lines[:first])
    assert {line.attempt for line in lines[first:]} == {2}, "a stale attempt has committed"
    assert CommitLog(store, RUN).checkpoints()[0].attempt == 2


SCENARIOS = [one_attempt_begins, every_number_has_one_winner, a_zombie_commits_nothing_more]


def _checked(store: Store) -> list[Line]:
    """The log, read through its index, without one, and object by object: all three alike. I5 holds in it."""
    lines = CommitLog(store, RUN).read()
    for stat in list(store.list(keys.indexes(RUN))):
        store.delete(stat.key)
    assert CommitLog(store, RUN).read() == lines
    objects = [store.get(stat.key, MAX_DOCUMENT_BYTES) for stat in store.list(keys.commits(RUN))]
    assert [in_short(parse_entry(data, "an entry")) for data in objects] == lines
    for attempt in (1, 2):
        steps = [line.step for line in lines if isinstance(line, Commit) and line.attempt == attempt]
        assert all(a < b for a, b in pairwise(steps)), "I5: the durable step went back"
    return lines


def small_index(monkeypatch: Any) -> None:
    """An index at every fourth entry, so that a race has many of them."""
    monkeypatch.setattr(index, "EVERY", 4)
