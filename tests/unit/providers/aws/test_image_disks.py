"""I1: every disk that a machine image brings goes with its machine."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws.instances import fleet_request, machine_image
from mgpu.providers.aws.options import Options
from mgpu.providers.base import FleetRequest
from mgpu.providers.start import HostKey

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ0000000000000000000000000000000000000000"
SHOWN = {
    "ImageId": "ami-1",
    "RootDeviceName": "/dev/sda1",
    "BlockDeviceMappings": [
        {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 80, "SnapshotId": "snap-1", "DeleteOnTermination": True}},
        {
            "DeviceName": "/dev/sdf",
            "Ebs": {
                "VolumeSize": 500,
                "SnapshotId": "snap-2",
                "DeleteOnTermination": False,
                "VolumeType": "io2",
                "Iops": 9000,
                "Encrypted": False,
            },
        },
        {"DeviceName": "/dev/sdg", "Ebs": {"VolumeSize": 20, "VolumeType": "gp3", "DeleteOnTermination": False}},
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
    ],
}


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> machine_image.MachineImage:
    monkeypatch.setattr(machine_image, "calling", lambda *_: nullcontext())
    describe = SimpleNamespace(describe_images=lambda **_: {"Images": [SHOWN]})
    account: Any = SimpleNamespace(client=lambda *_: describe, once=lambda _, ask: ask())
    return machine_image.find(account, Options(machine_image="ami-1"), "us-east-1")


def test_all_disks_of_an_image_go_with_the_machine(image):
    offer = Offer(
        provider="aws", instance_type="g5.xlarge", market="on-demand", price_usd_per_hour=1, region="us-east-1",
        zone="us-east-1a", fetched_at=1,
    )  # fmt: skip
    needed = Requirements(provider="aws", nodes=1, max_price_usd_per_hour=9, max_hours=1, disk_gib=200)
    request = FleetRequest(
        fleet="f", generation=1, owner="o", requirements=needed, ssh_public_key=KEY, lease_s=60, hard_cap_s=60
    )
    order = fleet_request.Order(request, offer, "t", (0,), Options())
    place: Any = SimpleNamespace(instance_profile="p", security_group_id="sg", subnet_id="subnet")
    kind: Any = SimpleNamespace(cluster=False, efa_cards=0, cards=1)
    key = HostKey(public=KEY, private="none")
    mapped = fleet_request.template(order, place, kind, image, key, 1, 1.0)["BlockDeviceMappings"]
    assert {each["DeviceName"]: each["Ebs"] for each in mapped} == {
        "/dev/sda1": {"VolumeSize": 200, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
        "/dev/sdf": {"VolumeType": "io2", "Iops": 9000, "Encrypted": True, "DeleteOnTermination": True},
        "/dev/sdg": {"VolumeSize": 20, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
    }
