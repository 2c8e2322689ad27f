"""Service quotas of EC2 for machines with GPUs: which one an offer counts against, and how much of it is left.

They count vCPUs of running machines, by family and market, in each region.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mgpu.plan.model import BoughtAs
from mgpu.providers.aws import names
from mgpu.providers.aws.failures import calling

if TYPE_CHECKING:
    from mgpu.providers.aws.session import Account


class Quota(NamedTuple):
    """One limit of an account: its code, AWS's name of it, and which machines count."""

    code: str
    name: str
    family: str
    market: BoughtAs
    types: str


# AWS publishes no code for spot machines of P6
QUOTAS = (
    Quota("L-417A185B", "Running On-Demand P instances", "P", "on-demand", r"p\d"),
    Quota("L-DB2E81BA", "Running On-Demand G and VT instances", "G and VT", "on-demand", r"(gr?|vt)\d"),
    Quota("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", "P2 to P4", "spot", r"p[234]"),
    Quota("L-C4BD4855", "All P5 Spot Instance Requests", "P5", "spot", r"p5"),
    Quota("L-3819A6DF", "All G and VT Spot Instance Requests", "G and VT", "spot", r"(gr?|vt)\d"),
)


class QuotaUse(NamedTuple):
    """What a quota allows in a region, and what of it is in use, in vCPUs."""

    limit_vcpus: int
    used_vcpus: int
    code: str


def quota_of(instance_type: str, market: BoughtAs) -> Quota | None:
    """The quota that a machine counts against; None: not known."""
    return next((q for q in QUOTAS if q.market == market and re.match(q.types, instance_type)), None)


def name_of(code: str) -> str:
    """AWS's name of a quota; the code itself where it is not one of ours."""
    return next((quota.name for quota in QUOTAS if quota.code == code), code)


def raise_command(code: str, region: str) -> str:
    """The command that asks AWS for more; the number of vCPUs goes at its end."""
    return (
        "aws service-quotas request-service-quota-increase --service-code ec2"
        f" --quota-code {code} --region {region} --desired-value"
    )


def headroom(
    account: Account, region: str, vcpus_of: Callable[[str], int | None] = lambda _: None
) -> dict[str, QuotaUse]:
    """Limit and use of each quota, by `family market`, e.g. `P on-demand`; a limit that AWS does not tell is left out.

    `vcpus_of` tells a type's vCPUs; where it does not know, the machine's own processor options do.

    Raises:
        PermissionDenied: `servicequotas:ListServiceQuotas` or `ec2:DescribeInstances` is missing.
        ProviderError: as `calling` translates it.
    """
    with calling("reading the service quotas of EC2", region, scope="region"):
        client = account.client("service-quotas", region)
        limits = {
            quota["QuotaCode"]: int(quota["Value"])
            for quota in account.pages(client, "list_service_quotas", "Quotas", ServiceCode="ec2")
        }
    used = _used(account, region, vcpus_of)
    return {
        f"{quota.family} {quota.market}": QuotaUse(limits[quota.code], used.get(quota.code, 0), quota.code)
        for quota in QUOTAS
        if quota.code in limits
    }


def _used(account: Account, region: str, vcpus_of: Callable[[str], int | None]) -> dict[str, int]:
    """vCPUs of machines that run or start, by quota code; those in Capacity Blocks count against none."""
    filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    used: dict[str, int] = {}
    with calling("counting the machines that run", region, scope="region"):
        client = account.client("ec2", region)
        for reservation in account.pages(client, "describe_instances", "Reservations", Filters=filters):
            for machine in reservation["Instances"]:
                lifecycle = machine.get("InstanceLifecycle")
                market: BoughtAs = "spot" if lifecycle == "spot" else "on-demand"
                quota = quota_of(machine["InstanceType"], market)
                if quota is not None and lifecycle != names.CAPACITY_BLOCK:
                    cpus = machine.get("CpuOptions", {})
                    own = cpus.get("CoreCount", 0) * cpus.get("ThreadsPerCore", 0)
                    used[quota.code] = used.get(quota.code, 0) + (vcpus_of(machine["InstanceType"]) or own)
    return used
