"""The fake's EC2 is as slow, as forgetful and as short of machines as the real one, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import fleets
from fakes.aws import FakeAws
from fakes.aws.fake import SCALE_ALONE
from fakes.aws.pace import Pace, realistic

G_SPOT, VCPUS = "L-3819A6DF", 4  # the quota of a g5.xlarge on the spot market, and what one takes of it
EC2 = Pace()


@pytest.fixture
def slow(aws: FakeAws) -> FakeAws:
    """On the wall's clock, which the tests move by hand."""
    aws.pace(**realistic(1))
    return aws


def launch(aws: FakeAws, kind: str = "g5.xlarge", zone: str = "us-east-1a", *, spot: bool = True) -> str:
    """A machine's id. Raises botocore's ClientError."""
    market: Any = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
    ec2 = fleets.client(aws)
    made = ec2.run_instances(
        ImageId=aws.image(), InstanceType=kind, MinCount=1, MaxCount=1, Placement={"AvailabilityZone": zone}, **market
    )
    return made["Instances"][0]["InstanceId"]


def state(aws: FakeAws, name: str) -> str:
    """As EC2 shows it; empty: it shows nothing."""
    found = fleets.client(aws).describe_instances(Filters=[{"Name": "instance-id", "Values": [name]}])["Reservations"]
    return found[0]["Instances"][0]["State"]["Name"] if found else ""


def refusal(aws: FakeAws, **asked: Any) -> str:
    """The code by which EC2 gives no machine; empty: it gives one."""
    from botocore.exceptions import ClientError

    try:
        launch(aws, **asked)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return ""


def test_who_says_nothing_has_ec2s_own_pace_on_a_faster_clock(aws: FakeAws):
    assert aws.ask("pace") == pytest.approx(realistic(SCALE_ALONE))
    aws.quick(ending_s=7)
    assert {name: seconds for name, seconds in aws.ask("pace").items() if seconds} == {"ending_s": 7}
    aws.reset()
    assert aws.ask("pace") == pytest.approx(realistic(SCALE_ALONE)), "until the test is over"


def test_listings_show_a_machine_minutes_after_it_was_granted_and_its_end_as_late(slow: FakeAws):
    name = launch(slow)
    assert state(slow, name) == ""
    slow.age(EC2.lag_s + 1)
    assert state(slow, name) == "pending"
    slow.age(EC2.lag_s)
    assert state(slow, name) == "running"
    fleets.client(slow).terminate_instances(InstanceIds=[name])
    slow.age(EC2.lag_s + 1)
    assert state(slow, name) == "shutting-down"
    assert slow.alive() == [name]
    slow.age(EC2.ending_s)
    assert (state(slow, name), slow.alive()) == ("terminated", [])


def test_metal_starts_in_twenty_five_minutes(slow: FakeAws):
    slow.pace(lag_s=0)
    name = launch(slow, "g4dn.metal", spot=False)
    slow.age(EC2.metal_s - 60)
    assert state(slow, name) == "pending"
    slow.age(61)
    assert state(slow, name) == "running"


def test_a_machine_that_has_ended_counts_against_its_quota_for_a_while(slow: FakeAws):
    slow.quota(G_SPOT, VCPUS)
    name = launch(slow)
    fleets.client(slow).terminate_instances(InstanceIds=[name])
    slow.age(EC2.ending_s + 1)
    assert slow.alive() == []
    assert refusal(slow, zone="us-east-1b") == "MaxSpotInstanceCountExceeded"
    slow.age(EC2.dead_count_s)
    assert refusal(slow, zone="us-east-1b") == ""


@pytest.mark.parametrize("told", [True, False])
def test_the_pool_that_a_machine_was_reclaimed_from_is_empty_for_a_while_and_no_other(slow: FakeAws, told: bool):
    name = launch(slow)
    slow.interrupt(name, 120) if told else slow.kill(name)
    assert refusal(slow) == "InsufficientInstanceCapacity"
    assert [refusal(slow, zone="us-east-1b"), refusal(slow, spot=False)] == ["", ""]
    slow.age(EC2.emptied_s + 121)
    assert refusal(slow) == ("InsufficientInstanceCapacity" if told else ""), "a notice comes before the end"
    slow.age(EC2.emptied_s)
    assert refusal(slow) == ""
