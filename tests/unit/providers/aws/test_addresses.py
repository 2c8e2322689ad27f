"""A machine with several network cards gets one public address, however late EC2 knows of what it has given."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from mgpu.errors import InvalidRequest, Transient
from mgpu.providers.aws import failures, names
from mgpu.providers.aws.instances import equip

CARD = {"NetworkInterfaceId": "eni-1", "Attachment": {"DeviceIndex": 0, "NetworkCardIndex": 0}}
SHOWN = {"i-1": {"InstanceId": "i-1", "NetworkInterfaces": [CARD]}}
ORDER: Any = SimpleNamespace(region="us-east-1", token="t", marks={names.TOKEN: "t"})


class Ec2:
    """Rents addresses and gives them to machines; `refusal` is the code of an error instead, until `now` is `until`."""

    def __init__(self) -> None:
        self.rented: list[dict[str, Any]] = []
        self.refusal, self.until, self.now = "", 1e9, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(self, **more: str) -> dict[str, Any]:
        marks = names.tag_list({names.TOKEN: "t", names.RANK: "0"})
        self.rented.append({"AllocationId": f"eipalloc-{len(self.rented)}", "Tags": marks, **more})
        return self.rented[-1]

    def allocate_address(self, **_: Any) -> dict[str, Any]:
        return self.add()

    def associate_address(self, AllocationId: str, **_: Any) -> None:  # noqa: N803 - as AWS names it
        if self.refusal and self.now < self.until:
            raise ClientError({"Error": {"Code": self.refusal, "Message": "words"}}, "AssociateAddress")
        found = next(each for each in self.rented if each["AllocationId"] == AllocationId)
        found["AssociationId"] = "eipassoc-1"


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Ec2:
    fake = Ec2()
    monkeypatch.setattr(equip.listing, "addresses", lambda *_: list(fake.rented))
    clock: Any = {"clock": lambda: fake.now, "sleep": fake.sleep}
    monkeypatch.setattr(equip, "patiently", functools.partial(failures.patiently, **clock))
    return fake


def give(ec2: Ec2) -> None:
    account: Any = SimpleNamespace(client=lambda *_: ec2)
    equip._give_addresses(account, ORDER, {0: "i-1"}, SHOWN, lambda _: None)


@pytest.mark.parametrize(
    "code",
    [
        "InvalidAllocationID.NotFound",  # of one that was rented a moment ago
        "InvalidNetworkInterfaceID.NotFound",  # of a machine that is too new, or was reclaimed since it was looked at
        "Resource.AlreadyAssociated",  # with one that is not listed yet
        "IncorrectInstanceState",
    ],
)
def test_what_ec2_does_not_know_yet_ends_no_gang(ec2, code):
    ec2.refusal = code
    with pytest.raises(Transient, match="i-1 cannot take an address yet"):
        give(ec2)
    ec2.refusal = ""
    give(ec2)
    assert [each.get("AssociationId") for each in ec2.rented] == ["eipassoc-1"], "the one that was rented before"


def test_an_address_that_is_too_new_is_waited_for_because_the_next_look_may_not_list_it_either(ec2):
    """One more would be rented, and an account may have five."""
    ec2.refusal, ec2.until = "InvalidAllocationID.NotFound", 6.0
    give(ec2)
    assert [each.get("AssociationId") for each in ec2.rented] == ["eipassoc-1"]


def test_what_ec2_refuses_for_good_is_told(ec2):
    ec2.refusal = "Gateway.NotAttached"
    with pytest.raises(InvalidRequest, match=r"Gateway\.NotAttached"):
        give(ec2)


@pytest.mark.parametrize("first", [True, False])
def test_of_two_addresses_for_one_machine_the_one_in_use_counts(ec2, first):
    """A call whose answer was lost is made again, and rents one more: with it, too, the machine would be refused."""
    for used in (first, not first):
        ec2.add(**({"AssociationId": "eipassoc-0"} if used else {}))
    ec2.refusal = "Resource.AlreadyAssociated"
    give(ec2)
    assert len(ec2.rented) == 2
