"""What is known of Yard before it is imported: its block of the run file, and what it can do."""

from __future__ import annotations

from typing import Annotated, Literal

from mgpu_train.config import EnvName
from pydantic import Field

from mgpu.spec.block import ProviderOptions
from mgpu.spec.provider import Capabilities, ProviderEntry
from mgpu.spec.values import form

_Address = Annotated[str, form(r"^https?://[^\s/]+\S*$", "an address that begins with https:// or http://")]


class YardOptions(ProviderOptions):
    """`yard:` settings of provider yard."""

    block = "yard"

    endpoint: _Address = Field("https://api.yard.example/v1", description="address of the API")
    key: EnvName = Field("YARD_API_KEY", description="environment variable that holds your API key")
    disk: Literal["ssd", "nvme"] = Field("ssd", description="kind of disk that machines have")
    answer_s: float = Field(30, gt=0, description="seconds that one answer may take")


ENTRY = ProviderEntry(
    provider="mgpu_yard.provider:YardProvider",
    options=YardOptions,
    capabilities=Capabilities(
        spot=True,
        multi_node=True,
        idempotent_create=True,  # by Idempotency-Key
        listing_lag_s=10,
        boot_s=120,
        end_s=60,
        notices="file",
        account_options=frozenset({"endpoint", "key"}),
        this_machine=True,  # of the test's cloud alone: its machines are processes. Yours says nothing here
    ),
)
