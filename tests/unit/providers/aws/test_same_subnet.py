"""One token makes one gang (I2): a second call asks for the same, although the first gang has taken addresses since."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mgpu.errors import AmbiguousCreate, NoCapacity, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws import names
from mgpu.providers.aws.instances import launch
from mgpu.providers.aws.instances.fleet_request import Order
from mgpu.providers.aws.instances.network import Kind, Place
from mgpu.providers.aws.options import Options
from mgpu.providers.base import FleetRequest

OFFER = Offer(
    provider="aws", instance_type="g5.xlarge", market="on-demand", price_usd_per_hour=1, region="us-east-1",
    zone="us-east-1a", fetched_at=1, stock=None,
)  # fmt: skip
NEEDED = Requirements(provider="aws", nodes=2, max_price_usd_per_hour=9, max_hours=1)


class Ec2:
    """Remembers the template; the answers of CreateFleet are lost, but for the last."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tags: list[dict[str, str]] = []

    def create_launch_template(self, **asked: Any) -> None:
        self.tags = asked["TagSpecifications"][0]["Tags"]

    def create_fleet(self, **asked: Any) -> dict[str, Any]:
        self.asked.append(asked["LaunchTemplateConfigs"][0]["Overrides"][0]["SubnetId"])
        if len(self.asked) == 1:
            raise AmbiguousCreate("the answer was lost")
        return {"Instances": [{"InstanceIds": ["i-1", "i-2"]}]}


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Ec2:
    """The subnet with the most addresses is another one at each look."""
    fake, best = Ec2(), iter(["subnet-1", "subnet-2"])

    def find(*_: Any) -> Place:
        found = next(best, None)
        if found is None:
            raise NoCapacity("too few addresses are left")
        return Place("us-east-1", "us-east-1a", found, "sg-1", "mgpu-node")

    monkeypatch.setattr(launch.network, "find", find)
    monkeypatch.setattr(launch.network, "kind", lambda *_: Kind(cards=1, efa_cards=0, cluster=False))
    monkeypatch.setattr(launch.machine_image, "find", lambda *_: None)
    monkeypatch.setattr(launch, "template", lambda *_: {})
    shown = lambda *_: {"LaunchTemplates": [{"Tags": fake.tags}] if fake.tags else []}  # noqa: E731
    monkeypatch.setattr(launch.listing, "templates", shown)
    return fake


@pytest.fixture
def account(ec2: Ec2) -> Any:
    return SimpleNamespace(client=lambda *_: ec2)


@pytest.fixture
def order() -> Order:
    request = FleetRequest(
        fleet="f", generation=1, owner="o", requirements=NEEDED, ssh_public_key="k", lease_s=60, hard_cap_s=60
    )
    return Order(request, OFFER, "t" * 40, (0, 1), Options.of({}))


def test_a_second_call_by_a_token_asks_for_the_subnet_of_the_first(ec2: Ec2, account: Any, order: Order):
    with pytest.raises(Transient):
        launch._make(account, order, None)
    known = launch._known(account, order)
    assert launch._make(account, order, known)[1] == ["i-1", "i-2"]
    assert ec2.asked == ["subnet-1", "subnet-1"]


def test_so_does_a_look_at_what_became_of_it(ec2: Ec2, account: Any, order: Order):
    with pytest.raises(Transient):
        launch._make(account, order, None)
    found = launch.recall(account, order)
    assert found is not None
    assert found.ids == ("i-1", "i-2")
    assert set(ec2.asked) == {"subnet-1"}


def test_a_template_of_an_earlier_version_says_no_subnet(ec2: Ec2, account: Any, order: Order):
    with pytest.raises(Transient):
        launch._make(account, order, None)
    ec2.tags = [each for each in ec2.tags if each["Key"] != names.SUBNET]
    launch._make(account, order, launch._known(account, order))
    assert ec2.asked == ["subnet-1", "subnet-2"]
