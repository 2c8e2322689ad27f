"""Provider `local` of a test's own, and its real nodes, which are all gone afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from waiting import until

from mgpu.plan.model import Requirements
from mgpu.providers.base import FleetRequest, Handle, NodePhase
from mgpu.providers.local import bill
from mgpu.providers.local.nodes import Instance
from mgpu.providers.local.provider import LocalProvider


@dataclass
class LocalWorld:
    """The provider; `public`: the key that its nodes let in."""

    provider: LocalProvider
    public: str

    @property
    def root(self) -> Path:
        return self.provider.root

    def request(
        self, nodes: int = 1, *, generation: int = 1, lease_s: float = 300, hard_cap_s: float = 600, **options: str
    ) -> FleetRequest:
        needed = Requirements(
            provider="local", nodes=nodes, max_price_usd_per_hour=9, max_hours=1, provider_options=options
        )
        return FleetRequest(
            fleet="demo",
            generation=generation,
            owner="o-1",
            requirements=needed,
            ssh_public_key=self.public,
            lease_s=lease_s,
            hard_cap_s=hard_cap_s,
        )

    def instance(self, handle: Handle, rank: int = 0) -> Instance:
        return Instance(self.root, handle.ids[rank])

    def phase(self, handle: Handle, rank: int = 0) -> NodePhase:
        return self.provider.describe(handle).nodes[rank].phase

    def gone(self, handle: Handle) -> None:
        until(lambda: self.provider.destroy(handle))

    def all_gone(self) -> None:
        """Ends whatever the test has left, and looks at the bill."""
        for handle in self.provider.list_owned("o-1"):
            self.gone(handle)
        assert bill.read(self.root).alive == ()
