"""I1: nothing that costs money outlives its machines, whatever was refused, repaired or cut off on the way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes.aws import FakeAws

from mgpu.errors import PermissionDenied, QuotaExceeded, RateLimited, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws.provider import AwsProvider
from mgpu.providers.base import FleetRequest, Handle
from mgpu.providers.start import HostKey

REGION, PATIENCE_S = "us-east-1", 20.0
OFFER = Offer(  # a type with several network cards: EC2 gives it no public address
    provider="aws",
    instance_type="p4d.24xlarge",
    market="on-demand",
    price_usd_per_hour=32.0,
    region=REGION,
    zone="us-east-1a",
    fetched_at=1,
)


@pytest.fixture
def provider(aws: FakeAws) -> AwsProvider:
    aws.base(REGION)
    aws.quick()
    return AwsProvider(aws.options)


def request(generation: int = 1) -> FleetRequest:
    return FleetRequest(
        fleet="demo",
        generation=generation,
        owner="me",
        requirements=Requirements(provider="aws", nodes=2, max_price_usd_per_hour=100, max_hours=1),
        ssh_public_key=HostKey.make().public,
        lease_s=300,
        hard_cap_s=3600,
    )


def insist(call: Callable[[], Any]) -> Any:
    """As acquire does: the same call again until it is done."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if answer := call():
                return answer
        except (Transient, RateLimited):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left(aws: FakeAws) -> dict[str, int]:
    ec2 = aws.client("ec2")
    return {
        "addresses": len(ec2.describe_addresses()["Addresses"]),
        "templates": len(ec2.describe_launch_templates()["LaunchTemplates"]),
        "groups": len(ec2.describe_placement_groups()["PlacementGroups"]),
        "schedules": len(aws.client("scheduler").list_schedules()["Schedules"]),
    }


NOTHING = {"addresses": 0, "templates": 0, "groups": 0, "schedules": 0}


def test_an_address_that_could_not_be_had_leaves_none_of_the_others(aws: FakeAws, provider: AwsProvider):
    aws.errors("AllocateAddress", "AddressLimitExceeded", skip=1)
    with pytest.raises(QuotaExceeded):
        provider.create(request(), OFFER, "t" * 40)
    assert len(aws.calls("AllocateAddress")) == 2
    assert left(aws)["addresses"] == 0


def test_an_address_that_ec2_does_not_take_back_keeps_no_other_one(aws: FakeAws, provider: AwsProvider):
    handle: Handle = provider.create(request(), OFFER, "t" * 40)
    aws.errors("ReleaseAddress", "Denied", 1)
    with pytest.raises(PermissionDenied):
        insist(lambda: provider.destroy(handle))
    assert left(aws)["addresses"] == 1
    insist(lambda: provider.destroy(handle))
    assert left(aws) == NOTHING


def test_a_fleet_all_of_whose_machines_were_replaced_leaves_nothing(aws: FakeAws, provider: AwsProvider):
    handle: Handle = provider.create(request(), OFFER, "a" * 40)
    aws.quick(ending_s=1)
    for generation, rank in ((2, 0), (3, 1)):
        aws.kill(handle.ids[rank])
        how = (handle, (rank,), request(generation), OFFER, str(generation) * 40)
        handle = insist(functools.partial(provider.repair, *how))
        assert left(aws)["addresses"] == 2, "the lost machine's is given back, for it to be had again"
    insist(lambda: provider.destroy(handle))
    assert aws.alive() == []
    assert left(aws) == NOTHING


def test_a_fleet_of_the_same_name_and_another_owner_keeps_what_it_has(aws: FakeAws, provider: AwsProvider):
    ours: Handle = provider.create(request(), OFFER, "a" * 40)
    theirs = provider.create(request().model_copy(update={"owner": "you"}), OFFER, "b" * 40)
    ec2 = aws.client("ec2")
    ec2.terminate_instances(InstanceIds=list(theirs.ids))  # by their own hands: they are not done with it yet
    insist(lambda: provider.destroy(ours))
    assert [each["LaunchTemplateName"] for each in ec2.describe_launch_templates()["LaunchTemplates"]] == [
        f"mgpu-{'b' * 40}"
    ]
    assert left(aws)["addresses"] == 2
