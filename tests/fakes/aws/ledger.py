"""What AWS would bill: moto's own machines, disks and addresses, never what mgpu believes."""

from __future__ import annotations

from typing import Any

from moto.ec2.models import ec2_backends

from fakes.aws.cloud import Cloud

OWNER = "mgpu:owner"


def bill(cloud: Cloud) -> list[dict[str, Any]]:
    """A row for each machine that ever was."""
    regions = [(region, one) for account in ec2_backends.values() for region, one in account.items()]
    return [_machine(region, each) for region, one in regions for each in one.all_instances()]


def _machine(region: str, instance: Any) -> dict[str, Any]:
    return {
        "id": instance.id,
        "instance_type": instance.instance_type,
        "market": instance.lifecycle or "on-demand",
        "region": region,
        "zone": instance.availability_zone,
        "owner": {tag["key"]: tag["value"] for tag in instance.get_tags()}.get(OWNER),
        "usd_per_hour": 0.0,
        "launched_at": instance.launch_time.timestamp(),
        "ended_at": None,
    }
