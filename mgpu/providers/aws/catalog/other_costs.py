"""What AWS bills beside the machines: disks, public addresses, traffic between regions, checkpoints in S3."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mgpu.plan.model import Cost, Offer, Requirements, Saves
from mgpu.providers.aws import names
from mgpu.providers.aws.options import Disk, Options


class _Prices(NamedTuple):
    """US dollars; AWS's GB are GiB. List prices of `OF`, to which those of most regions are near."""

    gp3_gib_month: float = 0.08
    gp3_iops_month: float = 0.005  # beyond 3000
    gp3_mib_s_month: float = 0.04  # beyond 125
    # once, for each GiB of a snapshot's data and each MiB/s, by the formula of
    # https://docs.aws.amazon.com/ebs/latest/userguide/initalize-volume.html#consistent-rate-billing; the figure is what
    # users tell, 0.0036 a GiB at 300 MiB/s
    initialization_gib_mib_s: float = 0.0036 / 300
    io2_gib_month: float = 0.125
    io2_iops_month: tuple[tuple[int, float], ...] = ((32_000, 0.065), (64_000, 0.0455), (256_000, 0.03185))  # up to
    address_hour: float = 0.005
    nat_gib: float = 0.045  # in either direction
    s3_gib_month: float = 0.023  # S3 Standard, the first 50 TB
    traffic_gib: float = 0.02  # out of the region; some regions ask several times as much
    near_traffic_gib: float = 0.01  # between us-east-1 and us-east-2
    internet_gib: float = 0.09  # out of AWS, the first 10 TB of a month


# Of https://aws.amazon.com: /ebs/pricing/, /vpc/pricing/ (public IPv4 addresses, NAT gateways), /s3/pricing/,
# /ec2/pricing/on-demand/ (data transfer), as known on AS_OF
PRICES = _Prices()
AS_OF = "2026-11-24"
OF = "us-east-1"
_SIZE = "GiB of a checkpoint"
_NEAR = {"us-east-1", "us-east-2"}
_HOURS = 730  # of a month, as AWS counts
_DAYS = _HOURS / 24


class ImageDisks(NamedTuple):
    """Of a machine image: its root disk in GiB, and the others as EC2 shows them."""

    root_gib: int
    others: tuple[Mapping[str, Any], ...] = ()


def other_costs(
    needed: Requirements,
    offer: Offer,
    options: Options,
    saves: Saves | None,
    region_of: Callable[[str], str],
    image: ImageDisks | None,
    store: str = "",
) -> Iterator[Cost]:
    """All of it for one offer. `region_of`: the region of a store's bucket, empty where it is not known; `image`: what
    its machines are made from, None: not known, and its disk is not larger than `disk_gib`, and alone; `store`: the
    server of all buckets, empty: S3."""
    disk = options.disk or Disk()
    gib = max(needed.disk_gib, image.root_gib if image else 0)
    whose = ", as the machine image has it" if gib > needed.disk_gib else ""
    monthly = needed.nodes * _of_disk(disk, gib)
    disks = f"disks, {needed.nodes} x {gib} GiB {disk.type}{whose}"
    yield Cost(what=disks, usd=monthly / _HOURS, per="hour", estimate=offer.region != OF or image is None)
    if image is not None and image.others:
        monthly = needed.nodes * sum(map(_of_other, image.others))
        what = f"disks that the machine image brings besides, {needed.nodes} x {len(image.others)}"
        yield Cost(what=what, usd=monthly / _HOURS, per="hour", estimate=True)
    if disk.initialization_mib_s:
        usd = needed.nodes * disk.initialization_mib_s * PRICES.initialization_gib_mib_s
        what = f"machine image read in at {disk.initialization_mib_s} MiB/s, {needed.nodes} x at each start"
        yield Cost(what=what, usd=usd, per="GiB of its data", estimate=True)
    if options.address == "public":
        usd = needed.nodes * PRICES.address_hour
        yield Cost(what=f"public IPv4 addresses, {needed.nodes}", usd=usd, per="hour")
    elif needed.stores:
        unless = "" if store else ", unless a gateway endpoint leads to S3, which costs nothing"
        yield Cost(what=f"data through a NAT gateway{unless}", usd=PRICES.nat_gib, per="GiB", estimate=True)
    yield from _traffic(needed, offer, region_of)
    if saves is not None and store:
        what = f"traffic to {store}, where that is outside of AWS"
        yield Cost(what=what, usd=PRICES.internet_gib, per="GiB", estimate=True)
    elif saves is not None:
        yield from _storage(saves)


def _of_disk(disk: Disk, gib: int) -> float:
    """Dollars a month."""
    if disk.type == "gp3":
        iops, speed = (disk.iops or 3000) - 3000, (disk.throughput_mib_s or 125) - 125
        return gib * PRICES.gp3_gib_month + iops * PRICES.gp3_iops_month + speed * PRICES.gp3_mib_s_month
    usd, below = gib * PRICES.io2_gib_month, 0
    for upto, price in PRICES.io2_iops_month:
        usd += max(0, min(disk.iops or 0, upto) - below) * price
        below = upto
    return usd


def _of_other(ebs: Mapping[str, Any]) -> float:
    """Dollars a month of a disk as EC2 shows it. One of a kind that mgpu does not make counts as gp3, more or less."""
    kind, gib = str(ebs.get("VolumeType", "")), int(ebs.get("VolumeSize") or 0)
    if kind.startswith("io"):
        return _of_disk(Disk.model_construct(type="io2", iops=ebs.get("Iops")), gib)
    speed = {"iops": ebs.get("Iops"), "throughput_mib_s": ebs.get("Throughput")} if kind == "gp3" else {}
    return _of_disk(Disk.model_construct(**speed), gib)


def _traffic(needed: Requirements, offer: Offer, region_of: Callable[[str], str]) -> Iterator[Cost]:
    for bucket in dict.fromkeys(map(_bucket, needed.stores)):
        region = region_of(f"s3://{bucket}")
        if region and region != offer.region:
            usd = PRICES.near_traffic_gib if {region, offer.region} == _NEAR else PRICES.traffic_gib
            what = f"traffic between {offer.region} and the bucket {bucket} in {region}"
            cure = f"`regions: [{region}]` avoids it."
            yield Cost(what=what, usd=usd, per="GiB", estimate=OF not in (region, offer.region), avoidable=cure)


def _storage(saves: Saves) -> Iterator[Cost]:
    """Of each GiB that a checkpoint has: how large it will be is known to the program alone."""
    kept = saves.kept if saves.made is None else min(saves.kept, saves.made)
    usd = kept * PRICES.s3_gib_month
    yield Cost(what=f"checkpoints kept in S3, {kept}", usd=usd, per=f"month and {_SIZE}", estimate=True)
    if not saves.made or saves.made <= kept or not re.fullmatch(names.bucket("[0-9]{12}", ".*"), _bucket(saves.to)):
        return  # how long a bucket of the user's keeps what is deleted, nobody knows
    days = names.OLD_PARTS_DAYS + 1  # S3 rounds up to the next midnight
    deleted = saves.made - kept
    usd = deleted * PRICES.s3_gib_month * days / _DAYS
    what = f"checkpoints deleted in S3, {deleted} until the hard cap, each billed for up to {days} days more"
    yield Cost(what=what, usd=usd, per=_SIZE, estimate=True)


def _bucket(url: str) -> str:
    return url.removeprefix("s3://").partition("/")[0]
