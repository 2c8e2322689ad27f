"""Reservations on the fake AWS: rented in alone, at their true price, within their time; Capacity Blocks found and
bought once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.aws import FakeAws

from mgpu import paths
from mgpu.acquire.purchase import Purchase
from mgpu.cli import cli
from mgpu.errors import AmbiguousCreate, AuthError, InputError, NoCapacity, NoOffer, PermissionDenied, Transient
from mgpu.events import Note
from mgpu.plan import rank
from mgpu.plan.model import Plan, Requirements
from mgpu.providers.aws import names
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.base import FleetRequest, Handle, NodePhase, ReservationRequest, create_token
from mgpu.providers.start import HostKey

KIND, REGION, ZONE, HOUR = "p4d.24xlarge", "us-east-1", "us-east-1a", 3600.0
KEY = HostKey.make().public


@pytest.fixture(autouse=True)
def quick(aws: FakeAws) -> None:
    """Single calls are judged."""
    aws.quick()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def needed(reservation: str, **changed: Any) -> Requirements:
    given = {
        "provider": "aws", "nodes": 2, "gpus_per_node": 8, "regions": (REGION,), "max_price_usd_per_hour": 99,
        "max_hours": 12, "provider_options": {"reservation": reservation},
    }  # fmt: skip
    return Requirements.model_validate({**given, **changed})


def planned(wanted: Requirements) -> Plan:
    """By a process of its own: nothing is remembered."""
    found = AwsProvider(wanted.provider_options).offers(wanted)
    return rank.plan(wanted, found.offers, found.notes)


class Fleet:
    """One fleet in a reservation, as acquire makes and repairs it."""

    def __init__(self, reservation: str, **changed: Any) -> None:
        self.wanted = needed(reservation, **changed)
        self.provider = AwsProvider(self.wanted.provider_options)

    def request(self, generation: int) -> FleetRequest:
        return FleetRequest(
            fleet="demo", generation=generation, owner="me", requirements=self.wanted, ssh_public_key=KEY, lease_s=300,
            hard_cap_s=self.wanted.max_hours * HOUR,
        )  # fmt: skip

    def made(self) -> Handle:
        chosen = planned(self.wanted).best
        token = create_token("me", "demo", 1, chosen, 0)
        return insist(lambda: self.provider.create(self.request(1), chosen, token))

    def repaired(self, handle: Handle, rank_: int) -> Handle:
        chosen = planned(self.wanted.model_copy(update={"nodes": 1})).best
        token = create_token("me", "demo", 2, chosen, 0)
        return insist(lambda: self.provider.repair(handle, (rank_,), self.request(2), chosen, token))


def insist(call: Any) -> Any:
    deadline = time.monotonic() + 20
    while True:
        try:
            return call()
        except Transient:
            assert time.monotonic() < deadline
            time.sleep(0.05)


# --- what the plan says -----------------------------------------------------------------------------------------------


def test_a_block_is_paid_already_and_its_end_is_the_hard_cap(aws: FakeAws):
    block = aws.reserve(KIND, 2, ZONE, block=True, begins_s=-2 * HOUR, hours=24)
    plan = planned(needed(block, max_hours=48))
    (offer,) = plan.offers
    assert (offer.instance_type, offer.price_usd_per_hour, plan.max_cost_usd) == (KIND, 0, 0)
    assert offer.label.endswith(f"in {block}")
    assert plan.hours == pytest.approx(22 - 0.5, abs=0.05)
    said = "\n".join(plan.notes)
    assert "paid already" in said
    assert "2 of 2 machines are free" in said
    assert "`max_hours: 48` is longer than that: the hard cap is 21.5 h" in said
    assert planned(needed(block, max_hours=3)).hours == 3


def test_a_reservation_costs_the_on_demand_price_and_says_so(aws: FakeAws):
    plan = planned(needed(aws.reserve(KIND, 4, ZONE, hours=30), gpu=("A100-40GB",)))
    assert plan.best.price_usd_per_hour == pytest.approx(21.9576, abs=0.01)
    assert (plan.best.headroom, plan.hours) == (None, 12)
    assert "billed at this price while it exists" in plan.notes[0]
    assert "machines go on at the on-demand price" in plan.notes[1]
    with pytest.raises(NoOffer, match="meets the run file") as caught:
        planned(needed(aws.reserve(KIND, 2, ZONE), max_price_usd_per_hour=1))
    assert "above the cap" in caught.value.why


@pytest.mark.parametrize(
    ("reserved", "wanted", "said"),
    [
        ({"count": 1}, {}, "1 of its 1 machines are free, 2 needed"),
        ({}, {"gpu": ("H100-80GB",)}, "GPU is A100-40GB, not H100-80GB"),
        ({}, {"gpus_per_node": 1}, "has 8 GPUs a machine, not 1"),
        ({"begins_s": -30 * HOUR, "hours": 30.6, "block": True}, {}, "too soon for new ones"),
        ({"begins_s": -9 * HOUR, "hours": 8}, {}, "is expired"),
        ({"InstancePlatform": "Windows"}, {}, "is for Windows"),
        ({"Tenancy": "dedicated"}, {}, "is of dedicated tenancy"),
        ({"Interruptible": True}, {}, "is interruptible"),
        ({"State": "payment-failed"}, {}, "is payment-failed"),
        ({"instance_type": "p3dn.24xlarge"}, {}, "does not support p3dn"),
        ({"zone": "sa-east-1a"}, {"regions": ("sa-east-1",)}, "no price of what the run file asks for"),
        ({"instance_type": "m5.large"}, {}, "is of m5.large"),
        ({}, {"regions": ("us-west-2",)}, "in us-west-2"),
        ({}, {"market": "spot"}, "market: "),
        ({}, {"gpu": ("H100",)}, "did you mean `H100-80GB`"),
    ],
)
def test_what_cannot_be_rented_is_refused_before_with_the_reason(
    aws: FakeAws, reserved: dict[str, Any], wanted: dict[str, Any], said: str
):
    made = aws.reserve(**{"instance_type": KIND, "count": 2, "zone": ZONE, **reserved})
    with pytest.raises((NoOffer, InputError)) as caught:
        planned(needed(made, **wanted))
    assert said in str(caught.value)
    assert aws.calls("CreateFleet") == []


def test_who_would_take_either_market_is_shown_what_there_is(aws: FakeAws):
    """As `mgpu offers` asks, which knows of no market that is wanted."""
    either = needed(aws.reserve(KIND, 2, ZONE), market="spot-then-on-demand")
    assert [offer.market for offer in planned(either).offers] == ["on-demand"]


def test_a_full_one_is_not_to_be_asked_for_no_machines(aws: FakeAws):
    with pytest.raises(NoOffer) as caught:
        planned(needed(aws.reserve(KIND, 0, ZONE)))
    assert caught.value.next_step.startswith("Free machines")


def test_without_regions_it_is_found_in_whichever_it_is_also_where_one_does_not_answer(aws: FakeAws):
    made = aws.reserve(KIND, 2, "us-west-2a", block=True, hours=24)
    aws.errors("DescribeCapacityReservations", "Denied", region="eu-west-1")
    assert planned(needed(made, regions=())).best.region == "us-west-2"
    with pytest.raises(PermissionDenied):  # it might be there
        planned(needed("cr-0", regions=()))


# --- machines in it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [True, False])
def test_machines_are_made_in_it_alone_and_replaced_in_it(aws: FakeAws, block: bool):
    aws.base(REGION)
    aws.quick(ending_s=60)
    aws.capacity(0)  # there is nothing but what is reserved
    aws.quota("L-417A185B", 0)
    fleet = Fleet(aws.reserve(KIND, 2, ZONE, block=block, hours=48))
    handle = fleet.made()
    (template,) = [call.parameters["LaunchTemplateData"] for call in aws.calls("CreateLaunchTemplate")]
    assert ("Placement" in template, aws.calls("CreatePlacementGroup")) == (False, [])
    told = {node.price_usd_per_hour for node in fleet.provider.describe(handle).nodes}
    assert (told == {0.0}) == ({row.usd_per_hour for row in aws.bill()} == {0.0}) == block
    aws.kill(handle.ids[1])
    with pytest.raises(NoOffer, match="meets the run file"):  # it holds its place until it is gone
        fleet.repaired(handle, 1)
    aws.age(61)
    repaired = fleet.repaired(handle, 1)
    assert repaired.ids[0] == handle.ids[0] != repaired.ids[1]
    assert sorted(aws.alive()) == sorted(repaired.ids)


def test_a_reservation_in_a_placement_group_is_used_in_that_group(aws: FakeAws):
    aws.base(REGION)
    aws.client("ec2").create_placement_group(GroupName="mine", Strategy="cluster")
    Fleet(aws.reserve(KIND, 2, ZONE, group="mine")).made()
    found = aws.client("ec2").describe_instances()["Reservations"]
    assert {machine["Placement"]["GroupName"] for each in found for machine in each["Instances"]} == {"mine"}


def test_a_gang_that_a_block_gives_only_a_part_of_is_ended(aws: FakeAws):
    aws.base(REGION)
    block = aws.reserve(KIND, 2, ZONE, block=True, hours=24)
    fleet = Fleet(block)
    chosen = planned(fleet.wanted).best
    Fleet(block, nodes=1).made()  # somebody was faster
    with pytest.raises(NoCapacity):
        insist(lambda: fleet.provider.create(fleet.request(7), chosen, "b" * 40))
    assert len(aws.alive()) == 1


def test_our_own_end_comes_before_the_one_that_aws_makes_however_long_the_run_may_last(aws: FakeAws):
    aws.base(REGION)
    block = aws.reserve(KIND, 2, ZONE, block=True, begins_s=-HOUR, hours=24)
    fleet = Fleet(block, max_hours=100)
    handle = fleet.made()
    (state,) = {node.hard_cap_at for node in fleet.provider.describe(handle).nodes}
    aws_begins = time.time() + 23 * HOUR - 1800
    assert aws_begins - 180 < state < aws_begins - 60
    aws.age(state - time.time() + 30)  # the kill switch has fired, AWS's end is yet to come
    assert {node.phase for node in fleet.provider.describe(handle).nodes} == {NodePhase.TERMINATED}
    assert aws.failed_schedules() == []


def test_what_has_not_begun_is_planned_and_waited_for(aws: FakeAws):
    aws.base(REGION)
    aws.pace(pending_s=0)
    fleet = Fleet(aws.reserve(KIND, 2, ZONE, block=True, begins_s=HOUR, hours=24))
    plan = planned(fleet.wanted)
    assert plan.best.reservation
    assert "scheduled and begins" in plan.notes[1]
    assert planned(needed(fleet.wanted.provider_options["reservation"], max_hours=99)).hours == pytest.approx(
        23.47, abs=0.01
    )
    with pytest.raises(NoCapacity, match=r"begins \d{4}-\d\d-\d\d \d\d:\d\d UTC"):  # what a launch asks for again
        fleet.made()
    assert aws.calls("CreateLaunchTemplate") == []
    aws.age(HOUR + 1)
    assert len(fleet.made().ids) == 2


def test_a_fleet_in_a_full_reservation_is_waited_for_as_long_as_its_machines_boot(aws: FakeAws):
    full = aws.reserve(KIND, 1, ZONE, block=True, hours=24)
    provider = AwsProvider({"reservation": full})
    assert provider.boot_s(needed(full)) == 900
    aws.deny("DescribeCapacityReservations")
    assert AwsProvider({"reservation": full}).boot_s(needed(full)) == provider.capabilities.boot_s


def test_the_check_has_a_line_for_it_and_none_for_quotas(aws: FakeAws):
    aws.base(REGION)
    made = aws.reserve(KIND, 1, ZONE, hours=24)
    wanted = needed(made, regions=(), nodes=1)
    here = lambda: "203.0.113.7/32"  # noqa: E731
    found = {each.subject: each for each in AwsProvider({"reservation": made}).findings(wanted, here)}
    assert (found["reservation"].status, "1 free" in found["reservation"].detail) == ("ok", True)
    assert not [subject for subject in found if subject.startswith("quota")]
    full = {each.subject: each for each in AwsProvider({"reservation": made}).findings(needed(made), here)}
    assert full["reservation"].status == "failed"


# --- Capacity Blocks: found and bought --------------------------------------------------------------------------------


def asked(**changed: Any) -> ReservationRequest:
    return ReservationRequest.model_validate({"gpu": ("a100-40gb",), "nodes": 2, "hours": 20, **changed})


def test_blocks_are_found_in_all_regions_by_gpu_and_what_is_asked_of_days(aws: FakeAws):
    aws.sell(KIND, 2, ZONE, usd=1920, begins_s=2 * HOUR)
    aws.sell(KIND, 2, "us-west-2b", usd=2000, begins_s=HOUR)
    aws.sell(KIND, 1, ZONE, usd=1)  # not so many
    aws.sell("p5.48xlarge", 2, ZONE, usd=1)
    aws.errors("DescribeCapacityBlockOfferings", "Denied", region="eu-west-1")
    found = AwsProvider().find_reservations(asked())
    assert [(each.region, each.usd, each.hours) for each in found.offers] == [
        ("us-west-2", 2000, 24),
        (REGION, 1920, 24),
    ]
    assert found.offers[1].usd_per_gpu_hour == 5
    assert "24 h for 20" in found.notes[0]
    assert set(found.failed) == {"eu-west-1"}
    late = asked(regions=(REGION,), begins_after=time.time() + 3 * HOUR)
    assert AwsProvider().find_reservations(late).offers == ()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hours": 5000}, "at most 4368"),
        ({"nodes": 65}, "at most 64"),
        ({"gpu": ("T4",)}, "8 x A100-40GB"),
        ({"regions": ("us-east-9",)}, "there is no region us-east-9"),
    ],
)
def test_what_blocks_are_not_sold_as_is_told(aws: FakeAws, wrong: dict[str, Any], said: str):
    with pytest.raises(InputError) as caught:
        AwsProvider().find_reservations(asked(**{"regions": (REGION,), **wrong}))
    assert said in str(caught.value)


def bought(aws: FakeAws) -> list[dict[str, Any]]:
    return aws.client("ec2").describe_capacity_reservations()["CapacityReservations"]


@pytest.mark.parametrize("lost", [False, True])
def test_a_block_is_bought_once_and_known_by_its_owner(aws: FakeAws, tmp_path: Path, lost: bool):
    provider, told = AwsProvider({"tags": '{"CostCenter": "4711"}'}), []
    aws.sell(KIND, 2, ZONE, usd=1920, left=5)
    (offer,) = provider.find_reservations(asked(regions=(REGION,))).offers
    if lost:
        aws.lose_answers("PurchaseCapacityBlock")
    found = Purchase(provider, tmp_path, told.append).buy(offer, "o-1")
    (there,) = bought(aws)
    assert (found.id, found.prepaid, found.machines, found.state) == (
        there["CapacityReservationId"], True, 2, "scheduled",
    )  # fmt: skip
    tags = {tag["Key"]: tag["Value"] for tag in there["Tags"]}
    assert (tags[names.OWNER], tags["CostCenter"]) == ("o-1", "4711")
    assert len(aws.calls("PurchaseCapacityBlock")) == 1
    assert bool([each for each in told if isinstance(each, Note)]) == lost
    assert [each.id for each in provider.list_reservations((REGION,)).reservations] == [found.id]
    assert Purchase(provider, tmp_path).unfinished(offer.account) == []


@pytest.mark.parametrize("new_ids", [False, True])
def test_the_commands_buy_what_they_have_found_also_where_ids_do_not_last(aws: FakeAws, xdg: Path, new_ids: bool):
    mgpu = lambda *words: CliRunner().invoke(cli, ["reservations", *words], standalone_mode=False)  # noqa: E731
    aws.ask("set", name="new_offering_ids", value=new_ids)
    aws.sell(KIND, 2, ZONE, usd=1920)
    assert mgpu("find", "--gpu", "A100-40GB", "--nodes", "2", "--hours", "24", "--region", REGION).return_value == 0
    (id_,) = json.loads((paths.cache_dir() / "reservations.json").read_text())["found"]
    done = mgpu("buy", id_, "--yes", "--max-usd", "1920")
    assert done.exception is None
    (there,) = bought(aws)
    assert f"aws: {{reservation: {there['CapacityReservationId']}}}" in done.stdout
    assert there["CapacityReservationId"] in mgpu("ls", "--region", REGION).stdout


def test_of_an_answer_that_does_not_say_it_nobody_knows_and_what_has_expired_is_not_bought(aws: FakeAws):
    provider = AwsProvider()
    aws.sell(KIND, 2, ZONE, usd=1920, expires_s=60)
    (offer,) = provider.find_reservations(asked(regions=(REGION,))).offers
    aws.unavailable("PurchaseCapacityBlock", 1)
    with pytest.raises(AmbiguousCreate):
        provider.buy_reservation(offer, "o-1", "t" * 40)
    assert provider.bought_reservation(offer, "t" * 40, time.time()) is None
    aws.age(61)
    with pytest.raises(NoOffer, match="cannot be bought any more"):
        provider.buy_reservation(offer, "o-1", "t" * 40)
    with pytest.raises(AuthError):  # it shows nothing of what this account has bought
        provider.bought_reservation(offer.model_copy(update={"account": "2" * 12}), "t" * 40, time.time())
    assert bought(aws) == []


def test_without_its_tags_a_purchase_is_known_by_what_it_has_made_and_others_are_not_taken_for_it(aws: FakeAws):
    provider = AwsProvider()
    aws.sell(KIND, 2, ZONE, usd=1920, left=2)
    (offer,) = provider.find_reservations(asked(regions=(REGION,))).offers
    mates = provider.buy_reservation(offer, "o-2", "m" * 40)
    assert provider.bought_reservation(offer, "t" * 40, time.time()) is None, "another purchase by mgpu"
    aws.client("ec2").purchase_capacity_block(CapacityBlockOfferingId=offer.id, InstancePlatform="Linux/UNIX")
    found = provider.bought_reservation(offer, "t" * 40, time.time())
    assert found is not None
    assert found.id != mates.id
    assert provider.bought_reservation(offer, "t" * 40, time.time() + 120) is None, "it is older"
