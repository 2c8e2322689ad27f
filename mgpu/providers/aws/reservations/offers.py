"""A run file that names a reservation -> the one offer that there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from mgpu.errors import InputError
from mgpu.plan.model import Obstacle, Offer, Requirements, Reservation
from mgpu.providers.aws.catalog import offers as catalog
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.providers.aws.catalog.machine_types import boot_s
from mgpu.providers.aws.catalog.snapshot import Snapshot
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.reservations import lookup
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Offers
from mgpu.words import duration, utc

_LEAST_S = 600.0  # that a Capacity Block has to last yet, where its machines are up in a minute
_ELSE = "Name another one (`mgpu reservations ls`), or leave `aws.reservation` out."


def offers(account: Account, options: Options, needed: Requirements, *, now: Callable[[], float] = time.time) -> Offers:
    """Machines of the reservation that `options` name, as EC2 shows it now; where they cannot be rented, with the
    reason. That one has not begun is none: the offer says when it does.

    Raises:
        InputError: there is no such reservation, or what it is of is nothing for mgpu; a key that cannot stand beside.
        NoOffer: the on-demand price, which its machines cost, is not known.
        ProviderError: EC2 refused, or did not answer.
    """
    # who takes either market, as `mgpu offers` does, has what there is
    for key, wrong in options.contradicts(needed) if needed.market == "spot" else ():
        raise InputError(f"{key}: {wrong}", "", f"Mend `{key}` of the run file.")
    known = snapshots.current(options)
    catalog.require_known(known, needed, options)
    found = look(account, options, needed.regions)
    reserved, at = found.reservation, now()
    machine = known.machines.get(reserved.instance_type)
    if machine is None:
        why = "mgpu knows no machine type of this name with GPUs of NVIDIA's and x86-64 processors."
        cure = f"{_ELSE} A type that is new at AWS is learnt by `{catalog.REFRESH}`."
        raise InputError(f"aws.reservation: {reserved.id} is of {reserved.instance_type}", why, cure)
    usd, priced_at = (0.0, at) if reserved.prepaid else _listed(known, reserved)
    row = catalog.Row(
        reserved.instance_type, machine, reserved.region, reserved.zone, "on-demand", usd=usd, at=priced_at
    )
    offer = catalog.offer_of(row, options).model_copy(update={"reservation": reserved})
    hindrance = obstacle(found, needed.nodes, at) or offer.obstacle
    return Offers(
        offers=(offer.model_copy(update={"obstacle": hindrance}),),
        source=f"{reserved.id}, asked",
        notes=tuple(_notes(offer, needed, at)),
    )


def _listed(known: Snapshot, reserved: Reservation) -> tuple[float, float]:
    """The on-demand price, and of when it is. Raises NoOffer: it is not known."""
    region = known.regions.get(reserved.region)
    if region is None or reserved.instance_type not in region.on_demand:
        raise catalog.no_prices((reserved.region,))
    return region.on_demand[reserved.instance_type], region.on_demand_at


def look(account: Account, options: Options, regions: tuple[str, ...]) -> lookup.Found:
    """The reservation of the options, as it was up to a minute ago. Raises InputError, ProviderError."""
    id_ = options.reservation or ""
    return account.once(("reservation", id_, regions), lambda: lookup.find(account, id_, regions))


def obstacle(found: lookup.Found, nodes: int, now: float) -> Obstacle | None:
    """Why so many machines cannot be rented in it; None: they can, once it has begun."""
    reserved = found.reservation
    if found.unusable:
        return Obstacle(reason=found.unusable, cure=_ELSE)
    if reserved.state in (*lookup.OVER, "cancelling", "unavailable"):
        return Obstacle(reason=f"is {reserved.state}", cure=_ELSE)
    if reserved.free < nodes:
        reason = f"{reserved.free} of its {reserved.machines} machines are free, {nodes} needed"
        fewer = f"Ask for at most {reserved.free} `nodes`, or free" if reserved.free else "Free"
        cure = f"{fewer} machines: `mgpu ls` shows yours; one that ends counts until it is gone."
        return Obstacle(reason=reason, cure=cure)
    least_s = max(_LEAST_S, boot_s(reserved.instance_type))
    if reserved.machines_end_at and reserved.machines_end_at - now < least_s:
        reason = f"AWS ends its machines from {utc(reserved.machines_end_at)} on: too soon for new ones"
        return Obstacle(reason=reason, cure=_ELSE)
    return None


def _notes(offer: Offer, needed: Requirements, now: float) -> Iterator[str]:
    """What it costs and how long it lasts, for the plan to say."""
    reserved = offer.reservation
    if reserved is None:
        return
    free = f"{reserved.free} of {reserved.machines} machines are free"
    if reserved.prepaid:
        yield f"{reserved.id}, {reserved.kind}: paid already, its machines cost nothing more by the hour; {free}"
    else:
        billed = "billed at this price while it exists, used or not"
        yield f"{reserved.id}, {reserved.kind}: {billed}; {free}"
    if reserved.state != "active":
        yield f"it is {reserved.state} and begins {utc(reserved.begins_at)}: no machine can be rented before"
    if reserved.machines_end_at:
        yield from _end(reserved, needed, now)
    elif reserved.ends_at:
        yield f"it ends {utc(reserved.ends_at)}: machines go on at the on-demand price, and a lost one is not replaced"


def _end(reserved: Reservation, needed: Requirements, now: float) -> Iterator[str]:
    end = reserved.machines_end_at or 0
    left_s = max(0.0, end - max(now, reserved.begins_at))
    yield f"it ends {utc(reserved.ends_at or end)}, its machines by {utc(end)}: {duration(left_s)} to use"
    if needed.max_hours * 3600 > left_s:
        yield f"`max_hours: {needed.max_hours:g}` is longer than that: the hard cap is {duration(left_s)}"
