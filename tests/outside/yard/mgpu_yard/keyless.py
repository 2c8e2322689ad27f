"""The same over an API that knows no Idempotency-Key, as most do: what was made is looked for before more is made."""

from __future__ import annotations

from typing import Any

from mgpu.errors import AmbiguousCreate, RateLimited, Transient
from mgpu_yard.api import Instance
from mgpu_yard.provider import YardProvider


class Keyless(YardProvider):
    """Promises less: of two creates by one token at once each may make machines; Pulumi's lock keeps them apart."""

    capabilities = YardProvider.capabilities.model_copy(update={"idempotent_create": False})

    def _make(self, *asked: Any) -> list[Instance]:
        try:
            return super()._make(*asked)
        except (RateLimited, Transient) as error:  # some may be made, and a listing may not show them yet
            raise AmbiguousCreate(error.what, error.why, retry_after=error.retry_after) from error
