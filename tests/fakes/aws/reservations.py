"""Capacity reservations and Capacity Blocks, which moto lacks, as the user guide describes them.

Reservations are made by a test (`FakeAws.reserve`) or bought (`FakeAws.sell`, then PurchaseCapacityBlock). Machines
count against theirs until they are terminated, also while they shut down. Machines of a block begin to end 30 minutes
before it does; those of other reservations outlive it. Codes that no page names: of an offering that has expired, and
of machines that the end of a block took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from moto.core.responses import ActionResult
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.responses import EC2Response
from moto.ec2.utils import convert_tag_spec, random_id

from fakes.aws import market, patching
from fakes.aws.rules import Pool

if TYPE_CHECKING:
    from fakes.aws.cloud import Cloud

BLOCK = "capacity-block"
ENDED_BEFORE_S = 1800.0
BY_BLOCK = ("Server.CapacityBlockExpired", "The Capacity Block of this instance has ended")
HOURS = (*range(24, 337, 24), *range(504, 4369, 168))  # that blocks are sold for
Data = dict[str, Any]


class Reservation(TaggedEC2Resource):
    """One; times in UNIX seconds."""

    def __init__(self, cloud: Cloud, backend: Any, wanted: Data) -> None:
        self.cloud, self.ec2_backend, self.id = cloud, backend, random_id("cr")
        self.pool = Pool(wanted["instance_type"], wanted["zone"], BLOCK if wanted["block"] else "on-demand")
        self.count, self.block, self.open = wanted["count"], wanted["block"], wanted["open"]
        self.group, self.more = wanted["group"], wanted["more"]
        self.made_at, self.unpaid_until = time.time(), time.time() + wanted["unpaid_s"]
        self.begins_at = wanted["begins_at"]
        self.ends_at: float | None = wanted["ends_at"]
        self.ended = False

    @property
    def state(self) -> str:
        """By the clock."""
        now = time.time()
        if self.ends_at and now >= self.ends_at:
            return "expired"
        if now < self.unpaid_until:
            return "payment-pending"
        return "active" if now >= self.begins_at else "scheduled"

    @property
    def free(self) -> int:
        """Machines that can be launched into it."""
        used = sum(life.reservation == self.id for life in self.cloud.lives.alive())
        return self.count - used if self.state == "active" else 0

    def age(self, seconds: float) -> None:
        """Makes all of it that much earlier."""
        self.made_at, self.unpaid_until = self.made_at - seconds, self.unpaid_until - seconds
        self.begins_at -= seconds
        self.ends_at = self.ends_at and self.ends_at - seconds

    def shown(self) -> Data:
        """As DescribeCapacityReservations gives it."""
        arn = f"arn:aws:ec2:{self.pool.region}:{self.ec2_backend.account_id}:placement-group/{self.group}"
        return {
            "CapacityReservationId": self.id,
            "OwnerId": self.ec2_backend.account_id,
            "InstanceType": self.pool.instance_type,
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": self.pool.zone,
            "AvailabilityZoneId": self.pool.zone_id,
            "Tenancy": "default",
            "TotalInstanceCount": self.count,
            "AvailableInstanceCount": self.free,
            "State": self.state,
            "StartDate": _date(self.begins_at),
            "EndDate": _date(self.ends_at) if self.ends_at else None,
            "EndDateType": "limited" if self.ends_at else "unlimited",
            "InstanceMatchCriteria": "open" if self.open else "targeted",
            "CreateDate": _date(self.made_at),
            "ReservationType": BLOCK if self.block else "default",
            "Tags": [{"Key": tag["key"], "Value": tag["value"]} for tag in self.get_tags()],
            **({"PlacementGroupArn": arn} if self.group else {}),
            **self.more,
        }


def _date(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def reserve(cloud: Cloud, backend: Any, tags: dict[str, str] | None = None, **wanted: Any) -> Reservation:
    """Makes one; what a block does to machines at its end is due from now on."""
    made = Reservation(cloud, backend, wanted)
    made.add_tags(tags or {})
    cloud.reservations[made.id] = made
    if made.block and made.ends_at:
        cloud.timers.after(made.ends_at - ENDED_BEFORE_S - time.time(), lambda: _end(cloud, made))
    return made


def _end(cloud: Cloud, made: Reservation) -> None:
    made.ended = True
    for life in cloud.lives.alive("pending", "running"):
        if life.reservation == made.id:
            cloud.lives.end(life, BY_BLOCK)


def target(cloud: Cloud, backend: Any, data: Data, pool: Pool) -> Reservation | None:
    """The reservation that a launch of machines of `pool` names; None: it names none. Raises what EC2 says of one that
    it cannot be in."""
    from fakes.aws.launch import refuse

    named = ((data.get("CapacityReservationSpecification") or {}).get("CapacityReservationTarget") or {}).get(
        "CapacityReservationId"
    )
    of_block = (data.get("InstanceMarketOptions") or {}).get("MarketType") == BLOCK
    if of_block != (pool.market == BLOCK):
        raise refuse("InvalidParameterCombination", "The market type of the request and of the template differ.")
    if not named:
        if of_block:
            raise refuse("InvalidParameterValue", "A Capacity Block launch has to name its Capacity Reservation.")
        return None
    found = cloud.reservations.get(named)
    if found is None or found.ec2_backend is not backend:
        text = f"The Capacity Reservation ID '{named}' does not exist"
        raise refuse("InvalidCapacityReservationId.NotFound", text)
    if found.block != of_block:
        raise refuse("InvalidParameterCombination", f"'{named}' and the market type of the request do not go together.")
    group = (data.get("Placement") or {}).get("GroupName") or ""
    if found.pool != pool or (found.group and found.group != group):
        raise full(found)
    return found


def open_for(cloud: Cloud, pool: Pool) -> Reservation | None:
    """An open reservation with a place for a machine of this pool that names none: EC2 puts it there."""
    return next((r for r in cloud.reservations.values() if r.open and r.pool == pool and r.free), None)


def full(reservation: Reservation) -> Any:
    """The refusal of a reservation that has no place, or has not begun, or is over."""
    from fakes.aws.launch import refuse

    if reservation.block:
        return refuse("InsufficientInstanceCapacity", "Insufficient capacity.")
    text = "The requested reservation does not have sufficient compatible and available capacity for this request."
    return refuse("ReservationCapacityExceeded", text)


def granted(reservation: Reservation, count: int) -> tuple[int, Any]:
    """How many of `count` it has a place for, and the refusal of the rest (None: there is no rest)."""
    free = 0 if reservation.ended else reservation.free
    return (count, None) if free >= count else (max(0, free), full(reservation))


# --- the calls --------------------------------------------------------------------------------------------------------


def install(cloud: Cloud) -> None:
    """From now on there are some."""
    actions: dict[str, Callable[[Cloud, Any], ActionResult]] = {
        "describe_capacity_reservations": _describe,
        "describe_capacity_block_offerings": _offerings,
        "purchase_capacity_block": _purchase,
    }
    for name, action in actions.items():
        patching.add_action(cloud, EC2Response, name, action)


def _describe(cloud: Cloud, response: Any) -> ActionResult:
    from fakes.aws.launch import refuse

    ids, at = response.params.get("CapacityReservationIds") or [], time.time() - cloud.rules.lag_s
    here = [
        r for r in cloud.reservations.values() if r.ec2_backend is response.ec2_backend and (r.made_at <= at or ids)
    ]
    if unknown := set(ids) - {each.id for each in here}:
        text = f"The Capacity Reservation ID '{unknown.pop()}' does not exist"
        raise refuse("InvalidCapacityReservationId.NotFound", text)
    return ActionResult({"CapacityReservations": [each.shown() for each in here if not ids or each.id in ids]})


def _offerings(cloud: Cloud, response: Any) -> ActionResult:
    from fakes.aws.launch import refuse

    asked = response.params
    kind, hours = asked.get("InstanceType"), int(asked["CapacityDurationHours"])
    if not market.sold_in_blocks(kind):
        raise refuse("InvalidParameterValue", f"The instance type {kind} is not supported for Capacity Blocks.")
    if hours not in HOURS:
        raise refuse("InvalidParameterValue", f"{hours} is no duration of a Capacity Block.")
    found = [
        each
        for each in cloud.offerings.values()
        if (each["InstanceType"], each["InstanceCount"], each["CapacityBlockDurationHours"])
        == (kind, int(asked["InstanceCount"]), hours)
        and each["AvailabilityZone"].startswith(response.region)
        and _within(each, asked)
        and not _is_gone(each)
    ]
    if cloud.rules.new_offering_ids:  # nobody says that an offering keeps its id
        found = [_renamed(cloud, each) for each in found]
    shown = [{name: value for name, value in each.items() if name[0].isupper()} for each in found]
    return ActionResult({"CapacityBlockOfferings": shown})


def _renamed(cloud: Cloud, offering: Data) -> Data:
    del cloud.offerings[offering["CapacityBlockOfferingId"]]
    fresh = {**offering, "CapacityBlockOfferingId": random_id("cb")}
    cloud.offerings[fresh["CapacityBlockOfferingId"]] = fresh
    return fresh


def _within(offering: Data, asked: Data) -> bool:
    after, before = asked.get("StartDateRange"), asked.get("EndDateRange")
    return (not after or offering["StartDate"] >= _moment(after)) and (
        not before or offering["EndDate"] <= _moment(before)
    )


def _moment(given: Any) -> datetime:
    moment = given if isinstance(given, datetime) else datetime.fromisoformat(str(given))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _is_gone(offering: Data) -> bool:
    return time.time() >= offering["expires_at"]


def _purchase(cloud: Cloud, response: Any) -> ActionResult:
    """Whoever calls twice buys twice, as far as there is a second one: it has no token."""
    from fakes.aws.launch import refuse

    asked = response.params
    offering = cloud.offerings.get(asked["CapacityBlockOfferingId"])
    if offering is None or _is_gone(offering):
        text = f"The Capacity Block offering '{asked['CapacityBlockOfferingId']}' has expired or was never made"
        raise refuse("InvalidCapacityBlockOfferingId.NotFound", text)
    offering["left"] -= 1
    if not offering["left"]:
        del cloud.offerings[offering["CapacityBlockOfferingId"]]
    bought = reserve(
        cloud,
        response.ec2_backend,
        convert_tag_spec(asked.get("TagSpecifications") or []).get("capacity-reservation", {}),
        instance_type=offering["InstanceType"],
        zone=offering["AvailabilityZone"],
        count=offering["InstanceCount"],
        block=True,
        open=False,
        group="",
        more={},
        unpaid_s=cloud.rules.unpaid_s,
        begins_at=offering["StartDate"].timestamp(),
        ends_at=offering["EndDate"].timestamp(),
    )
    return ActionResult({"CapacityReservation": bought.shown(), "CapacityBlocks": []})
