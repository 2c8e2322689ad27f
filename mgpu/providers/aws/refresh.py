"""What AWS sells now: asked of every region at once, kept in the cache folder for `offers`.

A region that does not answer in time, or not fully, keeps what was known of it, and is named. Quotas are asked for too;
a user who may not read them still gets the prices.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from mgpu.errors import ProviderError, Transient
from mgpu.providers.aws import quotas
from mgpu.providers.aws import snapshot as snapshots
from mgpu.providers.aws.failures import calling
from mgpu.providers.aws.machinetypes import machine_of
from mgpu.providers.aws.snapshot import Machine, QuotaState, Region, Snapshot
from mgpu.providers.base import Refreshed

if TYPE_CHECKING:
    from mgpu.providers.aws.session import Account

DEADLINE_S = 120.0  # for all regions together
PRICING_REGION = "us-east-1"  # the price list has endpoints in a few regions only; each knows all
_AT_ONCE = 12
_GPU_FAMILIES = ["p*", "g*"]
_PRODUCT = {
    "productFamily": "Compute Instance",
    "instanceFamily": "GPU instance",
    "operatingSystem": "Linux",
    "preInstalledSw": "NA",
    "tenancy": "Shared",
    "capacitystatus": "Used",
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
    answers = _ask_all(names, lambda name: _ask(account, name, now), deadline_s)
    found = {name: answer for name, answer in answers.items() if isinstance(answer, _Found)}
    failed = {name: answer for name, answer in answers.items() if isinstance(answer, ProviderError)}
    if not found:
        raise next(iter(failed.values()))
    known = snapshots.current(account.options)
    snapshots.save(_merged(known, found, whose), snapshots.cache_file(account.options))
    unread = {name: f"quotas: {each.no_quotas}" for name, each in found.items() if each.no_quotas}
    return Refreshed(regions=tuple(found), failed={name: _line(error) for name, error in failed.items()} | unread)


def _ask_all(
    names: tuple[str, ...], ask: Callable[[str], _Found], deadline_s: float
) -> dict[str, _Found | ProviderError]:
    """The answers of all regions; daemon threads, because a process does not wait for who is late."""
    answers: dict[str, _Found | Exception] = {}
    gate = threading.Semaphore(_AT_ONCE)

    def work(name: str) -> None:
        with gate:
            try:
                answers[name] = ask(name)
            except Exception as error:  # noqa: BLE001  raised again by who waits for it
                answers[name] = error

    threads = [threading.Thread(target=work, args=(name,), daemon=True, name=f"offers {name}") for name in names]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = {name: Transient(f"aws {name}: no full answer within {deadline_s:.0f} s", scope="region") for name in names}
    return {name: _expected(answers.get(name, late[name])) for name in names}


def _expected(answer: _Found | Exception) -> _Found | ProviderError:
    if isinstance(answer, (_Found, ProviderError)):
        return answer
    raise answer


def _merged(known: Snapshot, found: dict[str, _Found], whose: str) -> Snapshot:
    machines = dict(known.machines)
    for each in found.values():
        machines |= each.machines
    day = datetime.fromtimestamp(max(each.region.at for each in found.values()), UTC).date()
    source = f"AWS, asked on {day}"
    others = [each for each in known.sources if not each.startswith("AWS, asked")]
    regions = known.regions | {name: each.region for name, each in found.items()}
    return Snapshot(
        sources=(source, *(others if set(known.regions) - set(found) else ())),
        account=whose,
        machines=machines,
        regions=regions,
    )


def _line(error: ProviderError) -> str:
    return "; ".join(part for part in (error.what, error.why) if part)


# --- one region


def _ask(account: Account, name: str, now: Callable[[], float]) -> _Found:
    ec2 = account.client("ec2", name)
    at = now()
    with calling("asking what is on sale", name, scope="region"):
        machines = dict(_machines(account, ec2))
        zone_ids = _zone_ids(ec2)
        region = Region(
            zones=_zones(account, ec2, machines, set(zone_ids.values())),
            spot=_spot(account, ec2, machines, zone_ids, at),
            spot_at=at,
            on_demand=_on_demand(account, name, machines),
            on_demand_at=at,
        )
    try:
        found = quotas.headroom(account, name, lambda kind: machines[kind].vcpus if kind in machines else None)
    except ProviderError as error:
        return _Found(machines, region, _line(error))
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
    zones: dict[str, list[str]] = {}
    if not machines:
        return {}
    arguments = {
        "LocationType": "availability-zone-id",
        "Filters": [{"Name": "instance-type", "Values": sorted(machines)}],
    }
    for offering in account.pages(ec2, "describe_instance_type_offerings", "InstanceTypeOfferings", **arguments):
        if offering["InstanceType"] in machines and offering["Location"] in ids:
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
        if zone is None or entry["InstanceType"] not in machines:
            continue
        key, price = (entry["InstanceType"], zone), (entry["Timestamp"], float(entry["SpotPrice"]))
        newest[key] = max(price, newest.get(key, price))
    prices: dict[str, dict[str, float]] = {}
    for (kind, zone), (_, usd) in sorted(newest.items()):
        prices.setdefault(kind, {})[zone] = usd
    return prices


def _on_demand(account: Account, region: str, machines: dict[str, Machine]) -> dict[str, float]:
    terms = _PRODUCT | {"regionCode": region}
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in terms.items()]
    client = account.client("pricing", PRICING_REGION)
    prices: dict[str, float] = {}
    for text in account.pages(client, "get_products", "PriceList", ServiceCode="AmazonEC2", Filters=filters):
        product = json.loads(text)
        kind, usd = product["product"]["attributes"].get("instanceType"), _usd(product)
        if kind in machines and usd:
            prices[kind] = usd
    return prices


def _usd(product: dict[str, Any]) -> float:
    """Dollars per hour of one product of the price list; 0 where it has no hourly price."""
    dimensions: Sequence[dict[str, Any]] = [
        dimension
        for term in product.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
    ]
    return next((float(each["pricePerUnit"].get("USD", 0)) for each in dimensions if each.get("unit") == "Hrs"), 0.0)
