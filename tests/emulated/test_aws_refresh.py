"""A refresh of the offers from a fake AWS: what is asked, what is kept, and what a partial failure leaves as it was."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fakes.aws import FakeAws

from mgpu.errors import AuthError, InputError, NoOffer, PermissionDenied, Transient
from mgpu.plan import rank
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws.catalog import offers as aws_offers
from mgpu.providers.aws.catalog import quotas
from mgpu.providers.aws.catalog import refresh as refreshing
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.providers.aws.catalog.refresh import PRICES, refresh
from mgpu.providers.aws.catalog.snapshot import Snapshot
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

REGIONS = ("eu-west-1", "us-west-2")
KINDS = ["g4dn.12xlarge", "g5.xlarge", "p4d.24xlarge"]


@pytest.fixture(scope="module")
def clients(aws_server: FakeAws) -> Account:
    """One for all tests: a client takes longer to make than most of its calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in aws_server.env.items():
            patch.setenv(name, value)
        ours = Account(Options.of(aws_server.options), connect_s=2, read_s=20, attempts=1)
        for region in REGIONS:
            ours.client("ec2", region)
    return ours


@pytest.fixture
def account(aws: FakeAws, clients: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """Two regions and three types are enough; a cache of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Account, "regions", lambda _: REGIONS)
    monkeypatch.setattr("mgpu.providers.aws.catalog.refresh._GPU_FAMILIES", KINDS)
    return clients


def kept(account: Account) -> Snapshot:
    return snapshots._read(snapshots.cache_file(account.options))


def wanted(**changes: Any) -> Requirements:
    needed: dict[str, Any] = {
        "provider": "aws", "nodes": 2, "gpu": ("A100-40GB",), "gpus_per_node": 8, "market": "spot-then-on-demand",
        "max_price_usd_per_hour": 1000, "max_hours": 1,
    }  # fmt: skip
    return Requirements.model_validate(needed | changes)


def on_sale(account: Account, **changes: Any) -> tuple[Offer, ...]:
    return aws_offers.offers(wanted(**changes), account.options).offers


# --- what is kept


def test_every_region_gets_zones_and_prices_of_both_markets(aws: FakeAws, account: Account):
    aws.price(7.5, instance_type="p4d.24xlarge", zone="us-west-2b", market="spot")
    begin = time.time()
    done = refresh(account)
    assert (done.regions, done.failed) == (REGIONS, {})
    offers = on_sale(account, regions=("us-west-2",))
    names = {zone["ZoneId"]: zone["ZoneName"] for zone in _zones(aws, "us-west-2")}
    assert {names[offer.zone or ""] for offer in offers} >= {"us-west-2b"}
    spot = {names[offer.zone or ""]: offer for offer in offers if offer.market == "spot"}
    assert spot["us-west-2b"].price_usd_per_hour == 7.5
    assert not any(offer.price_is_limit for offer in offers)
    assert all(begin - 1 <= offer.fetched_at <= time.time() for offer in offers)
    assert {offer.price_usd_per_hour for offer in offers if offer.market == "on-demand"} == {21.9576}


def test_on_demand_prices_are_of_their_region_and_of_shared_machines_with_linux(aws: FakeAws, account: Account):
    refresh(account)
    listed = {name: kept(account).regions[name].on_demand["g5.xlarge"] for name in REGIONS}
    assert listed["us-west-2"] == 1.006  # not the dedicated one, nor the one with Windows, nor a reservation's 0
    assert listed["eu-west-1"] > listed["us-west-2"]


def test_what_the_price_list_gives_away_is_no_price(account: Account, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(refreshing._PRODUCT, "capacitystatus")  # machines in a reservation are listed for 0
    refresh(account)
    assert kept(account).regions["us-west-2"].on_demand["g5.xlarge"] == 1.006


def test_a_spot_price_is_the_newest_of_its_zone(aws: FakeAws, account: Account):
    pages = (
        aws.client("ec2", "us-west-2")
        .get_paginator("describe_spot_price_history")
        .paginate(InstanceTypes=["g5.xlarge"], ProductDescriptions=["Linux/UNIX"])
    )
    history = [row for page in pages for row in page["SpotPriceHistory"]]
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in _zones(aws, "us-west-2")}
    newest: dict[str, Any] = {}
    for row in sorted(history, key=lambda row: row["Timestamp"]):
        newest[ids[row["AvailabilityZone"]]] = float(row["SpotPrice"])
    assert len({row["SpotPrice"] for row in history}) > len(newest) > 1
    refresh(account, now=lambda: time.time() - 36 * 3600)  # a history of 36 hours, newest first
    assert kept(account).regions["us-west-2"].spot["g5.xlarge"] == newest


def test_zones_are_kept_by_id(account: Account):
    refresh(account)
    zones = {zone for found in kept(account).regions["us-west-2"].zones.values() for zone in found}
    assert zones
    assert all(zone.startswith("usw2-az") for zone in zones)


def test_the_sources_and_the_account_are_told(account: Account):
    refresh(account)
    assert kept(account).account == "123456789012"
    assert kept(account).sources[0].startswith("AWS, asked on 20")
    refresh(account)
    assert sum(source.startswith("AWS, asked") for source in kept(account).sources) == 1


def test_regions_that_were_not_asked_stay_as_they_shipped(account: Account):
    refresh(account)
    shipped = snapshots._read(snapshots.SHIPPED)
    assert kept(account).regions["ap-south-1"] == shipped.regions["ap-south-1"]


def test_the_price_list_is_asked_once_a_type_and_not_once_a_region(aws: FakeAws, account: Account):
    refresh(account)
    asked = aws.calls("GetProducts")
    assert {call.region for call in asked} == {"us-east-1"}
    assert len(asked) == len(KINDS)


def test_all_machine_types_with_gpus_are_asked_for(account: Account, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # also this test's cache and regions
    ec2 = account.client("ec2", "us-west-2")
    found = dict(refreshing._machines(account, ec2))
    assert found == snapshots._read(snapshots.SHIPPED).machines


# --- partial failures


def test_a_region_that_fails_keeps_its_old_prices_and_is_named(aws: FakeAws, account: Account):
    refresh(account, now=lambda: 1_900_000_000.0)
    aws.errors("DescribeSpotPriceHistory", "Unavailable", region="eu-west-1")
    done = refresh(account, now=lambda: 1_900_086_400.0)
    assert done.regions == ("us-west-2",)
    assert list(done.failed) == ["eu-west-1"]
    assert "Unavailable" in done.failed["eu-west-1"]
    ages = {name: region.spot_at for name, region in kept(account).regions.items() if name in REGIONS}
    assert ages == {"eu-west-1": 1_900_000_000, "us-west-2": 1_900_086_400}


def test_without_the_price_list_spot_prices_are_new_and_the_others_as_old_as_they_were(aws: FakeAws, account: Account):
    refresh(account, now=lambda: 1_900_000_000.0)
    aws.errors("GetProducts", "Throttling", 1)
    done = refresh(account, now=lambda: 1_900_086_400.0)
    assert list(done.failed) == [PRICES]
    region = kept(account).regions["us-west-2"]
    assert (region.on_demand_at, region.spot_at) == (1_900_000_000, 1_900_086_400)
    assert region.on_demand["g5.xlarge"] == 1.006


def test_a_region_that_hangs_is_not_waited_for(aws: FakeAws, account: Account):
    refresh(account)
    aws.ask("fault", action="DescribeInstanceTypes", kind="hang", seconds=60, region="eu-west-1")
    done = refresh(account, deadline_s=5)
    assert "no full answer in time" in done.failed["eu-west-1"]
    assert done.regions == ("us-west-2",)


def test_where_no_region_answers_nothing_is_written(aws: FakeAws, account: Account):
    aws.unavailable("DescribeInstanceTypes")
    with pytest.raises(Transient):
        refresh(account)
    assert not snapshots.cache_file(account.options).exists()


def test_a_permission_that_is_missing_is_named(aws: FakeAws, account: Account):
    aws.deny("DescribeSpotPriceHistory")
    with pytest.raises(PermissionDenied) as caught:
        refresh(account)
    assert "DescribeSpotPriceHistory" in str(caught.value)


def test_expired_credentials_end_it_before_any_region_is_asked(aws: FakeAws, account: Account):
    aws.expire()
    with pytest.raises(AuthError):
        refresh(Account(account.options, attempts=1))
    assert {call.action for call in aws.calls()} == {"GetCallerIdentity"}


def test_a_wrong_account_is_refused(aws: FakeAws, account: Account):
    other = Account(Options.of({**aws.options, "account": "999999999999"}))
    with pytest.raises(InputError):
        refresh(other)
    assert not snapshots.cache_file(other.options).exists()


# --- quotas


def test_quotas_are_read_and_a_fleet_beyond_one_is_put_aside(aws: FakeAws, account: Account):
    aws.quota("L-7212CCBC", 96)
    aws.quota("L-417A185B", 100)
    refresh(account)
    with pytest.raises(NoOffer) as caught:
        rank.plan(wanted(), on_sale(account, regions=("us-west-2",)))
    assert "L-417A185B" in caught.value.why
    assert "L-7212CCBC" in caught.value.why
    assert "request-service-quota-increase" in caught.value.next_step


def test_without_permission_for_quotas_the_prices_are_kept_all_the_same(aws: FakeAws, account: Account):
    aws.deny("ListServiceQuotas")
    done = refresh(account)
    assert done.regions == REGIONS
    assert all(done.failed[name].startswith("quotas: ") for name in REGIONS)
    offers = on_sale(account, regions=("us-west-2",))
    assert offers
    assert all(offer.headroom is None for offer in offers)


def test_machines_that_run_count_against_their_quota(aws: FakeAws, account: Account):
    aws.quick()  # single calls are judged
    ec2 = aws.client("ec2", "us-west-2")
    image = aws.image("us-west-2")
    for kind, count in (("g5.xlarge", 3), ("g4dn.12xlarge", 1), ("t3.micro", 2)):
        ec2.run_instances(ImageId=image, InstanceType=kind, MinCount=count, MaxCount=count)
    resting = ec2.run_instances(ImageId=image, InstanceType="p4d.24xlarge", MinCount=1, MaxCount=1)
    ec2.run_instances(
        ImageId=image, InstanceType="g5.xlarge", MinCount=2, MaxCount=2, InstanceMarketOptions={"MarketType": "spot"}
    )
    sizes = {"g5.xlarge": 4, "g4dn.12xlarge": 48, "p4d.24xlarge": 96}.get
    left = quotas.headroom(account, "us-west-2", sizes)
    assert left["G and VT on-demand"].used_vcpus == 3 * 4 + 48
    assert left["G and VT spot"].used_vcpus == 2 * 4
    assert left["P on-demand"] == quotas.QuotaUse(200_000, 96, "L-417A185B")
    ec2.stop_instances(InstanceIds=[each["InstanceId"] for each in resting["Instances"]])
    deadline = time.monotonic() + 10
    while quotas.headroom(account, "us-west-2", sizes)["P on-demand"].used_vcpus and time.monotonic() < deadline:
        time.sleep(0.1)
    assert quotas.headroom(account, "us-west-2", sizes)["P on-demand"].used_vcpus == 0


def _zones(aws: FakeAws, region: str) -> list[dict[str, str]]:
    return aws.client("ec2", region).describe_availability_zones()["AvailabilityZones"]
