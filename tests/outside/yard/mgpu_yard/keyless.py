"""The same over an API that knows no Idempotency-Key, as most do: what was made is looked for before more is made."""

from __future__ import annotations

from mgpu_yard.provider import YardProvider


class Keyless(YardProvider):
    """Promises less: of two creates by one token at once each may make machines; Pulumi's lock keeps them apart."""

    capabilities = YardProvider.capabilities.model_copy(update={"idempotent_create": False})
