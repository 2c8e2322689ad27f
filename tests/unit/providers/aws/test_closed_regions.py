"""Regions that an account's organization denies, or that do not take its credentials yet: they hide nothing of the
others, and are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mgpu.errors import AuthError, NoOffer, PermissionDenied
from mgpu.plan.model import Offer
from mgpu.providers.aws import check, failures, names
from mgpu.providers.aws.instances import launch, machine_image, teardown
from mgpu.providers.aws.provider import AwsProvider

BY_POLICY = (
    "You are not authorized to perform this operation. User: arn:aws:sts::1:assumed-role/dev/me is not authorized to "
    "perform: ec2:{} with an explicit deny in a service control policy."
)
BY_NOBODY = "User: me is not authorized to perform: ec2:{} because no identity-based policy allows the action."
ACCOUNT: Any = SimpleNamespace(
    regions=lambda: ("ap-south-1", "eu-west-1", "us-east-1"),
    opted_in=lambda: frozenset({"eu-west-1"}),
    once=lambda _, ask: ask(),
)
EXPIRED = "The provided token has expired"
SOLD = {"provider": "aws", "instance_type": "g5.xlarge", "market": "spot", "price_usd_per_hour": 1, "fetched_at": 0}
NOT_VALID = "AWS was not able to validate the provided access credentials"


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], str]:
    """Each region has a machine of ours; what is in the answer, by action and region, is refused with these words."""
    refused: dict[tuple[str, str], str] = {}

    def answer(action: str, region: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if words := refused.get((action, region)):
            code = {NOT_VALID: "AuthFailure", EXPIRED: "ExpiredToken"}.get(words, "UnauthorizedOperation")
            raise failures.refusal(code, words.format(action), f"aws {region}", scope="region")
        return found

    def machine(region: str) -> dict[str, Any]:
        return {"InstanceId": f"i-{region}", "Tags": [{"Key": names.FLEET, "Value": "f"}], "LaunchTime": NEVER}

    shown = {"DescribeInstances": machine, "DescribeAddresses": None, "DescribeVolumes": None}
    for action, name in zip(shown, ("tagged", "addresses", "disks"), strict=True):
        one = shown[action]
        monkeypatch.setattr(
            teardown.listing,
            name,
            lambda _, region, *__, action=action, one=one: answer(action, region, [one(region)] if one else []),
        )
    return refused


NEVER = SimpleNamespace(timestamp=lambda: 0.0)


def test_a_region_that_the_organization_denies_is_left_out_and_named(ec2):
    ec2["DescribeInstances", "eu-west-1"] = BY_POLICY
    found = teardown.list_owned(ACCOUNT, "o-1")
    assert [handle.region for handle in found.handles] == ["ap-south-1", "us-east-1"]
    assert "organization forbids ec2:DescribeInstances" in found.closed["eu-west-1"].what
    assert found.closed.keys() == {"eu-west-1"}
    assert check._listing(ACCOUNT).detail.endswith("but where your organization forbids it: eu-west-1")


@pytest.mark.parametrize(
    ("action", "words"),
    [("DescribeInstances", BY_NOBODY), ("DescribeAddresses", BY_POLICY), ("DescribeVolumes", BY_POLICY)],
)
def test_a_region_is_closed_only_where_nobody_sees_its_machines(ec2, action, words):
    """Who may see machines there may rent some: what else cannot be seen may be billed."""
    ec2[action, "eu-west-1"] = words
    with pytest.raises(PermissionDenied):
        teardown.list_owned(ACCOUNT, "o-1")


def test_where_all_are_closed_nothing_is_concluded(ec2):
    ec2.update({("DescribeInstances", region): BY_POLICY for region in ACCOUNT.regions()})
    with pytest.raises(PermissionDenied):
        teardown.list_owned(ACCOUNT, "o-1")


def test_a_region_that_was_just_enabled_and_takes_no_credentials_yet_is_left_out_and_named(ec2):
    ec2["DescribeInstances", "eu-west-1"] = NOT_VALID
    found = teardown.list_owned(ACCOUNT, "o-1")
    assert [handle.region for handle in found.handles] == ["ap-south-1", "us-east-1"]
    assert [*map(type, found.closed.values())] == [AuthError]
    told = check._listing(ACCOUNT)
    assert (told.status, told.detail[-9:]) == ("warning", "eu-west-1")


@pytest.mark.parametrize(
    ("action", "region", "words"),
    [
        ("DescribeInstances", "us-east-1", NOT_VALID),  # enabled since ever: the credentials are bad
        ("DescribeInstances", "eu-west-1", EXPIRED),
        ("DescribeVolumes", "eu-west-1", NOT_VALID),  # who sees machines there may rent some
    ],
)
def test_credentials_that_are_refused_otherwise_fail_the_whole_listing(ec2, action, region, words):
    ec2[action, region] = words
    with pytest.raises(AuthError):
        teardown.list_owned(ACCOUNT, "o-1")


SLR = "iam:CreateServiceLinkedRole: the ServiceLinkedRole for EC2 Spot does not exist"


@pytest.mark.parametrize(
    ("code", "words", "region", "scope"),
    [
        ("UnauthorizedOperation", BY_POLICY, "us-east-1", "region"),
        ("UnauthorizedOperation", BY_NOBODY, "us-east-1", "region"),
        ("AuthFailure", NOT_VALID, "eu-west-1", "region"),
        ("AuthFailure", NOT_VALID, "us-east-1", "account"),  # enabled since ever: the credentials are bad
        ("ExpiredToken", EXPIRED, "eu-west-1", "account"),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", SLR, "us-east-1", "account"),
    ],
)
@pytest.mark.parametrize("made", [False, True])
def test_a_create_that_is_denied_in_one_region_blocks_no_other_as_long_as_nothing_was_made(
    monkeypatch, code, words, region, scope, made
):
    def denied(*_: Any, **__: Any) -> None:
        raise failures.refusal(code, words.format("CreateFleet"), f"aws {region}", scope="zone")

    known = (lambda *_: {launch.names.HARD_CAP_AT: "1"}) if made else denied
    found = SimpleNamespace(ids=("i-1",), made_at=0.0)
    ended = list[Any]()
    monkeypatch.setattr(launch, "_known", known)
    monkeypatch.setattr(launch, "_end", lambda *given: ended.append(given[2]))
    monkeypatch.setattr(launch.machines, "find", lambda *_: found)
    monkeypatch.setattr(launch.equip, "finish", denied)
    request = SimpleNamespace(fleet="f", generation=1, owner="o")
    offer = Offer.model_validate(SOLD | {"region": region})
    order: Any = SimpleNamespace(region=region, offer=offer, ranks=(0,), request=request, token="t")
    with pytest.raises((AuthError, PermissionDenied)) as caught:
        launch.launch(ACCOUNT, order)
    assert caught.value.scope == ("account" if made else scope)
    assert ended == ([["i-1"]] if made else []), "and another region's machines would end like these"


def test_a_region_that_is_not_enabled_is_asked_for_nothing_and_left(monkeypatch):
    """It would refuse good credentials as bad ones, which ends a search."""
    monkeypatch.setattr(launch, "_known", lambda *_: pytest.fail("a call there"))
    offer = Offer.model_validate(SOLD | {"region": "me-south-1"})
    order: Any = SimpleNamespace(region="me-south-1", offer=offer)
    with pytest.raises(NoOffer, match="not enabled") as caught:
        launch.launch(ACCOUNT, order)
    assert (caught.value.scope, "Enable it" in caught.value.next_step) == ("region", True)


def test_the_driver_of_an_image_is_asked_for_where_it_may_be_seen(monkeypatch):
    def find(_account: Any, _options: Any, region: str) -> Any:
        if region != "us-east-1":
            raise failures.refusal("UnauthorizedOperation", BY_POLICY, f"aws {region}", scope="region")
        return SimpleNamespace(driver="the driver")

    monkeypatch.setattr(machine_image, "find", find)
    assert AwsProvider().machine_driver(["eu-west-1", "us-east-1"]) == "the driver"
    with pytest.raises(PermissionDenied):
        AwsProvider().machine_driver(["eu-west-1", "ap-south-1"])
