"""A search over the offers of provider `aws`: zones, markets and regions that refuse, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fakes.aws import FakeAws
from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.acquire import Acquired
from mgpu.errors import NoCapacity, NoOffer, PermissionDenied, QuotaExceeded
from mgpu.journal import Journal
from mgpu.plan import rank
from mgpu.plan.model import Offer, Plan, Requirements
from mgpu.providers import registry
from mgpu.providers.aws.instances import disk_key
from mgpu.providers.base import FleetRequest

EAST, WEST = "us-east-1", "us-west-2"
G_SPOT = "L-3819A6DF"  # the quota of all G and VT machines on the spot market


def public_key() -> str:
    form = serialization.PublicFormat.OpenSSH
    return Ed25519PrivateKey.generate().public_key().public_bytes(serialization.Encoding.OpenSSH, form).decode()


class Search:
    """Machines with one A10G of provider `aws` on the fake; first contact is left out, the fake has no machines."""

    def __init__(self, aws: FakeAws, folder: Path) -> None:
        self.aws, self.folder = aws, folder
        self.provider = registry.get("aws", aws.options)
        self.searches = 0

    def plan(self, nodes: int = 2, market: str = "spot") -> Plan:
        needed = Requirements(
            provider="aws",
            nodes=nodes,
            gpu=("A10G",),
            gpus_per_node=1,
            market=market,  # type: ignore[arg-type]
            regions=(EAST,),
            max_price_usd_per_hour=1000,
            max_hours=1,
        )
        return rank.plan(needed, self.provider.offers(needed).offers)

    def elsewhere(self) -> None:
        """From here on it is made by another machine, which has no journal."""
        self.folder /= "elsewhere"
        self.folder.mkdir()

    def __call__(self, nodes: int = 2, market: str = "spot", more: tuple[Offer, ...] = ()) -> Acquired:
        plan = self.plan(nodes, market)
        request = FleetRequest(
            fleet="f",
            generation=1,
            owner="o-1",
            requirements=plan.requirements,
            ssh_public_key=public_key(),
            lease_s=600,
            hard_cap_s=3600,
        )
        self.offers = (*plan.offers, *more)
        with Journal(self.folder / "journal") as journal:
            return acquire.acquire(
                self.provider,
                request,
                self.offers,
                journal,
                timeouts=Timeouts(provision_s=60, destroy_s=60),
                searches=self.searches,
            )

    @property
    def fleets(self) -> int:
        """Times that EC2 was asked for machines."""
        return len(self.aws.calls("CreateFleet"))


@pytest.fixture
def search(aws: FakeAws, tmp_path: Path) -> Search:
    aws.base(EAST)
    return Search(aws, tmp_path)


def places(offers: tuple[Offer, ...]) -> list[tuple[str, str, str | None]]:
    return [(offer.instance_type, offer.market, offer.zone) for offer in offers]


def test_a_pool_without_capacity_is_asked_once_and_the_next_one_grants(search: Search, aws: FakeAws):
    first, second = search.plan().offers[:2]
    aws.capacity(0, first.instance_type, zone_name(aws, first), first.market)
    made = search()
    assert places((made.offer,)) == places((second,))
    (refused,) = made.tried
    assert "InsufficientInstanceCapacity" in refused.reason
    assert search.fleets == 2


def test_a_region_whose_machines_cannot_open_their_disks_is_asked_once(search: Search, aws: FakeAws):
    """A key of the customer's that EC2 may not use: machines are granted, and die as they start."""
    key = aws.client("kms", EAST).create_key()["KeyMetadata"]["Arn"]
    aws.client("ec2", EAST).modify_ebs_default_kms_key_id(KmsKeyId=key)
    with pytest.raises(NoOffer) as caught:
        search()
    assert search.fleets == 1
    assert "Client.InternalError" in caught.value.why
    assert "mgpu check aws" in caught.value.next_step
    assert aws.alive() == []
    allowed = {"Version": "2012-10-17", "Statement": [disk_key.statement("123456789012", EAST)]}
    aws.client("kms", EAST).put_key_policy(KeyId=key, PolicyName="default", Policy=json.dumps(allowed))
    assert search().state.ready


def zone_name(aws: FakeAws, offer: Offer) -> str:
    """The fake's capacity goes by names, offers go by ids."""
    zones = aws.client("ec2", offer.region).describe_availability_zones()["AvailabilityZones"]
    return next(zone["ZoneName"] for zone in zones if offer.zone in (zone["ZoneId"], zone["ZoneName"]))


def test_without_any_capacity_every_pool_is_asked_once_and_named(search: Search, aws: FakeAws):
    aws.capacity(0)
    with pytest.raises(NoCapacity) as caught:
        search()
    lines = caught.value.why.splitlines()
    assert len(lines) == len(search.offers) == search.fleets
    assert all(offer.label in line for offer, line in zip(search.offers, lines, strict=True))
    assert aws.alive() == []


def test_what_ec2_has_refused_one_machine_is_asked_anew_by_the_next_one(search: Search, aws: FakeAws):
    """A known client token is answered as it was the first time, whatever there is by now."""
    aws.capacity(0)
    with pytest.raises(NoCapacity):
        search()
    aws.capacity(100)
    search.elsewhere()
    search.searches = 1
    asked = search.fleets
    assert search().state.ready
    assert search.fleets == asked + 1


def test_a_quota_ends_its_family_on_that_market_after_one_call(search: Search, aws: FakeAws):
    aws.quota(G_SPOT, 0)
    with pytest.raises(QuotaExceeded, match=G_SPOT) as caught:
        search()
    assert search.fleets == 1
    assert f"and {len(search.offers) - 1} more" in caught.value.why


def test_on_demand_follows_spot_past_a_quota(search: Search, aws: FakeAws):
    aws.quota(G_SPOT, 0)
    made = search(market="spot-then-on-demand")
    assert made.offer.market == "on-demand"
    assert search.fleets == 2


def test_a_region_without_base_is_left_for_one_that_has_it(aws: FakeAws, tmp_path: Path):
    aws.base(WEST)
    search = Search(aws, tmp_path)
    elsewhere = search.plan().best.model_copy(update={"region": WEST, "zone": f"{WEST}a"})
    made = search(more=(elsewhere,))
    assert made.offer == elsewhere
    assert search.fleets == 1
    assert [refusal.offer.region for refusal in made.tried] == [EAST], "one word about the region is enough"


def test_no_base_anywhere_names_the_command(aws: FakeAws, tmp_path: Path):
    with pytest.raises(NoOffer, match="mgpu bootstrap aws"):
        Search(aws, tmp_path)()
    assert aws.calls("CreateFleet") == []


def test_a_permission_that_is_missing_is_met_once_in_a_region_and_told(search: Search, aws: FakeAws):
    aws.deny("CreateFleet")
    with pytest.raises(PermissionDenied, match="CreateFleet"):
        search()
    assert search.fleets == 1


def test_throttling_slows_the_search_down_and_makes_no_second_gang(search: Search, aws: FakeAws):
    aws.throttle(0.3)
    made = search()
    aws.calm()
    assert sorted(aws.alive()) == sorted(made.handle.ids)


@pytest.mark.parametrize("fault", ["lost", "503 after it ran"])
def test_an_answer_that_does_not_come_makes_one_gang(search: Search, aws: FakeAws, fault: str):
    faults: dict[str, Callable[[], None]] = {
        "lost": lambda: aws.lose_answers("CreateFleet"),
        "503 after it ran": lambda: aws.unavailable("CreateFleet", n=1, after=True),
    }
    faults[fault]()
    made = search()
    assert sorted(aws.alive()) == sorted(made.handle.ids)
    assert len(made.handle.ids) == 2


def test_thirty_two_machines_take_one_request_and_few_calls_each(search: Search, aws: FakeAws):
    made = search(nodes=32)
    assert len(set(made.handle.ids)) == 32
    assert search.fleets == 1
    assert len(aws.calls()) <= 4 * 32
