"""`mgpu.acquire` against a double that keeps the provider contract; the clock moves only when somebody sleeps."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from fakes.clock import Clock
from mgpu_train.timeouts import Timeouts

from mgpu import acquire, journal
from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    BidTooLow,
    CleanupFailed,
    Conflict,
    ConnectionFailed,
    HostKeyMismatch,
    Interrupted,
    InvalidRequest,
    NoCapacity,
    NoOffer,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Event, Note, OfferTried, Warned
from mgpu.journal import Journal
from mgpu.plan.model import Cost, Offer, Requirements, Saves
from mgpu.providers.base import (
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    NodePhase,
    NodeState,
    create_token,
)
from mgpu.spec.provider import Capabilities

TIMEOUTS = Timeouts(provision_s=100, destroy_s=50, describe_every_s=1)


CAPS = Capabilities(spot=True, multi_node=True, idempotent_create=True)


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
    capabilities: Capabilities = CAPS
    ready_after_s: float = 3.0
    queued_for_s: float = 0.0  # before that it waits in a queue
    queue_limit_s: float = 0.0
    queue_cure: str = ""  # what would let them start that wait in it for ever,
    cure_scope: Literal["zone", "region"] = "region"  # and where
    looks: int = 0
    slowest_s: float = 0.0  # what it says of how long machines take to boot
    ending_s: float = 0.0  # from "asked to end" to gone: billed no more, and not gone
    granted: int | None = None  # machines that a create makes at most
    unfound_s: float = 0.0  # for which `find` does not show what was made
    undescribed_s: float = 0.0  # for which `describe` does not know it
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
    one_use: str = ""  # the key that machines come with, where it is for one use
    ended_at: dict[str, float] = field(default_factory=dict)
    asked_to_end: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def boot_s(self, requirements: Requirements) -> float:
        return self.slowest_s

    def queue_s(self) -> float:
        return self.queue_limit_s

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
            for rank in ranks[: self.granted]:
                name = f"i-{len(self.machines)}"
                self.machines[name] = Machine(name, token, rank, self.clock.now)
        if self.after_create and (error := self.after_create.pop(0)):
            raise error
        return self._handle(token)

    def find(self, intent: Intent) -> Handle | None:
        self.calls.append(("find", intent.offer.label))
        if self.find_errors:
            raise self.find_errors.pop(0)
        young = [m for m in self.machines.values() if self.clock.now - m.born < self.unfound_s]
        shown = intent.token in self.asked and not any(m.token == intent.token for m in young)
        return self._handle(intent.token) if shown else None

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
        self.looks += 1
        if self.describe_errors:
            raise self.describe_errors.pop(0)
        for name in handle.ids:
            if name in self.machines and self.clock.now - self.machines[name].born < self.undescribed_s:
                raise Transient(f"{name} is not known yet")
        return FleetState(nodes=tuple(self._node(rank, name) for rank, name in enumerate(handle.ids)))

    def _node(self, rank: int, name: str) -> NodeState:
        machine = self.machines.get(name)
        if machine is None:
            return NodeState(rank=rank, id=name, phase=NodePhase.TERMINATED)
        age_s = self.clock.now - machine.born - self.queued_for_s
        if machine.phase is None and age_s < 0:
            told = {"reason": "Priority", "cure": self.queue_cure, "cure_scope": self.cure_scope}
            return NodeState(rank=rank, id=name, phase=NodePhase.PENDING, queued=True, **told)
        up = age_s >= self.ready_after_s
        phase = machine.phase or (NodePhase.RUNNING if up else NodePhase.PENDING)
        why = "" if up else "it still boots"
        return NodeState(
            rank=rank, id=name, phase=phase, host_key="ssh-ed25519 AAAA", one_use_key=self.one_use, reason=why
        )

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        self.calls.append(("destroy", handle.token))
        if self.destroy_errors:
            raise self.destroy_errors.pop(0)
        gone = True
        for name in handle.ids if nodes is None else nodes:
            if name in self.machines and self.machines[name].phase is not NodePhase.TERMINATED:
                self.asked_to_end[name] += 1
                self.ended_at.setdefault(name, self.clock.now)
                slow = self.clock.now - self.ended_at[name] < self.ending_s
                done = self.asked_to_end[name] >= self.destroy_calls_needed and not slow
                on_its_way = NodePhase.ENDING if slow else NodePhase.STOPPING
                self.machines[name].phase = NodePhase.TERMINATED if done else on_its_way
                gone = gone and done
        return gone

    @property
    def billed(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.phase is not NodePhase.TERMINATED]

    @property
    def created(self) -> list[str]:
        return [label for call, label in self.calls if call == "create"]


def offer(
    kind: str = "p4.big", market: str = "spot", region: str = "r1", zone: str = "z1", price: float = 1, quota: str = ""
) -> Offer:
    return Offer(
        provider="double",
        instance_type=kind,
        market=market,
        price_usd_per_hour=price,
        region=region,
        zone=zone,
        quota=quota,
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


NOTHING = {"provider": "double", "region": "r1", "fleet": "f", "generation": 0, "token": "", "ids": ()}


class Bench:
    """A double, a clock, a journal, and the calls under test with all of them filled in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.double = Double(self.clock)
        self.events: list[Event] = []
        self.cancelled = threading.Event()
        self.cap_s = 3600.0
        self.hard_cap_at = self.max_usd = 0.0
        self.searches = 0
        self.until = math.inf
        self.meet: acquire.Meet | None = None
        self.timeouts = TIMEOUTS

    @property
    def _common(self) -> dict:
        common = {"timeouts": self.timeouts, "emit": self.events.append}
        return {**common, "clock": self.clock, "sleep": self.clock.sleep}

    def acquire(self, *offers: Offer, wanted: FleetRequest | None = None) -> acquire.Acquired:
        with self.journal() as entries:
            return acquire.acquire(
                self.double,
                wanted or request(),
                offers,
                entries,
                cancelled=self.cancelled,
                meet=self.meet,
                max_usd=self.max_usd,
                searches=self.searches,
                until=self.until,
                now=self.clock,
                **self._common,
            )

    def repair(self, handle: Handle, missing: tuple[int, ...], *offers: Offer) -> acquire.Acquired:
        with self.journal() as entries:
            wanted = request(len(handle.ids), handle.generation + 1).model_copy(update={"hard_cap_s": self.cap_s})
            return acquire.repair(
                self.double,
                handle,
                missing,
                wanted,
                offers,
                entries,
                cancelled=self.cancelled,
                meet=self.meet,
                hard_cap_at=self.hard_cap_at,
                searches=self.searches,
                now=self.clock,
                **self._common,
            )

    def journal(self) -> Journal:
        return Journal(self.folder / "journal", self.clock)

    def destroy(self, handle: Handle, **more: Any) -> None:
        acquire.destroy(self.double, handle, **self._common, **more)

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
        (NoOffer("x", scope="offer"), {"same"}),
        (NoOffer("x", scope="region"), {"same", "other zone", "same family", "other market", "other family"}),
        (PermissionDenied("x", scope="region"), {"same", "other zone", "same family", "other market", "other family"}),
        (AuthError("x", scope="region"), {"same", "other zone", "same family", "other market", "other family"}),
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


@pytest.mark.parametrize("kind", [AuthError, PermissionDenied])
def test_a_region_that_is_closed_to_the_credentials_is_left_and_where_all_are_that_is_said(bench: Bench, kind):
    offers = offer(), offer("g5.small"), offer("p4.small", region="r2", zone="z9")
    bench.double.refuse["p4.big"] = kind("r1 is closed", next_step="Open it.", scope="region")
    assert bench.acquire(*offers).offer.region == "r2"
    assert len(bench.double.created) == 2
    bench.double.refuse["p4.small"] = kind("r2 is closed", scope="region")
    with pytest.raises(kind, match="r1 is closed") as caught:
        bench.acquire(*offers)
    assert ("r2 is closed" in caught.value.why, caught.value.next_step) == (True, "Open it.")


@pytest.mark.parametrize("kind", [AuthError, PermissionDenied])
def test_a_denial_of_the_account_ends_the_search(bench: Bench, kind):
    bench.double.refuse["p4.big"] = kind("no", scope="account")
    with pytest.raises(kind, match=r"^no"):
        bench.acquire(offer(), offer(region="r2", zone="z9"))
    assert len(bench.double.created) == 1


def test_a_quota_that_offers_name_rules_out_what_counts_against_it_and_no_more(bench: Bench):
    bench.double.refuse["p4.big"] = QuotaExceeded("quota L-1 is 0", scope="region")
    made = bench.acquire(offer(quota="L-1"), offer("p3.big", quota="L-1"), offer("p4.huge", quota="L-2"))
    assert bench.double.created == [offer().label, offer("p4.huge").label]
    assert made.offer.instance_type == "p4.huge"


def test_thousands_of_offers_are_refused_one_call_each(bench: Bench):
    kinds = [f"g{number}.big" for number in range(300)]
    bench.double.refuse = {kind: NoCapacity("none left", scope="zone") for kind in kinds}
    zones = [offer(kind, zone=zone) for kind in kinds for zone in ("z1", "z2")]
    with pytest.raises(NoCapacity) as caught:
        bench.acquire(*zones)
    assert bench.double.created == [each.label for each in zones]
    assert len(caught.value.why.splitlines()) == len(zones)
    assert bench.clock.now == 0, "no capacity here is no reason to wait before asking there"


def test_offers_that_were_ruled_out_are_counted_and_not_searched_one_by_one(bench: Bench):
    bench.double.refuse["p4.big"] = NoOffer("r1 has no base", "", "Run `mgpu bootstrap`.", scope="region")
    offers = [offer()] + [offer(f"g{number}.big", zone=f"z{number}") for number in range(5000)]
    with pytest.raises(NoOffer) as caught:
        bench.acquire(*offers)
    assert caught.value.why.splitlines() == [f"{offer().label}: r1 has no base", "and 5000 more that these rule out"]
    assert caught.value.next_step == "Run `mgpu bootstrap`."


def test_a_region_without_what_machines_stand_on_is_left_for_the_next_one(bench: Bench):
    bench.double.refuse["p4.big"] = NoOffer("r1 has no base", scope="region")
    made = bench.acquire(offer(), offer(market="on-demand"), offer("g5.small", region="r2"))
    assert made.offer.region == "r2"
    assert len(bench.double.created) == 2


def test_what_can_never_start_is_not_waited_for_and_another_region_is_asked(bench: Bench):
    bench.double.queued_for_s = bench.double.queue_limit_s = 3600.0
    bench.double.queue_cure = "Mend it."
    with pytest.raises(NoOffer, match=r"cannot start: Priority[^$]*Mend it") as caught:
        bench.acquire(offer(), offer(region="r2"))
    assert bench.clock.now < 60, "no hour of the queue"
    assert caught.value.why.count("cannot start") == 2
    assert bench.double.billed == []


def test_what_can_never_start_in_a_zone_is_asked_for_in_another(bench: Bench):
    bench.double.queued_for_s = bench.double.queue_limit_s = 3600.0
    bench.double.queue_cure, bench.double.cure_scope = "Mend it.", "zone"
    with pytest.raises(NoOffer):
        bench.acquire(offer(), offer("p5.big"), offer(zone="z2"))
    assert bench.double.created == [offer().label, offer(zone="z2").label]


def test_every_cure_is_named_once(bench: Bench):
    bench.double.refuse = {
        "p4.big": QuotaExceeded("quota L-1 is 0", next_step="Raise L-1.", scope="region"),
        "g5.small": QuotaExceeded("quota L-2 is 0", next_step="Raise L-2.", scope="region"),
        "g6.small": QuotaExceeded("quota L-2 is 0", next_step="Raise L-2.", scope="region"),
    }
    with pytest.raises(QuotaExceeded) as caught:
        bench.acquire(offer(), offer("g5.small"), offer("g6.small"))
    assert caught.value.next_step == "Raise L-2. Raise L-1."


def test_nothing_granted_names_every_offer_and_its_refusal(bench: Bench):
    bench.double.refuse = {
        "p4.big": NoCapacity("no p4 today", scope="offer"),
        "g5.small": QuotaExceeded("quota L-1 is 0", next_step="Raise L-1.", scope="region"),
    }
    with pytest.raises(NoCapacity) as caught:
        bench.acquire(offer("p4.big"), offer("g5.small"))
    assert caught.value.why.splitlines() == [
        "double p4.big spot @ z1:   no p4 today",
        "double g5.small spot @ z1: quota L-1 is 0",
    ]
    assert caught.value.next_step == "Raise L-1."


def test_a_refusal_that_names_its_offer_names_it_once(bench: Bench):
    bench.double.refuse["p4.big"] = NoCapacity("aws here: asking for 2 x p4.big spot @ z1: no capacity", scope="offer")
    with pytest.raises(NoCapacity) as caught:
        bench.acquire(offer("p4.big"))
    assert caught.value.why == "double p4.big spot @ z1: no capacity"


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


def test_machines_are_waited_for_as_long_as_their_provider_says_that_they_boot(bench: Bench):
    """Metal answers after 25 minutes."""
    bench.timeouts = Timeouts()
    bench.double.ready_after_s, bench.double.slowest_s = 1400, 1500
    assert bench.acquire(offer()).state.ready
    assert bench.clock.now == pytest.approx(1400, abs=20)


def test_what_somebody_has_set_is_longer_than_no_machine_may_boot(bench: Bench):
    bench.double.ready_after_s, bench.double.slowest_s = 1400, 1500
    with pytest.raises(Transient) as caught:
        bench.acquire(offer())
    assert "it still boots" in caught.value.why
    assert bench.clock.now <= TIMEOUTS.provision_s + TIMEOUTS.destroy_s


def test_machines_that_end_slowly_take_no_time_from_the_next_ones(bench: Bench):
    bench.timeouts = Timeouts()
    bench.double.capabilities = CAPS.model_copy(update={"end_s": 1800})
    bench.double.ending_s, bench.double.granted, bench.double.ready_after_s = 580, 1, 100
    bench.double.on_describe = lambda: setattr(bench.double, "granted", None)  # the first gang lacks one
    made = bench.acquire(offer(), offer("g5.small"))
    assert (made.state.ready, len(bench.double.billed)) == (True, 2)
    assert 680 <= bench.clock.now < 720, "more than `provision_s`"


def test_a_search_is_over_by_the_time_that_all_of_the_operation_has(bench: Bench):
    """Whatever it waits for in between: here, for machines that end slowly."""
    bench.timeouts, bench.until = Timeouts(), 650.0
    bench.double.capabilities = CAPS.model_copy(update={"end_s": 1800})
    bench.double.ending_s, bench.double.granted, bench.double.ready_after_s = 580, 1, 100
    bench.double.on_describe = lambda: setattr(bench.double, "granted", None)
    with pytest.raises(Transient, match="not every node was ready"):
        bench.acquire(offer(), offer("g5.small"))
    assert not bench.double.billed
    assert bench.clock.now == pytest.approx(650 + 580, abs=60), "the time of the second gang's end comes after it"


def test_an_end_is_waited_for_as_long_as_it_takes_at_this_provider_and_what_it_costs_is_said(bench: Bench):
    bench.timeouts = Timeouts()
    bench.double.capabilities = CAPS.model_copy(update={"end_s": 1800})
    handle = bench.acquire(offer()).handle
    bench.double.ending_s, begun = 480, bench.clock.now
    bench.destroy(handle)
    assert bench.double.billed == []
    assert 480 <= bench.clock.now - begun < 500
    assert [str(event) for event in bench.events if "billed no more" in str(event)] != []


def test_an_end_that_never_comes_says_that_nothing_is_billed(bench: Bench):
    bench.timeouts = Timeouts()
    bench.double.capabilities = CAPS.model_copy(update={"end_s": 1800})
    handle = bench.acquire(offer()).handle
    bench.double.ending_s, begun = 1e9, bench.clock.now
    with pytest.raises(TeardownIncomplete, match="are billed no more"):
        bench.destroy(handle)
    assert bench.clock.now - begun == pytest.approx(1800, abs=20)


def test_what_costs_nothing_more_is_not_waited_for_where_that_is_enough(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.ending_s, begun = 480, bench.clock.now
    bench.destroy(handle, nodes=("i-1",), unbilled=True)
    assert bench.clock.now - begun < 3
    assert [machine.phase for machine in bench.double.machines.values()] == [None, NodePhase.ENDING]


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
    assert "undone" not in bench.journalled, "the next process looks again"


def test_what_a_refused_create_has_left_is_ended_with_all_retries_before_the_next_offer_is_asked(bench: Bench):
    left = CleanupFailed("i-0 is still there")
    left.__cause__ = NoCapacity("no more of them")
    bench.double.after_create = [left]
    bench.double.destroy_errors = [Transient("no answer")] * 3
    made = bench.acquire(offer("p4.big"), offer("g5.small"))
    assert {machine.token for machine in bench.double.billed} == {made.handle.token}
    assert [(each.offer.instance_type, each.reason) for each in made.tried] == [("p4.big", "no more of them")]


def test_what_a_refused_create_has_left_and_cannot_be_ended_is_told(bench: Bench):
    bench.double.after_create = [CleanupFailed("i-0 is still there")]
    bench.double.destroy_errors = [Transient("no answer")] * 1000
    with pytest.raises(TeardownIncomplete, match="may still be billed"):
        bench.acquire(offer("p4.big"), offer("g5.small"))
    assert bench.journalled[-1] == "intent"


def crash(bench: Bench, wanted: Offer, request_: FleetRequest | None = None, attempt: int = 0) -> str:
    """An earlier process that journalled its intent, made the gang, and died."""
    asked = request_ or request()
    token = create_token("o", "f", asked.generation, wanted, attempt)
    intent = Intent(fleet="f", generation=asked.generation, owner="o", token=token, offer=wanted)
    with bench.journal() as entries:
        entries.append("intent", **intent.model_dump(mode="json"), hard_cap_s=asked.hard_cap_s)
    bench.double.create(asked, wanted, token)
    return token


@pytest.mark.parametrize("kind", [AuthError, PermissionDenied, NoOffer, QuotaExceeded, NoCapacity])
def test_what_a_dead_process_made_is_ended_before_another_region_is_asked_where_its_own_is_closed_now(bench, kind):
    """A quota that it fills itself refuses to make it once more, whatever the token."""
    token = crash(bench, offer("p4.big"))
    bench.double.refuse["p4.big"] = kind("r1 is closed", scope="region")
    made = bench.acquire(offer("p4.big"), offer("p4.small", region="r2", zone="z9"))
    assert (made.offer.region, made.handle.token == token) == ("r2", False)
    assert bench.double.machines.keys() - bench.double.ended_at.keys() == set(made.handle.ids)


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


def elsewhere(bench: Bench) -> None:
    """From here on the bench is another machine, which has no journal."""
    bench.folder /= "elsewhere"
    bench.folder.mkdir()


@pytest.mark.parametrize("searches", [0, 3])
@pytest.mark.parametrize("lost", [(), (1,)])
def test_what_a_search_that_was_cut_off_has_made_is_found_without_its_journal(
    bench: Bench, searches: int, lost: tuple[int, ...]
):
    """By its tokens, in a repair as in a create."""

    def search() -> acquire.Acquired:
        return bench.repair(stands, lost, offer()) if lost else bench.acquire(offer())

    stands = bench.acquire(offer()).handle if lost else Handle(**NOTHING)
    elsewhere(bench)
    bench.searches = searches
    first = search()
    made = len(bench.double.machines)
    elsewhere(bench)
    assert search().handle == first.handle
    assert len(bench.double.machines) == made


@pytest.mark.parametrize("lost", [(), (1,)])
def test_a_search_after_one_that_has_ended_is_not_told_again_what_that_one_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...]
):
    """By a provider, as EC2 is, that gives a token the same answer for days; on a machine without the journal."""
    said, make = dict[str, NoCapacity](), bench.double._make

    def answer(request: FleetRequest, offer: Offer, token: str, ranks: tuple[int, ...]) -> Handle:
        if token in said:
            raise said[token]
        try:
            return make(request, offer, token, ranks)
        except NoCapacity as error:
            said[token] = error
            raise

    def search() -> acquire.Acquired:
        return bench.repair(stands, lost, offer()) if lost else bench.acquire(offer())

    stands = bench.acquire(offer()).handle if lost else Handle(**NOTHING)
    elsewhere(bench)
    monkeypatch.setattr(bench.double, "_make", answer)
    bench.double.refuse["p4.big"] = NoCapacity("sold out")
    with pytest.raises(NoCapacity):
        search()
    bench.double.refuse.clear()
    elsewhere(bench)
    bench.searches = 1
    assert search().state.ready


def test_the_first_search_asks_by_the_tokens_that_it_always_had():
    """What an mgpu of before has made is found by them."""
    assert create_token("o", "f", 1, offer(), 0) == "2e90677b821f3e587fa00388125b2589548e47f6"
    every = [create_token("o", "f", 1, offer(), attempt, searches) for attempt in range(12) for searches in range(12)]
    assert len(set(every)) == len(every)


def test_a_token_that_somebody_else_uses_is_a_conflict_and_is_not_touched(bench: Bench):
    bench.double.create(request(nodes=3), offer(), create_token("o", "f", 1, offer(), 0))
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


# ---- answers that are lost, late or short (F6 to F9, F12)


def lagging(bench: Bench, seconds: float, *, idempotent: bool = True) -> None:
    """Nothing that was made is shown for so long, and the provider says so."""
    changes = {"listing_lag_s": seconds, "idempotent_create": idempotent}
    bench.double.capabilities = CAPS.model_copy(update=changes)
    bench.double.unfound_s = seconds


def gangs(bench: Bench) -> int:
    return len({machine.token for machine in bench.double.machines.values()})


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_lost_answer_and_a_late_find_make_one_gang(bench: Bench, idempotent: bool):
    lagging(bench, 30, idempotent=idempotent)
    bench.double.after_create = [AmbiguousCreate("no answer")]
    made = bench.acquire(offer(), offer("g5.small"))
    assert made.state.ready
    assert len(bench.double.machines) == 2
    assert len(bench.double.created) == (2 if idempotent else 1), "where tokens promise nothing, nothing is asked twice"


def test_what_a_dead_process_asked_for_is_waited_for_until_it_would_show(bench: Bench):
    lagging(bench, 30)
    bench.clock.now = 1000
    token = crash(bench, offer())
    bench.clock.now += 2  # the next `up` comes at once
    made = bench.acquire(offer("g5.small"), offer())
    assert made.handle.token == token
    assert len(bench.double.machines) == 2


class Recalling(Double):
    """One that tells of a token what it has made before `find` shows it, and makes nothing by it from then on."""

    def recall(self, request: FleetRequest, intent: Intent, ranks: tuple[int, ...]) -> Handle | None:
        if intent.token not in self.asked:
            self.asked[intent.token] = (request.model_copy(update={"owner": "nobody"}), intent.offer)
        elif self.asked[intent.token][0] != request:
            raise Conflict("the token was used with other parameters")
        made = any(machine.token == intent.token for machine in self.machines.values())
        return self._handle(intent.token) if made else None


@pytest.fixture
def recalling(bench: Bench) -> Bench:
    bench.double = Recalling(bench.clock)
    lagging(bench, 300)
    return bench


def test_what_a_dead_process_asked_for_is_told_by_its_token_before_it_shows(recalling: Bench):
    token = crash(recalling, offer())
    recalling.clock.now += 2
    made = recalling.acquire(offer("g5.small"), offer())
    assert (made.handle.token, len(recalling.double.machines)) == (token, 2)
    assert recalling.clock.now < 30


def test_a_token_that_a_dead_process_never_asked_by_is_used_up_and_costs_no_wait(recalling: Bench):
    token = crash(recalling, offer())
    recalling.double.machines.clear()
    recalling.double.asked.clear()
    made = recalling.acquire(offer())
    assert made.handle.token != token
    assert (made.tried, len(recalling.double.machines)) == ((), 2)
    assert recalling.clock.now < 30


@pytest.mark.parametrize("made", [True, False])
def test_a_cancel_after_a_lost_answer_asks_what_the_token_has_made(recalling: Bench, made: bool):
    lost = [Transient("the answer was lost")]
    recalling.double.before_create, recalling.double.after_create = ([], lost) if made else (lost, [])
    original = recalling.clock.sleep
    recalling.clock.sleep = lambda seconds: (recalling.cancelled.set(), original(seconds))[1]
    with pytest.raises(Interrupted):
        recalling.acquire(offer())
    assert (len(recalling.double.machines), recalling.double.billed) == (2 if made else 0, [])
    assert recalling.clock.now < 30


def test_a_provider_without_a_word_on_a_token_is_looked_at_until_it_would_show(recalling: Bench):
    recalling.double.recall = lambda *_: (_ for _ in ()).throw(Conflict("somebody's"))  # type: ignore[method-assign]
    recalling.double.after_create = [Transient("the answer was lost")]
    recalling.double.before_create = [None, AuthError("expired")]
    with pytest.raises(AuthError):
        recalling.acquire(offer())
    assert (len(recalling.double.machines), recalling.double.billed) == (2, [])
    assert recalling.clock.now >= 300


def test_an_intent_that_is_old_enough_costs_no_wait(bench: Bench):
    lagging(bench, 30)
    crash(bench, offer())
    bench.double.machines.clear()
    bench.double.asked.clear()
    bench.clock.now = began = TIMEOUTS.provision_s + 31
    assert bench.acquire(offer("g5.small")).offer.instance_type == "g5.small"
    assert bench.clock.now < began + 10


def test_a_process_that_died_long_after_its_intent_may_have_asked_until_then(bench: Bench):
    lagging(bench, 30)
    token = crash(bench, offer())
    bench.clock.now = TIMEOUTS.provision_s - 1
    for machine in bench.double.machines.values():
        machine.born = bench.clock.now - 1  # it was busy or throttled before
    assert bench.acquire(offer("g5.small"), offer()).handle.token == token
    assert len(bench.double.machines) == 2


@pytest.mark.parametrize("refusal", [AuthError("expired"), NoCapacity("none", scope="zone")])
@pytest.mark.parametrize("first", [Transient("the answer was lost"), RateLimited("429 in the middle of a gang")])
def test_a_refusal_does_not_take_back_what_may_have_been_granted_before(
    bench: Bench, first: ProviderError, refusal: ProviderError
):
    lagging(bench, 30)
    bench.double.after_create = [first]
    bench.double.before_create = [None, refusal]
    with pytest.raises(type(refusal)):
        bench.acquire(offer())
    assert len(bench.double.machines) == 2
    assert bench.double.billed == []


def test_looking_for_what_a_refused_try_may_have_made_leaves_the_next_offers_their_time(bench: Bench):
    lagging(bench, 300)
    refused = [RateLimited("slow down"), NoCapacity("none", scope="offer")]
    bench.double.before_create = refused * 3
    made = bench.acquire(*(offer(f"p{number}.big") for number in range(4)))
    assert made.offer.instance_type == "p3.big"
    assert [refusal.reason for refusal in made.tried] == ["none"] * 3


def test_after_such_looking_nothing_is_asked_for_past_the_fleets_hard_cap(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    lagging(bench, 300)
    bench.hard_cap_at = bench.clock.now + 400
    bench.double.before_create = [RateLimited("slow down"), NoCapacity("none", scope="offer")] * 4
    with pytest.raises(Transient):
        bench.repair(handle, (0,), *(offer(f"p{number}.big") for number in range(4)))
    tried = [label.split()[1] for label in bench.double.created[1:]]
    assert tried == ["p0.big", "p0.big", "p1.big", "p1.big"]


def test_a_conflict_after_a_lost_answer_ends_what_was_granted_before_another_try(bench: Bench):
    lagging(bench, 30)
    bench.double.after_create = [Transient("the answer was lost")]
    bench.double.before_create = [None, Conflict("other parameters")]
    made = bench.acquire(offer())
    assert {machine.token for machine in bench.double.billed} == {made.handle.token}
    assert len(bench.double.machines) == 4


@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_an_undo_finds_what_does_not_show_yet(bench: Bench, end: str):
    lagging(bench, 30)
    answers = [AmbiguousCreate("no answer")] + [Transient("503")] * 1000
    bench.double.after_create = answers[: 1 if end == "cancel" else None]
    if end == "cancel":
        original = bench.clock.sleep
        bench.clock.sleep = lambda seconds: (bench.cancelled.set(), original(seconds))[1]
    with pytest.raises(Interrupted if end == "cancel" else Transient):
        bench.acquire(offer())
    assert len(bench.double.machines) == 2
    assert bench.double.billed == []
    assert bench.journalled[-1] == "undone"


def test_an_undo_goes_on_through_trouble(bench: Bench):
    bench.double.after_create = [AmbiguousCreate("no answer")]
    bench.double.find_errors = [Transient("503")] * 5
    original = bench.clock.sleep
    bench.clock.sleep = lambda seconds: (bench.cancelled.set(), original(seconds))[1]
    with pytest.raises(Interrupted):
        bench.acquire(offer())
    assert len(bench.double.machines) == 2
    assert bench.double.billed == []


def test_an_undo_that_never_hears_anything_is_told(bench: Bench):
    bench.double.after_create = [AmbiguousCreate("no answer")]
    bench.double.find_errors = [Transient("503 for an hour")] * 1000
    with pytest.raises(TeardownIncomplete, match="503 for an hour"):
        bench.acquire(offer())
    assert bench.clock.now <= TIMEOUTS.provision_s + TIMEOUTS.destroy_s + 1
    assert bench.journalled == ["intent"]  # no end: the next process looks again


def test_nothing_is_looked_for_where_nothing_was_asked_for(bench: Bench):
    lagging(bench, 30)
    original = bench.journal

    def cancelling() -> Journal:
        entries = original()
        append = entries.append
        entries.append = lambda kind, **fields: (bench.cancelled.set(), append(kind, **fields))[1]
        return entries

    bench.journal = cancelling
    with pytest.raises(Interrupted):
        bench.acquire(offer())
    assert bench.double.calls == []
    assert bench.clock.now == 0


def test_fewer_than_asked_for_are_ended_and_the_next_offer_is_tried(bench: Bench):
    bench.double.granted = 1
    with pytest.raises(NoCapacity, match=r"1 of 2 nodes|ended while it started"):
        bench.acquire(offer())
    assert bench.double.billed == []
    assert len(bench.double.machines) == len(bench.double.asked) == 3


@pytest.mark.parametrize("short", [True, False])
def test_fewer_than_asked_for_whose_end_is_refused_stop_the_search(bench: Bench, short: bool):
    bench.double.granted = 1
    bench.double.destroy_errors = [AuthError("expired")]
    original = bench.double._handle
    if short:  # a handle with fewer places than ranks
        bench.double._handle = lambda token: original(token).model_copy(update={"ids": ("i-0",)})
    with pytest.raises(TeardownIncomplete, match=r"i-0.*may still be billed"):
        bench.acquire(offer(), offer("g5.small"))
    assert bench.double.created == [offer().label]
    assert bench.journalled == ["intent", "created"]


def test_a_describe_that_does_not_know_the_new_machines_yet_asks_for_no_others(bench: Bench):
    bench.double.undescribed_s = 30
    made = bench.acquire(offer())
    assert made.handle.ids == ("i-0", "i-1")
    assert len(bench.double.machines) == 2
    assert made.tried == ()
    assert 30 <= bench.clock.now < 65


def test_machines_that_are_never_described_are_ended_at_the_deadline(bench: Bench):
    bench.double.undescribed_s = 1e9
    with pytest.raises(Transient, match="is not known yet"):
        bench.acquire(offer())
    assert bench.double.billed == []


def test_a_repair_after_a_crash_adopts_although_less_time_is_left_until_the_hard_cap(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED

    def die(*_args: object) -> None:
        raise SystemExit

    describe, destroy = bench.double.describe, bench.double.destroy
    bench.double.describe = bench.double.destroy = die  # SIGKILL: it undoes nothing
    with pytest.raises(SystemExit):
        bench.repair(handle, (0,), offer())
    bench.double.describe, bench.double.destroy = describe, destroy
    bench.cap_s -= 5
    assert bench.repair(handle, (0,), offer()).handle.ids == ("i-2", "i-1")
    assert len(bench.double.machines) == 3
    bench.double.machines["i-2"].phase = NodePhase.TERMINATED
    bench.cap_s -= 5
    handle = handle.model_copy(update={"ids": ("i-2", "i-1"), "generation": 2})
    bench.repair(handle, (0,), offer())
    assert [asked.hard_cap_s for asked, _ in bench.double.asked.values()] == [3600, 3600, 3590]


def test_no_replacement_outlives_its_fleet_however_long_it_was_searched_for(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    bench.cap_s, bench.hard_cap_at = 3600.0, bench.clock.now + 3600
    bench.double.before_create = [RateLimited("slow down", retry_after=40)]
    bench.double.refuse["p4.small"] = NoCapacity("none", scope="offer")
    bench.repair(handle, (0,), offer("p4.small"), offer())
    fresh = bench.double.machines["i-2"]
    asked, _ = bench.double.asked[fresh.token]
    assert fresh.born + asked.hard_cap_s <= bench.hard_cap_at


class WithDisks(Double):
    def other_costs(self, requirements: Requirements, offer: Offer, saves: Saves | None) -> tuple[Cost, ...]:
        assert not requirements.stores, "where they are takes a call, and traffic has no hours"
        return Cost(what="disks", usd=offer.price_usd_per_hour, per="hour"), Cost(what="traffic", usd=1e6, per="GiB")


@pytest.mark.parametrize(("provider", "shares"), [(Double, 2), (WithDisks, 3)])
def test_a_fleet_lives_no_longer_than_is_paid_for(bench: Bench, provider: type[Double], shares: int):
    """By its own clock, whoever has died; what is billed by the hour beside its two machines counts, too."""
    bench.double = provider(bench.clock)
    bench.max_usd = offer().price_usd_per_hour * shares / 4
    bench.acquire(offer())
    ((asked, _),) = bench.double.asked.values()
    assert asked.hard_cap_s == pytest.approx(900)


def test_a_fleet_whose_price_changes_lives_no_longer_than_is_paid_for_at_its_highest(bench: Bench):
    bench.max_usd = offer().price_usd_per_hour
    bench.acquire(offer().model_copy(update={"most_usd_per_hour": 4 * offer().price_usd_per_hour}))
    ((asked, _),) = bench.double.asked.values()
    assert asked.hard_cap_s == pytest.approx(3600 / 4 / 2), "two machines"


def test_no_machine_is_searched_for_that_would_end_at_once(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    bench.hard_cap_at = bench.clock.now + acquire.ENDING_S + 20
    bench.double.before_create = [Transient("503")] * 1000
    with pytest.raises(Transient):
        bench.repair(handle, (0,), offer())
    assert bench.clock.now < bench.hard_cap_at
    assert len(bench.double.machines) == 2


def test_a_repair_without_capacity_says_what_was_tried_and_touches_nothing(bench: Bench):
    handle = bench.acquire(offer("g5.small"), offer()).handle
    bench.double.refuse = {kind: NoCapacity(f"no {kind} today", scope="zone") for kind in ("g5.small", "p4.big")}
    bench.double.machines["i-1"].phase = NodePhase.TERMINATED
    with pytest.raises(NoCapacity) as caught:
        bench.repair(handle, (1,), offer("g5.small"), offer())
    assert [line.rpartition(": ")[2].strip() for line in caught.value.why.splitlines()] == [
        "no g5.small today",
        "no p4.big today",
    ]
    assert caught.value.next_step
    assert [machine.id for machine in bench.double.billed] == ["i-0"]


# ---- first contact


def meeting(bench: Bench, *answers: BaseException | str) -> list[list[str]]:
    """Machines come with a key for one use; each pass over them ends as the next answer says: raised, or the reason
    why node 0 was not met; none is left: all were. What was journalled when each began is returned."""
    bench.double.one_use = "ssh-ed25519 AAAA"
    begun: list[list[str]] = []
    left = list(answers)

    def meet(handle: Handle, state: FleetState) -> FleetState:
        begun.append(bench.journalled)
        answer = left.pop(0) if left else None
        if isinstance(answer, BaseException):
            raise answer
        new = [node.model_copy(update={"host_key": f"new {node.id}", "one_use_key": ""}) for node in state.nodes]
        if answer is not None:
            new[0] = state.nodes[0].model_copy(update={"reason": answer})
        return FleetState(nodes=tuple(new))

    bench.meet = meet
    return begun


def test_machines_are_met_when_all_run_and_before_they_count(bench: Bench):
    begun = meeting(bench)
    made = bench.acquire(offer())
    assert begun == [["intent", "created"]]
    assert bench.clock.now >= bench.double.ready_after_s
    assert [node.host_key for node in made.state.nodes] == ["new i-0", "new i-1"]


def test_machines_are_met_until_every_one_has_its_key(bench: Bench):
    begun = meeting(bench, "no answer", "no answer", Transient("503"))
    assert bench.acquire(offer()).state.nodes[0].host_key == "new i-0"
    assert len(begun) == 4
    assert len(bench.double.machines) == 2


def test_machines_that_nobody_could_meet_are_ended_and_the_next_try_begins(bench: Bench):
    meeting(bench, acquire.Lost("no SSH answer for 300 s"))
    made = bench.acquire(offer())
    assert [refusal.reason for refusal in made.tried] == ["no SSH answer for 300 s"]
    assert sorted(machine.id for machine in bench.double.billed) == ["i-2", "i-3"]


@pytest.mark.parametrize("error", [HostKeyMismatch("another machine"), ConnectionFailed("a bug")])
def test_what_first_contact_cannot_judge_ends_the_search_and_leaves_nothing(bench: Bench, error: Exception):
    meeting(bench, error)
    with pytest.raises(type(error)):
        bench.acquire(offer(), offer("g5.small"))
    assert bench.double.billed == []
    assert bench.double.created == [offer().label]


def test_a_machine_that_is_lost_while_it_is_met_is_noticed(bench: Bench):
    meeting(bench, "no answer")
    first = iter([0, 0, 0])

    def lose() -> None:
        if bench.clock.now > bench.double.ready_after_s + 0.1 and next(first, None) == 0:
            bench.double.machines["i-1"].phase = NodePhase.STOPPING

    bench.double.on_describe = lose
    made = bench.acquire(offer())
    assert "i-1" in made.tried[0].reason
    assert made.handle.ids == ("i-2", "i-3")


def test_the_deadline_says_which_machine_was_not_met(bench: Bench):
    meeting(bench, *["node 0: no first contact by SSH"] * 1000)
    with pytest.raises(Transient, match="node 0: no first contact by SSH"):
        bench.acquire(offer())
    assert bench.double.billed == []
    assert bench.clock.now <= TIMEOUTS.provision_s + TIMEOUTS.describe_every_s


def test_a_cancel_ends_first_contact(bench: Bench):
    meeting(bench, *["no answer"] * 1000)
    original = bench.clock.sleep
    bench.clock.sleep = lambda s: (bench.cancelled.set() if bench.clock.now > 5 else None, original(s))[1]
    with pytest.raises(Interrupted):
        bench.acquire(offer())
    assert bench.double.billed == []


def test_a_gang_that_was_met_in_part_is_met_by_the_process_that_adopts_it(bench: Bench):
    meeting(bench, SystemExit())
    destroy, bench.double.destroy = bench.double.destroy, lambda *_: (_ for _ in ()).throw(SystemExit())
    with pytest.raises(SystemExit):
        bench.acquire(offer())
    bench.double.destroy = destroy
    begun = meeting(bench)
    made = bench.acquire(offer())
    assert len(begun) == 1
    assert made.handle.ids == ("i-0", "i-1")
    assert made.state.nodes[0].host_key == "new i-0"


def test_a_repair_meets_its_own_machines_and_waits_for_no_other(bench: Bench):
    handle = bench.acquire(offer()).handle
    bench.double.machines["i-0"].phase = NodePhase.TERMINATED
    meeting(bench)
    meet = bench.meet
    assert meet is not None

    def without_the_survivor(handle: Handle, state: FleetState) -> FleetState:
        return FleetState(nodes=(meet(handle, state).nodes[0], state.nodes[1]))

    bench.meet = without_the_survivor
    made = bench.repair(handle, (0,), offer())
    assert made.state.nodes[0].host_key == "new i-2"


def test_machines_whose_key_nobody_has_to_replace_count_when_they_run(bench: Bench):
    bench.double.one_use = "ssh-ed25519 AAAA"
    assert bench.acquire(offer()).handle.ids == ("i-0", "i-1")


def short_of(bench: Bench) -> None:
    """Handles have no places after the last machine that was made."""
    original = bench.double._handle

    def short(token: str) -> Handle:
        made = original(token)
        last = max(rank for rank, name in enumerate(made.ids) if name)
        return made.model_copy(update={"ids": made.ids[: last + 1], "made_at": 7.0})

    bench.double._handle = short


def test_a_repair_finds_its_machine_in_a_handle_with_too_few_places(bench: Bench):
    handle = bench.acquire(offer(), wanted=request(3)).handle
    bench.double.machines["i-1"].phase = NodePhase.TERMINATED
    bench.double.after_create = [AmbiguousCreate("no answer")]
    short_of(bench)
    made = bench.repair(handle, (1,), offer())
    assert made.handle.ids == ("i-0", "i-3", "i-2")
    assert made.handle.made_at == 7


def test_a_repair_that_finds_fewer_than_it_asked_for_ends_them_and_no_other(bench: Bench):
    handle = bench.acquire(offer(), wanted=request(3)).handle
    for name in ("i-1", "i-2"):
        bench.double.machines[name].phase = NodePhase.TERMINATED
    bench.double.granted = 1
    bench.double.capabilities = CAPS.model_copy(update={"idempotent_create": False})
    bench.double.after_create = [AmbiguousCreate("no answer")] * 3
    short_of(bench)
    with pytest.raises(NoCapacity):
        bench.repair(handle, (1, 2), offer())
    assert [machine.id for machine in bench.double.billed] == ["i-0"]


# ---- a queue of the provider's


def test_a_queue_that_admits_after_an_hour_is_waited_for_under_a_deadline_of_its_own(bench: Bench):
    bench.double.queued_for_s, bench.double.queue_limit_s = 3600, 2 * 3600
    made = bench.acquire(offer())
    assert made.state.ready
    assert bench.double.created == [offer().label], "it was asked for once"
    assert bench.clock.now == pytest.approx(3603, abs=30), "and is seen soon after"
    assert bench.double.looks < 400, "nobody asks twice a second for an hour"
    assert [event for event in bench.events if isinstance(event, Note)] == [
        Note("in the queue (Priority); waiting for 120 min at most")
    ]


def test_what_the_queue_says_is_told_once_whatever_the_nodes_say_that_wait_in_none(bench: Bench):
    bench.double.queued_for_s, bench.double.queue_limit_s = 3600, 2 * 3600
    describe = bench.double.describe

    def first_has_room(handle: Handle) -> FleetState:
        first, second = describe(handle).nodes
        if second.queued:
            first = first.model_copy(update={"queued": False, "reason": "ContainerCreating"})
        return FleetState(nodes=(first, second))

    bench.double.describe = first_has_room
    bench.acquire(offer())
    assert [event.text for event in bench.events if isinstance(event, Note)] == [
        "in the queue (Priority); waiting for 120 min at most"
    ]


def test_a_queue_that_does_not_admit_in_time_is_left_and_the_next_offer_is_asked(bench: Bench):
    bench.double.queued_for_s, bench.double.queue_limit_s = 3600, 600
    with pytest.raises(NoCapacity) as caught:
        bench.acquire(offer(), offer("p5.big"))
    assert "waited in the queue for 10 min" in caught.value.why
    assert bench.double.created == [offer().label, offer("p5.big").label]
    assert bench.double.billed == []
    assert bench.clock.now == pytest.approx(1200, abs=60)


def test_the_time_to_come_up_begins_when_the_queue_admits(bench: Bench):
    bench.double.queued_for_s, bench.double.queue_limit_s = 3600, 2 * 3600
    bench.double.ready_after_s = 10_000
    with pytest.raises(Transient, match="not every node was ready within 100 s"):
        bench.acquire(offer())
    assert bench.clock.now == pytest.approx(3700, abs=30)
    assert bench.double.billed == []


@pytest.mark.parametrize("error", [AuthError("expired", "", "Log in again."), Transient("the login node is away")])
def test_a_request_stays_in_the_queue_while_nobody_can_look_at_it(bench: Bench, error: ProviderError):
    bench.double.queued_for_s, bench.double.queue_limit_s = 5 * 3600, 6 * 3600

    def away_for_hours() -> None:
        if 600 < bench.clock.now < 4 * 3600:
            raise error

    bench.double.on_describe = away_for_hours
    assert bench.acquire(offer()).state.ready
    assert bench.double.created == [offer().label], "it was asked for once"
    told = [event.text for event in bench.events if isinstance(event, Warned)]
    assert told == ["expired; what was asked for stays in the queue. Log in again."] * isinstance(error, AuthError)
    assert bench.double.looks < 2000


def test_machines_that_boot_are_given_back_where_the_log_in_is_over(bench: Bench):
    bench.double.queued_for_s, bench.double.queue_limit_s, bench.double.ready_after_s = 600, 3600, 90

    def over() -> None:
        if bench.clock.now > 650:
            raise AuthError("expired")

    bench.double.on_describe = over
    with pytest.raises(AuthError):
        bench.acquire(offer())
    assert bench.double.billed == []


def test_machines_of_a_fleet_that_has_a_hard_cap_are_told_it_however_late_they_start(bench: Bench):
    made = bench.acquire(offer())
    assert [asked.ends_by for asked, _ in bench.double.asked.values()] == [0], "a new fleet's counts from its start"
    bench.hard_cap_at = bench.clock.now + 1000
    repaired = bench.repair(made.handle, (1,), offer())
    asked, _ = bench.double.asked[repaired.handle.token]
    assert asked.ends_by == bench.hard_cap_at
