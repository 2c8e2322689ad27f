"""What AWS would bill: moto's own machines, disks and addresses, never what mgpu believes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC
from typing import Any

from moto.ec2.models import ec2_backends

from fakes.aws.cloud import Cloud
from fakes.aws.life import Life

OWNER = "mgpu:owner"
DISK_USD_PER_GIB_HOUR = 0.08 / 730
ADDRESS_USD_PER_HOUR = 0.005

Row = dict[str, Any]


def bill(cloud: Cloud) -> list[Row]:
    """A row for each machine that ever was, and for each disk and address that no living machine has."""
    living = {life.instance.id for life in cloud.lives.alive()}
    rows = [_machine(life) for life in cloud.lives.by_id.values()]
    for account in ec2_backends.values():
        for region, backend in account.items():
            rows += [*_disks(region, backend, living), *_addresses(region, backend, living)]
    return rows


def _machine(life: Life) -> Row:
    kind, zone, market = life.pool.instance_type, life.pool.zone, life.pool.market
    row = _row(life.instance, kind, life.pool.region, zone, life.usd_per_hour)
    return {**row, "market": market, "launched_at": life.launched_at, "ended_at": life.ended_at}


def _disks(region: str, backend: Any, living: set[str]) -> Iterator[Row]:
    for volume in backend.volumes.values():
        if volume.attachment is None or volume.attachment.instance.id not in living:
            usd = float(volume.size) * DISK_USD_PER_GIB_HOUR
            row = _row(volume, f"disk {volume.size} GiB", region, volume.zone.name, usd)
            yield {**row, "launched_at": volume.create_time.replace(tzinfo=UTC).timestamp()}


def _addresses(region: str, backend: Any, living: set[str]) -> Iterator[Row]:
    for address in backend.addresses:
        if address.instance_id not in living and not (address.eni and address.eni.instance):
            yield _row(address, "address", region, "", ADDRESS_USD_PER_HOUR)


def _row(what: Any, kind: str, region: str, zone: str, usd: float) -> Row:
    tags = {tag["key"]: tag["value"] for tag in what.get_tags()}
    return {
        "id": what.id,
        "instance_type": kind,
        "market": "on-demand",
        "region": region,
        "zone": zone,
        "owner": tags.get(OWNER),
        "usd_per_hour": usd,
        "launched_at": time.time(),
        "ended_at": None,
    }
