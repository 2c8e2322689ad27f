"""Who sells reservations, and what `find` has been told lately, so that `buy` knows what an id stands for."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
from pydantic import Field, ValidationError

from mgpu import paths
from mgpu.cli.common import agreement
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.plan.model import Reservation, Value
from mgpu.providers.base import ReservationOffer, ReservationRequest, SellsReservations

_REMEMBERED_S = 86400.0  # what was on sale yesterday is asked for anew

provider_option = click.option(
    "--provider", help="Who sells them (default: the run file's, or the only provider that does)."
)
profile_option = click.option("--profile", help="Profile of provider aws, as `aws: {profile: ...}` of a run file.")


class Seller(NamedTuple):
    """A provider that sells reservations, by name, and the options that it is asked with."""

    name: str
    options: dict[str, str]
    provider: SellsReservations


def seller(name: str | None, options: Mapping[str, str], profile: str | None = None) -> Seller:
    """The provider of this name, or the only one that sells reservations. Raises InputError: it does not."""
    from mgpu.providers import registry

    sellers = [each for each in registry.names() if isinstance(registry.get(each), SellsReservations)]
    if name is None and len(sellers) == 1:
        name = sellers[0]
    known = f"Those that do: {', '.join(sellers) or 'none'}."
    if name is None:
        raise InputError("--provider: several providers sell reservations, or none does", "", known)
    given = agreement.with_profile(name, dict(options), profile, known) if profile else dict(options)
    provider = registry.get(name, given)
    if not isinstance(provider, SellsReservations):
        raise InputError(f"provider {name} sells no reservations", "", known)
    return Seller(name, given, provider)


class Found(Value):
    """An offer of `find`, and how it was asked for at `at` (UNIX seconds)."""

    provider: str
    options: dict[str, str]
    wanted: ReservationRequest
    offer: ReservationOffer
    at: float


class _Memory(Value):
    found: dict[str, Found] = Field(default={}, description="by the offer's id")


def remember(seller: Seller, wanted: ReservationRequest, offers: tuple[ReservationOffer, ...]) -> None:
    """Keeps these offers for a day, by their ids."""
    now = time.time()
    fresh = {
        each.id: Found(provider=seller.name, options=seller.options, wanted=wanted, offer=each, at=now)
        for each in offers
    }
    kept = {id_: each for id_, each in _read().found.items() if now - each.at < _REMEMBERED_S}
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(_Memory(found=kept | fresh).model_dump_json(), encoding="utf-8")
    aside.replace(path)


def recall(id_: str) -> Found:
    """What `find` was told of this id. Raises InputError: nothing, or too long ago."""
    found = _read().found.get(id_)
    if found is None or time.time() - found.at >= _REMEMBERED_S:
        why = "An id says neither what it is for nor what it costs: that is known for a day after `find` printed it."
        raise InputError(f"{id_} is not known here", why, "`mgpu reservations find` prints what is on sale now.")
    return found


def _read() -> _Memory:
    try:
        return _Memory.model_validate_json(_path().read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return _Memory()


def _path() -> Path:
    return paths.cache_dir() / "reservations.json"


def to_paste(name: str, reserved: Reservation, gpus: int) -> list[str]:
    """Lines of a run file that rents in this reservation, machines with so many GPUs each."""
    lines = [
        f"{name}: {{reservation: {reserved.id}}}",
        f"regions: [{reserved.region}]",
        f"nodes: {reserved.machines}",
        f"gpus_per_node: {gpus}",
        "market: on-demand",
    ]
    if reserved.machines_end_at:
        hours = (reserved.machines_end_at - max(reserved.begins_at, time.time())) / 3600
        lines.append(f"max_hours: {math.floor(max(0.0, hours) * 10) / 10:g}")
    return lines


def tell_failed(console: Console, failed: Mapping[str, str]) -> None:
    """Names the regions of which nothing is known."""
    for region, why in failed.items():
        console.say(f"warning: {region}: {why}", "yellow")
