"""Offers of provider aws: from the shipped snapshot, from what a refresh has kept, and what a quota leaves of them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mgpu.errors import InputError, NoOffer
from mgpu.plan import rank
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws.catalog import offers as aws_offers
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.providers.aws.catalog.machine_types import machine_of
from mgpu.providers.aws.catalog.quotas import QUOTAS, QuotaUse, headroom, name_of, quota_of, raise_command
from mgpu.providers.aws.catalog.snapshot import Machine, QuotaState, Region, Snapshot
from mgpu.providers.aws.options import Options
from mgpu.spec.load import loads

SHIPPED = snapshots._read(snapshots.SHIPPED)
NOW = 2_000_000_000.0
PLAIN = Options()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test alone, and no AWS settings of the user's."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE", *snapshots._KEYS, *snapshots._FILES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return snapshots.cache_file(PLAIN)


def wanted(**changes: Any) -> Requirements:
    """Two machines of eight A100, in any region, bought in any way."""
    needed: dict[str, Any] = {
        "provider": "aws", "nodes": 2, "gpu": ("A100-80GB", "A100-40GB"), "gpus_per_node": 8,
        "market": "spot-then-on-demand", "max_price_usd_per_hour": 1000, "max_hours": 1,
    }  # fmt: skip
    return Requirements.model_validate(needed | changes)


def found(options: Options = PLAIN, **changes: Any) -> tuple[Offer, ...]:
    return aws_offers.offers(wanted(**changes), options, now=lambda: NOW).offers


def kept(cache: Path, *, account: str = "", at: float = NOW, **regions: Region) -> Snapshot:
    """A refresh that has found these regions; an underscore stands for a hyphen."""
    dated = {
        name.replace("_", "-"): region.model_copy(update={"on_demand_at": at, "spot_at": at, "quotas_at": at})
        for name, region in regions.items()
    }
    made = Snapshot(sources=("AWS, asked",), account=account, machines=SHIPPED.machines, regions=dated)
    snapshots.save(made, cache)
    return made


def p4d(usd: float = 20, spot: float | None = 8, quotas: dict[str, QuotaState] | None = None) -> Region:
    """One zone with one machine type, p4d.24xlarge."""
    return Region(
        zones={"p4d.24xlarge": ("z-az1",)},
        on_demand={"p4d.24xlarge": usd},
        spot={} if spot is None else {"p4d.24xlarge": {"z-az1": spot}},
        quotas=quotas or {},
    )


# --- one type, one disk


def test_a_type_that_the_run_file_names_is_the_only_one(cache):
    kept(cache, us_east_1=Region(
        zones=dict.fromkeys(("g5.xlarge", "g5.2xlarge", "g5.48xlarge"), ("z-az1",)),
        on_demand={"g5.xlarge": 1, "g5.2xlarge": 2, "g5.48xlarge": 9},
    ))  # fmt: skip
    needed = {"gpu": (), "gpus_per_node": 1, "regions": ("us-east-1",)}
    assert {each.instance_type for each in found(**needed)} == {"g5.xlarge", "g5.2xlarge"}
    pinned = Options.of({"instance_type": "g5.2xlarge"})
    assert {each.instance_type for each in found(pinned, **needed)} == {"g5.2xlarge"}
    with pytest.raises(NoOffer, match="1 GPU each") as caught:
        rank.plan(wanted(**needed), found(Options.of({"instance_type": "g5.48xlarge"}), **needed))
    assert "8 GPUs a machine, not 1" in caught.value.why


def test_a_type_that_there_is_not_is_refused_with_the_nearest(cache):
    with pytest.raises(InputError) as caught:
        found(Options.of({"instance_type": "p5.84xlarge"}))
    assert "aws.instance_type" in caught.value.why
    assert "`p5.48xlarge`" in caught.value.why


def test_a_disk_that_is_too_small_for_its_speed_is_refused_before_anything_is_rented(cache):
    with pytest.raises(InputError, match="disk_gib") as caught:
        found(Options.of({"disk": '{"type": "io2", "iops": 200000}'}), disk_gib=100)
    assert "200 GiB" in caught.value.why


# --- near the run's buckets


def test_offers_say_whether_they_are_near_the_runs_buckets(cache):
    kept(cache, eu_west_1=p4d(), us_east_1=p4d())
    needed = wanted(stores=("s3://a/runs", "s3://b/data"), gpu="A100-40GB")
    regions = {"s3://a/runs": "eu-west-1", "s3://b/data": ""}
    offers = aws_offers.offers(needed, PLAIN, region_of=regions.__getitem__, now=lambda: NOW).offers
    assert {(each.region, each.near_stores) for each in offers} == {("eu-west-1", True), ("us-east-1", False)}


@pytest.mark.parametrize("regions", [(), ("us-east-1",)], ids=["nobody knows", "no choice"])
def test_where_it_is_not_known_or_does_not_matter_nothing_is_said(cache, regions):
    kept(cache, eu_west_1=p4d(), us_east_1=p4d())
    asked: list[str] = []
    region_of = lambda url: asked.append(url) or ""  # noqa: E731
    needed = wanted(stores=("s3://a/runs",), regions=regions)
    offers = aws_offers.offers(needed, PLAIN, region_of=region_of, now=lambda: NOW).offers
    assert {each.near_stores for each in offers} == {None}
    assert bool(asked) == (not regions)


# --- what the default machine image supports

UNSUPPORTED = ("V100-32GB", "RTX-PRO-4500", "RTX-PRO-6000", "B300")


@pytest.mark.parametrize("gpu", UNSUPPORTED)
def test_gpus_that_the_default_machine_image_does_not_support_are_refused_with_what_to_set(cache, gpu):
    types = [name for name, machine in SHIPPED.machines.items() if (machine.gpu, machine.gpus) == (gpu, 8)]
    zones, prices = dict.fromkeys(types, ("z-az1",)), dict.fromkeys(types, 20.0)
    kept(cache, us_east_1=Region(zones=zones, on_demand=prices))
    needed = wanted(gpu=(gpu,), regions=("us-east-1",), market="on-demand")
    with pytest.raises(NoOffer, match="machine_image") as caught:
        rank.plan(needed, aws_offers.offers(needed, PLAIN, now=lambda: NOW).offers)
    assert "the default machine image does not support" in caught.value.why
    with_image = Options.of({"machine_image": "ami-0123"})
    plan = rank.plan(needed, aws_offers.offers(needed, with_image, now=lambda: NOW).offers)
    assert {each.gpu for each in plan.offers} == {gpu}


def test_all_other_gpus_that_ship_are_supported_by_the_default_machine_image():
    refused = {each.gpu for each in found(gpu=(), gpus_per_node=0) if each.obstacle}
    supported = {each.gpu for each in found(gpu=(), gpus_per_node=0) if not each.obstacle}
    assert refused <= set(UNSUPPORTED)
    assert supported >= {"T4", "A10G", "L4", "L40S", "A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200"}
    assert not refused & supported


# --- the snapshot that ships


def test_the_shipped_snapshot_says_where_it_comes_from_and_of_which_day_its_prices_are():
    assert any("moto" in source for source in SHIPPED.sources)
    for name, region in SHIPPED.regions.items():
        assert bool(region.on_demand) == bool(region.on_demand_at), name
        assert bool(region.spot) == bool(region.spot_at), name
        if region.on_demand:
            assert any(f"prices of {name}: " in source for source in SHIPPED.sources)
            assert time.gmtime(region.on_demand_at).tm_year >= 2026


def test_the_shipped_snapshot_is_what_its_builder_writes():
    path = Path(__file__).parents[4] / "scripts" / "write_aws_offers.py"
    spec = importlib.util.spec_from_file_location("write_aws_offers", path)
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    assert builder._built() == SHIPPED


def test_the_shipped_snapshot_belongs_to_no_account():
    assert not SHIPPED.account
    assert not any(region.quotas for region in SHIPPED.regions.values())


def test_the_shipped_machines_have_names_that_run_files_use_and_sizes_that_can_be():
    assert {"A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200", "L4", "L40S", "A10G", "T4", "V100-32GB"} <= {
        machine.gpu for machine in SHIPPED.machines.values()
    }
    for name, machine in SHIPPED.machines.items():
        assert re.fullmatch(r"[A-Z0-9][A-Za-z0-9-]+", machine.gpu), name
        assert 1 <= machine.gpus <= 16, name
        assert 14 <= machine.gpu_memory_gib <= 300, name
        assert (machine.interconnect == "") == (machine.gpus == 1), name
        assert machine.vcpus >= 4, name
        assert machine.memory_gib >= 16, name
        assert machine.network_gbit_s > 0, name


def test_the_largest_shipped_machines_are_as_aws_describes_them():
    p5, p4d = SHIPPED.machines["p5.48xlarge"], SHIPPED.machines["p4d.24xlarge"]
    assert (p5.gpu, p5.gpus, p5.gpu_memory_gib, p5.vcpus, p5.memory_gib) == ("H100-80GB", 8, 80, 192, 2048)
    assert (p5.interconnect, p5.network_gbit_s, p5.efa_cards) == ("NVSwitch", 3200, 32)
    assert (p4d.network_gbit_s, p4d.nvme_disks, p4d.nvme_gib) == (400, 8, 7450)


def test_every_price_is_of_a_machine_that_is_known_and_on_sale_in_that_region():
    for name, region in SHIPPED.regions.items():
        assert region.on_demand.keys() <= SHIPPED.machines.keys(), name
        assert region.on_demand.keys() <= region.zones.keys(), name
        assert all(0.3 < usd < 200 for usd in region.on_demand.values()), name


def test_zones_are_named_by_id_because_names_differ_between_accounts():
    assert all(
        re.fullmatch(r"[a-z]+\d-az\d", zone)
        for region in SHIPPED.regions.values()
        for zones in region.zones.values()
        for zone in zones
    )


def test_efa_cards_of_a_type():
    machines = snapshots.current(PLAIN).machines
    assert [machines[name].efa_cards for name in ("p4d.24xlarge", "g4dn.xlarge")] == [4, 0]
    assert "t3.micro" not in machines


# --- what is offered


def test_the_run_file_of_two_a100_machines_gets_a_plan_within_its_cap():
    text = (
        "name: llama\nprovider: aws\nregions: [us-east-1, us-west-2]\nnodes: 2\ngpus_per_node: 8\n"
        "gpu: [A100-80GB, A100-40GB]\nmarket: spot-then-on-demand\nmax_price_usd_per_hour: 70\nmax_hours: 12\n"
        "command: [train.py]\n"
    )
    needed = rank.requirements(loads(text + 'checkpoint: {to: "s3://bucket/runs"}\n', "x"))
    answer = aws_offers.offers(needed, PLAIN)
    plan = rank.plan(needed, answer.offers, answer.notes)
    assert (plan.best.gpu, plan.best.market, plan.best.region) == ("A100-80GB", "spot", "us-east-1")
    assert {offer.gpu for offer in plan.offers} == {"A100-80GB", "A100-40GB"}
    assert "us-west-2" in plan.notes[0]
    assert "mgpu offers aws --refresh" in plan.notes[0]


def test_only_what_meets_the_requirements_is_offered():
    for offer in found(regions=("us-east-1",), market="on-demand"):
        assert (offer.gpus, offer.region, offer.market) == (8, "us-east-1", "on-demand")
        assert offer.gpu in ("A100-80GB", "A100-40GB")


def test_a_gpu_may_be_named_in_any_case():
    assert found(gpu=("a100-80gb",)) == found(gpu=("A100-80GB",)) != ()


def test_a_spot_price_that_is_not_known_is_given_as_its_limit():
    spot, listed = (found(market=market, gpu=("A100-40GB",))[0] for market in ("spot", "on-demand"))
    assert spot.price_is_limit
    assert not listed.price_is_limit
    assert spot.price_usd_per_hour == listed.price_usd_per_hour
    assert spot.fetched_at == listed.fetched_at == SHIPPED.regions["us-east-1"].on_demand_at


def test_a_spot_price_that_is_known_is_the_price(cache: Path):
    kept(cache, us_east_1=p4d(usd=20, spot=8))
    offers = {offer.market: offer for offer in found(gpu=("A100-40GB",))}
    assert (offers["spot"].price_usd_per_hour, offers["on-demand"].price_usd_per_hour) == (8, 20)
    assert (offers["spot"].price_is_limit, offers["spot"].fetched_at) == (False, NOW)


@pytest.mark.parametrize(("cap", "most"), [(1000, 20), (30, 15), (16, 8)])
def test_spot_may_be_billed_up_to_the_bid_and_never_above_on_demand(cache: Path, cap: float, most: float):
    """Of two machines; at 16 its own price is all that the bid lets it be."""
    kept(cache, us_east_1=p4d(usd=20, spot=8))
    offers = {offer.market: offer for offer in found(max_price_usd_per_hour=cap)}
    assert (offers["spot"].billed_at_most, offers["on-demand"].billed_at_most) == (most, 20)


def test_a_zone_without_a_spot_price_after_a_refresh_has_no_spot_market(cache: Path):
    kept(cache, us_east_1=p4d(spot=None))
    assert {offer.market for offer in found(gpu=("A100-40GB",))} == {"on-demand"}


def test_a_type_without_any_price_is_left_out():
    assert "p5e.48xlarge" in SHIPPED.machines  # sold by the block alone
    assert {offer.instance_type for offer in found(gpu=("H200",))} == {"p5en.48xlarge"}


# --- mistakes and dead ends


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"regions": ("us-esat-1",)}, "there is no region `us-esat-1` (did you mean `us-east-1`?)"),
        ({"regions": ("US-EAST-1",)}, "there is no region `US-EAST-1` (did you mean `us-east-1`?)"),
        ({"gpu": ("A100",)}, "there is no GPU `A100` (did you mean `A100-40GB` or `A100-80GB`?)"),
        ({"gpu": ("L40",)}, "there is no GPU `L40` (did you mean `L40S`?)"),
        ({"gpu": ("MI300X",)}, "there is no GPU `MI300X`; known: A100-40GB, A100-80GB, "),
    ],
)
def test_what_aws_does_not_have_is_a_mistake_with_the_nearest_name(changes: dict[str, Any], said: str):
    with pytest.raises(InputError) as caught:
        found(**changes)
    assert said in caught.value.why
    assert ("known: " in caught.value.why) is ("did you mean" not in caught.value.why), "one or the other"
    assert next(iter(changes)) in caught.value.why
    assert "mgpu offers aws" in caught.value.next_step


def test_all_mistakes_are_told_at_once():
    with pytest.raises(InputError) as caught:
        found(regions=("mars", "us-east-1"), gpu=("A100-80GB", "RTX4090"))
    assert [line.split(";")[0] for line in caught.value.why.splitlines()] == [
        "regions: there is no region `mars`",
        "gpu: there is no GPU `RTX4090`",
    ]


def test_a_region_without_prices_is_told_with_what_would_get_them():
    with pytest.raises(NoOffer) as caught:
        found(regions=("eu-west-1",))
    assert "eu-west-1" in caught.value.what
    assert "mgpu offers aws --refresh" in caught.value.next_step


def test_a_number_of_gpus_that_no_machine_has_says_which_there_are():
    needed = wanted(gpus_per_node=3)
    with pytest.raises(NoOffer) as caught:
        rank.plan(needed, aws_offers.offers(needed, PLAIN).offers)
    assert caught.value.next_step.startswith("On offer for `gpus_per_node`: 8 ")


def test_a_region_that_has_not_this_gpu_says_where_it_is(cache: Path):
    kept(cache, us_west_2=Region(zones={"g5.xlarge": ("z-az1",)}, on_demand={"g5.xlarge": 1.0}))
    with pytest.raises(NoOffer) as caught:
        found(regions=("us-west-2",))
    assert "us-west-2" in caught.value.what


# --- what a refresh has kept


def test_a_refreshed_region_stands_in_the_place_of_the_shipped_one_and_the_others_stay(cache: Path):
    kept(cache, us_west_2=p4d())
    assert {offer.region for offer in found()} == {"us-east-1", "us-west-2"}
    assert found(regions=("us-west-2",))[0].zone == "z-az1"


def test_a_newer_shipped_region_beats_an_older_refresh(cache: Path):
    kept(cache, at=SHIPPED.regions["us-east-1"].on_demand_at - 1, us_east_1=p4d(usd=1))
    assert all(offer.price_usd_per_hour > 10 for offer in found(regions=("us-east-1",)))


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"not gzip",
        gzip.compress(b"not json"),
        gzip.compress(b'{"regions": 3}'),
        gzip.compress(b"{}" * 1000)[:-9],
    ],
    ids=["empty", "not gzip", "no JSON", "other JSON", "cut off"],  # gzip's own bytes have the time in them
)
def test_a_cache_that_cannot_be_read_counts_as_absent(cache: Path, broken: bytes):
    without = found()
    cache.parent.mkdir(parents=True)
    cache.write_bytes(broken)
    assert found() == without


def test_a_cache_of_another_version_of_mgpu_counts_as_absent(cache: Path):
    without = found()
    snapshots.save(kept(cache, us_west_2=p4d()).model_copy(update={"version": 99}), cache)
    assert found() == without


def test_another_endpoint_or_profile_has_a_cache_of_its_own(monkeypatch: pytest.MonkeyPatch):
    plain = snapshots.cache_file(PLAIN)
    fake = snapshots.cache_file(Options(endpoint_url="http://127.0.0.1:1"))
    assert len({plain, fake, snapshots.cache_file(Options(profile="other"))}) == 3
    assert snapshots.cache_file(PLAIN, {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}) == fake
    assert snapshots.cache_file(Options(account="123456789012"), {}) == plain


def test_a_snapshot_is_written_aside_and_read_back_the_same(cache: Path):
    made = kept(cache, us_west_2=p4d())
    assert snapshots._read(cache) == made
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_a_write_that_fails_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch):
    made = kept(cache, us_west_2=p4d())

    def full(*_: object, **__: object) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(Snapshot, "model_dump_json", full)
    with pytest.raises(OSError, match="disk full"):
        snapshots.save(made, cache)
    assert snapshots._read(cache) == made
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


# --- quotas

P_SPOT, P_ON_DEMAND = "L-7212CCBC", "L-417A185B"


def states(limit: int, used: int = 0, code: str = P_SPOT) -> dict[str, QuotaState]:
    return {code: QuotaState(name=name_of(code), limit_vcpus=limit, used_vcpus=used)}


@pytest.mark.parametrize(
    ("instance_type", "market", "code"),
    [
        ("p4d.24xlarge", "on-demand", P_ON_DEMAND),
        ("p5.48xlarge", "on-demand", P_ON_DEMAND),
        ("p6-b200.48xlarge", "on-demand", P_ON_DEMAND),
        ("p4d.24xlarge", "spot", P_SPOT),
        ("p5en.48xlarge", "spot", "L-C4BD4855"),
        ("g5.xlarge", "on-demand", "L-DB2E81BA"),
        ("gr6.4xlarge", "on-demand", "L-DB2E81BA"),
        ("g6e.xlarge", "spot", "L-3819A6DF"),
    ],
)
def test_the_quota_that_a_machine_counts_against(instance_type: str, market: Any, code: str):
    quota = quota_of(instance_type, market)
    assert quota is not None
    assert quota.code == code
    assert quota in QUOTAS


def test_every_offer_names_its_quota():
    assert {offer.quota for offer in found()} == {P_SPOT, P_ON_DEMAND}


def test_without_a_refresh_nothing_is_known_of_quotas_and_nothing_is_refused_for_them():
    offers = found()
    assert all(offer.headroom is None for offer in offers)
    assert len(rank.plan(wanted(), offers).offers) == len(offers)


def test_a_fleet_beyond_a_known_quota_is_put_aside_with_its_code(cache: Path):
    kept(cache, us_east_1=p4d(quotas=states(limit=96)))
    plan = rank.plan(wanted(gpu=("A100-40GB",)), found(gpu=("A100-40GB",)))
    assert [offer.market for offer in plan.offers] == ["on-demand"]
    (refusal,) = plan.refused
    assert refusal.reason == (
        "needs 192 vCPUs, quota L-7212CCBC (All P4, P3 and P2 Spot Instance Requests) leaves 96 vCPUs in us-east-1"
    )


def test_a_fleet_that_fills_a_quota_is_not_refused(cache: Path):
    kept(cache, us_east_1=p4d(quotas=states(limit=192)))
    assert not rank.plan(wanted(gpu=("A100-40GB",)), found(gpu=("A100-40GB",))).refused


def test_where_all_offers_are_beyond_a_quota_the_command_that_raises_it_is_named(cache: Path):
    kept(cache, us_east_1=p4d(quotas=states(limit=100, used=60)))
    needed = wanted(gpu=("A100-40GB",), market="spot")
    with pytest.raises(NoOffer) as caught:
        rank.plan(needed, found(gpu=("A100-40GB",), market="spot"))
    assert "leaves 40 of 100 vCPUs" in caught.value.why
    assert f"`{raise_command(P_SPOT, 'us-east-1')} 252`" in caught.value.next_step


def test_what_ran_at_an_older_refresh_is_not_held_against_a_quota(cache: Path):
    kept(cache, at=NOW - 3600, us_east_1=p4d(quotas=states(limit=192, used=192)))
    offer = found(gpu=("A100-40GB",), market="spot")[0]
    assert offer.headroom is not None
    assert (offer.headroom.limit_vcpus, offer.headroom.left_vcpus) == (192, 192)
    kept(cache, at=NOW - 60, us_east_1=p4d(quotas=states(limit=192, used=192)))
    offer = found(gpu=("A100-40GB",), market="spot")[0]
    assert offer.headroom is not None
    assert offer.headroom.left_vcpus == 0


def test_quotas_of_another_account_are_not_gone_by(cache: Path):
    kept(cache, account="111111111111", us_east_1=p4d(quotas=states(limit=0)))
    for account, known in (("111111111111", True), ("222222222222", False), (None, True)):
        offer = found(Options(account=account), gpu=("A100-40GB",), market="spot")[0]
        assert (offer.headroom is not None) is known


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SHARED_CREDENTIALS_FILE"])
def test_quotas_that_other_credentials_were_told_are_not_gone_by(
    cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str
):
    """Many accounts in turn, of one profile: of the variables, only a run file's account says more."""

    def goes_by(account: str | None = None) -> bool:
        offer = found(Options(account=account), gpu=("A100-40GB",), market="spot")[0]
        return offer.headroom is not None

    monkeypatch.setenv(variable, "of one account")
    asked = kept(cache, account="111111111111", us_east_1=p4d(quotas=states(limit=0)))
    snapshots.save(asked.model_copy(update={"credentials": snapshots.mark_of(PLAIN)}), cache)
    assert goes_by()
    monkeypatch.setenv(variable, "of another one")
    assert not goes_by()
    assert goes_by("111111111111")
    monkeypatch.delenv(variable)
    assert not goes_by()


def test_a_profile_that_is_named_goes_before_keys_in_variables():
    keys, files = {"AWS_ACCESS_KEY_ID": "AKIA"}, {"AWS_CONFIG_FILE": "config"}
    of_profile = Options(profile="mine")
    assert snapshots.mark_of(of_profile, keys) == snapshots.mark_of(PLAIN, {}) == ""
    assert snapshots.mark_of(of_profile, keys | files) == snapshots.mark_of(of_profile, files) != ""
    assert snapshots.mark_of(PLAIN, keys) != ""


def test_machines_in_capacity_blocks_count_against_no_quota():
    """One that is paid for as a whole runs beside one on demand."""
    common = {"InstanceType": "p5.48xlarge", "CpuOptions": {"CoreCount": 96, "ThreadsPerCore": 2}}
    told = {
        "list_service_quotas": [{"QuotaCode": P_ON_DEMAND, "Value": 384.0}],
        "describe_instances": [{"Instances": [common, {**common, "InstanceLifecycle": "capacity-block"}]}],
    }
    account = Mock()
    account.pages.side_effect = lambda client, operation, *_, **__: told[operation]
    assert headroom(account, "us-east-1") == {"P on-demand": QuotaUse(384, 192, P_ON_DEMAND)}


# --- what AWS tells of a type


def entry(**changes: Any) -> dict[str, Any]:
    gpu = {"Name": "A100", "Manufacturer": "NVIDIA", "Count": 8, "MemoryInfo": {"SizeInMiB": 81920}}
    return {
        "InstanceType": "p4de.24xlarge",
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "VCpuInfo": {"DefaultVCpus": 96},
        "MemoryInfo": {"SizeInMiB": 1179648},
        "GpuInfo": {"Gpus": [gpu]},
        "NetworkInfo": {"NetworkPerformance": "4x 100 Gigabit", "EfaInfo": {"MaximumEfaInterfaces": 4}},
        "InstanceStorageInfo": {"Disks": [{"Count": 8, "SizeInGB": 1000}]},
    } | changes


def test_gigabytes_become_gibibytes_and_cards_are_added_up():
    assert machine_of(entry()) == Machine(
        gpu="A100-80GB", gpus=8, gpu_memory_gib=80, vcpus=96, memory_gib=1152, nvme_disks=8, nvme_gib=7450,
        interconnect="NVSwitch", network_gbit_s=400, efa_cards=4,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"GpuInfo": {}},
        {"ProcessorInfo": {"SupportedArchitectures": ["arm64"]}},
        {
            "GpuInfo": {
                "Gpus": [{"Name": "L4", "Manufacturer": "NVIDIA", "Count": 0, "MemoryInfo": {"SizeInMiB": 2861}}]
            }
        },
        {"GpuInfo": {"Gpus": [{"Name": "V520", "Manufacturer": "AMD", "Count": 1, "MemoryInfo": {"SizeInMiB": 8192}}]}},
    ],
)
def test_what_cannot_be_used_is_no_machine(changes: dict[str, Any]):
    assert machine_of(entry(**changes)) is None


@pytest.mark.parametrize(
    ("words", "gbit_s"), [("Up to 25 Gigabit", 25), ("3200 Gigabit", 3200), ("500 Megabit", 0.5), ("High", 0)]
)
def test_network_speeds_are_numbers(words: str, gbit_s: float):
    machine = machine_of(entry(NetworkInfo={"NetworkPerformance": words}))
    assert machine is not None
    assert machine.network_gbit_s == gbit_s


# --- cost


@pytest.fixture
def full(cache: Path) -> Snapshot:
    """Every type in three zones of 34 regions, on both markets."""
    kinds = list(SHIPPED.machines)
    region = Region(
        zones=dict.fromkeys(kinds, ("z-az1", "z-az2", "z-az3")),
        on_demand=dict.fromkeys(kinds, 20.0),
        spot={kind: dict.fromkeys(("z-az1", "z-az2", "z-az3"), 9.0) for kind in kinds},
    )
    return kept(cache, **{f"xx_{number}": region for number in range(34)})


def test_all_types_in_all_regions_are_planned(full: Snapshot):
    needed = wanted(gpu=(), gpus_per_node=8, nodes=1)
    assert len(rank.plan(needed, aws_offers.offers(needed, PLAIN).offers).offers) > 2000


def test_offers_load_nothing_of_aws_and_ask_nobody(full: Snapshot):
    code = """
import json, socket, sys
def refuse(*_): raise AssertionError("network")
socket.socket.connect = refuse
from mgpu.plan.model import Requirements
from mgpu.providers.aws.catalog.offers import offers
from mgpu.providers.aws.options import Options
needed = Requirements.model_validate(json.loads(sys.argv[1]))
assert offers(needed, Options()).offers
print(sorted({"boto3", "botocore", "urllib3", "pulumi"} & set(sys.modules)))
"""
    run: Callable[..., Any] = subprocess.run
    argument = json.dumps(wanted().model_dump(mode="json"))
    done = run([sys.executable, "-c", code, argument], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
