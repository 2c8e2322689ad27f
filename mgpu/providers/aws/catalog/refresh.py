"""What AWS sells now: asked of every region at once, kept in the cache folder for `offers`.

    each region          machine types, zones, spot prices, quotas
    the price list       on-demand prices: one question a machine type, for all regions

What does not answer in time keeps what was known of it, and is named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu.errors import ProviderError
from mgpu.providers.aws.catalog import quotas
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.providers.aws.catalog.machine_types import machine_of
from mgpu.providers.aws.catalog.snapshot import Machine, QuotaState, Region, Snapshot
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.side_by_side import ask_all, in_a_line
from mgpu.providers.base import Refreshed

if TYPE_CHECKING:
    from mgpu.providers.aws.session import Account

DEADLINE_S = 120.0  # for everything together
PRICING_REGION = "us-east-1"  # the price list has endpoints in a few regions only; each knows all
PRICES = "on-demand prices"  # in the place of a region, where the price list did not answer
_GPU_FAMILIES = ["p*", "g*"]
_PRODUCT = {
    "operatingSystem": "Linux",
    "preInstalledSw": "NA",
    "tenancy": "Shared",
    "capacitystatus": "Used",
    "locationType": "AWS Region",
}


class _Found(NamedTuple):
    """What one region has answered; `no_quotas` says why its quotas are not known."""

    machines: dict[str, Machine]
    region: Region
    no_quotas: str = ""


def refresh(account: Account, *, deadline_s: float = DEADLINE_S, now: Callable[[], float] = time.time) -> Refreshed:
    """Asks all regions that are enabled for the account, and writes what they said in place of what was known.

    Raises:
        AuthError, InputError: there are no credentials, or those of another account than `aws.account`.
        ProviderError: the regions could not be listed, or not one of them answered.
    """
    whose, names = account.id(), account.regions()
    end = time.monotonic() + deadline_s
    found, failed = ask_all(names, lambda name: _ask(account, name, now), end)
    if not found:
        raise next(iter(failed.values()))
    kinds = sorted({kind for each in found.values() for kind in each.region.zones})
    prices, unpriced = ask_all(kinds, lambda kind: _on_demand(account, kind), end)
    reasons = {name: in_a_line(error) for name, error in failed.items()}
    reasons |= {name: f"quotas: {each.no_quotas}" for name, each in found.items() if each.no_quotas}
    if unpriced:
        reasons[PRICES] = in_a_line(next(iter(unpriced.values())))
    known = snapshots.current(account.options)
    fresh = {
        name: _priced(name, each.region, known.regions.get(name, Region()), None if unpriced else prices, now())
        for name, each in found.items()
    }
    machines = {kind: machine for each in found.values() for kind, machine in each.machines.items()}
    merged = _merged(known, fresh, machines, now())
    asked_by = {"account": whose, "credentials": snapshots.mark_of(account.options)}
    snapshots.save(merged.model_copy(update=asked_by), snapshots.cache_file(account.options))
    return Refreshed(regions=tuple(found), failed=reasons)


def _priced(name: str, region: Region, old: Region, prices: dict[str, dict[str, float]] | None, at: float) -> Region:
    """With the on-demand prices that are new, or else all that were known: one region's prices are of one day."""
    if prices is None:
        return region.model_copy(update={"on_demand": old.on_demand, "on_demand_at": old.on_demand_at})
    listed = {kind: prices[kind][name] for kind in region.zones if name in prices[kind]}
    return region.model_copy(update={"on_demand": listed, "on_demand_at": at})


def _merged(known: Snapshot, fresh: dict[str, Region], machines: dict[str, Machine], at: float) -> Snapshot:
    source = f"AWS, asked on {datetime.fromtimestamp(at, UTC).date()}"
    others = [each for each in known.sources if not each.startswith("AWS, asked")]
    return Snapshot(
        sources=(source, *(others if set(known.regions) - set(fresh) else ())),
        machines=known.machines | machines,
        regions=known.regions | fresh,
    )


# --- one region


def _ask(account: Account, name: str, now: Callable[[], float]) -> _Found:
    ec2, at = account.client("ec2", name), now()
    with calling("asking what is on sale", name, scope="region"):
        machines = dict(_machines(account, ec2))
        zone_ids = _zone_ids(ec2)
        zones = _zones(account, ec2, machines, set(zone_ids.values()))
        region = Region(zones=zones, spot=_spot(account, ec2, machines, zone_ids, at), spot_at=at)
    try:
        found = quotas.headroom(account, name, lambda kind: machines[kind].vcpus if kind in machines else None)
    except ProviderError as error:
        return _Found(machines, region, in_a_line(error))
    states = {
        each.code: QuotaState(name=quotas.name_of(each.code), limit_vcpus=each.limit_vcpus, used_vcpus=each.used_vcpus)
        for each in found.values()
    }
    return _Found(machines, region.model_copy(update={"quotas": states, "quotas_at": at}))


def _machines(account: Account, ec2: Any) -> Iterator[tuple[str, Machine]]:
    filters = [{"Name": "instance-type", "Values": _GPU_FAMILIES}]
    for entry in account.pages(ec2, "describe_instance_types", "InstanceTypes", Filters=filters):
        machine = machine_of(entry)
        if machine:
            yield entry["InstanceType"], machine


def _zone_ids(ec2: Any) -> dict[str, str]:
    """This account's names of the zones -> their ids; no local zones."""
    answer = ec2.describe_availability_zones()
    return {
        zone["ZoneName"]: zone["ZoneId"]
        for zone in answer["AvailabilityZones"]
        if zone.get("ZoneType", "availability-zone") == "availability-zone"
    }


def _zones(account: Account, ec2: Any, machines: dict[str, Machine], ids: set[str]) -> dict[str, tuple[str, ...]]:
    if not machines:
        return {}
    zones: dict[str, list[str]] = {}
    arguments = {
        "LocationType": "availability-zone-id",
        "Filters": [{"Name": "instance-type", "Values": sorted(machines)}],
    }
    for offering in account.pages(ec2, "describe_instance_type_offerings", "InstanceTypeOfferings", **arguments):
        if offering["Location"] in ids:
            zones.setdefault(offering["InstanceType"], []).append(offering["Location"])
    return {kind: tuple(sorted(found)) for kind, found in zones.items()}


def _spot(
    account: Account, ec2: Any, machines: dict[str, Machine], zone_ids: dict[str, str], at: float
) -> dict[str, dict[str, float]]:
    """The newest price of each type and zone; a history that begins now has, of each, the one that holds now."""
    if not machines:
        return {}
    arguments = {
        "InstanceTypes": sorted(machines),
        "ProductDescriptions": ["Linux/UNIX"],
        "StartTime": datetime.fromtimestamp(at, UTC),
    }
    newest: dict[tuple[str, str], tuple[datetime, float]] = {}
    for entry in account.pages(ec2, "describe_spot_price_history", "SpotPriceHistory", **arguments):
        zone = zone_ids.get(entry["AvailabilityZone"])
        if zone is not None:
            key, price = (entry["InstanceType"], zone), (entry["Timestamp"], float(entry["SpotPrice"]))
            newest[key] = max(price, newest.get(key, price))
    prices: dict[str, dict[str, float]] = {}
    for (kind, zone), (_, usd) in sorted(newest.items()):
        prices.setdefault(kind, {})[zone] = usd
    return prices


# --- the price list


def _on_demand(account: Account, kind: str) -> dict[str, float]:
    """Region -> US dollars per hour of one machine type."""
    terms = _PRODUCT | {"instanceType": kind}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in terms.items()]
    prices: dict[str, float] = {}
    with calling(f"asking for the price of {kind}", PRICING_REGION, scope="provider"):
        client = account.client("pricing", PRICING_REGION)
        for text in account.pages(client, "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters):
            product = json.loads(text)
            about, usd = product["product"]["attributes"], _usd(product)
            if usd and about.get("marketoption", "OnDemand") == "OnDemand":  # capacity blocks are listed beside it
                prices[about["regionCode"]] = usd
    return prices


def _usd(product: dict[str, Any]) -> float:
    """Dollars per hour of one product of the price list; 0 where it has no hourly price."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            if dimension.get("unit") == "Hrs":
                return float(dimension["pricePerUnit"].get("USD", 0))
    return 0.0
