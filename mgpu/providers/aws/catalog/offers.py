"""Requirements -> what AWS sells, from the snapshot: no boto3, and no network but for where the run's buckets are.

An offer is one machine type in one zone on one market. What has no price of a known date is left out; a spot price that
is not known is given as its limit, the on-demand price, and marked as such: AWS charges no more for spot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple, TypeVar

from mgpu.errors import InputError, NoOffer
from mgpu.plan.model import BoughtAs, Headroom, Obstacle, Offer, Requirements
from mgpu.providers.aws.catalog import snapshot as snapshots
from mgpu.providers.aws.catalog.machine_types import in_default_image
from mgpu.providers.aws.catalog.quotas import quota_of, raise_command
from mgpu.providers.aws.catalog.snapshot import Machine, Region, Snapshot
from mgpu.providers.aws.options import Disk, Options
from mgpu.providers.base import Offers

REFRESH = "mgpu offers aws --refresh"
_BOTH = "spot-then-on-demand"
_USE_IS_KNOWN_S = 600.0  # after that, machines that ran at the refresh may be gone: only the limit counts
_T = TypeVar("_T")


def offers(
    needed: Requirements,
    options: Options,
    *,
    region_of: Callable[[str], str] = lambda _: "",
    now: Callable[[], float] = time.time,
) -> Offers:
    """What is on sale for these requirements; where nothing meets them, what comes nearest, for the plan to say why.
    `region_of`: the region of a store, empty where it is not known; asked where there is a choice.

    Raises:
        InputError: a region, a GPU or a type that AWS does not have, with the nearest name; a disk that cannot be.
        NoOffer: no price is known in any of these regions.
    """
    known = snapshots.current(options)
    require_known(known, needed, options)
    rows = list(_rows(known, needed, options))
    regions = needed.regions or tuple(known.regions)
    priced = {row.region for row in rows}
    if not priced & set(regions):
        raise no_prices(needed.regions)
    rows = _narrow(rows, lambda row: row.region in regions, lambda row: needed.market in (row.market, _BOTH))
    near = {region_of(url) for url in needed.stores} - {""} if len({row.region for row in rows}) > 1 else set[str]()
    silent = sorted(set(needed.regions) - priced)
    return Offers(
        offers=tuple(_offer(known, row, needed, now(), options, near) for row in rows),
        source="; ".join(known.sources),
        notes=(f"no prices are known in {', '.join(silent)}: `{REFRESH}`",) if silent else (),
    )


class Row(NamedTuple):
    """A machine type in one zone on one market; `usd` is a price of the day `at` (UNIX seconds), or its limit."""

    type: str
    machine: Machine
    region: str
    zone: str
    market: BoughtAs
    usd: float
    at: float
    is_limit: bool = False


def _rows(known: Snapshot, needed: Requirements, options: Options) -> Iterator[Row]:
    wanted = [gpu.casefold() for gpu in needed.gpu]
    machines = _narrow(
        [item for item in known.machines.items() if options.instance_type in (None, item[0])],
        lambda item: not wanted or item[1].gpu.casefold() in wanted,
        lambda item: not needed.gpus_per_node or item[1].gpus == needed.gpus_per_node,
    )
    for name, region in known.regions.items():
        for kind, machine in machines:
            for zone in region.zones.get(kind, ()):
                yield from _priced(kind, machine, name, region, zone)


def _priced(kind: str, machine: Machine, name: str, region: Region, zone: str) -> Iterator[Row]:
    listed = region.on_demand.get(kind)
    spot = region.spot.get(kind, {}).get(zone)
    if spot is not None:
        yield Row(kind, machine, name, zone, "spot", spot, region.spot_at)
    elif listed is not None and not region.spot_at:  # a refresh that shows no spot price means that there is no market
        yield Row(kind, machine, name, zone, "spot", listed, region.on_demand_at, is_limit=True)
    if listed is not None:
        yield Row(kind, machine, name, zone, "on-demand", listed, region.on_demand_at)


def _offer(known: Snapshot, row: Row, needed: Requirements, now: float, options: Options, near: set[str]) -> Offer:
    quota = quota_of(row.type, row.market)
    bid = needed.max_price_usd_per_hour / needed.nodes
    # AWS bills spot as its price changes: up to the bid, and never above on-demand
    most = max(row.usd, min(bid, known.regions[row.region].on_demand.get(row.type, bid)))
    counted = {
        "most_usd_per_hour": most if row.market == "spot" else None,
        "near_stores": row.region in near if near else None,
        "quota": quota.code if quota else "",
        "headroom": _headroom(known.regions[row.region], row.region, quota.code, now) if quota else None,
    }
    return offer_of(row, options).model_copy(update=counted)


def offer_of(row: Row, options: Options) -> Offer:
    """The offer of a row, as if no quota counted."""
    machine = row.machine
    return Offer(
        provider="aws",
        instance_type=row.type,
        gpu=machine.gpu,
        gpus=machine.gpus,
        gpu_memory_gib=machine.gpu_memory_gib,
        vcpus=machine.vcpus,
        memory_gib=machine.memory_gib,
        nvme_gib=machine.nvme_gib,
        interconnect=machine.interconnect,
        network_gbit_s=machine.network_gbit_s,
        efa_cards=machine.efa_cards,
        market=row.market,
        price_usd_per_hour=row.usd,
        price_is_limit=row.is_limit,
        region=row.region,
        zone=row.zone,
        stock=None,
        obstacle=_obstacle(row, options),
        fetched_at=row.at,
    )


def _obstacle(row: Row, options: Options) -> Obstacle | None:
    if options.machine_image or not row.machine.gpus or in_default_image(row.type):
        return None
    family = row.type.partition(".")[0]
    return Obstacle(
        reason=f"the default machine image does not support {family} machines",
        cure=f"Set `aws: {{machine_image: ami-...}}` to an image that supports {family}.",
    )


def _headroom(region: Region, name: str, code: str, now: float) -> Headroom | None:
    state = region.quotas.get(code)
    if state is None:
        return None
    used = state.used_vcpus if now - region.quotas_at < _USE_IS_KNOWN_S else 0
    return Headroom(
        name=state.name,
        limit_vcpus=state.limit_vcpus,
        left_vcpus=max(0, state.limit_vcpus - used),
        at=region.quotas_at,
        raise_command=raise_command(code, name),
    )


def _narrow(items: list[_T], *tests: Callable[[_T], bool]) -> list[_T]:
    """What passes the tests one after another, up to the first that nothing passes."""
    for test in tests:
        kept = [item for item in items if test(item)]
        if not kept:
            break
        items = kept
    return items


def require_known(known: Snapshot, needed: Requirements, options: Options) -> None:
    """Raises InputError: a region, a GPU or a type that AWS does not have, with the nearest name; a disk that cannot
    be."""
    gpus = sorted({machine.gpu for machine in known.machines.values()})
    mistakes = [
        *_mistakes("regions", "region", needed.regions, sorted(known.regions)),
        *_mistakes("gpu", "GPU", needed.gpu, gpus),
        *_mistakes(
            "aws.instance_type", "type with GPUs", filter(None, [options.instance_type]), sorted(known.machines)
        ),
    ]
    cure = f"`mgpu offers aws` lists what there is; what is new at AWS is learnt by `{REFRESH}`." if mistakes else ""
    if wrong := (options.disk or Disk()).wrong_size(needed.disk_gib):
        mistakes.append(f"disk_gib: {wrong}, as EBS has it")
        cure = f"{cure} Change `disk_gib`, or `aws.disk`.".lstrip()
    if mistakes:
        raise InputError("aws does not have what the run file asks for", "\n".join(mistakes), cure)


def _mistakes(key: str, thing: str, values: Iterable[str], known: Sequence[str]) -> Iterator[str]:
    for value in values:
        # a GPU may be named in any case, a region as AWS writes it
        if value not in known and not (key == "gpu" and value.casefold() in map(str.casefold, known)):
            yield f"{key}: there is no {thing} `{value}`{_hint(value, known)}"


def _hint(value: str, known: Sequence[str]) -> str:
    """The nearest names: longer ones (A100 -> A100-80GB), the same letters in another order, similar ones; else all."""
    sought = value.casefold()
    longer = [name for name in known if name.casefold().startswith(sought)]
    swapped = [name for name in known if sorted(name.casefold()) == sorted(sought)]
    near = longer or swapped or get_close_matches(value, known, n=1, cutoff=0.75)
    if not near:
        return f"; known: {', '.join(known)}"
    return f" (did you mean {' or '.join(f'`{name}`' for name in near)}?)"


def no_prices(regions: Sequence[str]) -> NoOffer:
    """The error where no price is known in these regions (none: in any)."""
    where = f"in {', '.join(regions)}" if regions else "in any region"
    return NoOffer(
        f"no price of what the run file asks for is known {where}",
        "mgpu comes with prices of a few regions and types only.",
        f"Ask AWS for the others: `{REFRESH}`.",
    )
