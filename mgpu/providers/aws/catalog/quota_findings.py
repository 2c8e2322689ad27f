"""What the quotas of a region leave for a fleet: the findings of `mgpu check aws` about them."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu.errors import NoOffer
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.aws.catalog import offers as on_sale
from mgpu.providers.aws.catalog import quotas
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account
from mgpu.providers.base import Finding


def findings(account: Account, options: Options, requirements: Requirements | None, region: str) -> Iterator[Finding]:
    """One line a quota: those that the run file's machines count against, or all. It is a failure only where none of
    them is enough for the fleet."""
    room = {each.code: each for each in quotas.headroom(account, region).values()}
    needed = _needed(options, requirements, region) if requirements else {}
    short = [code for code, vcpus in needed.items() if code in room and _left(room[code]) < vcpus]
    status = "failed" if needed and len(short) == len(needed) else "warning"
    for code in sorted(needed or room):
        if code not in room:
            continue
        subject, vcpus = f"quota {region}", needed.get(code, 1)
        left = _left(room[code])
        detail = f"{quotas.name_of(code)} ({code}): {left} of {room[code].limit_vcpus} vCPUs are left"
        if left >= vcpus:
            yield Finding(subject=subject, status="ok", detail=detail)
            continue
        detail += f", the fleet needs {vcpus}" if needed else ""
        wanted = room[code].used_vcpus + vcpus if needed else "VCPUS"
        cure = f"`{quotas.raise_command(code, region)} {wanted}`"
        yield Finding(subject=subject, status=status, detail=detail, cure=cure)


def _left(room: quotas.QuotaUse) -> int:
    return max(0, room.limit_vcpus - room.used_vcpus)


def _needed(options: Options, requirements: Requirements, region: str) -> dict[str, int]:
    """vCPUs that the smallest fleet would count, by quota; empty where no prices are known. Raises InputError."""
    here = requirements.model_copy(update={"regions": (region,)})
    fleets: dict[str, int] = {}
    try:
        known = on_sale.offers(here, options).offers
    except NoOffer:
        return {}
    for offer in known:
        quota = quotas.quota_of(offer.instance_type, offer.market)
        if quota and not offer.obstacle and _meets(requirements, offer):
            vcpus = offer.vcpus * requirements.nodes
            fleets[quota.code] = min(vcpus, fleets.get(quota.code, vcpus))
    return fleets


def _meets(requirements: Requirements, offer: Offer) -> bool:
    markets = ("spot", "on-demand") if requirements.market == "spot-then-on-demand" else (requirements.market,)
    gpus = {gpu.casefold() for gpu in requirements.gpu}
    fits = requirements.gpus_per_node in (0, offer.gpus) and offer.market in markets
    return fits and (not gpus or (offer.gpu or "").casefold() in gpus)
