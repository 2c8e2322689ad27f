"""The fake AWS does what its page says: tokens, templates, capacity, life cycle, faults, the bill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from fakes.aws import FakeAws, patching
from fakes.aws.control import Refused

KIND, ZONE = "p4d.24xlarge", "us-east-1b"
OWNED = [{"Key": "mgpu:owner", "Value": "me"}]


@pytest.fixture
def ec2(aws: FakeAws) -> Any:
    aws.quick()  # single calls are judged
    return aws.client("ec2")


def refused(code: str, call: Callable[[], object]) -> dict[str, Any]:
    """The error that a call ends with, which has to be this one."""
    with pytest.raises(ClientError) as caught:
        call()
    assert caught.value.response["Error"]["Code"] == code
    return caught.value.response


def subnet(ec2: Any, zone: str) -> str:
    return ec2.describe_subnets(Filters=[{"Name": "availability-zone", "Values": [zone]}])["Subnets"][0]["SubnetId"]


def template(aws: FakeAws, name: str = "mgpu-t", **data: Any) -> str:
    tags = [{"ResourceType": kind, "Tags": OWNED} for kind in ("instance", "volume", "network-interface")]
    given = {"ImageId": aws.image(), "TagSpecifications": tags, **data}
    aws.client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=given)
    return name


def fleet(ec2: Any, name: str, n: int = 2, *, zones: tuple[str, ...] = (ZONE,), market: str = "spot", **more: Any):
    """One CreateFleet; `more`: token, least (MinTargetCapacity), kind, and what else an override has."""
    token, least, kind = more.pop("token", None), more.pop("least", n), more.pop("kind", KIND)
    whole = {
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
        **({"MinTargetCapacity": least} if least else {}),
    }
    return ec2.create_fleet(
        Type="instant",
        TargetCapacitySpecification={"TotalTargetCapacity": n, "DefaultTargetCapacityType": market},
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": name, "Version": "1"},
                "Overrides": [{"InstanceType": kind, "SubnetId": subnet(ec2, zone), **more} for zone in zones],
            }
        ],
        **{"SpotOptions" if market == "spot" else "OnDemandOptions": whole},
        **({"ClientToken": token} if token else {}),
    )


def made(answer: dict[str, Any]) -> list[str]:
    return [one for each in answer["Instances"] for one in each["InstanceIds"]]


def codes(answer: dict[str, Any]) -> list[str]:
    return [each["ErrorCode"] for each in answer["Errors"]]


def shown(ec2: Any, *ids: str) -> list[dict[str, Any]]:
    pages = ec2.get_paginator("describe_instances").paginate(**({"InstanceIds": list(ids)} if ids else {}))
    return [each for page in pages for reservation in page["Reservations"] for each in reservation["Instances"]]


def states(ec2: Any) -> set[str]:
    return {each["State"]["Name"] for each in shown(ec2)}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# the process


def test_a_reset_leaves_nothing_of_what_was(aws: FakeAws, ec2: Any):
    ec2.run_instances(ImageId=aws.image(), InstanceType=KIND, MinCount=1, MaxCount=1)
    aws.capacity(0)
    aws.reset()
    assert (aws.bill(), aws.calls(), shown(ec2)) == ([], [], [])
    assert len(made(fleet(ec2, template(aws), 1))) == 1


def test_its_environment_is_all_that_boto3_needs(aws: FakeAws):
    assert boto3.Session().client("sts").get_caller_identity()["Account"] == "123456789012"
    assert [call.action for call in aws.calls()] == ["GetCallerIdentity"]
    assert os.environ["AWS_ENDPOINT_URL"] == aws.endpoint


def test_it_ends_with_the_process_that_started_it(tmp_path: Path):
    script = (
        "import os, sys; from pathlib import Path; from fakes.aws import FakeAws\n"
        "print(FakeAws.start(Path(sys.argv[1])).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=path, stdout=subprocess.PIPE, timeout=60, check=False
    )
    pid = int(ran.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_a_moto_that_lacks_a_name_is_refused_by_that_name():
    with pytest.raises(patching.MotoChanged, match=r"str\.no_such_thing"):
        patching.replace(str, "no_such_thing", None)
    with pytest.raises(patching.MotoChanged, match=r"str\.upper"):
        patching.add(str, "upper", None)


def test_an_unknown_verb_is_refused_with_the_ones_there_are(aws: FakeAws):
    with pytest.raises(Refused, match="capacity"):
        aws.ask("nonsense")


# creating


def test_one_token_makes_one_fleet_and_other_parameters_are_a_mismatch(aws: FakeAws, ec2: Any):
    name = template(aws)
    first, again = fleet(ec2, name, token="t"), fleet(ec2, name, token="t")
    assert made(first) == made(again)
    refused("IdempotentParameterMismatch", lambda: fleet(ec2, name, 3, token="t"))
    assert sorted(aws.alive()) == sorted(made(first))


def test_run_instances_dedupes_as_well(aws: FakeAws, ec2: Any):
    def run(count: int) -> Any:
        return ec2.run_instances(
            ImageId=aws.image(), InstanceType=KIND, MinCount=count, MaxCount=count, ClientToken="same"
        )

    assert run(1)["Instances"][0]["InstanceId"] == run(1)["Instances"][0]["InstanceId"]
    refused("IdempotentParameterMismatch", lambda: run(2))
    assert len(aws.alive()) == 1


def test_a_lost_answer_has_run_and_its_token_finds_it(aws: FakeAws, ec2: Any):
    name = template(aws)
    aws.lose_answers("CreateFleet")
    with pytest.raises(ConnectionClosedError):
        fleet(ec2, name, token="t")
    assert sorted(aws.alive()) == sorted(made(fleet(ec2, name, token="t")))
    assert len(aws.calls("CreateFleet")) == 2


def test_machines_are_what_the_template_says(aws: FakeAws, ec2: Any):
    base = aws.base()
    name = template(
        aws,
        UserData="IyEvYmluL3No",
        InstanceInitiatedShutdownBehavior="terminate",
        IamInstanceProfile={"Name": base["instance_profile"]},
        MetadataOptions={"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 200, "Encrypted": True}}],
        NetworkInterfaces=[{"DeviceIndex": 0, "AssociatePublicIpAddress": True, "Groups": [base["security_group_id"]]}],
    )
    it = shown(ec2, *made(fleet(ec2, name, 1)))[0]
    assert it["InstanceLifecycle"] == "spot"
    assert it["Placement"]["AvailabilityZone"] == ZONE
    assert it["SubnetId"] == subnet(ec2, ZONE)
    assert it["PublicIpAddress"].startswith("198.51.100.")
    assert it["MetadataOptions"]["HttpTokens"] == "required"
    assert it["MetadataOptions"]["HttpPutResponseHopLimit"] == 2
    assert it["IamInstanceProfile"]["Arn"].endswith("/mgpu-node")
    assert [group["GroupId"] for group in it["SecurityGroups"]] == [base["security_group_id"]]
    attribute = ec2.describe_instance_attribute(InstanceId=it["InstanceId"], Attribute="userData")
    assert attribute["UserData"]["Value"] == "IyEvYmluL3No"
    volume = ec2.describe_volumes()["Volumes"][0]
    assert (volume["Size"], volume["Encrypted"], volume["Tags"]) == (200, True, OWNED)
    interface = ec2.describe_network_interfaces()["NetworkInterfaces"][0]
    assert interface["TagSet"] == OWNED


def test_several_network_cards_come_without_a_public_address(aws: FakeAws, ec2: Any):
    cards = [{"DeviceIndex": min(card, 1), "NetworkCardIndex": card, "InterfaceType": "efa"} for card in range(4)]
    it = shown(ec2, *made(fleet(ec2, template(aws, NetworkInterfaces=cards), 1)))[0]
    seen = [
        (one["Attachment"]["NetworkCardIndex"], one["Attachment"]["DeviceIndex"]) for one in it["NetworkInterfaces"]
    ]
    assert seen == [(0, 0), (1, 1), (2, 1), (3, 1)]
    assert "PublicIpAddress" not in it
    cards[0]["AssociatePublicIpAddress"] = True
    answer = fleet(ec2, template(aws, "mgpu-public", NetworkInterfaces=cards), 1)
    assert (codes(answer), made(answer)) == (["InvalidParameterCombination"], [])


@pytest.mark.parametrize(
    "cards",
    [
        [(0, 0, "efa-only")],
        [(1, 0, "interface")],
        [(0, 0, "interface"), (0, 0, "efa-only")],
        [(0, 0, "interface"), (1, 0, "efa-only"), (1, 0, "efa-only")],
    ],
)
def test_a_layout_of_cards_that_ec2_does_not_take(aws: FakeAws, ec2: Any, cards: list[tuple[int, int, str]]):
    asked = [{"NetworkCardIndex": card, "DeviceIndex": device, "InterfaceType": kind} for card, device, kind in cards]
    answer = fleet(ec2, template(aws, NetworkInterfaces=asked), 1)
    assert (codes(answer), made(answer)) == (["InvalidParameterCombination"], [])


def test_a_machine_takes_an_address_once_it_runs(aws: FakeAws, ec2: Any):
    aws.pace(pending_s=60.0)
    ids = made(fleet(ec2, template(aws), 1))
    address = ec2.allocate_address(Domain="vpc")["AllocationId"]
    refused("IncorrectInstanceState", lambda: ec2.associate_address(AllocationId=address, InstanceId=ids[0]))


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ({"kind": "p4d.25xlarge"}, "InvalidParameterValue"),
        ({"zones": ("us-east-1f",)}, "InvalidFleetConfiguration"),
        ({"MaxPrice": "0.5"}, "SpotMaxPriceTooLow"),
        ({"ImageId": "ami-00000000"}, "InvalidAMIID.NotFound"),
        ({"Placement": {"GroupName": "nobody"}}, "InvalidPlacementGroup.Unknown"),
    ],
)
def test_what_cannot_be_had_is_named_by_its_pool(aws: FakeAws, ec2: Any, override: dict[str, Any], code: str):
    answer = fleet(ec2, template(aws), 1, **override)
    assert (codes(answer), made(answer), aws.alive()) == ([code], [], [])


def test_a_zone_without_capacity_is_named_and_the_next_one_taken(aws: FakeAws, ec2: Any):
    aws.capacity(0, zone=ZONE, market="spot")
    answer = fleet(ec2, template(aws), zones=(ZONE, "us-east-1c"))
    assert codes(answer) == ["InsufficientInstanceCapacity"]
    assert {it["Placement"]["AvailabilityZone"] for it in shown(ec2, *made(answer))} == {"us-east-1c"}
    assert len(made(fleet(ec2, "mgpu-t", market="on-demand"))) == 2  # another market of that zone


def test_all_or_nothing_and_without_it_what_there_is(aws: FakeAws, ec2: Any):
    aws.capacity(1, instance_type="p4d*")
    assert made(fleet(ec2, template(aws), 2)) == []
    assert aws.alive() == []
    assert len(made(fleet(ec2, "mgpu-t", 2, least=None))) == 1
    aws.capacity(None)
    aws.fewer(1)
    assert len(made(fleet(ec2, "mgpu-t", 3))) == 2


def test_one_zone_means_one_zone(aws: FakeAws, ec2: Any):
    aws.capacity(1)
    answer = fleet(ec2, template(aws), 2, zones=(ZONE, "us-east-1c"), least=None)
    assert len(made(answer)) == 1


@pytest.mark.parametrize(
    ("market", "quota", "code"),
    [("on-demand", "L-417A185B", "VcpuLimitExceeded"), ("spot", "L-7212CCBC", "MaxSpotInstanceCountExceeded")],
)
def test_a_quota_counts_vcpus_of_its_family_and_market(aws: FakeAws, ec2: Any, market: str, quota: str, code: str):
    aws.quota(quota, 96 * 2)
    name = template(aws)
    assert len(made(fleet(ec2, name, 2, market=market))) == 2
    assert codes(fleet(ec2, name, 1, market=market)) == [code]
    assert len(made(fleet(ec2, name, 1, market=market, kind="g5.xlarge"))) == 1
    quotas = aws.client("service-quotas")
    assert quotas.get_service_quota(ServiceCode="ec2", QuotaCode=quota)["Quota"]["Value"] == 192


def test_a_dry_run_makes_nothing(aws: FakeAws, ec2: Any):
    asked = {"ImageId": aws.image(), "InstanceType": KIND, "MinCount": 1, "MaxCount": 1, "DryRun": True}
    refused("DryRunOperation", lambda: ec2.run_instances(**asked))
    assert aws.alive() == []


# life


def test_machines_pass_through_all_their_states(aws: FakeAws, ec2: Any):
    aws.pace(pending_s=60, ending_s=60)
    ids = made(fleet(ec2, template(aws), 1))
    assert states(ec2) == {"pending"}
    aws.age(61)
    assert states(ec2) == {"running"}
    answer = ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"][0]
    assert (answer["PreviousState"]["Name"], answer["CurrentState"]["Name"]) == ("running", "shutting-down")
    assert aws.alive() == ids
    aws.age(61)
    assert (states(ec2), aws.alive()) == ({"terminated"}, [])
    aws.age(3600)
    assert shown(ec2) == []
    refused("InvalidInstanceID.NotFound", lambda: shown(ec2, *ids))
    assert len(aws.bill()) == 1


def test_a_reader_lags_behind_both_ways(aws: FakeAws, ec2: Any):
    aws.pace(ending_s=0)
    aws.lag(30)
    ids = made(fleet(ec2, template(aws), 1))
    assert shown(ec2) == []
    refused("InvalidInstanceID.NotFound", lambda: shown(ec2, *ids))
    aws.age(31)
    ec2.terminate_instances(InstanceIds=ids)
    assert states(ec2) != {"terminated"}
    aws.age(31)
    assert states(ec2) == {"terminated"}


def test_pages_are_no_larger_than_asked_for(aws: FakeAws, ec2: Any):
    ids = made(fleet(ec2, template(aws), 7))
    aws.pages(3)
    assert len(ec2.describe_instances(MaxResults=5)["Reservations"][0]["Instances"]) == 3
    assert sorted(it["InstanceId"] for it in shown(ec2)) == sorted(ids)
    assert len(aws.calls("DescribeInstances")) == 4


def test_a_stubborn_machine_says_yes_and_runs_on(aws: FakeAws, ec2: Any):
    ids = made(fleet(ec2, template(aws), 1))
    until(lambda: states(ec2) == {"running"})
    aws.stubborn()
    assert (
        ec2.terminate_instances(InstanceIds=ids)["TerminatingInstances"][0]["CurrentState"]["Name"] == "shutting-down"
    )
    assert states(ec2) == {"running"}
    ec2.terminate_instances(InstanceIds=ids)
    until(lambda: states(ec2) == {"terminated"})


def test_one_unknown_id_ends_none(aws: FakeAws, ec2: Any):
    ids = made(fleet(ec2, template(aws), 1))
    refused("InvalidInstanceID.NotFound", lambda: ec2.terminate_instances(InstanceIds=[*ids, "i-0123456789abcdef0"]))
    assert aws.alive() == ids


def test_the_reason_of_an_end_is_told(aws: FakeAws, ec2: Any):
    name = template(aws, InstanceInitiatedShutdownBehavior="terminate")
    killed, off = made(fleet(ec2, name, 2))
    stops = made(fleet(ec2, template(aws, "mgpu-stops"), 1))[0]
    aws.kill(killed)
    aws.stop(off)
    aws.stop(stops)
    until(lambda: aws.alive() != [] and len(aws.alive()) == 1)
    seen = {it["InstanceId"]: (it["State"]["Name"], it["StateReason"]["Code"]) for it in shown(ec2)}
    assert seen == {
        killed: ("terminated", "Server.SpotInstanceTermination"),
        off: ("terminated", "Client.InstanceInitiatedShutdown"),
        stops: ("stopped", "Client.InstanceInitiatedShutdown"),
    }
    assert aws.alive()[0].startswith("vol-")  # a stopped machine's disk is billed


def test_the_bill_is_by_pool_and_time_and_names_what_was_left_behind(aws: FakeAws, ec2: Any):
    aws.price(7.5, instance_type=KIND, zone=ZONE, market="spot")
    disk = [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 100, "DeleteOnTermination": False}}]
    ids = made(fleet(ec2, template(aws, BlockDeviceMappings=disk), 1))
    tagged = [{"ResourceType": "elastic-ip", "Tags": OWNED}]
    address = ec2.allocate_address(Domain="vpc", TagSpecifications=tagged)["AllocationId"]
    until(lambda: shown(ec2, *ids)[0]["State"]["Name"] == "running")
    ec2.associate_address(AllocationId=address, InstanceId=ids[0])
    assert aws.alive() == ids
    refused("InvalidIPAddress.InUse", lambda: ec2.release_address(AllocationId=address))
    ec2.terminate_instances(InstanceIds=ids)
    until(lambda: ids[0] not in aws.alive())
    machine, *left = aws.bill()
    assert (machine.usd_per_hour, machine.market, machine.zone, machine.owner) == (7.5, "spot", ZONE, "me")
    assert machine.ended_at is not None
    assert machine.ended_at > machine.launched_at
    assert {(row.instance_type, row.owner) for row in left} == {("disk 100 GiB", "me"), ("address", "me")}
    ec2.release_address(AllocationId=address)
    ec2.delete_volume(VolumeId=next(row.id for row in left if row.id.startswith("vol-")))
    assert aws.alive() == []


# faults


@pytest.mark.parametrize(
    ("fault", "service", "call", "code", "status"),
    [
        ("throttle", "ec2", "describe_instances", "RequestLimitExceeded", 503),
        ("throttle", "scheduler", "list_schedules", "ThrottlingException", 400),
        ("unavailable", "ec2", "describe_instances", "Unavailable", 503),
        ("expire", "ec2", "describe_instances", "RequestExpired", 400),
        ("expire", "sts", "get_caller_identity", "ExpiredToken", 400),
        ("expire", "ssm", "describe_parameters", "ExpiredTokenException", 400),
    ],
)
def test_each_service_says_it_in_its_own_words(aws, fault: str, service: str, call: str, code: str, status: int):
    getattr(aws, fault)()
    answer = refused(code, getattr(aws.client(service), call))
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == status
    aws.calm()
    getattr(aws.client(service), call)()


def test_a_denied_action_is_named(aws: FakeAws, ec2: Any):
    name = template(aws)
    aws.deny("CreateFleet")
    assert "ec2:CreateFleet" in refused("UnauthorizedOperation", lambda: fleet(ec2, name))["Error"]["Message"]
    aws.calm()
    aws.deny("RunInstances")
    answer = fleet(ec2, name)
    assert codes(answer) == ["UnauthorizedOperation"]
    assert "ec2:RunInstances" in answer["Errors"][0]["ErrorMessage"]


def test_errors_hit_as_often_as_told_before_or_after_it_ran(aws: FakeAws, ec2: Any):
    run = {"ImageId": aws.image(), "InstanceType": KIND, "MinCount": 1, "MaxCount": 1}
    aws.errors("RunInstances", "InternalError", n=1, skip=1)
    ec2.run_instances(**run)
    refused("InternalError", lambda: ec2.run_instances(**run))
    assert len(aws.alive()) == 1
    aws.unavailable("RunInstances", n=1, after=True)
    refused("Unavailable", lambda: ec2.run_instances(**run))
    assert len(aws.alive()) == 2


def test_a_share_of_calls_is_a_share(aws: FakeAws, ec2: Any):
    aws.throttle(0.5)
    failed = 0
    for _ in range(40):
        try:
            ec2.describe_regions()
        except ClientError:
            failed += 1
    assert 8 < failed < 32


def test_a_hanging_call_holds_no_other(aws: FakeAws, ec2: Any):
    aws.hang("DescribeVpcs", 120.0)
    hanging = subprocess.Popen(
        [sys.executable, "-c", "import boto3; boto3.client('ec2').describe_vpcs()"], stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: bool(aws.calls("DescribeVpcs")))
        ec2.describe_regions()
        assert hanging.poll() is None, "it was waited for"
    finally:
        hanging.kill()
        hanging.wait()


def test_calls_are_listed_with_what_was_asked(aws: FakeAws):
    aws.client("ec2", "eu-west-1").describe_instances(Filters=[{"Name": "tag:a", "Values": ["b"]}])
    aws.client("s3").list_buckets()
    first, second = aws.calls()
    assert (first.service, first.action, first.region) == ("ec2", "DescribeInstances", "eu-west-1")
    assert first.parameters["Filters"] == [{"Name": "tag:a", "Values": ["b"]}]
    assert (second.service, second.action) == ("s3", "ListBuckets")


# what moto lacks altogether


def test_a_placement_group_goes_when_its_machines_have(aws: FakeAws, ec2: Any):
    tagged = [{"ResourceType": "placement-group", "Tags": OWNED}]
    ec2.create_placement_group(GroupName="g", Strategy="cluster", TagSpecifications=tagged)
    refused("InvalidPlacementGroup.Duplicate", lambda: ec2.create_placement_group(GroupName="g"))
    mine = [{"Name": "tag:mgpu:owner", "Values": ["me"]}]
    assert [group["GroupName"] for group in ec2.describe_placement_groups(Filters=mine)["PlacementGroups"]] == ["g"]
    ids = made(fleet(ec2, template(aws, Placement={"GroupName": "g"}), 1))
    refused("InvalidPlacementGroup.InUse", lambda: ec2.delete_placement_group(GroupName="g"))
    ec2.terminate_instances(InstanceIds=ids)
    until(lambda: aws.alive() == [])
    ec2.delete_placement_group(GroupName="g")
    refused("InvalidPlacementGroup.Unknown", lambda: ec2.delete_placement_group(GroupName="g"))


def test_scores_follow_capacity(aws: FakeAws, ec2: Any):
    aws.capacity(0, zone="use1-az1")
    aws.capacity(8, zone="use1-az2")
    asked = {"InstanceTypes": [KIND], "TargetCapacity": 4, "SingleAvailabilityZone": True, "RegionNames": ["us-east-1"]}
    scores = {
        s["AvailabilityZoneId"]: s["Score"] for s in ec2.get_spot_placement_scores(**asked)["SpotPlacementScores"]
    }
    assert (scores["use1-az1"], scores["use1-az2"]) == (1, 10)


def test_spot_prices_vary_by_zone_and_time_below_on_demand(aws: FakeAws, ec2: Any):
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        InstanceTypes=[KIND], StartTime=time.time() - 86400, ProductDescriptions=["Linux/UNIX"]
    )
    rows = [row for page in pages for row in page["SpotPriceHistory"]]
    by_zone: dict[str, set[str]] = {}
    for row in rows:
        by_zone.setdefault(row["AvailabilityZone"], set()).add(row["SpotPrice"])
    assert len(by_zone) == 4
    assert all(len(prices) > 2 for prices in by_zone.values())
    assert len(set.union(*by_zone.values())) == sum(map(len, by_zone.values()))
    assert max(float(row["SpotPrice"]) for row in rows) < on_demand_usd(aws)


def on_demand_usd(aws: FakeAws) -> float:
    wanted = {"instanceType": KIND, "regionCode": "us-east-1", "operatingSystem": "Linux", "tenancy": "Shared"}
    wanted |= {"capacitystatus": "Used", "marketoption": "OnDemand"}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    listed = aws.client("pricing").get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
    term = next(iter(json.loads(listed[0])["terms"]["OnDemand"].values()))
    assert len(listed) == 1
    return float(next(iter(term["priceDimensions"].values()))["pricePerUnit"]["USD"])


def test_the_price_of_a_bid_is_the_price_of_the_list(aws: FakeAws, ec2: Any):
    aws.price(3.25, instance_type=KIND, market="on-demand")
    assert on_demand_usd(aws) == 3.25


def test_images_are_found_by_parameter_and_by_name(aws: FakeAws):
    west = aws.client("ec2", "us-west-2")
    named = [{"Name": "name", "Values": ["Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.7*"]}]
    found = west.describe_images(Owners=["amazon"], Filters=named)["Images"]
    newest = max(found, key=lambda image: image["CreationDate"])
    name = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04/latest/ami-id"
    value = aws.client("ssm", "us-west-2").get_parameter(Name=name)["Parameter"]["Value"]
    assert (len(found), value) == (2, newest["ImageId"])
    assert aws.image() != aws.image("us-west-2")


# schedules and permissions


def put(aws: FakeAws, machine: str, role: str, in_s: float, verb: str = "create_schedule") -> None:
    getattr(aws.client("scheduler"), verb)(
        Name="end",
        ScheduleExpression=time.strftime("at(%Y-%m-%dT%H:%M:%S)", time.gmtime(time.time() + in_s)),
        FlexibleTimeWindow={"Mode": "OFF"},
        ActionAfterCompletion="DELETE",
        Target={
            "Arn": "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": role,
            "Input": json.dumps({"InstanceIds": [machine]}),
            "RetryPolicy": {"MaximumRetryAttempts": 0},
        },
    )


def test_a_schedule_ends_its_machine_when_it_is_due_and_goes(aws: FakeAws, ec2: Any):
    machine, role = made(fleet(ec2, template(aws), 1))[0], aws.base()["reaper_role"]
    put(aws, machine, role, 600)
    put(aws, machine, role, 1200, "update_schedule")
    aws.age(900)
    assert states(ec2) == {"running"}
    aws.age(400)
    until(lambda: aws.alive() == [])
    assert aws.client("scheduler").list_schedules()["Schedules"] == []


def test_a_deleted_schedule_and_one_in_the_past_never_fire(aws: FakeAws, ec2: Any):
    machine, role = made(fleet(ec2, template(aws), 1))[0], aws.base()["reaper_role"]
    put(aws, machine, role, 600)
    aws.client("scheduler").delete_schedule(Name="end")
    put(aws, machine, role, -5)
    aws.age(900)
    time.sleep(0.3)
    assert aws.alive() == [machine]


def test_a_schedule_works_by_its_role_alone(aws: FakeAws, ec2: Any):
    machine, role = made(fleet(ec2, template(aws), 1))[0], aws.base()["reaper_role"]
    refused("ValidationException", lambda: put(aws, machine, role.replace("reaper", "node"), 600))
    narrow = {
        "Effect": "Allow",
        "Action": "ec2:TerminateInstances",
        "Resource": "arn:aws:ec2:us-east-1:123456789012:instance/*",
        "Condition": {"StringEquals": {"aws:ResourceTag/mgpu:owner": "somebody else"}},
    }
    document = json.dumps({"Version": "2012-10-17", "Statement": [narrow]})
    aws.client("iam").put_role_policy(RoleName="mgpu-reaper", PolicyName="mgpu-reaper", PolicyDocument=document)
    put(aws, machine, role, 600)
    aws.age(700)
    assert machine in aws.failed_schedules()[0]
    assert aws.alive() == [machine]


def test_a_role_may_have_its_permission_from_a_managed_policy(aws: FakeAws, ec2: Any):
    machine, role = made(fleet(ec2, template(aws), 1))[0], aws.base()["reaper_role"]
    iam = aws.client("iam")
    iam.delete_role_policy(RoleName="mgpu-reaper", PolicyName="mgpu-reaper")
    tagged = {"Null": {"aws:ResourceTag/mgpu:owner": "false"}}
    may = {"Effect": "Allow", "Action": ["ec2:TerminateInstances"], "Resource": "*", "Condition": tagged}
    document = json.dumps({"Version": "2012-10-17", "Statement": may})
    policy = iam.create_policy(PolicyName="end", PolicyDocument=document)["Policy"]["Arn"]
    iam.attach_role_policy(RoleName="mgpu-reaper", PolicyArn=policy)
    put(aws, machine, role, 600)
    aws.age(700)
    until(lambda: aws.alive() == [])


def test_permissions_are_asked_for_once_that_is_wanted(aws: FakeAws):
    iam = aws.client("iam")
    iam.create_user(UserName="operator")
    key = iam.create_access_key(UserName="operator")["AccessKey"]
    user = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
    theirs = aws.client("ec2", **user)
    theirs.describe_instances()
    aws.enforce()
    assert "ec2:DescribeInstances" in refused("UnauthorizedOperation", theirs.describe_instances)["Error"]["Message"]
    allowed = {"Effect": "Allow", "Action": "ec2:Describe*", "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="operator", PolicyName="p", PolicyDocument=document)
    theirs.describe_instances()
    refused("UnauthorizedOperation", lambda: theirs.terminate_instances(InstanceIds=["i-1"]))
