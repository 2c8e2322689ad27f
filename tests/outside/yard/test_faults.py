"""What a cloud does to those who rent there: mgpu's own search over provider yard. Its clock moves when it sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.clock import Clock
from fakes.cloud import KEY, Cloud, serving
from fakes.cloud.machines import Paper
from mgpu_train.timeouts import Timeouts
from mgpu_yard import api
from mgpu_yard.keyless import Keyless
from mgpu_yard.provider import YardProvider
from waiting import until

from mgpu import acquire
from mgpu.acquire import Acquired
from mgpu.errors import AuthError, InvalidRequest, NoCapacity, QuotaExceeded, TeardownIncomplete, Transient
from mgpu.journal import Journal
from mgpu.plan import rank
from mgpu.plan.model import Requirements
from mgpu.providers.base import FleetRequest
from mgpu.providers.rate_limit import RateLimit

TIMES = Timeouts(provision_s=300, describe_every_s=1)


@pytest.fixture
def clock() -> Clock:
    return Clock(1e9)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Cloud]:
    monkeypatch.setenv("YARD_API_KEY", KEY)
    with serving(Paper()) as cloud:
        cloud.now = lambda: clock.now
        yield cloud


@pytest.fixture
def rent(cloud: Cloud, clock: Clock, tmp_path: Path) -> Callable[..., Acquired]:
    """`rent(nodes)`: a fleet as the plugin rents it, cheapest offer first; `then` happens between plan and purchase."""

    def rent(nodes: int = 2, kind: type[YardProvider] = YardProvider, then: Callable[[], object] = str, **options: Any):
        needed = Requirements(provider="yard", nodes=nodes, max_price_usd_per_hour=1, max_hours=1)
        offers = rank.plan(needed, kind({"endpoint": cloud.endpoint}).offers(needed).offers).offers
        provider = kind({"endpoint": cloud.endpoint, **options})
        request = FleetRequest(
            fleet="demo", generation=1, owner="o-1", requirements=needed, ssh_public_key="ssh-ed25519 AAAA",
            lease_s=300, hard_cap_s=600,
        )  # fmt: skip
        then()
        with Journal(tmp_path / "fleet.jsonl") as journal:
            terms: acquire.Terms = {"timeouts": TIMES, "clock": clock, "sleep": clock.sleep, "now": clock}
            return acquire.acquire(provider, request, offers, journal, **terms)

    return rent


def posted(cloud: Cloud) -> int:
    return sum(method == "POST" for method, _ in cloud.requests)


@pytest.mark.parametrize("fault", ["lost", "broken"])
def test_an_answer_that_is_lost_makes_no_second_machine(cloud: Cloud, rent, fault):
    cloud.lag_s, cloud.creates = 1000, ["", fault]
    assert sorted(rent(3).handle.ids) == sorted(cloud.instances), "by the key it is the same one"


@pytest.mark.parametrize("nodes", [1, 2])
def test_without_keys_it_is_looked_for_until_it_would_be_listed(cloud: Cloud, rent, clock, nodes):
    cloud.keys, cloud.lag_s, cloud.creates = False, 8, ["lost"]
    made = rent(nodes, Keyless)
    assert sorted(cloud.billed) == sorted(made.handle.ids), "and the part of a gang that there is of it is given back"
    assert len(cloud.instances) == (1 if nodes == 1 else 3)
    assert clock.now - 1e9 >= 8


def test_without_keys_nothing_of_a_gang_is_asked_for_twice_because_the_rest_was_refused(cloud: Cloud, rent):
    cloud.keys, cloud.lag_s, cloud.creates = False, 8, ["", "busy"]
    assert sorted(rent(2, Keyless).handle.ids) == sorted(cloud.billed)
    assert len(cloud.instances) == 3, "the one that was made first, and a gang"


def test_a_create_that_comes_late_makes_no_second_machine(cloud: Cloud, rent):
    cloud.creates = ["late"]
    made = rent(1, answer_s="0.2")
    until(lambda: cloud.done == posted(cloud) > 1)
    assert list(made.handle.ids) == list(cloud.instances)


def test_an_api_that_does_not_answer_is_asked_again(cloud: Cloud, rent, clock, monkeypatch):
    def sleep(seconds: float) -> None:
        cloud.latency_s = 0.0
        Clock.sleep(clock, seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    made = rent(answer_s="0.2", then=lambda: setattr(cloud, "latency_s", 0.5))
    assert cloud.latency_s == 0, "there was a pause"
    assert sorted(made.handle.ids) == sorted(cloud.instances)


def test_who_is_asked_to_come_later_comes_later(cloud: Cloud, rent, clock):
    made = rent(then=lambda: setattr(cloud, "busy", 2))
    assert [seconds for seconds in clock.sleeps if seconds >= cloud.retry_after_s] == [7.0, 7.0]
    assert sorted(made.handle.ids) == sorted(cloud.instances)


def test_an_api_that_takes_one_request_a_second_is_asked_no_faster(cloud: Cloud, rent, clock, monkeypatch):
    limit = RateLimit(1, clock=clock, sleep=clock.sleep)
    monkeypatch.setattr(api, "limit", lambda *_: limit)
    cloud.per_s = 1
    made = rent(4)
    assert sorted(made.handle.ids) == sorted(cloud.instances)
    assert cloud.refused == 0, "a gang of which each try is refused never comes"


def test_where_there_is_no_room_for_all_none_stays_and_the_next_offer_is_taken(cloud: Cloud, rent):
    made = rent(then=lambda: cloud.capacity.update({("north", "on-demand"): 1}))
    assert (made.handle.region, len(made.handle.ids)) == ("south", 2)
    assert sorted(cloud.billed) == sorted(made.handle.ids)
    (refusal,) = made.tried
    assert refusal.reason == "yard: no barrow is free in north"


def test_nothing_is_left_where_nothing_is_to_be_had(cloud: Cloud, rent):
    def sold_out() -> None:
        cloud.capacity.update({("north", "on-demand"): 1, ("south", "on-demand"): 0})

    with pytest.raises(NoCapacity) as caught:
        rent(then=sold_out)
    assert all(f"no barrow is free in {region}" in caught.value.why for region in ("north", "south"))
    assert len(cloud.instances) == 1
    assert cloud.billed == []


def test_a_quota_is_named_and_no_other_region_is_tried(cloud: Cloud, rent):
    cloud.quota = 1
    with pytest.raises(QuotaExceeded) as caught:
        rent()
    assert "your account may have 1 instances (limit `instances`)" in caught.value.why
    assert caught.value.next_step == "Ask for more at https://yard.example/limits."
    assert posted(cloud) == 2
    assert cloud.billed == []


def test_what_cannot_be_given_back_ends_the_search_and_is_named(cloud: Cloud, rent):
    cloud.quota, cloud.locked = 1, True
    with pytest.raises(TeardownIncomplete) as caught:
        rent()
    assert caught.value.what == f"fleet demo: {cloud.billed[0]} at yard north may still be billed"
    assert "Run `mgpu gc`" in caught.value.next_step


def test_a_machine_that_cannot_be_ended_keeps_no_other_one_alive(cloud: Cloud, rent):
    made = rent(3)
    cloud.stuck = made.handle.ids[:1]
    with pytest.raises(InvalidRequest, match="protected from its end"):
        YardProvider({"endpoint": cloud.endpoint}).destroy(made.handle)
    assert cloud.billed == [*cloud.stuck]


def test_a_key_that_is_revoked_in_the_middle_of_a_gang_hides_no_machine(cloud: Cloud, rent, clock, monkeypatch):
    def sleep(seconds: float) -> None:
        monkeypatch.setenv("YARD_API_KEY", "revoked")
        Clock.sleep(clock, seconds)

    monkeypatch.setattr(clock, "sleep", sleep)
    cloud.creates = ["", "busy"]
    with pytest.raises(TeardownIncomplete, match="may have made machines that are billed"):
        rent()
    assert len(cloud.billed) == 1


def test_from_a_state_that_nobody_knows_nothing_is_concluded(cloud: Cloud, rent, monkeypatch):
    made = rent(1)
    monkeypatch.setattr(cloud.machines, "look", lambda _: {"status": "migrating", "reason": ""})
    with pytest.raises(Transient, match=f"yard: {made.handle.ids[0]} is migrating"):
        YardProvider({"endpoint": cloud.endpoint}).describe(made.handle)


def test_a_wrong_key_is_told_with_the_variable_that_holds_it(rent, monkeypatch):
    monkeypatch.setenv("YARD_API_KEY", "another")
    with pytest.raises(AuthError) as caught:
        rent()
    assert caught.value.what == "yard: the key is wrong"
    assert "`yard.key`" in caught.value.next_step
