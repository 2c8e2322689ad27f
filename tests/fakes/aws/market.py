"""What machines cost and which quota they count against: plausible numbers of the fake's own."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any

# USD per hour on demand in us-east-1; what is not named is priced by its vCPUs and GPUs
ON_DEMAND = {
    "g4dn.xlarge": 0.526,
    "g4dn.12xlarge": 3.912,
    "g5.xlarge": 1.006,
    "g5.12xlarge": 5.672,
    "g5.48xlarge": 16.288,
    "g6.xlarge": 0.8048,
    "g6.12xlarge": 4.6016,
    "g6.48xlarge": 13.3504,
    "g6e.xlarge": 1.861,
    "g6e.48xlarge": 30.1312,
    "p4d.24xlarge": 21.9576,
    "p4de.24xlarge": 27.4471,
    "p5.48xlarge": 55.04,
    "p5en.48xlarge": 63.296,
    "p6-b200.48xlarge": 113.9328,
}
DEARER = {"us": 1.0, "ca": 1.1, "eu": 1.12, "ap": 1.25, "sa": 1.5}  # by the first part of a region's name
QUOTAS = {  # family, market -> code of the quota; in vCPUs
    ("p", "on-demand"): "L-417A185B",
    ("g", "on-demand"): "L-DB2E81BA",
    ("other", "on-demand"): "L-1216C47A",
    ("p", "spot"): "L-7212CCBC",
    ("p5", "spot"): "L-C4BD4855",
    ("g", "spot"): "L-3819A6DF",
    ("other", "spot"): "L-34B43A08",
}
QUOTA_NAMES = {
    "L-417A185B": "Running On-Demand P instances",
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-1216C47A": "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-0263D0A3": "EC2-VPC Elastic IPs",
    "L-34B43A08": "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
}
DEFAULT_QUOTA_VCPUS = 200_000.0


@cache
def _types() -> dict[str, dict[str, Any]]:
    from moto.ec2.models.instance_types import INSTANCE_TYPES  # a second: not where somebody only names this module

    return INSTANCE_TYPES


def known(instance_type: str) -> bool:
    """Whether there is such a type at all."""
    return instance_type in _types()


@cache
def _offered(region: str) -> dict[str, list[str]]:
    from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

    rows = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, ())
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["InstanceType"], []).append(row["Location"])
    return found


def zones(instance_type: str, region: str) -> list[str]:
    """The zones of a region that have the type."""
    return sorted(_offered(region).get(instance_type, []))


def sold_in_blocks(instance_type: str | None) -> bool:
    """Whether there are Capacity Blocks of it."""
    return "capacity-block" in _types().get(instance_type, {}).get("SupportedUsageClasses", ())


@cache
def gpu_types() -> list[str]:
    """All that have a GPU."""
    return sorted(name for name in _types() if gpus(name))


def vcpus(instance_type: str) -> int:
    """Of one machine."""
    return _types()[instance_type]["VCpuInfo"]["DefaultVCpus"]


def gpus(instance_type: str) -> int:
    """Of one machine."""
    cards: list[dict[str, Any]] = _types()[instance_type].get("GpuInfo", {}).get("Gpus", [])
    return sum(card["Count"] for card in cards)


def quota_code(instance_type: str, market: str) -> str:
    """The quota that a machine of this type counts against."""
    family = (
        "p" if instance_type.startswith("p") else "g" if instance_type[:2] in ("g4", "g5", "g6", "gr", "g7") else ""
    )
    if market == "spot" and instance_type.startswith(("p5", "p6")):
        family = "p5"
    return QUOTAS[family or "other", market]


def on_demand_usd(instance_type: str, region: str) -> float:
    """Per hour."""
    listed = ON_DEMAND.get(instance_type, 0.05 * vcpus(instance_type) + 0.5 * gpus(instance_type))
    return round(listed * DEARER.get(region.split("-")[0], 1.2), 4)


def spot_usd(instance_type: str, zone: str, at: float) -> float:
    """Per hour at UNIX time `at`: a quarter to a half of on demand by zone, a few percent up and down in a day."""
    digest = hashlib.sha256(f"{instance_type} {zone}".encode()).digest()
    share = 0.25 + 0.25 * digest[0] / 255
    wave = 1 + 0.04 * math.sin(2 * math.pi * (at / 86400 + digest[1] / 255))
    return round(on_demand_usd(instance_type, zone[:-1]) * share * wave, 4)
