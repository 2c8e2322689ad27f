"""What EC2 shows of machines, addresses and disks: by tag and by id, over all pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.session import Account

VALUES = 200  # that one filter takes

Shown = dict[str, Any]  # a machine, an address or a disk as EC2 shows it


def tags_of(resource: Shown) -> dict[str, str]:
    """The tags of a machine, an address or a disk."""
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def tagged(account: Account, region: str, marks: Mapping[str, str], states: Sequence[str] = ()) -> list[Shown]:
    """All machines of a region that carry exactly these tags, in these states (default: any)."""
    return [each for each in filtered(account, region, tag_filters(marks), states) if carries(each, marks)]


def tag_filters(marks: Mapping[str, str]) -> list[dict[str, Any]]:
    """EC2's filters for tags with these values; `*`, `?` and `\\` of a value stand for themselves."""
    return [{"Name": f"tag:{key}", "Values": [re.sub(r"([*?\\])", r"\\\1", value)]} for key, value in marks.items()]


def carries(resource: Shown, marks: Mapping[str, str]) -> bool:
    """Whether a thing has all these tags; looked at again here, because what is found may be ended."""
    return marks.items() <= tags_of(resource).items()


def by_id(account: Account, region: str, ids: Iterable[str]) -> dict[str, Shown]:
    """Those of these machines, addresses and disks that EC2 shows. Filters, because one unknown id fails a whole
    call that names ids."""
    wanted = sorted({name for name in ids if name})
    found: dict[str, Shown] = {}
    for kind, (look, by) in _LOOKS.items():
        for some in in_batches([name for name in wanted if name.startswith(kind)]):
            found |= {id_of(each): each for each in look(account, region, [{"Name": by, "Values": some}])}
    return found


def filtered(account: Account, region: str, filters: list[dict[str, Any]], states: Sequence[str] = ()) -> list[Shown]:
    """All machines of a region that pass these filters, in these states (default: any)."""
    ec2 = account.client("ec2", region)
    every = [*filters, {"Name": "instance-state-name", "Values": list(states)}] if states else filters
    with calling("describing machines", region):
        pages = account.pages(ec2, "describe_instances", "Reservations", Filters=every)
        return [machine for reservation in pages for machine in reservation["Instances"]]


def addresses(account: Account, region: str, filters: list[dict[str, Any]]) -> list[Shown]:
    """All addresses of a region that pass these filters."""
    with calling("listing addresses", region):
        return account.client("ec2", region).describe_addresses(Filters=filters)["Addresses"]


def disks(account: Account, region: str, filters: list[dict[str, Any]]) -> list[Shown]:
    """All disks of a region that pass these filters."""
    with calling("listing disks", region):
        return list(account.pages(account.client("ec2", region), "describe_volumes", "Volumes", Filters=filters))


def templates(account: Account, region: str, name: str) -> dict[str, Any]:
    """EC2's answer about the launch template of this name, which may not exist."""
    named = [{"Name": "launch-template-name", "Values": [name]}]
    with calling(f"looking for launch template {name}", region):
        pages = account.client("ec2", region).get_paginator("describe_launch_templates").paginate(Filters=named)
        found = list(pages)  # EC2 gives 200 at a time, asked or not, and a page may have none that passes a filter
    return {**found[-1], "LaunchTemplates": [each for page in found for each in page["LaunchTemplates"]]}


def templates_of(account: Account, region: str, fleet: str) -> list[Shown]:
    """The launch templates of all creates of a fleet of this name, whoever's it is."""
    with calling(f"listing the launch templates of {fleet}", region):
        ec2, marks = account.client("ec2", region), {names.FLEET: fleet}
        found = account.pages(ec2, "describe_launch_templates", "LaunchTemplates", Filters=tag_filters(marks))
        return [each for each in found if carries(each, marks)]


@contextmanager
def unless_absent() -> Iterator[None]:
    """Passes over the answers by which AWS says that there is no such thing."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if not is_absent(error):
            raise


def is_absent(error: Any) -> bool:
    """Whether an error of botocore's says that there is no such thing."""
    return bool(re.search(r"NotFound|\.Unknown$", error.response["Error"]["Code"]))


def in_batches(ids: list[str], size: int = VALUES) -> Iterator[list[str]]:
    """The ids, at most `size` at a time (default: what one filter takes)."""
    return (ids[start : start + size] for start in range(0, len(ids), size))


def id_of(resource: Shown) -> str:
    """The id of an address or a disk, else of a machine; the first two name a machine as well."""
    return resource.get("AllocationId") or resource.get("VolumeId") or resource["InstanceId"]


# by the id's beginning: what lists such things, and the filter for their ids
_LOOKS: dict[str, tuple[Callable[[Account, str, list[dict[str, Any]]], list[Shown]], str]] = {
    "i-": (filtered, "instance-id"),
    "eipalloc-": (addresses, "allocation-id"),
    "vol-": (disks, "volume-id"),
}
