"""Which driver AWS's machine images bring, by their names."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from mgpu.image.compat import version
from mgpu.image.compat_table import FAMILIES
from mgpu.providers.aws.instances import drivers
from mgpu.providers.aws.instances.drivers import RELEASES, brought_by

PYTORCH = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.9 (Ubuntu 24.04)"


def shown(name: str, **more: str) -> dict[str, str]:
    """As EC2 shows an image of AWS's."""
    return {"ImageId": "ami-1", "Name": name, "ImageOwnerAlias": "amazon", "OwnerId": "898082745236", **more}


def driver(date: str) -> str | None:
    found = brought_by(shown(f"{PYTORCH} {date}"))
    return found.version if found else None


def test_the_table_is_in_order_and_drivers_only_go_forward():
    for before, after in pairwise(RELEASES):
        assert before.date < after.date
        assert version(before.driver) <= version(after.driver)


@pytest.mark.parametrize("release", RELEASES, ids=lambda each: each.date)
def test_every_row_names_its_release_notes(release: drivers.Release):
    found = re.fullmatch(r"aws-deep-learning-ami-gpupt\d+oss-ul\d{4}-(\d{4})-(\d\d)-(\d\d)\.html", release.page)
    assert found, "an image for x86_64, with PyTorch, on Ubuntu"
    assert release.date <= "".join(found.groups()), "notes come with the image, or after it"
    assert re.fullmatch(r"\d{3}\.\d{2,3}\.\d\d", release.driver)


def test_the_newest_row_runs_every_family_of_cuda():
    """Images newer than the table are taken to have this driver: who adds a family of CUDA reads the notes again."""
    assert version(RELEASES[-1].driver) >= max(FAMILIES.values())


@pytest.mark.parametrize(
    ("date", "known"),
    [
        ("20250919", None),  # before all of them
        ("20250920", "570.172.08"),
        ("20250921", None),  # of 570 or of 580: not known
        ("20260102", None),
        ("20260103", "580.105.08"),
        ("20260316", "580.105.08"),  # of one branch: the older one
        ("20260317", "580.126.09"),
        ("20260814", None),
        ("20260815", "595.91.07"),
        ("20260818", "595.91.07"),
        ("20991231", "595.91.07"),
    ],
)
def test_a_date_between_two_rows_has_the_older_driver_unless_it_may_be_of_another_branch(date: str, known: str | None):
    assert driver(date) == known


@pytest.mark.parametrize(
    "name",
    [
        "Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch 2.9 (Ubuntu 24.04) 20260317",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260317",
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.9 (Amazon Linux 2023) 20260317",
        f"{PYTORCH} 20260317 with our tools",
        f"my {PYTORCH} 20260317",
        PYTORCH,
        "",
    ],
)
def test_of_other_images_nothing_is_known(name: str):
    assert brought_by(shown(name)) is None


@pytest.mark.parametrize("owner", ["self", "aws-marketplace", ""])
def test_such_a_name_counts_only_with_amazon_as_its_owner(owner: str):
    whole = shown(f"{PYTORCH} 20260317")
    assert brought_by(whole) is not None
    assert brought_by({**whole, "ImageOwnerAlias": owner}) is None
    del whole["ImageOwnerAlias"]
    assert brought_by(whole) is None


def test_it_says_which_image_and_what_is_not_sure():
    sure, later = brought_by(shown(f"{PYTORCH} 20260317")), brought_by(shown(f"{PYTORCH} 20260110"))
    assert sure is not None
    assert later is not None
    assert sure.why == f'Machine image ami-1 "{PYTORCH} 20260317" brings NVIDIA\'s driver 580.126.09.'
    assert "machine_image" in sure.cure
    assert later.why.endswith("driver 580.105.08, or a newer one: an image of 20260103 had it.")
