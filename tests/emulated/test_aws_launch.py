"""Gangs made on the fake AWS: what is asked for, one gang a token whatever is lost, and refusals that leave nothing."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.aws import FakeAws, market
from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.errors import (
    BidTooLow,
    CleanupFailed,
    Conflict,
    InvalidRequest,
    NoCapacity,
    NoOffer,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Transient,
)
from mgpu.plan.model import BoughtAs, Offer, Requirements
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import launch
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.base import FleetRequest, Handle, NodePhase, create_token
from mgpu.providers.start import HostKey

REGION, ZONE = "us-east-1", "us-east-1a"
KEY = HostKey.make().public
PATIENCE_S = 20.0
WITH_EFA = "g5.8xlarge"  # one card


@pytest.fixture
def provider(aws: FakeAws) -> AwsProvider:
    aws.base(REGION)
    aws.quick()  # single calls are judged
    return AwsProvider(aws.options)


def offer(instance_type: str = "g5.xlarge", market: BoughtAs = "spot", zone: str | None = ZONE) -> Offer:
    return Offer(
        provider="aws",
        instance_type=instance_type,
        market=market,
        price_usd_per_hour=1.25,
        region=REGION,
        zone=zone,
        fetched_at=1,
    )


def request(nodes: int = 2, generation: int = 1, cap_usd: float = 100.0, **options: str) -> FleetRequest:
    needed = Requirements(
        provider="aws",
        nodes=nodes,
        max_price_usd_per_hour=cap_usd,
        max_hours=1,
        provider_options=options,
    )
    return FleetRequest(
        fleet="demo",
        generation=generation,
        owner="me",
        requirements=needed,
        ssh_public_key=KEY,
        lease_s=300,
        hard_cap_s=3600,
    )


def token(of: Offer, attempt: int = 0) -> str:
    return create_token("o-1", "demo", 1, of, attempt)


def insist(call: Callable[[], Handle]) -> Handle:
    """As acquire does: the same call again while the provider asks for it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (Transient, RateLimited):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def machines(aws: FakeAws) -> list[dict[str, Any]]:
    found = aws.client("ec2").describe_instances()["Reservations"]
    return [machine for reservation in found for machine in reservation["Instances"]]


def tags(thing: dict[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in thing["Tags"]}


def left(aws: FakeAws) -> list[str]:
    """Templates and placement groups."""
    ec2 = aws.client("ec2")
    templates = [each["LaunchTemplateName"] for each in ec2.describe_launch_templates()["LaunchTemplates"]]
    return templates + [each["GroupName"] for each in ec2.describe_placement_groups()["PlacementGroups"]]


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_a_fleet_is_asked_for_whole_in_one_place_at_most_at_its_price(aws: FakeAws, provider: AwsProvider):
    provider.create(request(nodes=3, cap_usd=4.0), offer(), token(offer()))
    (call,) = aws.calls("CreateFleet")
    asked = call.parameters
    (config,) = asked["LaunchTemplateConfigs"]
    (pool,) = config["Overrides"]
    assert (asked["Type"], asked["ClientToken"]) == ("instant", token(offer()))
    assert asked["TargetCapacitySpecification"] == {"TotalTargetCapacity": 3, "DefaultTargetCapacityType": "spot"}
    spot = asked["SpotOptions"]
    assert (spot["SingleInstanceType"], spot["SingleAvailabilityZone"], spot["MinTargetCapacity"]) == (True, True, 3)
    assert spot["InstanceInterruptionBehavior"] == "terminate"
    assert pool["InstanceType"] == "g5.xlarge"
    assert pool["MaxPrice"] == "1.33333", "a third of the cap, rounded down"


def test_on_demand_machines_are_asked_for_without_a_bid(aws: FakeAws, provider: AwsProvider):
    chosen = offer(market="on-demand")
    provider.create(request(), chosen, token(chosen))
    (call,) = aws.calls("CreateFleet")
    assert "MaxPrice" not in call.parameters["LaunchTemplateConfigs"][0]["Overrides"][0]
    assert call.parameters["OnDemandOptions"]["MinTargetCapacity"] == 2
    assert [row.market for row in aws.bill()] == ["on-demand"] * 2


def test_every_machine_ends_its_bill_and_tells_whose_it_is(aws: FakeAws, provider: AwsProvider):
    before = time.time()
    handle = provider.create(request(), offer(), token(offer()))
    ec2 = aws.client("ec2")
    shown = {"InstanceTypes": ["g5.xlarge"], "AvailabilityZone": ZONE, "MaxResults": 1}
    price = ec2.describe_spot_price_history(**shown)["SpotPriceHistory"][0]
    assert [machine["InstanceId"] for machine in sorted(machines(aws), key=lambda m: tags(m)[names.RANK])] == list(
        handle.ids
    )
    for machine in machines(aws):
        assert machine["Placement"]["AvailabilityZone"] == ZONE
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert machine["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
        assert machine["IamInstanceProfile"]["Arn"].endswith(f"/{names.NODE_ROLE}")
        marks = tags(machine)
        assert (marks[names.OWNER], marks[names.FLEET], marks[names.GENERATION]) == ("me", "demo", "1")
        assert (marks[names.TOKEN], marks[names.RANKS]) == (token(offer()), "0-1")
        assert float(marks[names.PRICE]) == float(price["SpotPrice"]) != offer().price_usd_per_hour
        assert before + 3600 <= float(marks[names.HARD_CAP_AT]) <= time.time() + 3601
        assert marks[names.HOST_KEY] == marks[names.ONE_USE_KEY]
        answer = ec2.describe_instance_attribute(
            InstanceId=machine["InstanceId"], Attribute="instanceInitiatedShutdownBehavior"
        )
        assert answer["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
    for disk in ec2.describe_volumes()["Volumes"]:
        assert disk["Encrypted"]
        assert tags(disk)[names.OWNER] == "me"
    (call,) = aws.calls("CreateLaunchTemplate")
    (disk,) = call.parameters["LaunchTemplateData"]["BlockDeviceMappings"]
    assert disk["Ebs"]["DeleteOnTermination"]


TAGS = {"CostCenter": "4711", "Team": "ml research"}


def test_everything_that_a_fleet_is_made_of_carries_the_users_tags(aws: FakeAws, provider: AwsProvider):
    chosen = offer("p4d.24xlarge", "on-demand")
    insist(lambda: provider.create(request(tags=json.dumps(TAGS)), chosen, token(chosen)))
    ec2 = aws.client("ec2")
    made = {
        "machine": machines(aws),
        "disk": ec2.describe_volumes()["Volumes"],
        "address": ec2.describe_addresses()["Addresses"],
        "template": ec2.describe_launch_templates()["LaunchTemplates"],
        "group": ec2.describe_placement_groups()["PlacementGroups"],
    }
    for kind, things in made.items():
        assert things, kind
        for each in things:
            assert TAGS.items() <= tags(each).items(), kind
            assert tags(each)[names.OWNER] == "me", kind
    (call,) = aws.calls("CreateLaunchTemplate")
    of_template = {
        each["ResourceType"]: tags(each) for each in call.parameters["LaunchTemplateData"]["TagSpecifications"]
    }
    assert all(TAGS.items() <= each.items() for each in of_template.values())
    assert of_template.keys() == {"instance", "volume", "network-interface"}
    (call,) = aws.calls("CreateFleet")
    of_fleet = {each["ResourceType"]: tags(each) for each in call.parameters["TagSpecifications"]}
    assert all(TAGS.items() <= each.items() for each in of_fleet.values())
    assert of_fleet.keys() == {"fleet", "instance", "volume"}


def test_a_machine_has_no_more_tags_of_mgpus_than_a_run_file_leaves_room_for(aws: FakeAws, provider: AwsProvider):
    provider.create(request(), offer(), token(offer()))
    for machine in machines(aws):
        assert {key for key in tags(machine) if not key.startswith("aws:")} == set(names.ON_MACHINE)


def test_an_organization_that_demands_a_tag_is_obeyed_where_the_run_file_has_it(aws: FakeAws, provider: AwsProvider):
    demands = {"Null": {"aws:RequestTag/CostCenter": "true"}}
    on = ["arn:aws:ec2:*:*:fleet/*", "arn:aws:ec2:*:*:instance/*", "arn:aws:ec2:*:*:volume/*"]
    aws.organization({"Effect": "Deny", "Action": "ec2:CreateFleet", "Resource": on, "Condition": demands})
    with pytest.raises(PermissionDenied) as caught:
        provider.create(request(), offer(), token(offer()))
    assert "aws: {tags:" in caught.value.next_step
    assert aws.alive() == left(aws) == []
    provider.create(request(tags=json.dumps(TAGS)), offer(), token(offer(), 1))
    assert len(machines(aws)) == 2


def test_the_disk_is_as_large_as_asked_and_no_smaller_than_the_image(aws: FakeAws, provider: AwsProvider):
    wanted = request(nodes=1)
    wanted = wanted.model_copy(update={"requirements": wanted.requirements.model_copy(update={"disk_gib": 555})})
    provider.create(wanted, offer(), token(offer()))
    assert [disk["Size"] for disk in aws.client("ec2").describe_volumes()["Volumes"]] == [555]


@pytest.mark.parametrize(
    ("disk", "asked"),
    [
        (None, {"VolumeType": "gp3"}),
        ({"throughput_mib_s": 1000, "iops": 4000}, {"VolumeType": "gp3", "Throughput": 1000, "Iops": 4000}),
        ({"type": "io2", "iops": 9000}, {"VolumeType": "io2", "Iops": 9000}),
        ({"initialization_mib_s": 200}, {"VolumeType": "gp3", "VolumeInitializationRate": 200}),
    ],
    ids=["as it is", "gp3", "io2", "read in"],
)
def test_the_disk_is_of_the_kind_and_speed_that_the_run_file_says(aws: FakeAws, provider: AwsProvider, disk, asked):
    given = {"disk": json.dumps(disk)} if disk else {}
    provider.create(request(nodes=1, **given), offer(), token(offer()))
    (call,) = aws.calls("CreateLaunchTemplate")
    (mapped,) = call.parameters["LaunchTemplateData"]["BlockDeviceMappings"]
    said = ("VolumeType", "Throughput", "Iops", "VolumeInitializationRate")
    assert {key: value for key, value in mapped["Ebs"].items() if key in said} == asked
    (made,) = aws.client("ec2").describe_volumes()["Volumes"]
    assert {key: value for key, value in asked.items() if key != "VolumeInitializationRate"}.items() <= made.items()


def test_the_kill_switch_is_set_to_the_hard_cap_that_the_machines_tell(aws: FakeAws, provider: AwsProvider):
    handle = provider.create(request(), offer(), token(offer()))
    cap = float(tags(machines(aws)[0])[names.HARD_CAP_AT])
    at = f"at({time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(cap))})"
    schedules = [call.parameters for call in aws.calls("CreateSchedule")]
    assert [each["ScheduleExpression"] for each in schedules] == [at] * 2
    assert {name for name in handle.ids for each in schedules if name in str(each)} == set(handle.ids)


@pytest.mark.parametrize(("address", "public"), [("public", True), ("private", False)])
def test_a_public_address_only_where_it_is_wanted(aws: FakeAws, provider: AwsProvider, address: str, public: bool):
    provider.create(request(nodes=1, address=address), offer(), token(offer()))
    (machine,) = machines(aws)
    assert bool(machine.get("PublicIpAddress")) == public


def test_a_gang_is_kept_together_where_it_talks_by_efa_and_nowhere_else(aws: FakeAws, provider: AwsProvider):
    fast, plain = offer(WITH_EFA), request(network="plain")
    provider.create(request(), fast, token(fast))
    assert {machine["Placement"].get("GroupName") for machine in machines(aws)} == {names.template(token(fast))}
    others = {
        *provider.create(plain, fast, token(fast, 1)).ids,
        *provider.create(request(), offer(), token(offer())).ids,
    }
    assert len(others) == 4
    ungrouped = [machine for machine in machines(aws) if machine["InstanceId"] in others]
    assert not any(machine["Placement"].get("GroupName") for machine in ungrouped)


def test_machines_with_many_cards_get_efa_on_each_and_a_rented_address(aws: FakeAws, provider: AwsProvider):
    chosen = offer("p4d.24xlarge", "on-demand")
    handle = insist(lambda: provider.create(request(), chosen, token(chosen)))
    (call,) = aws.calls("CreateLaunchTemplate")
    cards = call.parameters["LaunchTemplateData"]["NetworkInterfaces"]
    assert [card["InterfaceType"] for card in cards] == ["interface", *["efa-only"] * 4]
    assert [(card["NetworkCardIndex"], card["DeviceIndex"]) for card in cards] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert not any("AssociatePublicIpAddress" in card for card in cards)
    rented = aws.client("ec2").describe_addresses()["Addresses"]
    assert {each["InstanceId"] for each in rented} == set(handle.ids)
    assert {tags(each)[names.OWNER] for each in rented} == {"me"}
    deadline = time.monotonic() + PATIENCE_S
    while not (state := provider.describe(handle)).ready:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {node.address for node in state.nodes} == {each["PublicIp"] for each in rented}


def test_a_rented_address_goes_after_its_machine_though_nobody_is_left(aws: FakeAws, provider: AwsProvider):
    aws.pace(ending_s=0)
    chosen = offer("p4d.24xlarge", "on-demand")
    insist(lambda: provider.create(request(), chosen, token(chosen)))
    asked = request().hard_cap_s
    aws.age(asked + 120)
    assert not [name for name in aws.alive() if name.startswith("i-")]
    assert len(aws.alive()) == 2, "the addresses are billed on"
    aws.age(600)
    assert aws.alive() == [], aws.failed_schedules()


def test_a_machine_takes_its_address_once_it_runs_and_has_its_kill_switch_before(aws: FakeAws, provider: AwsProvider):
    aws.pace(pending_s=60.0)
    chosen = offer("p4d.24xlarge", "on-demand")
    with pytest.raises(Transient):
        provider.create(request(), chosen, token(chosen))
    assert len([name for name in aws.alive() if name.startswith("i-")]) == 2, "it is no refusal"
    armed = [call.parameters["Name"] for call in aws.calls("CreateSchedule")]
    assert len([name for name in armed if name.startswith("mgpu-i-")]) == 2


def test_one_machine_alone_needs_no_efa(aws: FakeAws, provider: AwsProvider):
    chosen = offer("p4d.24xlarge", "on-demand")
    provider.create(request(nodes=1), chosen, token(chosen))
    (call,) = aws.calls("CreateLaunchTemplate")
    (card,) = call.parameters["LaunchTemplateData"]["NetworkInterfaces"]
    assert card["InterfaceType"] == "interface"
    assert left(aws) == [names.template(token(chosen))], "and no placement group"


def test_no_secret_but_the_one_use_key_is_in_the_user_data(aws: FakeAws, provider: AwsProvider):
    provider.create(request(nodes=1), offer(), token(offer()))
    (call,) = aws.calls("CreateLaunchTemplate")
    text = base64.b64decode(call.parameters["LaunchTemplateData"]["UserData"]).decode()
    assert text.count("PRIVATE KEY-----") == 2, "one key, its begin and its end"
    assert aws.env["AWS_SECRET_ACCESS_KEY"] not in text.replace("/fake", "")
    assert "AKIA" not in text


# --- one token, one gang ----------------------------------------------------------------------------------------------


@pytest.mark.drawn("calls of AWS x errors", "mgpu/providers/aws")
@pytest.mark.parametrize(
    "action", ["CreatePlacementGroup", "CreateLaunchTemplate", "CreateFleet", "CreateTags", "CreateSchedule"]
)
@pytest.mark.parametrize("fault", ["lost", "503 after it ran", "503"])
def test_one_gang_whatever_answer_is_lost(aws: FakeAws, provider: AwsProvider, action: str, fault: str):
    wanted = offer(WITH_EFA)
    if fault == "lost":
        aws.lose_answers(action, n=4)
    else:
        aws.unavailable(action, n=4, after="after" in fault)
    handle = insist(lambda: AwsProvider(aws.options).create(request(), wanted, token(wanted)))
    assert sorted(handle.ids) == sorted(aws.alive())
    assert len(handle.ids) == 2
    assert {tags(machine)[names.RANK] for machine in machines(aws)} == {"0", "1"}
    assert len({tags(machine)[names.HOST_KEY] for machine in machines(aws)}) == 1
    armed = str([call.parameters for call in aws.calls("CreateSchedule")])
    assert all(name in armed for name in handle.ids)


def test_a_lost_answer_is_told_as_the_same_call_again(aws: FakeAws, provider: AwsProvider):
    aws.lose_answers("CreateFleet", n=10)
    with pytest.raises(Transient):
        provider.create(request(), offer(), token(offer()))
    assert len(aws.alive()) == 2, "it ran"
    aws.calm()
    handle = AwsProvider(aws.options).create(request(), offer(), token(offer()))
    assert sorted(handle.ids) == sorted(aws.alive())


def test_a_later_try_keeps_the_first_ones_host_key_and_hard_cap(
    aws: FakeAws, provider: AwsProvider, monkeypatch: pytest.MonkeyPatch
):
    aws.unavailable("CreateFleet", n=10)
    with pytest.raises(Transient):
        provider.create(request(), offer(), token(offer()))
    (call,) = aws.calls("CreateLaunchTemplate")
    aws.calm()
    monkeypatch.setattr(launch, "time", SimpleNamespace(time=lambda: time.time() + 2))  # another second
    AwsProvider(aws.options).create(request(), offer(), token(offer()))
    assert len(aws.calls("CreateLaunchTemplate")) == 1
    (wanted,) = (
        tags(each)
        for each in call.parameters["LaunchTemplateData"]["TagSpecifications"]
        if each["ResourceType"] == "instance"
    )
    for machine in machines(aws):
        assert tags(machine)[names.HOST_KEY] == wanted[names.HOST_KEY]
        assert tags(machine)[names.HARD_CAP_AT] == wanted[names.HARD_CAP_AT]


def test_a_crash_after_create_fleet_is_finished_by_the_next_process(aws: FakeAws, provider: AwsProvider):
    aws.deny("CreateTags")
    aws.deny("TerminateInstances")
    with pytest.raises(CleanupFailed):
        provider.create(request(), offer(), token(offer()))
    assert len(aws.alive()) == 2
    aws.calm()
    handle = AwsProvider(aws.options).create(request(), offer(), token(offer()))
    assert sorted(handle.ids) == sorted(aws.alive())
    assert [tags(m)[names.RANK] for m in sorted(machines(aws), key=lambda m: m["InstanceId"])] == ["0", "1"]
    assert len(aws.calls("CreateFleet")) == 1


def test_machines_that_ec2_does_not_show_yet_are_not_made_twice(aws: FakeAws, provider: AwsProvider):
    aws.lag(2.0)
    first = insist(lambda: provider.create(request(), offer(), token(offer())))
    second = insist(lambda: AwsProvider(aws.options).create(request(), offer(), token(offer())))
    assert first.ids == second.ids
    assert sorted(aws.alive()) == sorted(first.ids)


def test_a_lost_answer_and_machines_not_shown_yet_are_one_gang_all_the_same(aws: FakeAws, provider: AwsProvider):
    aws.lag(60.0)
    aws.lose_answers("CreateFleet", n=3)  # as often as one call is tried
    with pytest.raises(Transient):
        provider.create(request(), offer(), token(offer()))
    made = sorted(aws.alive())
    handle = insist(lambda: AwsProvider(aws.options).create(request(), offer(), token(offer())))
    assert sorted(aws.alive()) == made == sorted(handle.ids)


def test_another_price_is_the_same_request_and_another_lease_is_not(aws: FakeAws, provider: AwsProvider):
    first = provider.create(request(), offer(), token(offer()))
    dearer = offer().model_copy(update={"price_usd_per_hour": 2.0})
    assert provider.create(request(), dearer, token(offer())).ids == first.ids
    with pytest.raises(Conflict):
        provider.create(request().model_copy(update={"lease_s": 1.0}), offer(), token(offer()))
    assert sorted(aws.alive()) == sorted(first.ids)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_no_capacity_names_the_code_and_leaves_nothing(aws: FakeAws, provider: AwsProvider):
    aws.capacity(1, zone=ZONE)
    with pytest.raises(NoCapacity) as caught:
        provider.create(request(), offer(), token(offer()))
    assert "g5.xlarge" in caught.value.what
    assert "Capacity" in caught.value.what
    assert caught.value.scope == "zone"
    assert aws.alive() == []
    assert left(aws) == []
    assert len(aws.calls("CreateFleet")) == 1, "no retry storm"


@pytest.mark.parametrize("listed", [True, False], ids=["in the fleet's list", "as the answer"])
def test_a_quota_is_named_with_the_way_to_raise_it(aws: FakeAws, provider: AwsProvider, listed: bool):
    if listed:
        aws.quota("L-DB2E81BA", 4)
    else:
        aws.errors("CreateFleet", "VcpuLimitExceeded")
    chosen = offer(market="on-demand")
    with pytest.raises(QuotaExceeded) as caught:
        provider.create(request(), chosen, token(chosen))
    assert "L-DB2E81BA" in caught.value.what
    assert "request-service-quota-increase" in caught.value.next_step
    assert caught.value.scope == "region"
    assert aws.alive() == []
    assert len(aws.calls("CreateFleet")) == 1


def test_a_limit_of_something_else_than_machines_is_not_named_as_theirs(aws: FakeAws, provider: AwsProvider):
    aws.errors("CreateFleet", "MaxFleetCountExceeded")
    with pytest.raises(QuotaExceeded) as caught:
        provider.create(request(), offer(), token(offer()))
    assert "MaxFleetCountExceeded" in caught.value.why
    assert "L-" not in caught.value.what


def test_a_type_that_its_zone_does_not_have_is_no_capacity(aws: FakeAws, provider: AwsProvider):
    zone = next(each for each in "abcdef" if f"{REGION}{each}" not in market.zones("p4d.24xlarge", REGION))
    chosen = offer("p4d.24xlarge", zone=f"{REGION}{zone}")
    with pytest.raises(NoCapacity) as caught:
        provider.create(request(), chosen, token(chosen))
    assert "InvalidFleetConfiguration" in caught.value.what
    assert left(aws) == []


def test_a_type_that_its_region_does_not_know_is_no_capacity(aws: FakeAws, provider: AwsProvider):
    aws.errors("DescribeInstanceTypes", "InvalidInstanceType")
    with pytest.raises(NoCapacity):
        provider.create(request(), offer(), token(offer()))


def test_an_instance_profile_that_ec2_does_not_know_yet_does_not_end_the_search(aws: FakeAws, provider: AwsProvider):
    provider.create(request(), offer(), token(offer()))
    iam, profile = aws.client("iam"), {"InstanceProfileName": names.NODE_ROLE}
    iam.remove_role_from_instance_profile(**profile, RoleName=names.NODE_ROLE)
    iam.delete_instance_profile(**profile)  # as EC2 sees it before IAM's news have reached it
    with pytest.raises(NoCapacity) as caught:
        provider.create(request(), offer(), token(offer(), 1))
    assert "Invalid IAM Instance Profile name" in caught.value.why


def test_a_spot_price_above_the_cap_is_a_bid_too_low(aws: FakeAws, provider: AwsProvider):
    aws.price(3.0, market="spot")
    with pytest.raises(BidTooLow):
        provider.create(request(cap_usd=5.0), offer(), token(offer()))
    assert aws.alive() == []


def test_a_denial_names_the_action(aws: FakeAws, provider: AwsProvider):
    aws.deny("CreateFleet")
    with pytest.raises(PermissionDenied) as caught:
        provider.create(request(), offer(), token(offer()))
    assert "CreateFleet" in caught.value.next_step
    assert left(aws) == []


def test_throttling_is_passed_on_and_costs_few_calls(aws: FakeAws, provider: AwsProvider):
    aws.throttle(action="CreateFleet")
    with pytest.raises(RateLimited):
        provider.create(request(), offer(), token(offer()))
    assert len(aws.calls("CreateFleet")) <= 3


def test_fewer_than_asked_are_ended(aws: FakeAws, provider: AwsProvider):
    aws.fewer(1)
    with pytest.raises(NoCapacity):
        provider.create(request(nodes=3), offer(), token(offer()))
    assert wait_for(lambda: aws.alive() == [])


def test_fewer_than_asked_that_cannot_be_ended_are_said_so(aws: FakeAws, provider: AwsProvider):
    aws.fewer(1)
    aws.deny("TerminateInstances")
    with pytest.raises(CleanupFailed) as caught:
        provider.create(request(nodes=3), offer(), token(offer()))
    assert all(name in caught.value.what for name in aws.alive())
    assert isinstance(caught.value.__cause__, NoCapacity)
    assert len(aws.alive()) == 2


@pytest.mark.parametrize("action", ["CreateTags", "CreateSchedule"])
def test_machines_that_cannot_be_finished_are_ended(aws: FakeAws, provider: AwsProvider, action: str):
    aws.deny(action)
    with pytest.raises(PermissionDenied):
        provider.create(request(), offer(), token(offer()))
    assert wait_for(lambda: aws.alive() == [])


def test_addresses_that_cannot_be_had_end_the_gang_and_name_the_quota(aws: FakeAws, provider: AwsProvider):
    aws.errors("AllocateAddress", "AddressLimitExceeded")
    chosen = offer("p4d.24xlarge", "on-demand")
    with pytest.raises(QuotaExceeded) as caught:
        provider.create(request(), chosen, token(chosen))
    assert "L-0263D0A3" in caught.value.what
    assert wait_for(lambda: aws.alive() == [])


def test_a_role_that_scheduler_does_not_know_yet_is_waited_for_but_not_for_long(aws: FakeAws, provider: AwsProvider):
    said = "The execution role you provide must allow AWS EventBridge Scheduler to assume the role."
    aws.errors("CreateSchedule", "ValidationException", message=said)
    with pytest.raises(Transient):
        provider.create(request(), offer(), token(offer()))
    assert len(aws.alive()) == 2
    aws.age(100.0)
    with pytest.raises(InvalidRequest, match="kill switch"):
        provider.create(request(), offer(), token(offer()))
    assert wait_for(lambda: aws.alive() == [])


def test_too_few_addresses_are_told_before_any_machine_is_billed(aws: FakeAws, provider: AwsProvider):
    aws.quota("L-0263D0A3", 2)
    aws.client("ec2").allocate_address(Domain="vpc")
    chosen = offer("p4d.24xlarge", "on-demand")
    with pytest.raises(QuotaExceeded) as caught:
        provider.create(request(), chosen, token(chosen))
    assert "1 of 2 are rented" in caught.value.why
    assert aws.calls("CreateFleet") == []
    assert left(aws) == []


def test_who_may_not_read_quotas_rents_addresses_all_the_same(aws: FakeAws, provider: AwsProvider):
    aws.deny("ListServiceQuotas")
    chosen = offer("p4d.24xlarge", "on-demand")
    assert insist(lambda: provider.create(request(), chosen, token(chosen))).ids


def wait_for(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


# --- repair -----------------------------------------------------------------------------------------------------------


def test_a_lost_machine_is_replaced_only_once_it_is_ending(aws: FakeAws, provider: AwsProvider):
    handle = provider.create(request(), offer(), token(offer()))
    aws.stubborn(1)
    new, asked = token(offer(), 1), request(generation=2)
    with pytest.raises(Transient) as caught:
        provider.repair(handle, (1,), asked, offer(), new)
    assert handle.ids[1] in str(caught.value)
    assert sorted(aws.alive()) == sorted(handle.ids), "nothing was made beside it"
    repaired = insist(lambda: provider.repair(handle, (1,), asked, offer(), new))
    assert repaired.ids[0] == handle.ids[0]
    assert wait_for(lambda: sorted(aws.alive()) == sorted(repaired.ids))
    assert provider.describe(repaired).nodes[1].phase in (NodePhase.PENDING, NodePhase.RUNNING)
    fresh = next(machine for machine in machines(aws) if machine["InstanceId"] == repaired.ids[1])
    assert (tags(fresh)[names.RANK], tags(fresh)[names.GENERATION]) == ("1", "2")
    assert not fresh["Placement"].get("GroupName"), "alone in a group it would be near nobody"


def test_a_machine_that_ends_as_slowly_as_ec2s_do_keeps_no_replacement_waiting(aws: FakeAws, provider: AwsProvider):
    """Machines with GPUs are `shutting-down`, and billed no more, for five minutes and longer."""
    handle = provider.create(request(), offer(), token(offer()))
    aws.pace(ending_s=3600)
    ended, state = handle.ids[1], provider.describe
    acquire.destroy(provider, handle, nodes=(ended,), unbilled=True, timeouts=Timeouts())
    assert state(handle.model_copy(update={"ids": (ended,)})).nodes[0].phase is NodePhase.ENDING
    repaired = insist(lambda: provider.repair(handle, (1,), request(generation=2), offer(), token(offer(), 1)))
    assert repaired.ids[0] == handle.ids[0]
    assert state(repaired).nodes[1].phase in (NodePhase.PENDING, NodePhase.RUNNING)
    aws.pace(ending_s=0)


def test_metal_and_machines_with_many_gpus_get_the_time_that_they_boot(aws: FakeAws, provider: AwsProvider):
    def boot_s(**changes: Any) -> float:
        return provider.boot_s(request().requirements.model_copy(update=changes))

    assert boot_s(gpu=("T4",), gpus_per_node=1) == 0
    assert boot_s(gpu=("A100-40GB",), gpus_per_node=8) == 900
    assert boot_s(gpu=("T4",), gpus_per_node=8) == 1500, "g4dn.metal"


# --- the provider's own calls -----------------------------------------------------------------------------------------


def test_check_passes_and_names_what_is_missing(aws: FakeAws, provider: AwsProvider):
    provider.check()
    aws.deny("DescribeInstances")
    with pytest.raises(PermissionDenied, match="DescribeInstances"):
        provider.check()


def test_configured_looks_at_variables_and_files(monkeypatch: pytest.MonkeyPatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_SHARED_CREDENTIALS_FILE", raising=False)
    assert not AwsProvider().configured()
    assert AwsProvider({"profile": "work"}).configured()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    assert AwsProvider().configured()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]\n")
    assert AwsProvider().configured()


def test_without_a_base_the_region_is_passed_over_and_the_command_named(aws: FakeAws):
    with pytest.raises(NoOffer) as caught:
        AwsProvider(aws.options).create(request(), offer(), token(offer()))
    assert caught.value.scope == "region"
    assert f"mgpu bootstrap aws --region {REGION}" in caught.value.next_step
    assert left(aws) == []


def test_every_refusal_is_an_error_of_ours(aws: FakeAws, provider: AwsProvider):
    aws.errors("CreateFleet", "SomethingNobodyHasHeardOf")
    with pytest.raises(ProviderError, match="SomethingNobodyHasHeardOf"):
        provider.create(request(), offer(), token(offer()))
