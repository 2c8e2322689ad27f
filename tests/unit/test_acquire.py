"""`mgpu.acquire` against a double that keeps the provider contract; the clock moves only when somebody sleeps."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu import acquire, journal
from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    BidTooLow,
    CleanupFailed,
    Conflict,
    Interrupted,
    InvalidRequest,
    NoCapacity,
    NoOffer,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Event, OfferTried, Warned
from mgpu.journal import Journal
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, FleetState, Handle, Intent, NodePhase, NodeState, create_token

TIMEOUTS = Timeouts(provision_s=100, destroy_s=50, describe_every_s=1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@dataclass
class Machine:
    id: str
    token: str
    rank: int
    born: float
    phase: NodePhase | None = None  # None: by the clock


@dataclass
class Double:
    """Machines in memory. `on_create` maps a call's number (from 1) or an instance type to what it does."""

    clock: Clock
    ready_after_s: float = 3.0
    machines: dict[str, Machine] = field(default_factory=dict)
    asked: dict[str, tuple[FleetRequest, Offer]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    refuse: dict[str, ProviderError] = field(default_factory=dict)  # instance type or label -> refusal
    before_create: list[ProviderError | None] = field(default_factory=list)  # raised before anything is made
    after_create: list[ProviderError | None] = field(default_factory=list)  # the answer that is lost
    describe_errors: list[ProviderError] = field(default_factory=list)
    find_errors: list[ProviderError] = field(default_factory=list)
    destroy_errors: list[ProviderError] = field(default_factory=list)
    destroy_calls_needed: int = 1
    on_describe: Callable[[], None] = lambda: None
    asked_to_end: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        return self._make(request, offer, token, tuple(range(request.requirements.nodes)))

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        made = self._make(request, offer, token, missing)
        ids = tuple(made.ids[rank] if rank in missing else old for rank, old in enumerate(handle.ids))
        return made.model_copy(update={"ids": ids})

    def _make(self, request: FleetRequest, offer: Offer, token: str, ranks: tuple[int, ...]) -> Handle:
        self.calls.append(("create", offer.label))
        if self.before_create and (error := self.before_create.pop(0)):
            raise error
        for name in (offer.label, offer.instance_type):
            if name in self.refuse:
                raise self.refuse[name]
        if token in self.asked and self.asked[token] != (request, offer):
            raise Conflict("the token was used with other parameters")
        if token not in self.asked:
            self.asked[token] = (request, offer)
            for rank in ranks:
                name = f"i-{len(self.machines)}"
                self.machines[name] = Machine(name, token, rank, self.clock.now)
        if self.after_create and (error := self.after_create.pop(0)):
            raise error
        return self._handle(token)

    def find(self, intent: Intent) -> Handle | None:
        self.calls.append(("find", intent.offer.label))
        if self.find_errors:
            raise self.find_errors.pop(0)
        return self._handle(intent.token) if intent.token in self.asked else None

    def _handle(self, token: str) -> Handle:
        request, offer = self.asked[token]
        ids = [""] * request.requirements.nodes
        for machine in self.machines.values():
            if machine.token == token:
                ids[machine.rank] = machine.id
        return Handle(
            provider="double",
            region=offer.region,
            fleet=request.fleet,
            generation=request.generation,
            token=token,
            ids=tuple(ids),
        )

    def describe(self, handle: Handle) -> FleetState:
        self.on_describe()
        if self.describe_errors:
            raise self.describe_errors.pop(0)
        return FleetState(nodes=tuple(self._node(rank, name) for rank, name in enumerate(handle.ids)))

    def _node(self, rank: int, name: str) -> NodeState:
        machine = self.machines.get(name)
        if machine is None:
            return NodeState(rank=rank, id=name, phase=NodePhase.TERMINATED)
        up = self.clock.now - machine.born >= self.ready_after_s
        phase = machine.phase or (NodePhase.RUNNING if up else NodePhase.PENDING)
        return NodeState(rank=rank, id=name, phase=phase, host_key="ssh-ed25519 AAAA")

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        self.calls.append(("destroy", handle.token))
        if self.destroy_errors:
            raise self.destroy_errors.pop(0)
        gone = True
        for name in handle.ids if nodes is None else nodes:
            if name in self.machines and self.machines[name].phase is not NodePhase.TERMINATED:
                self.asked_to_end[name] += 1
                done = self.asked_to_end[name] >= self.destroy_calls_needed
                self.machines[name].phase = NodePhase.TERMINATED if done else NodePhase.STOPPING
                gone = gone and done
        return gone

    @property
    def billed(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.phase is not NodePhase.TERMINATED]

    @property
    def created(self) -> list[str]:
        return [label for call, label in self.calls if call == "create"]


def offer(kind: str = "p4.big", market: str = "spot", region: str = "r1", zone: str = "z1", price: float = 1) -> Offer:
    return Offer(
        provider="double",
        instance_type=kind,
        market=market,
        price_usd_per_hour=price,
        region=region,
        zone=zone,
        fetched_at=0,
    )


def request(nodes: int = 2, generation: int = 1) -> FleetRequest:
    return FleetRequest(
        fleet="f",
        generation=generation,
        owner="o",
        requirements=Requirements(provider="double", nodes=nodes, max_price_usd_per_hour=9, max_hours=1),
        ssh_public_key="ssh-ed25519 AAAA",
        lease_s=60,
        hard_cap_s=3600,
    )


class Bench:
    """A double, a clock, a journal, and the calls under test with all of them filled in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.double = Double(self.clock)
        self.events: list[Event] = []
        self.cancelled = threading.Event()

    @property
    def _common(self) -> dict:
        common = {"timeouts": TIMEOUTS, "emit": self.events.append}
        return {**common, "clock": self.clock, "sleep": self.clock.sleep}

    def acquire(self, *offers: Offer, wanted: FleetRequest | None = None) -> acquire.Acquired:
        with Journal(self.folder / "journal") as entries:
            return acquire.acquire(
                self.double, wanted or request(), offers, entries, cancelled=self.cancelled, **self._common
            )

    def repair(self, handle: Handle, missing: tuple[int, ...], *offers: Offer) -> acquire.Acquired:
        with Journal(self.folder / "journal") as entries:
            wanted = request(len(handle.ids), handle.generation + 1)
            return acquire.repair(
                self.double, handle, missing, wanted, offers, entries, cancelled=self.cancelled, **self._common
            )

    def destroy(self, handle: Handle) -> None:
        acquire.destroy(self.double, handle, **self._common)

    @property
    def journalled(self) -> list[str]:
        return [entry["kind"] for entry in journal.read(self.folder / "journal")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_first_offer_that_is_granted_is_taken_and_every_node_runs(bench: Bench):
    made = bench.acquire(offer())
    assert made.state.ready
    assert made.handle.ids == ("i-0", "i-1")
    assert made.tried == ()
    assert bench.events == [OfferTried(offer().label)]
    assert bench.clock.now == pytest.approx(3, abs=1)


def test_the_intent_is_on_disk_before_anything_is_asked_for(bench: Bench):
    seen = []
    original = bench.double.create
    bench.double.create = lambda *args: (seen.append(bench.journalled), original(*args))[1]
    bench.acquire(offer())
    assert seen == [["intent"]]
    assert bench.journalled == ["intent", "created", "acquired"]


def test_no_capacity_goes_on_with_the_next_offer_and_is_told(bench: Bench):
    bench.double.refuse["p4.big"] = NoCapacity("none left", scope="zone")
    made = bench.acquire(offer("p4.big"), offer("g5.small"))
    assert made.offer.instance_type == "g5.small"
    assert [(r.offer.instance_type, r.reason) for r in made.tried] == [("p4.big", "none left")]
    assert bench.events[0] == OfferTried(offer("p4.big").label, "none left")


@pytest.mark.parametrize(
    ("error", "skipped"),
    [
        (NoCapacity("x", scope="offer"), {"same"}),
        (NoCapacity("x", scope="zone"), {"same"}),
        (NoCapacity("x", scope="region"), {"same", "other zone"}),
        (NoCapacity("x", scope="provider"), {"same", "other zone", "other region"}),
        (BidTooLow("x", scope="zone"), {"same"}),
        (QuotaExceeded("x", scope="offer"), {"same", "other zone", "same family"}),
        (QuotaExceeded("x", scope="region"), {"same", "other zone", "same family"}),
        (QuotaExceeded("x", scope="account"), {"same", "other zone", "other region", "same family"}),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.scope}" if isinstance(value, ProviderError) else "",
)
def test_a_refusal_blocks_its_scope_for_that_type_and_market(bench: Bench, error: ProviderError, skipped: set[str]):
    offers = {
        "same": offer(price=2),
        "other zone": offer(zone="z2"),
        "other region": offer(region="r2", zone="z9"),
        "same family": offer("p4.huge"),
        "other market": offer(market="on-demand"),
        "other family": offer("g5.small"),
    }
    bench.double.before_create = [error] + [NoCapacity("later", scope="offer")] * len(offers)
    with pytest.raises(ProviderError):
        bench.acquire(offer(), *offers.values())
    tried = set(bench.double.created[1:])
    expected = {o.label for name, o in offers.items() if name not in skipped}
    assert tried == expected


def test_nothing_granted_names_every_offer_and_its_refusal(bench: Bench):
    bench.double.refuse = {
        "p4.big": NoCapacity("no p4 today", scope="offer"),
        "g5.small": QuotaExceeded("quota L-1 is 0", next_step="Raise L-1.", scope="region"),
    }
    with pytest.raises(NoCapacity) as caught:
        bench.acquire(offer("p4.big"), offer("g5.small"))
    assert caught.value.why.splitlines() == [
        f"{offer('p4.big').label}: no p4 today",
        f"{offer('g5.small').label}: quota L-1 is 0",
    ]


def test_only_quota_refusals_end_as_a_quota_error_with_its_cure(bench: Bench):
    bench.double.refuse["p4.big"] = QuotaExceeded("quota L-1 is 0", next_step="Raise L-1.", scope="region")
    with pytest.raises(QuotaExceeded, match=r"Raise L-1\."):
        bench.acquire(offer())


def test_no_offers_at_all_is_no_offer(bench: Bench):
    with pytest.raises(NoOffer):
        bench.acquire()


@pytest.mark.parametrize("error", [AuthError("expired"), InvalidRequest("bad")])
def test_what_no_other_offer_would_change_ends_the_search(bench: Bench, error: ProviderError):
    bench.double.refuse["p4.big"] = error
    with pytest.raises(type(error)):
        bench.acquire(offer("p4.big"), offer("g5.small"))
    assert bench.double.created == [offer("p4.big").label]
    assert bench.journalled == ["intent", "undone"]


def test_busy_and_silent_providers_are_asked_again_with_growing_pauses(bench: Bench):
    bench.double.before_create = [RateLimited("slow down", retry_after=7), Transient("500"), Transient("500")]
    bench.acquire(offer())
    first, second, third = bench.clock.sleeps[:3]
    assert first >= 7
    assert 1 <= second <= 2
    assert 2 <= third <= 4
    assert len(bench.double.asked) == 1


def test_a_provider_that_never_answers_ends_at_the_deadline(bench: Bench):
    bench.double.before_create = [Transient("503 from the API")] * 1000
    with pytest.raises(Transient, match="503 from the API"):
        bench.acquire(offer())
    assert bench.clock.now == pytest.approx(TIMEOUTS.provision_s)
    assert bench.double.machines == {}


@pytest.mark.parametrize("error", [AmbiguousCreate("no answer"), Transient("connection reset")])
def test_a_lost_answer_makes_one_gang_and_not_two(bench: Bench, error: ProviderError):
    bench.double.after_create = [error]
    made = bench.acquire(offer())
    assert made.state.ready
    assert len(bench.double.machines) == 2


def test_an_ambiguous_create_is_looked_for_before_it_is_repeated(bench: Bench):
    bench.double.before_create = [AmbiguousCreate("no answer")]
    bench.acquire(offer())
    assert [call for call, _ in bench.double.calls] == ["create", "find", "create"]


def test_what_an_ambiguous_create_has_made_is_taken_and_not_asked_for_again(bench: Bench):
    bench.double.after_create = [AmbiguousCreate("no answer")]
    bench.acquire(offer())
    assert [call for call, _ in bench.double.calls] == ["create", "find"]


def test_nodes_that_are_not_ready_in_time_are_ended(bench: Bench):
    bench.double.ready_after_s = 1e9
    with pytest.raises(Transient, match="within 100 s"):
        bench.acquire(offer())
    assert bench.double.billed == []
    assert bench.journalled[-1] == "undone"


def test_a_node_lost_while_it_starts_is_tried_again_under_a_new_token(bench: Bench):
    def lose() -> None:
        bench.double.machines["i-1"].phase = NodePhase.TERMINATED

    bench.double.on_describe = lose
    made = bench.acquire(offer())
    assert made.handle.ids == ("i-2", "i-3")
    assert [machine.id for machine in bench.double.billed] == ["i-2", "i-3"]
    assert "ended while it started" in made.tried[0].reason


def test_an_offer_whose_nodes_never_live_is_given_up(bench: Bench):
    def lose() -> None:
        for machine in bench.double.machines.values():
            machine.phase = NodePhase.TERMINATED

    bench.double.on_describe = lose
    with pytest.raises(NoCapacity):
        bench.acquire(offer())
    assert len(bench.double.asked) == 3


def test_describe_may_fail_while_nodes_start(bench: Bench):
    bench.double.describe_errors = [Transient("502"), RateLimited("busy")]
    assert bench.acquire(offer()).state.ready
    assert len(bench.double.machines) == 2


def test_cancel_before_the_first_create_makes_nothing(bench: Bench):
    bench.cancelled.set()
    with pytest.raises(Interrupted):
        bench.acquire(offer())
    assert bench.double.machines == {}


def test_cancel_while_waiting_ends_what_was_made(bench: Bench):
    bench.double.on_describe = bench.cancelled.set
    bench.double.destroy_calls_needed = 3
    with pytest.raises(Interrupted):
        bench.acquire(offer(), offer("g5.small"))
    assert bench.double.billed == []
    assert bench.double.created == [offer().label]


def test_cancel_after_an_answer_that_was_lost_ends_what_it_made(bench: Bench):
    original = bench.clock.sleep
    bench.double.after_create = [Transient("connection reset")]
    bench.clock.sleep = lambda seconds: (bench.cancelled.set(), original(seconds))[1]
    with pytest.raises(Interrupted):
        bench.acquire(offer())
    assert len(bench.double.machines) == 2
    assert bench.double.billed == []


def test_a_bug_in_the_provider_leaves_nothing_behind(bench: Bench):
    def explode() -> None:
        raise ZeroDivisionError

    bench.double.on_describe = explode
    with pytest.raises(ZeroDivisionError):
        bench.acquire(offer())
    assert bench.double.billed == []


@pytest.mark.parametrize("errors", [{"destroy_errors": [AuthError("expired")]}, {"destroy_calls_needed": 10**6}])
def test_an_undo_that_fails_is_told_and_stops_the_search(bench: Bench, errors: dict):
    bench.double.ready_after_s = 1e9
    for name, value in errors.items():
        setattr(bench.double, name, value)
    with pytest.raises(TeardownIncomplete, match=r"i-0, i-1.*may still be billed") as caught:
        bench.acquire(offer(), offer("g5.small"))
    assert caught.value.exit_code == 7
    assert bench.double.created == [offer().label]
    assert bench.journalled == ["intent", "created"]  # no end: the next process finds it


def test_an_undo_that_cannot_even_look_is_told(bench: Bench):
    bench.double.after_create = [Transient("reset")] * 1000
    bench.double.find_errors = [AuthError("expired")]
    with pytest.raises(TeardownIncomplete, match="may have made machines"):
        bench.acquire(offer())


def test_a_provider_that_could_not_clean_up_stops_the_search(bench: Bench):
    bench.double.refuse["p4.big"] = CleanupFailed("i-9 is still there")
    with pytest.raises(TeardownIncomplete, match="i-9 is still there"):
        bench.acquire(offer("p4.big"), offer("g5.small"))
    assert bench.double.created == [offer("p4.big").label]


def crash(bench: Bench, wanted: Offer, request_: FleetRequest | None = None, attempt: int = 0) -> str:
    """An earlier process that journalled its intent, made the gang, and died."""
    asked = request_ or request()
    token = create_token("f", asked.generation, wanted, attempt)
    intent = Intent(fleet="f", generation=asked.generation, owner="o", token=token, offer=wanted)
    with Journal(bench.folder / "journal") as entries:
        entries.append("intent", **intent.model_dump(mode="json"))
    bench.double.create(asked, wanted, token)
    return token


def test_what_a_dead_process_made_is_adopted_even_when_the_offers_have_changed_places(bench: Bench):
    token = crash(bench, offer("p4.big"))
    made = bench.acquire(offer("g5.small"), offer("p4.big"))
    assert made.handle.token == token
    assert len(bench.double.machines) == 2


def test_an_intent_that_made_nothing_is_closed(bench: Bench):
    crash(bench, offer("p4.big"))
    bench.double.asked.clear()
    bench.double.machines.clear()
    made = bench.acquire(offer("g5.small"))
    assert made.offer.instance_type == "g5.small"
    assert bench.journalled.count("undone") == 1


def test_what_a_dead_process_made_from_another_request_is_ended_first(bench: Bench):
    crash(bench, offer(), request(nodes=3))
    made = bench.acquire(offer())
    assert len(made.handle.ids) == 2
    assert sorted(machine.id for machine in bench.double.billed) == sorted(made.handle.ids)


def test_a_token_that_somebody_else_uses_is_a_conflict_and_is_not_touched(bench: Bench):
    bench.double.create(request(nodes=3), offer(), create_token("f", 1, offer(), 0))
    with pytest.raises(Conflict):
        bench.acquire(offer())
    assert len(bench.double.billed) == 3


def test_a_token_that_was_undone_is_never_asked_for_again(bench: Bench):
    for _ in range(4):
        bench.double.ready_after_s = 1e9
        with pytest.raises(Transient):
            bench.acquire(offer())
    bench.double.ready_after_s = 1
    made = bench.acquire(offer())
    assert made.tried == ()
    assert len(bench.double.asked) == 5


def test_repair_replaces_the_missing_rank_and_touches_no_other(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    made = bench.repair(handle, (0,), offer())
    assert made.handle.ids == ("i-2", "i-1")
    assert made.handle.generation == 2
    assert [node.phase for node in made.state.nodes] == [NodePhase.RUNNING] * 2


def test_repair_fills_ranks_that_are_new(bench: Bench):
    handle = bench.acquire(offer()).handle
    made = bench.repair(handle.model_copy(update={"ids": (*handle.ids, "")}), (2,), offer())
    assert made.handle.ids == ("i-0", "i-1", "i-2")


def test_repair_buys_in_the_region_of_the_fleet_only(bench: Bench):
    handle = bench.acquire(offer()).handle
    with pytest.raises(NoOffer):
        bench.repair(handle, (0,), offer(region="r2"))


def test_a_repair_that_fails_ends_the_new_machines_alone(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    bench.double.ready_after_s = 1e9
    bench.double.machines["i-1"].born = -1e10
    with pytest.raises(Transient):
        bench.repair(handle, (0,), offer())
    assert [machine.id for machine in bench.double.billed] == ["i-1"]


def test_a_lost_answer_to_a_repair_makes_one_machine(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    bench.double.after_create = [AmbiguousCreate("no answer")]
    assert bench.repair(handle, (0,), offer()).handle.ids == ("i-2", "i-1")
    assert len(bench.double.machines) == 3


def test_destroy_asks_until_the_provider_says_gone(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.destroy_calls_needed = 5
    bench.destroy(handle)
    assert bench.double.billed == []


def test_destroy_goes_on_through_trouble_and_says_so_once(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.destroy_errors = [Transient("503"), Transient("503"), RateLimited("busy")]
    bench.destroy(handle)
    assert bench.double.billed == []
    assert len([event for event in bench.events if isinstance(event, Warned)]) == 1


@pytest.mark.parametrize("errors", [[Transient("503 for an hour")] * 1000, [AuthError("expired")]])
def test_destroy_never_says_gone_when_it_does_not_know(bench: Bench, errors: list[ProviderError]):
    handle = bench.acquire(offer()).handle
    bench.double.destroy_errors = list(errors)
    start = bench.clock.now
    with pytest.raises(TeardownIncomplete, match=r"i-0, i-1") as caught:
        bench.destroy(handle)
    assert errors[0].what in str(caught.value)
    assert bench.clock.now - start <= TIMEOUTS.destroy_s
