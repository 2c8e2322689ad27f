"""What a gang stands on: found by name, or given by id; what is missing rules out its zone or its region."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from fakes.aws import PROGRAMS, FakeAws

from mgpu.errors import NoCapacity, NoOffer, PermissionDenied, ProviderError
from mgpu.plan.model import Offer
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import network
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account
from mgpu.providers.base import NETWORK

REGION = "us-east-1"


def offer(zone: str | None = "us-east-1a", region: str = REGION) -> Offer:
    return Offer(
        provider="aws",
        instance_type="g5.xlarge",
        market="spot",
        price_usd_per_hour=1,
        region=region,
        zone=zone,
        fetched_at=1,
    )


def find(aws: FakeAws, wanted: Offer, nodes: int = 2, **given: str) -> network.Place:
    options = Options.of({**aws.options, **given})
    return network.find(Account(options), options, wanted, nodes)


def missing(aws: FakeAws, wanted: Offer, nodes: int = 2, **given: str) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        find(aws, wanted, nodes, **given)
    return caught.value


def test_a_base_and_the_default_vpc_are_enough(aws: FakeAws):
    aws.base(REGION)
    found = find(aws, offer())
    assert (found.region, found.zone, found.instance_profile) == (REGION, "us-east-1a", names.NODE_ROLE)
    ec2 = aws.client("ec2")
    (group,) = ec2.describe_security_groups(GroupIds=[found.security_group_id])["SecurityGroups"]
    assert group["GroupName"] == names.SECURITY_GROUP
    (subnet,) = ec2.describe_subnets(SubnetIds=[found.subnet_id])["Subnets"]
    assert subnet["AvailabilityZone"] == "us-east-1a"


def test_from_within_a_network_nothing_is_rented_in_another_one(aws: FakeAws, monkeypatch: pytest.MonkeyPatch):
    aws.base(REGION)
    subnet = aws.client("ec2").describe_subnets(SubnetIds=[find(aws, offer()).subnet_id])["Subnets"][0]
    monkeypatch.setenv(NETWORK, "vpc-other")
    said = missing(aws, offer())
    assert ("nobody could log in" in said.what, subnet["VpcId"] in said.why) == (True, True)
    assert "Systems Manager" in missing(aws, offer(), address="ssm").what  # which needs no way there
    monkeypatch.setenv(NETWORK, subnet["VpcId"])
    assert find(aws, offer()).subnet_id == subnet["SubnetId"]


def test_a_zone_may_be_told_by_its_id_which_is_the_same_for_all_accounts(aws: FakeAws):
    aws.base(REGION)
    zone = aws.client("ec2").describe_availability_zones()["AvailabilityZones"][1]
    assert find(aws, offer(zone["ZoneId"])).zone == zone["ZoneName"]


def test_without_a_zone_any_will_do(aws: FakeAws):
    aws.base(REGION)
    assert find(aws, offer(None)).zone.startswith(REGION)


def test_given_subnets_are_used_and_those_of_other_regions_passed_over(aws: FakeAws):
    aws.base(REGION)
    mine = aws.client("ec2").describe_subnets()["Subnets"][0]
    theirs = aws.client("ec2", "eu-west-1").describe_subnets()["Subnets"][0]
    given = f"{mine['SubnetId']},{theirs['SubnetId']}"
    assert find(aws, offer(mine["AvailabilityZone"]), subnet_ids=given).subnet_id == mine["SubnetId"]
    other = next(z for z in "abc" if not mine["AvailabilityZone"].endswith(z))
    error = missing(aws, offer(f"us-east-1{other}"), subnet_ids=given)
    assert isinstance(error, NoOffer)
    assert (error.scope, "aws.subnet_ids" in error.what) == ("zone", True)


def test_subnets_that_are_not_in_a_region_rule_it_out_by_name(aws: FakeAws):
    aws.base(REGION)
    error = missing(aws, offer(), subnet_ids="subnet-0123")
    assert (error.scope, "(subnet-0123)" in error.what) == ("region", True)
    assert "create-default-subnet" not in error.next_step


def test_a_profile_of_the_run_file_that_is_not_there_is_not_blamed_on_the_base(aws: FakeAws):
    aws.base(REGION)
    error = missing(aws, offer(), instance_profile="nobody")
    assert "instance profile nobody" in error.what
    assert "bootstrap" not in error.next_step


def test_of_two_subnets_the_one_with_more_room(aws: FakeAws):
    aws.base(REGION)
    ec2 = aws.client("ec2")
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    small, large = (
        ec2.create_subnet(VpcId=vpc, CidrBlock=cidr, AvailabilityZone="us-east-1a")["Subnet"]["SubnetId"]
        for cidr in ("172.31.128.0/28", "172.31.144.0/24")
    )
    given = f"{small},{large}"
    assert find(aws, offer(), subnet_ids=given).subnet_id == large
    error = missing(aws, offer(), nodes=12, subnet_ids=small)
    assert isinstance(error, NoCapacity)
    assert small in error.what


def test_everything_given_needs_no_base(aws: FakeAws):
    ec2 = aws.client("ec2")
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    group = ec2.create_security_group(GroupName="mine", Description="mine", VpcId=vpc)["GroupId"]
    aws.client("iam").create_instance_profile(InstanceProfileName="mine")
    role = "arn:aws:iam::123456789012:role/mine"
    found = find(aws, offer(), security_group_id=group, instance_profile="mine", reaper_role=role)
    assert (found.security_group_id, found.instance_profile) == (group, "mine")


def test_a_group_of_that_name_that_is_not_ours_is_not_taken(aws: FakeAws):
    aws.base(REGION)
    ec2 = aws.client("ec2")
    group = find(aws, offer()).security_group_id
    ec2.delete_tags(Resources=[group], Tags=[{"Key": names.BASE}])
    assert names.SECURITY_GROUP in missing(aws, offer()).what


@pytest.mark.parametrize(
    ("take_away", "key"),
    [
        (lambda aws: drop_profile(aws), "aws.instance_profile"),
        (lambda aws: drop_reaper(aws), "aws.reaper_role"),
        (lambda aws: drop_group(aws), "aws.security_group_id"),
    ],
)
def test_what_base_lacks_rules_out_the_region_and_names_the_command(
    aws: FakeAws, take_away: Callable[[FakeAws], None], key: str
):
    aws.base(REGION)
    take_away(aws)
    error = missing(aws, offer())
    assert isinstance(error, NoOffer)
    assert error.scope == "region"
    assert f"mgpu bootstrap aws --region {REGION}" in error.next_step
    assert key in error.next_step


def drop_profile(aws: FakeAws) -> None:
    iam = aws.client("iam")
    iam.remove_role_from_instance_profile(InstanceProfileName=names.NODE_ROLE, RoleName=names.NODE_ROLE)
    iam.delete_instance_profile(InstanceProfileName=names.NODE_ROLE)


def drop_reaper(aws: FakeAws) -> None:
    iam = aws.client("iam")
    for policy in iam.list_role_policies(RoleName=names.REAPER_ROLE)["PolicyNames"]:
        iam.delete_role_policy(RoleName=names.REAPER_ROLE, PolicyName=policy)
    iam.delete_role(RoleName=names.REAPER_ROLE)


def drop_group(aws: FakeAws) -> None:
    ec2 = aws.client("ec2")
    filters = [{"Name": "group-name", "Values": [names.SECURITY_GROUP]}]
    for group in ec2.describe_security_groups(Filters=filters)["SecurityGroups"]:
        ec2.delete_security_group(GroupId=group["GroupId"])


def test_no_default_vpc_names_the_command_that_makes_one(aws: FakeAws):
    aws.base(REGION)
    ec2 = aws.client("ec2")
    drop_group(aws)
    vpc = ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"][0]["VpcId"]
    for subnet in ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [vpc]}])["Subnets"]:
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    for gateway in ec2.describe_internet_gateways()["InternetGateways"]:
        ec2.detach_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"], VpcId=vpc)
    ec2.delete_vpc(VpcId=vpc)
    error = missing(aws, offer())
    assert isinstance(error, NoOffer)
    assert "create-default-vpc" in error.next_step
    assert error.scope == "region"


def test_a_region_that_is_not_enabled_is_passed_over(aws: FakeAws):
    error = missing(aws, offer("xx-north-1a", "xx-north-1"))
    assert isinstance(error, NoOffer)
    assert (error.scope, "not enabled" in error.why) == ("region", True)


def test_many_offers_cost_few_calls(aws: FakeAws):
    aws.base(REGION)
    options = Options.of(aws.options)
    account = Account(options)
    before = len(aws.calls())
    for zone in "abc" * 30:
        network.find(account, options, offer(f"us-east-1{zone}"), 2)
    assert len(aws.calls()) - before < 12


def test_a_denied_look_is_a_denial_and_not_a_missing_base(aws: FakeAws):
    aws.base(REGION)
    aws.deny("GetInstanceProfile")
    assert isinstance(missing(aws, offer()), PermissionDenied)


def test_what_a_type_can_do(aws: FakeAws):
    account = Account(Options.of(aws.options))
    assert network.kind(account, REGION, "g5.xlarge").efa_cards == 0
    large = network.kind(account, REGION, "p4d.24xlarge")
    assert (large.cards, large.efa_cards, large.cluster) == (4, 4, True)


# --- Session Manager --------------------------------------------------------------------------------------------------


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")


def routed(aws: FakeAws, subnet: str, **target: str) -> None:
    """Gives a subnet a route table of its own, which sends everything there."""
    ec2 = aws.client("ec2")
    (shown,) = ec2.describe_subnets(SubnetIds=[subnet])["Subnets"]
    table = ec2.create_route_table(VpcId=shown["VpcId"])["RouteTable"]["RouteTableId"]
    ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **target)
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)


@pytest.mark.usefixtures("program")
def test_machines_without_an_address_go_to_a_subnet_that_leads_to_systems_manager(aws: FakeAws):
    aws.base(REGION)
    ec2 = aws.client("ec2")
    subnet = next(each for each in ec2.describe_subnets()["Subnets"] if each["AvailabilityZone"] == "us-east-1a")
    error = missing(aws, offer(), address="ssm")
    assert (type(error), error.scope, "NAT gateway" in error.why) == (NoOffer, "zone", True)
    gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=subnet["VpcId"])
    second = ec2.create_subnet(VpcId=subnet["VpcId"], CidrBlock="172.31.200.0/24", AvailabilityZone="us-east-1a")
    nat = ec2.create_nat_gateway(SubnetId=subnet["SubnetId"], ConnectivityType="private")["NatGateway"]["NatGatewayId"]
    behind = second["Subnet"]["SubnetId"]
    routed(aws, subnet["SubnetId"], GatewayId=gateway)
    routed(aws, behind, NatGatewayId=nat)
    both = f"{subnet['SubnetId']},{behind}"
    assert find(aws, offer(), address="ssm", subnet_ids=both).subnet_id == behind, "the other one has more addresses"
    aws.endpoints(REGION)
    assert find(aws, offer(), address="ssm", subnet_ids=both).subnet_id == subnet["SubnetId"]


@pytest.mark.usefixtures("program")
def test_a_base_from_before_lets_no_machine_be_reached_through_session_manager(aws: FakeAws):
    aws.base(REGION)
    aws.endpoints(REGION)
    aws.client("iam").delete_role_policy(RoleName=names.NODE_ROLE, PolicyName=names.NODE_ROLE)
    error = missing(aws, offer(), address="ssm")
    assert (error.scope, error.next_step) == ("region", f"Run `mgpu bootstrap aws --region {REGION} --ssm`.")
    assert find(aws, offer())
