"""The queue: who begins, who waits for what, and that every machine finds the same order."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from mgpu.plan.model import Requirements
from mgpu.run.fleet import reuse
from mgpu.run.record.record import Record, State
from mgpu.schedule.decide import Seen, decide
from mgpu.schedule.queue import line_up


def run(run_id: str, state: State = State.QUEUED, **more: Any) -> Record:
    return Record(run_id, *[""] * 5, own_stack=True, fleet_name="", provider="", nodes=1, state=state, **more)


A_WAITING = {"sweep": "s", "max_parallel": 2}
CASES = {
    "the oldest first": ([run("b", created_at=2.0), run("a", created_at=1.0)], [], ["a", "b"], {}),
    "the higher priority first": ([run("a"), run("b", priority=1), run("c", priority=-1)], [], ["b", "a", "c"], {}),
    "whoever has less at work first": (
        [run("a1", created_by="a"), run("a2", created_by="a"), run("b1", created_by="b", created_at=9.0)],
        [run("a0", State.RUNNING, created_by="a")],
        ["b1", "a1", "a2"],
        {},
    ),
    "owners take turns": (
        [run(f"{who}{n}", created_by=who, created_at=float(n)) for who in "ab" for n in range(2)],
        [],
        ["a0", "b0", "a1", "b1"],
        {},
    ),
    "after one that trains": (
        [run("b", after=["a"])],
        [run("a", State.RUNNING)],
        ["b"],
        {"b": "run a to succeed"},
    ),
    "after one that has succeeded": ([run("b", after=["done"])], [], ["b"], {}),
    "after one that has failed": (
        [run("b", after=["done", "failed"])],
        [],
        ["b"],
        {"b": "run failed, which has failed: it may be resumed"},
    ),
    "after one that is gone": ([run("b", after=["gone"])], [], ["b"], {"b": "run gone, whose record was removed"}),
    "a chain": ([run("b", after=["a"]), run("a", priority=-1)], [], ["b", "a"], {"b": "run a to succeed"}),
    "a sweep that has its runs at work": (
        [run("c", **A_WAITING), run("d", **A_WAITING), run("x")],
        [run("a", State.RUNNING, **A_WAITING)],
        ["c", "d", "x"],
        {"d": "its sweep, which has 2 runs at a time"},
    ),
    "one that waits holds up no other": (
        [run("b", after=["gone"], priority=5, created_by="a"), run("c", created_by="a")],
        [],
        ["b", "c"],
        {"b": "run gone, whose record was removed"},
    ),
}
OVER = {"done": run("done", State.SUCCEEDED), "failed": run("failed", State.FAILED)}


@pytest.mark.parametrize(("queued", "at_work", "order", "waits"), CASES.values(), ids=CASES)
def test_the_queue(queued, at_work, order, waits):
    known = {each.run_id: each for each in (*queued, *at_work)} | OVER
    for _ in range(5):  # in whichever order records are read
        random.shuffle(queued)
        line = line_up(queued, at_work, known.get)
        assert [each.record.run_id for each in line] == order
        assert {each.record.run_id: each.waits_for for each in line if each.waits_for} == waits


NEEDS = Requirements(provider="local", max_price_usd_per_hour=1, max_hours=1).model_dump(mode="json")
OUTPUT = {
    "provider": "local", "region": "here", "nodes": [{"id": "i"}], "gpu": None, "gpus_per_node": 0,
    "market": "on-demand", "price_usd_per_hour": 0.1, "image": None, "hard_cap_at": 0,
}  # fmt: skip


def kept(*names: str) -> list[Record]:
    more = {"needs": NEEDS, "lease_until": 200.0, "teardown": "kept", "ended_at": 90.0}
    return [
        replace(run(f"{name}-run", State.SUCCEEDED, **more), stack=name, fleet=OUTPUT | {"fleet": name})
        for name in names
    ]


ON_KEPT = {
    "the first in line gets it": ({"a": {}, "b": {}}, {"a": "f"}, {}),
    "each gets one": ({"a": {}, "b": {}}, {"a": "e", "b": "f"}, {}),
    "the higher priority gets it": ({"a": {}, "b": {"priority": 1}}, {"b": "f"}, {}),
    "one that needs others leaves it": ({"a": {"needs": NEEDS | {"nodes": 2}}, "b": {}}, {"b": "f"}, {}),
    "one that wants new ones leaves it": ({"a": {"machines": "new"}, "b": {}}, {"b": "f"}, {}),
    "one that waits leaves it": (
        {"a": {"after": ["gone"]}, "b": {}}, {"b": "f"}, {"a": "run gone, whose record was removed"},
    ),
    "one that takes kept ones alone waits for it": (
        {"a": {}, "b": {"machines": "kept"}}, {"a": "f"}, {"b": "kept fleet f, which run a uses"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("runs", "on", "waits"), ON_KEPT.values(), ids=ON_KEPT)
def test_kept_fleets_go_to_those_who_are_first_in_line(runs, on, waits):
    queued = [run(name, created_at=float(n), **{"needs": NEEDS} | more) for n, (name, more) in enumerate(runs.items())]
    fleets = reuse.kept(kept(*on.values()), {}, 100.0)
    seen = {each.run_id: Seen(each, supervised=False) for each in random.sample(queued, len(queued))}
    todo = decide({}, seen, lambda _: None, 100.0, fleets)
    assert {each.run_id: each.why for each in todo.needs if each.on_kept} == {
        name: f"queued: starts on kept fleet {stack}" for name, stack in on.items()
    }
    assert {each.record.run_id: each.waits_for for each in todo.waiting} == waits
    assert len(todo.needs) + len(todo.waiting) == len(runs)


def test_a_pass_begins_with_what_nothing_holds_up_and_counts_what_somebody_has_begun_with():
    runs = [run(name, created_at=float(n), **A_WAITING) for n, name in enumerate("abcd")]
    seen = {each.run_id: Seen(each, each.run_id == "a") for each in runs}
    todo = decide({}, seen, lambda _: None, 100.0)
    assert [need.run_id for need in todo.needs] == ["b"], "a has a supervisor that has not rented yet"
    assert [each.record.run_id for each in todo.waiting] == ["c", "d"]


@pytest.mark.parametrize("waits", [{"after": ["gone"]}, A_WAITING, {"machines": "kept", "needs": NEEDS}])
@pytest.mark.parametrize("begun", [{"begun_at": 90.0, "max_hours": 10 / 3600}, {"hard_cap_at": 100.0}])
def test_a_run_that_is_queued_again_and_whose_time_is_over_is_looked_after_and_takes_nobodys_place(waits, begun):
    """It is to be ended, and not to wait for ever."""
    others = [run("a", State.RUNNING, **A_WAITING), run("b", created_at=2.0, **A_WAITING), run("c", priority=9)]
    late = run("late", created_at=1.0, attempt=1, priority=1, **waits, **begun)
    seen = {each.run_id: Seen(each, each.run_id == "a") for each in (*others, late)}
    for now, looked_after in ((99.0, {"b", "c"}), (100.0, {"b", "c", "late"})):
        todo = decide({}, seen, lambda _: None, now)
        if now == 100.0 or waits != A_WAITING:  # until then it is one of its sweep
            assert {need.run_id for need in todo.needs} == looked_after
