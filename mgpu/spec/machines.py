"""Which machines a run needs: the keys that a run file, `Requirements` and the Fleet resource have in common.

A key that stands here reaches the plan, the provider and the stack's state without another line.
"""

from __future__ import annotations

from pydantic import Field

from mgpu.spec.block import Block, Market, Word, Words
from mgpu.spec.provider import installed


class MachineKeys(Block):
    """The keys that say which machines are needed. Only these, and the provider's own settings, diff in a stack."""

    provider: Word = Field(
        description="who rents out the machines", json_schema_extra={"enum": list(installed().names)}
    )
    regions: Words = Field(default=(), description="where machines may be (default: any)")
    nodes: int = Field(default=1, ge=1, le=1024, description="machines")
    gpus_per_node: int = Field(default=0, ge=0, le=16, description="GPUs of a machine; one process each (0: none)")
    gpu: Words = Field(
        default=(), description="GPU types, best first; one type is used for the whole fleet (default: any)"
    )
    disk_gib: int = Field(default=100, ge=1, description="disk of a machine, GiB")
    market: Market = Field(default="on-demand", description="how the machines are bought")
    max_price_usd_per_hour: float = Field(gt=0, description="dollars per hour, whole fleet, all nodes")
    max_hours: float = Field(
        ge=0.01,  # half a minute: below it machines end before anything has begun
        le=24 * 60,
        description="hard cap: hours after which the machines end, whatever happens",
    )
    lease_minutes: float = Field(default=60, gt=0, description="minutes that a fleet without a run lives")
