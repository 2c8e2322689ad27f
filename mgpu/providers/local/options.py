"""What is known of provider `local` before it is imported."""

from __future__ import annotations

from pydantic import Field

from mgpu.spec.block import File, ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry


class Options(ProviderOptions):
    """`local:` settings of provider local."""

    block = "local"

    python: File | None = Field(
        None, description="Python interpreter of the nodes; has torch (default: the one that runs mgpu)"
    )


ENTRY = ProviderEntry(
    provider="mgpu.providers.local.provider:LocalProvider",
    options=Options,
    capabilities=Capabilities(spot=True, multi_node=True, this_machine=True, idempotent_create=True, notices="file"),
)
