"""The fake's capacity reservations and Capacity Blocks are as unkind as EC2's guide says that they are."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError
from fakes.aws import FakeAws

KIND, ZONE = "p4d.24xlarge", "us-east-1a"


def fleet(aws: FakeAws, count: int, reservation: str = "", *, block: bool = False, kind: str = KIND) -> dict[str, Any]:
    """CreateFleet's answer to machines in a reservation, or in none."""
    ec2 = aws.client("ec2")
    data: dict[str, Any] = {"ImageId": aws.image()}
    if reservation:
        data["CapacityReservationSpecification"] = {"CapacityReservationTarget": {"CapacityReservationId": reservation}}
    if block:
        data["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    name = f"test-{len(ec2.describe_launch_templates()['LaunchTemplates'])}"
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    pool = {"InstanceType": kind, "AvailabilityZone": ZONE}
    template = {"LaunchTemplateName": name, "Version": "1"}
    market = "capacity-block" if block else "on-demand"
    return ec2.create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[{"LaunchTemplateSpecification": template, "Overrides": [pool]}],
        TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": market},
    )


def got(answer: dict[str, Any]) -> tuple[list[str], set[str]]:
    """Machines and codes of errors."""
    ids = [name for each in answer["Instances"] for name in each["InstanceIds"]]
    return ids, {each["ErrorCode"] for each in answer["Errors"]}


def free(aws: FakeAws, reservation: str) -> int:
    found = aws.client("ec2").describe_capacity_reservations(CapacityReservationIds=[reservation])
    return found["CapacityReservations"][0]["AvailableInstanceCount"]


def test_machines_count_against_their_reservation_until_they_are_gone(aws: FakeAws):
    aws.capacity(0, market="on-demand")  # what is reserved is there all the same
    aws.quick(ending_s=60)
    held = aws.reserve(KIND, 2, ZONE)
    assert got(fleet(aws, 1)) == ([], {"InsufficientInstanceCapacity"}), "nobody named it"
    ids, errors = got(fleet(aws, 3, held))
    assert (len(ids), errors, free(aws, held)) == (2, {"ReservationCapacityExceeded"}, 0)
    aws.client("ec2").terminate_instances(InstanceIds=ids[:1])
    assert free(aws, held) == 0, "it is shutting down"
    aws.age(61)
    assert free(aws, held) == 1
    assert got(fleet(aws, 1, held, kind="g5.xlarge"))[1] == {"ReservationCapacityExceeded"}
    assert got(fleet(aws, 1, "cr-0"))[1] == {"InvalidCapacityReservationId.NotFound"}


def test_an_open_reservation_takes_in_what_names_none(aws: FakeAws):
    held = aws.reserve(KIND, 1, ZONE, is_open=True)
    assert len(got(fleet(aws, 2))[0]) == 2
    assert free(aws, held) == 0


def test_a_block_is_used_by_its_own_market_alone_and_ends_its_machines_half_an_hour_before_it_does(aws: FakeAws):
    aws.quick()
    aws.quota("L-417A185B", 0)
    block = aws.reserve(KIND, 2, ZONE, block=True, begins_s=3600, hours=24)
    assert got(fleet(aws, 1, block, block=True)) == ([], {"InsufficientInstanceCapacity"}), "it has not begun"
    aws.age(3601)
    assert got(fleet(aws, 1, block))[1] == {"InvalidParameterCombination"}
    ids, _ = got(fleet(aws, 2, block, block=True))
    assert [row.usd_per_hour for row in aws.bill()] == [0, 0]
    aws.age(23.4 * 3600)
    assert sorted(aws.alive()) == sorted(ids)
    aws.age(0.2 * 3600)
    assert aws.alive() == []
    assert got(fleet(aws, 1, block, block=True))[1] == {"InsufficientInstanceCapacity"}


def test_offerings_expire_and_a_purchase_whose_answer_is_lost_has_bought(aws: FakeAws):
    aws.quick()
    ec2 = aws.client("ec2")
    asked = {"InstanceType": KIND, "InstanceCount": 2, "CapacityDurationHours": 24}
    offering = aws.sell(KIND, 2, ZONE, usd=1000, left=2)
    aws.sell(KIND, 2, ZONE, usd=1, expires_s=0)
    (shown,) = ec2.describe_capacity_block_offerings(**asked)["CapacityBlockOfferings"]
    assert (shown["CapacityBlockOfferingId"], shown["UpfrontFee"]) == (offering, "1000.00")
    buy = {"CapacityBlockOfferingId": offering, "InstancePlatform": "Linux/UNIX"}
    aws.lose_answers("PurchaseCapacityBlock")
    with pytest.raises(ConnectionClosedError):
        ec2.purchase_capacity_block(**buy)
    ec2.purchase_capacity_block(**buy)  # it has no token: that was the second one
    assert len(ec2.describe_capacity_reservations()["CapacityReservations"]) == 2
    with pytest.raises(ClientError, match="NotFound"):
        ec2.purchase_capacity_block(**buy)
