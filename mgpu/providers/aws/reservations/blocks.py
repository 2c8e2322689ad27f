"""Capacity Blocks for ML: what is on sale, and buying one.

A purchase cannot be undone and has no token at EC2: the call is made once, never again by itself, and what it has
bought is known by its tags.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from mgpu.errors import AuthError, InputError, InvalidRequest, NoCapacity, NoOffer
from mgpu.plan.model import Reservation
from mgpu.providers.aws import names
from mgpu.providers.aws.catalog.machine_types import machine_of
from mgpu.providers.aws.catalog.snapshot import Machine
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.instances.listing import Shown
from mgpu.providers.aws.reservations import lookup
from mgpu.providers.aws.session import Account
from mgpu.providers.aws.side_by_side import ask_all, in_a_line
from mgpu.providers.base import ReservationOffer, ReservationOffers, ReservationRequest

_DAY_H, _WEEK_H = 24, 168
_MOST_DAYS, _MOST_WEEKS = 14, 26  # whole days up to 14, then whole weeks
_MOST_MACHINES = 64  # of one block
_SAME_S = 60.0  # by which AWS's times of an offer and of what was bought may differ
_CURRENCY = "USD"


class _Sold(NamedTuple):
    """What one region has: the types that blocks are of, and the offers for what was asked."""

    types: dict[str, Machine]
    offers: tuple[ReservationOffer, ...]


def find(account: Account, wanted: ReservationRequest) -> ReservationOffers:
    """What AWS offers for this, the earliest first; of each type and region it names few, most often one.

    Raises:
        InputError: longer, or of more machines, than blocks are sold; a GPU that they are not sold of; no such region.
        ProviderError: not one region has answered.
    """
    hours = _sold_hours(wanted.hours)
    if wanted.nodes > _MOST_MACHINES:
        why = f"AWS sells Capacity Blocks of at most {_MOST_MACHINES} machines."
        raise InputError(f"nodes: {wanted.nodes} machines are too many for one", why, "Ask for fewer.")
    end, regions = time.monotonic() + lookup.DEADLINE_S, account.require_regions(wanted.regions)
    answers, failed = ask_all(regions, lambda region: _ask(account, region, wanted, hours), end)
    if not answers:
        raise next(iter(failed.values()))
    _require_sold(wanted, {kind: machine for each in answers.values() for kind, machine in each.types.items()})
    offers = [offer for each in answers.values() for offer in each.offers]
    longer = f"Capacity Blocks are sold by whole days, from 15 on by weeks: {hours} h for {wanted.hours:g}"
    return ReservationOffers(
        offers=tuple(sorted(offers, key=lambda each: (each.begins_at, each.usd_per_gpu_hour, each.id))),
        notes=(longer,) if hours != wanted.hours else (),
        failed={region: in_a_line(error) for region, error in failed.items()},
    )


def buy(account: Account, offer: ReservationOffer, owner: str, token: str) -> Reservation:
    """Buys it, with one call.

    Raises:
        AmbiguousCreate: the answer was lost.
        AuthError: the credentials are of another account than those that it was offered to.
        NoOffer: it is not on sale any more; nothing was bought.
        ProviderError: nothing was bought.
    """
    _require_whose(account, offer)
    marks = {**account.options.tags, names.OWNER: owner, names.TOKEN: token, names.NAME: "mgpu"}
    tags = [{"ResourceType": "capacity-reservation", "Tags": names.tag_list(marks)}]
    client = Account(account.options, attempts=1).client("ec2", offer.region)  # one that never asks again by itself
    try:
        with calling(f"buying {offer.id}", offer.region, create=True):
            answer = client.purchase_capacity_block(
                CapacityBlockOfferingId=offer.id, InstancePlatform=lookup.PLATFORM, TagSpecifications=tags
            )
    except (InvalidRequest, NoCapacity) as error:
        cure = "Nothing was bought. `mgpu reservations find` asks for what is on sale now."
        raise NoOffer(f"{offer.id} cannot be bought any more", error.why, cure) from error
    return lookup.of(answer["CapacityReservation"], offer.region)


def bought(account: Account, offer: ReservationOffer, token: str, at: float) -> Reservation | None:
    """What a purchase of this offer by this token has bought, which was asked for at `at` (UNIX seconds). Tags may be
    shown late: without any, it is the block that this offer would be, made since. Raises ProviderError."""
    _require_whose(account, offer)
    shown = lookup.listed(account, offer.region)
    ours = [each for each in shown if lookup.bought_by(each) == token]
    ours += [each for each in shown if not lookup.bought_by(each) and _is_it(each, offer, at)]
    return lookup.of(ours[0], offer.region) if ours else None


def _require_whose(account: Account, offer: ReservationOffer) -> None:
    if offer.account not in ("", account.id()):
        what = f"{offer.id} was offered to AWS account {offer.account}, the credentials are of {account.id()}"
        raise AuthError(what, "", "Use credentials of that account: AWS_PROFILE, or `--profile` with `find`.")


def _sold_hours(hours: float) -> int:
    days = math.ceil(hours / _DAY_H)
    weeks = math.ceil(days / 7)
    if weeks > _MOST_WEEKS:
        why = f"AWS sells Capacity Blocks of at most {_MOST_WEEKS} weeks."
        raise InputError(f"hours: {hours:g} are too many for one", why, f"Ask for at most {_MOST_WEEKS * _WEEK_H}.")
    return days * _DAY_H if days <= _MOST_DAYS else weeks * _WEEK_H


def _ask(account: Account, region: str, wanted: ReservationRequest, hours: int) -> _Sold:
    ec2 = account.client("ec2", region)
    sold = [{"Name": "supported-usage-class", "Values": [names.CAPACITY_BLOCK]}]
    with calling("asking which machines Capacity Blocks are of", region):
        shown = account.pages(ec2, "describe_instance_types", "InstanceTypes", Filters=sold)
        types = {each["InstanceType"]: machine for each in shown if (machine := machine_of(each))}
    meant = [(kind, machine) for kind, machine in types.items() if _meets(machine, wanted)]
    offers = [offer for kind, machine in meant for offer in _on_sale(account, region, kind, machine, wanted, hours)]
    return _Sold(types, tuple(offers))


def _meets(machine: Machine, wanted: ReservationRequest) -> bool:
    gpus = {gpu.casefold() for gpu in wanted.gpu}
    return (not gpus or machine.gpu.casefold() in gpus) and wanted.gpus_per_node in (0, machine.gpus)


def _on_sale(
    account: Account, region: str, kind: str, machine: Machine, wanted: ReservationRequest, hours: int
) -> Iterator[ReservationOffer]:
    ec2 = account.client("ec2", region)
    asked: dict[str, Any] = {"InstanceType": kind, "InstanceCount": wanted.nodes, "CapacityDurationHours": hours}
    for name, at in (("StartDateRange", wanted.begins_after), ("EndDateRange", wanted.ends_before)):
        if at is not None:
            asked[name] = datetime.fromtimestamp(at, UTC)
    try:
        with calling(f"asking for Capacity Blocks of {kind}", region):
            shown = list(account.pages(ec2, "describe_capacity_block_offerings", "CapacityBlockOfferings", **asked))
    except NoCapacity:  # this type is not sold here
        return
    for each in shown:
        # one of several segments would be several reservations, and a run is in one
        plain = len(each.get("CapacityBlockOfferingSegments", ())) < 2 and each.get("Tenancy", "default") == "default"
        if plain and each["CurrencyCode"] == _CURRENCY:
            yield _offer(each, machine, region, account.id())


def _offer(shown: Shown, machine: Machine, region: str, account: str) -> ReservationOffer:
    ends_at = shown["EndDate"].timestamp()
    return ReservationOffer(
        id=shown["CapacityBlockOfferingId"],
        kind=lookup.BLOCK,
        instance_type=shown["InstanceType"],
        gpu=machine.gpu,
        gpus=machine.gpus,
        machines=shown["InstanceCount"],
        region=region,
        zone=shown["AvailabilityZone"],
        begins_at=shown["StartDate"].timestamp(),
        ends_at=ends_at,
        machines_end_at=lookup.machines_end_at(ends_at),
        usd=float(shown["UpfrontFee"]),
        account=account,
    )


def _require_sold(wanted: ReservationRequest, types: dict[str, Machine]) -> None:
    if any(_meets(machine, wanted) for machine in types.values()) or not types:
        return
    what = f"{wanted.gpus_per_node or 'any number of'} x {' or '.join(wanted.gpu) or 'any GPU'}"
    kinds = sorted({f"{machine.gpus} x {machine.gpu}" for machine in types.values()})
    why = f"They are of machines with {', '.join(kinds)}."
    raise InputError(f"AWS sells no Capacity Blocks of machines with {what}", why, "Ask for one of these.")


def _is_it(shown: Shown, offer: ReservationOffer, at: float) -> bool:
    """Whether a reservation is what this offer makes, and was made since `at`."""
    there = lookup.of(shown, offer.region)
    alike = (there.instance_type, there.machines, there.prepaid) == (offer.instance_type, offer.machines, True)
    here = offer.zone in (shown.get("AvailabilityZone"), there.zone)
    times = ((there.begins_at, offer.begins_at), (there.ends_at or 0, offer.ends_at))
    since = shown["CreateDate"].timestamp() > at - _SAME_S
    return alike and here and since and all(abs(one - other) <= _SAME_S for one, other in times)
