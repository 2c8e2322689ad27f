"""Which machine image is taken."""

from __future__ import annotations

import pytest
from fakes.aws import FakeAws

from mgpu.errors import NoOffer, PermissionDenied
from mgpu.providers.aws import image
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

REGION = "us-east-1"


def find(aws: FakeAws, region: str = REGION, **given: str) -> image.MachineImage:
    options = Options.of({**aws.options, **given})
    return image.find(Account(options), options, region)


def published(aws: FakeAws) -> dict[str, str]:
    names = [image.PARAMETER.format(kind) for kind in image.KINDS]
    return {each["Name"]: each["Value"] for each in aws.client("ssm").get_parameters(Names=names)["Parameters"]}


def test_the_first_published_kind_that_is_known_is_taken(aws: FakeAws):
    by_name = published(aws)
    best = next(image.PARAMETER.format(kind) for kind in image.KINDS if image.PARAMETER.format(kind) in by_name)
    found = find(aws)
    assert found.id == by_name[best]
    assert found.root_device.startswith("/dev/")
    assert found.root_gib > 0


def test_without_parameters_the_newest_image_of_that_name_is_taken(aws: FakeAws, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image, "KINDS", ("0.1-ubuntu-00.04",))
    shown = aws.client("ec2").describe_images(Owners=["amazon"], Filters=[{"Name": "name", "Values": [image.PATTERN]}])
    newest = max(shown["Images"], key=lambda each: each["CreationDate"])
    assert find(aws).id == newest["ImageId"]


def test_the_run_files_image_is_taken(aws: FakeAws):
    assert find(aws, machine_image=aws.image()).id == aws.image()
    assert aws.calls("DescribeImages")


def test_an_image_that_is_not_in_the_region_rules_the_region_out(aws: FakeAws):
    with pytest.raises(NoOffer) as caught:
        find(aws, machine_image="ami-00000000000000000")
    assert (caught.value.scope, "ami-00000000000000000" in caught.value.what) == ("region", True)


def test_a_denied_look_is_a_denial(aws: FakeAws):
    aws.deny("GetParameters")
    with pytest.raises(PermissionDenied, match="GetParameters"):
        find(aws)
