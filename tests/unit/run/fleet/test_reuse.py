"""Which kept fleet a queued run begins on, and that no two runs are put on one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.backend import objects
from mgpu.context import Context
from mgpu.events import ignore
from mgpu.plan.model import Requirements
from mgpu.run.fleet import reuse, stack
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State

NOW, HOUR = 1_800_000_000.0, 3600.0
NEEDS = Requirements(
    provider="aws",
    regions=("us-east-1",),
    nodes=2,
    gpus_per_node=8,
    gpu=("H100-80GB", "A100-80GB"),
    market="spot",
    disk_gib=200,
    memory_gib=64,
    max_price_usd_per_hour=20,
    max_hours=2,
    provider_options={"vpc": "v1"},
).model_dump(mode="json")
OUTPUT = {
    "fleet": "f",
    "provider": "aws",
    "region": "us-east-1",
    "nodes": [{"id": "i-0"}, {"id": "i-1"}],
    "gpu": "A100-80GB",
    "gpus_per_node": 8,
    "market": "spot",
    "price_usd_per_hour": 20.0,
    "image": None,
    "hard_cap_at": NOW + 2 * HOUR,
}
KEEPER = Record(
    "keeper", "a", "p", "/", "/mgpu.yaml", "the-stack", True, "f", "aws", 2, state=State.SUCCEEDED, created_by="me@one",
    teardown="kept", fleet=OUTPUT, needs=NEEDS, lease_until=NOW + HOUR, ended_at=NOW,
)  # fmt: skip
QUEUED = Record(
    "queued", "a", "p", "/", "/mgpu.yaml", "queued", True, "q", "aws", 2, created_by="me@two", needs=NEEDS
)  # fmt: skip


def needs(**changes: Any) -> Record:
    return replace(QUEUED, needs=NEEDS | changes)


def output(**changes: Any) -> Record:
    return replace(KEEPER, fleet=OUTPUT | changes)


FITS = {
    "as it was asked for": (KEEPER, QUEUED),
    "any GPU, region and market": (KEEPER, needs(gpu=[], regions=[], market="spot-then-on-demand")),
    "less disk and memory": (KEEPER, needs(disk_gib=10, memory_gib=0)),
    "a hard cap that nobody knows": (output(hard_cap_at=0), QUEUED),
    "less time, for one that takes kept ones alone": (KEEPER, replace(needs(max_hours=9), machines="kept")),
    "what is left, for one that was at work before": (
        KEEPER,
        replace(needs(max_hours=3), max_hours=3.0, begun_at=NOW - 1.5 * HOUR),
    ),
    "its image": (output(image="r@sha256:1"), replace(QUEUED, image="r@sha256:1")),
    "a name of a GPU, however it is spelt": (KEEPER, needs(gpu=["a100-80gb"])),
}
SHARED = replace(KEEPER, share=True)


def sharing(gpus: int = 4, **more: Any) -> Record:
    return replace(needs(gpus_per_node=gpus, **more), share=True)


FITS |= {
    "a part, where both share": (SHARED, sharing()),
    "all of one that shares": (SHARED, sharing(8)),
    "the price of its part": (SHARED, sharing(max_price_usd_per_hour=10)),
}
REFUSED = {
    "a part, where the run alone shares": (KEEPER, sharing(), "its number of GPUs a node is 8, not 4"),
    "a part, where the fleet alone does": (SHARED, needs(gpus_per_node=4), "its number of GPUs a node is 8, not 4"),
    "more than it has": (SHARED, sharing(16), "it has 8 GPUs a node, not 16"),
    "no GPUs, where it has some": (SHARED, sharing(0), "its number of GPUs a node is 8, not none"),
    "the price of its part is too high": (
        SHARED,
        sharing(max_price_usd_per_hour=9),
        "it costs $10.00 per hour, above the cap of $9.00",
    ),
    "another user's": (KEEPER, replace(QUEUED, created_by="you@one"), "its owner is me, not you"),
    "new machines": (KEEPER, replace(QUEUED, machines="new"), "the run asks for new machines"),
    "gone": (KEEPER, replace(QUEUED, avoid=["f"]), "the run could not begin on it"),
    "provider": (KEEPER, needs(provider="local"), "its provider is aws, not local"),
    "options": (KEEPER, needs(provider_options={}), "it has other settings of its provider"),
    "nodes": (KEEPER, needs(nodes=1), "its number of nodes is 2, not 1"),
    "GPUs": (KEEPER, needs(gpus_per_node=4), "its number of GPUs a node is 8, not 4"),
    "GPU": (output(gpu="V100"), QUEUED, "its GPU is V100, not H100-80GB or A100-80GB"),
    "region": (output(region="eu-west-1"), QUEUED, "its region is eu-west-1, not us-east-1"),
    "market": (KEEPER, needs(market="on-demand"), "its market is spot, not on-demand"),
    "disk": (KEEPER, needs(disk_gib=201), "its disk in GiB is 200, and 201 are asked for"),
    "memory": (KEEPER, needs(memory_gib=65), "its memory in GiB is 64, and 65 are asked for"),
    "an image": (KEEPER, replace(QUEUED, image="r@sha256:1"), "its image is none, not r@sha256:1"),
    "another image": (output(image="r@sha256:2"), QUEUED, "its image is r@sha256:2, not none"),
    "price": (KEEPER, needs(max_price_usd_per_hour=19), "it costs $20.00 per hour, above the cap of $19.00"),
    "time": (KEEPER, needs(max_hours=3), "it ends in 2 h, and the run may take 3 h"),
    "time that is left": (
        KEEPER,
        replace(needs(max_hours=4), max_hours=4.0, begun_at=NOW - 1.5 * HOUR),
        "it ends in 2 h, and the run may take 2.5 h",
    ),
    "hardly any time": (
        output(hard_cap_at=NOW + 599),
        replace(QUEUED, machines="kept"),
        "it ends in 9.98 min, and the run may take 2 h",
    ),
    "its lease": (replace(KEEPER, lease_until=NOW + 59), QUEUED, "its lease ends in a moment"),
    "an earlier mgpu's": (replace(KEEPER, needs={}), QUEUED, "an earlier mgpu has not written down what it needs"),
}


@pytest.mark.parametrize(
    ("keeper", "run", "why"), [*((*each, None) for each in FITS.values()), *REFUSED.values()], ids=[*FITS, *REFUSED]
)
def test_what_fits(keeper: Record, run: Record, why: str | None):
    (fleet,) = reuse.kept([keeper], {}, NOW)
    assert reuse.refusal(fleet, run, NOW) == why
    assert (reuse.choice([fleet], run, NOW) is not None) is (why is None)


BORROWER = replace(
    KEEPER, run_id="b", kept_by="keeper", needs=NEEDS | {"disk_gib": 1}, ended_at=NOW + 9, own_stack=False
)
CLAIM = {"f": [{"run": "other", "at": NOW - 5, "slots": []}]}
OTHER = replace(QUEUED, run_id="other")
STANDS = {
    "nobody uses it": ([KEEPER], {}, ""),
    "a run trains on it": ([KEEPER, replace(OTHER, state=State.RUNNING, fleet=OUTPUT)], {}, "other"),
    "a run was put on it": ([KEEPER, OTHER], CLAIM, "other"),
    "a run whose record is about to be written": ([KEEPER], CLAIM, "other"),
    "of a run that has not begun for too long": (
        [KEEPER, OTHER],
        {"f": [{"run": "other", "at": NOW - 601, "slots": []}]},
        "",
    ),
    "of a run that is over": ([KEEPER, replace(OTHER, state=State.FAILED, ended_at=NOW - 1)], CLAIM, ""),
    "of a run that is begun again": ([KEEPER, replace(OTHER, state=State.FAILED, ended_at=NOW - 9)], CLAIM, "other"),
    "kept once more by a run that was put there": ([KEEPER, BORROWER], {}, ""),
    "its lease is over": ([replace(KEEPER, lease_until=NOW - 1)], {}, None),
    "its lease is over, but a run has it": (
        [replace(KEEPER, lease_until=NOW - 1), replace(OTHER, state=State.RUNNING, fleet=OUTPUT)],
        {},
        "other",
    ),
    "its lease was renewed by another run": ([replace(KEEPER, lease_until=NOW - 1), BORROWER], {}, ""),
    "given back": ([replace(KEEPER, teardown="confirmed")], {}, None),
}


@pytest.mark.parametrize(("records", "claims", "used_by"), STANDS.values(), ids=STANDS)
def test_what_stands(records: list[Record], claims: dict[str, Any], used_by: str | None):
    found = reuse.kept(records, claims, NOW)
    assert ["".join(each.uses) for each in found] == ([] if used_by is None else [used_by])
    assert all((each.maker.run_id, each.name, each.stack) == ("keeper", "f", "the-stack") for each in found)


def test_the_cheapest_that_is_free_is_taken():
    names = {"dear": (20.0, ""), "cheap": (10.0, ""), "cheaper": (5.0, "other")}
    fleets = [
        replace(reuse.kept([output(fleet=name, price_usd_per_hour=price)], {}, NOW)[0], uses={used: ()} if used else {})
        for name, (price, used) in names.items()
    ]
    taken = reuse.choice(fleets, QUEUED, NOW)
    assert taken is not None
    assert taken.name == "cheap"


ROOM: dict[str, tuple[dict[str, reuse.Slots], Record, reuse.Slots | None]] = {
    "the first": ({}, sharing(), (0, 1, 2, 3)),
    "beside another": ({"other": (0, 1, 2, 3)}, sharing(), (4, 5, 6, 7)),
    "where it was": ({"queued": (4, 5), "other": (0, 1)}, sharing(2), (4, 5)),
    "between others": ({"other": (0, 1), "third": (4, 5, 6, 7)}, sharing(2), (2, 3)),
    "not enough": ({"other": (0, 1), "third": (4, 5, 6, 7)}, sharing(), None),
    "all, beside another": ({"other": (0,)}, sharing(8), None),
    "beside one that has all": ({"other": ()}, sharing(), None),
    "all for one that does not share": ({}, QUEUED, ()),
    "for one that does not share, beside others": ({"other": (0,)}, QUEUED, None),
}


@pytest.mark.parametrize(("uses", "run", "slots"), ROOM.values(), ids=ROOM)
def test_which_part_a_run_gets(uses, run, slots):
    (fleet,) = reuse.kept([SHARED], {}, NOW)
    found = reuse.choice([replace(fleet, uses=uses)], run, NOW)
    assert (None if found is None else found.uses["queued"]) == slots


def test_a_fleet_that_others_share_is_filled_before_another_is_begun_on():
    empty, begun = reuse.kept([replace(SHARED, fleet=OUTPUT | {"fleet": name}, run_id=name) for name in "ab"], {}, NOW)
    found = reuse.choice([empty, replace(begun, uses={"other": (0, 1)})], sharing(2), NOW)
    assert found is not None
    assert (found.name, found.uses["queued"]) == ("b", (2, 3))


def test_many_at_once_get_each_their_own_part(xdg):
    now = time.time()
    record.save(replace(SHARED, fleet=OUTPUT | {"hard_cap_at": now + 2.5 * HOUR}, lease_until=now + HOUR))
    runs = [replace(sharing(2), run_id=f"q-{number}") for number in range(6)]
    for each in runs:
        record.save(each)
    gate = threading.Barrier(12, timeout=60)

    def one(number: int) -> tuple[str, reuse.Slots] | None:
        run = runs[number % 6]
        gate.wait()
        found = reuse.claim(run)
        return (run.run_id, found.uses[run.run_id]) if found else None

    with ThreadPoolExecutor(12) as pool:
        got = {each for each in pool.map(one, range(12)) if each is not None}
    assert sorted(slot for _, slots in got for slot in slots) == [*range(8)], got
    assert len({run for run, _ in got}) == 4
    assert reuse.take("f", "by-hand") in {run for run, _ in got}, "who takes all of it waits"


def test_for_what_a_run_waits_that_takes_kept_fleets_alone():
    run = replace(QUEUED, machines="kept")
    (fleet,) = reuse.kept([KEEPER, OTHER], CLAIM, NOW)
    assert reuse.waits_for([], run, NOW) == "a kept fleet that fits, and none is kept"
    assert reuse.waits_for([fleet], run, NOW) == "kept fleet the-stack, which run other uses"
    other = needs(nodes=3)
    assert reuse.waits_for([fleet], other, NOW) == (
        "a kept fleet that fits (the-stack: its number of nodes is 2, not 3)"
    )


@pytest.fixture
def fleets(xdg) -> list[Record]:
    """Two that are kept, and six runs that wait."""
    now = time.time()
    for name in ("a", "b"):
        stands = OUTPUT | {"fleet": name, "hard_cap_at": now + 2.5 * HOUR}
        record.save(replace(KEEPER, run_id=f"kept-{name}", fleet=stands, lease_until=now + HOUR, ended_at=now))
    runs = [replace(QUEUED, run_id=f"q-{number}") for number in range(6)]
    for each in runs:
        record.save(each)
    return runs


def test_of_many_at_once_one_run_is_put_on_a_fleet(fleets: list[Record]):
    gate = threading.Barrier(18, timeout=60)

    def one(number: int) -> tuple[str, str] | None:
        run = fleets[number % 6]
        gate.wait()
        found = reuse.claim(run)
        return (run.run_id, found.name) if found else None

    with ThreadPoolExecutor(18) as pool:  # three look after each run
        got = {each for each in pool.map(one, range(18)) if each is not None}
    assert sorted(fleet for _, fleet in got) == ["a", "b"], got
    assert len({run for run, _ in got}) == 2
    (run, fleet), *_ = got
    assert reuse.take(fleet, "mgpu-run-by-hand") == reuse.claimed_by(fleet) == run
    assert (reuse.claimed_by(fleet, but=run), reuse.take(fleet, run)) == ("", "")
    reuse.let_go(run)
    assert (reuse.take(fleet, "mgpu-run-by-hand"), reuse.claimed_by(fleet)) == ("", "mgpu-run-by-hand")


def test_what_a_newer_mgpu_has_written_beside_the_claims_is_carried_through(fleets: list[Record]):
    objects.change(reuse._CLAIMS, lambda _: {"version": 1, "claims": {}, "of_tomorrow": [1]})
    assert reuse.claim(fleets[0]) is not None
    reuse.let_go(fleets[0].run_id)
    assert reuse.take("a", "q-1") == ""
    assert (objects.read(reuse._CLAIMS) or {})["of_tomorrow"] == [1]


def test_the_stack_is_worked_on_as_the_run_that_has_kept_it_says(xdg, monkeypatch: pytest.MonkeyPatch):
    opened = list[tuple[Any, ...]]()
    monkeypatch.setattr(stack, "open_stack", lambda *args: opened.append(args))
    record.save(KEEPER)
    stack.stack_of(BORROWER, Context(ignore, Timeouts()))
    ((_, name, run_file, log_dir, *_),) = opened
    assert (name, run_file, log_dir) == ("the-stack", Folder("keeper").run_file, Folder("keeper").pulumi)
