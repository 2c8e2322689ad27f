"""The machine image: the run file's, else the newest of AWS's deep-learning images with PyTorch that mgpu knows of."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mgpu.errors import MgpuError, NoOffer
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.instances import drivers
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account
from mgpu.providers.base import MachineDriver

# AWS publishes the newest build of each kind under such a name; the first of these that a region has is taken
PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-{}/latest/ami-id"
KINDS = (
    "2.12-ubuntu-24.04",
    "2.11-ubuntu-24.04",
    "2.10-ubuntu-24.04",
    "2.9-ubuntu-24.04",
    "2.8-ubuntu-24.04",
    "2.7-ubuntu-22.04",
    "2.6-ubuntu-22.04",
)  # a call takes ten at most
# where no parameter is to be had: by name
PATTERN = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch * (Ubuntu *"
DEADLINE_S = 4.0
# for prices, by account and region, as long as this process lives; None: nobody has said it in time
_seen = dict[tuple[str | None, ...], "MachineImage | None"]()


@dataclass(frozen=True)
class MachineImage:
    """A machine image of one region, and its disks."""

    id: str
    root_device: str
    root_gib: int  # a disk may not be smaller
    driver: MachineDriver | None = None  # None: not known
    others: tuple[tuple[str, dict[str, Any]], ...] = ()  # by device, what EC2 shows of disks beside the root's


def find(account: Account, options: Options, region: str) -> MachineImage:
    """The image for machines in this region.

    Raises:
        NoOffer: the region has none (scope: region).
        ProviderError: AWS refused, or did not answer.
    """
    found = account.once(("image", options.machine_image, region), lambda: _find(account, options, region))
    _seen[_asked(options, region)] = found
    return found


def glance(account: Account, options: Options, region: str) -> MachineImage | None:
    """The same for a price, for which nobody is waited for twice, or has to type a code; None: AWS has not said it in
    time, or says it to nobody here."""

    def look() -> None:
        with suppress(MgpuError):  # whoever asks for machines is told
            if not account.wants_code():
                find(account, options, region)

    asked = _asked(options, region)
    if asked not in _seen:
        thread = threading.Thread(target=look, daemon=True, name=f"machine image in {region}")
        thread.start()
        thread.join(DEADLINE_S)
    return _seen.setdefault(asked, None)


def driver(account: Account, region: str, image: str) -> MachineDriver | None:
    """The driver that an image brings; None: not known, or the image is not there any more. Raises ProviderError."""
    shown = _by_id(account, region, image)
    return drivers.brought_by(shown) if shown else None


def _asked(options: Options, region: str) -> tuple[str | None, ...]:
    return options.profile, options.account, options.endpoint_url, options.machine_image, region


def _find(account: Account, options: Options, region: str) -> MachineImage:
    wanted = options.machine_image or _published(account, region)
    shown = _by_id(account, region, wanted) if wanted else _newest(account, region)
    if shown is None:
        missing = f"aws.machine_image {wanted}" if options.machine_image else "AWS's deep-learning image with PyTorch"
        raise NoOffer(
            f"aws {region}: there is no {missing}",
            "a machine image exists in one region only" if options.machine_image else "",
            "Set `aws: {machine_image: ami-...}` and `regions` to where it is.",
            scope="region",
        )
    device = shown.get("RootDeviceName") or "/dev/sda1"
    mapped = {each["DeviceName"]: each["Ebs"] for each in shown.get("BlockDeviceMappings", ()) if "Ebs" in each}
    gib = int(mapped.pop(device, {}).get("VolumeSize") or 0)
    return MachineImage(shown["ImageId"], device, gib, drivers.brought_by(shown), tuple(mapped.items()))


def _published(account: Account, region: str) -> str:
    names = [PARAMETER.format(kind) for kind in KINDS]
    with calling("looking for the deep-learning machine image", region):
        answer = account.client("ssm", region).get_parameters(Names=names)
    found = {each["Name"]: each["Value"] for each in answer["Parameters"]}
    return next((found[name] for name in names if name in found), "")


def _by_id(account: Account, region: str, image: str) -> dict[str, Any] | None:
    # a filter: of an unknown one the list is empty; machines can be made of an image that AWS has deprecated
    only = [{"Name": "image-id", "Values": [image]}]
    shown = _images(account, region, Filters=only, IncludeDeprecated=True)
    return shown[0] if shown else None


def _newest(account: Account, region: str) -> dict[str, Any] | None:
    wanted = {"name": PATTERN, "architecture": "x86_64", "state": "available"}
    filters = [{"Name": name, "Values": [value]} for name, value in wanted.items()]
    shown = _images(account, region, Owners=["amazon"], Filters=filters)
    return max(shown, key=lambda each: each.get("CreationDate", ""), default=None)


def _images(account: Account, region: str, **arguments: Any) -> list[dict[str, Any]]:
    with calling("describing machine images", region):
        return account.client("ec2", region).describe_images(**arguments)["Images"]
