"""What is known of the yard before it is imported: its block of the run file, and what it can do."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mgpu.spec.block import ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry


class YardOptions(ProviderOptions):
    """`yard:` settings of provider yard."""

    block = "yard"

    gate: Literal["north", "south"] = Field("north", description="where machines are handed out")
    price_usd_per_hour: float = Field(0.07, ge=0, description="what one machine costs")


ENTRY = ProviderEntry(
    provider="mgpu_yard.provider:YardProvider",
    options=YardOptions,
    capabilities=Capabilities(multi_node=True, this_machine=True, idempotent_create=True),
)
