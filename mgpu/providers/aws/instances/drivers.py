"""Which driver of NVIDIA's a deep-learning machine image brings. EC2 does not say; AWS's release notes do. Read on
2026-11-22.

Of AWS's images with PyTorch on Ubuntu, for x86_64, and of no others: base images are months ahead of these, those for
ARM64 have drivers of their own.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mgpu.providers.base import MachineDriver

_NAME = re.compile(
    r"Deep Learning OSS Nvidia Driver AMI GPU PyTorch [0-9.]+ \(Ubuntu [0-9]{2}\.04\) (?P<date>[0-9]{8})"
)


@dataclass(frozen=True)
class Release:
    """An image's release notes. `date`: the end of its name; `page`: of the DLAMI's guide, below `GUIDE`."""

    date: str
    driver: str
    page: str


GUIDE = "https://docs.aws.amazon.com/dlami/latest/devguide/"
# all that could be read, in the translations of docs.amazonaws.cn and of .../ja_jp/, which keep names and numbers
RELEASES = (
    Release("20250920", "570.172.08", "aws-deep-learning-ami-gpupt26oss-ul2204-2025-09-30.html"),
    Release("20260103", "580.105.08", "aws-deep-learning-ami-gpupt29oss-ul2404-2026-01-08.html"),
    Release("20260317", "580.126.09", "aws-deep-learning-ami-gpupt29oss-ul2404-2026-03-20.html"),
    Release("20260815", "595.91.07", "aws-deep-learning-ami-gpupt211oss-ul2404-2026-08-17.html"),
    Release("20260822", "595.91.07", "aws-deep-learning-ami-gpupt212oss-ul2404-2026-08-24.html"),
)


def brought_by(shown: Mapping[str, Any]) -> MachineDriver | None:
    """The driver of a machine image, as EC2 shows it; None: not known."""
    name = _NAME.fullmatch(shown.get("Name") or "")
    if name is None or shown.get("ImageOwnerAlias") != "amazon":  # anybody may give an image such a name
        return None
    release = _release(name["date"])
    if release is None:
        return None
    why = f'Machine image {shown["ImageId"]} "{name[0]}" brings NVIDIA\'s driver {release.driver}'
    told = "" if release.date == name["date"] else f", or a newer one: an image of {release.date} had it"
    cure = "`aws: {machine_image: ami-...}` names another."
    return MachineDriver(version=release.driver, why=f"{why}{told}.", cure=cure)


def _release(date: str) -> Release | None:
    """The newest that is not after this day: drivers only went forward. None: before all of them, or between two of
    different branches, as it may be of either."""
    at = bisect_right(RELEASES, date, key=lambda each: each.date)
    known, later = RELEASES[:at][-1:], RELEASES[at : at + 1]
    if not known or (known[0].date != date and later and _branch(later[0]) != _branch(known[0])):
        return None
    return known[0]


def _branch(release: Release) -> str:
    return release.driver.partition(".")[0]
