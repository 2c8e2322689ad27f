"""What EC2 shows of capacity reservations -> `Reservation`. Capacity Blocks are reservations of a kind of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from mgpu.errors import InputError
from mgpu.plan.model import Reservation
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.instances.listing import Shown, is_absent, tags_of
from mgpu.providers.aws.session import Account
from mgpu.providers.aws.side_by_side import ask_all, in_a_line
from mgpu.providers.base import Reservations

DEADLINE_S = 60.0  # for all regions together
BLOCK, ON_DEMAND = "Capacity Block", "On-Demand Capacity Reservation"
PLATFORM = "Linux/UNIX"
OVER = ("cancelled", "expired", "failed", "payment-failed", "unsupported")
# "Thirty minutes before the reservation expires, we begin to terminate any instances":
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-using.html (UltraServers: 60, none has x86-64)
_ENDED_BEFORE_S = 1800.0
_OURS_FIRST_S = 120.0  # EventBridge Scheduler goes by whole minutes


class Found(NamedTuple):
    """A reservation, and why mgpu's machines cannot be in it; empty: they can."""

    reservation: Reservation
    unusable: str


def find(account: Account, id_: str, regions: Sequence[str]) -> Found:
    """The reservation of this id, in these regions (none: all).

    Raises:
        InputError: there is none.
        ProviderError: it is in none of the regions that have answered, and others have not.
    """
    asked = tuple(regions) or account.once("regions", account.regions)
    answers, failed = ask_all(asked, lambda region: _named(account, region, id_), _deadline())
    for region, shown in answers.items():
        if shown is not None:
            return Found(of(shown, region), _unusable(shown))
    if failed:
        raise next(iter(failed.values()))
    where = f"in {', '.join(regions)}" if regions else f"of this account in {len(asked)} regions"
    cure = "`mgpu reservations ls` lists what there is" + ("; `regions` may name others." if regions else ".")
    raise InputError(f"aws.reservation: there is no {id_} {where}", "", cure)


def every(account: Account, regions: Sequence[str]) -> Reservations:
    """All that are not over, of these regions (none: all), by the time when they begin. Raises InputError: there is no
    such region; ProviderError: not one of them has answered."""
    asked = account.require_regions(regions)
    answers, failed = ask_all(asked, lambda region: listed(account, region), _deadline())
    if not answers:
        raise next(iter(failed.values()))
    found = [of(each, region) for region, some in answers.items() for each in some if each["State"] not in OVER]
    return Reservations(
        reservations=tuple(sorted(found, key=lambda each: (each.begins_at, each.id))),
        failed={region: in_a_line(error) for region, error in failed.items()},
    )


def listed(account: Account, region: str) -> list[Shown]:
    """All reservations of a region, as EC2 shows them. Raises ProviderError."""
    with calling("listing capacity reservations", region):
        ec2 = account.client("ec2", region)
        return list(account.pages(ec2, "describe_capacity_reservations", "CapacityReservations"))


def of(shown: Shown, region: str) -> Reservation:
    """A reservation as EC2 shows it."""
    block, state = shown.get("ReservationType") == names.CAPACITY_BLOCK, shown["State"]
    machines, ends = shown["TotalInstanceCount"], shown.get("EndDate")
    ends_at = ends.timestamp() if ends else None
    return Reservation(
        id=shown["CapacityReservationId"],
        kind=BLOCK if block else ON_DEMAND,
        prepaid=block,
        state=state,
        instance_type=shown["InstanceType"],
        region=region,
        zone=shown.get("AvailabilityZoneId") or shown["AvailabilityZone"],
        group=shown.get("PlacementGroupArn", "").rpartition("/")[2],
        machines=machines,
        free=shown["AvailableInstanceCount"] if state == "active" else machines,
        begins_at=(shown.get("StartDate") or shown["CreateDate"]).timestamp(),
        ends_at=ends_at,
        machines_end_at=machines_end_at(ends_at) if block and ends_at else None,
    )


def machines_end_at(ends_at: float) -> float:
    """When our own end of machines in a Capacity Block that ends then has to come: before AWS's."""
    return math.floor(ends_at - _ENDED_BEFORE_S - _OURS_FIRST_S)


def bought_by(shown: Shown) -> str:
    """The token of the purchase; empty: it was not mgpu's."""
    return tags_of(shown).get(names.TOKEN, "")


def _named(account: Account, region: str, id_: str) -> Shown | None:
    from botocore.exceptions import ClientError

    with calling(f"looking for {id_}", region):
        try:
            answer: Any = account.client("ec2", region).describe_capacity_reservations(CapacityReservationIds=[id_])
        except ClientError as error:
            if not is_absent(error):
                raise
            return None
    return next(iter(answer["CapacityReservations"]), None)


def _unusable(shown: Shown) -> str:
    if shown.get("InstancePlatform", PLATFORM) != PLATFORM:
        return f"is for {shown['InstancePlatform']}, mgpu's machines are {PLATFORM}"
    if shown.get("Tenancy", "default") != "default":
        return f"is of {shown['Tenancy']} tenancy, mgpu's machines are of default tenancy"
    return "is interruptible: its owner may take the machines" if shown.get("Interruptible") else ""


def _deadline() -> float:
    return time.monotonic() + DEADLINE_S
