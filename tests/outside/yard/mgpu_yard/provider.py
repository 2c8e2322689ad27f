"""The eight calls. A yard hands out processes of this machine, so that tests need no other one."""

from __future__ import annotations

from collections.abc import Mapping

from mgpu import paths
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import FleetRequest, FleetState, Handle, Intent, Offers, Provider
from mgpu.providers.local.provider import LocalProvider
from mgpu_yard.options import ENTRY, YardOptions


class YardProvider(Provider):
    """Rents out the machines of a yard, on demand, at a price that its user may say."""

    name = "yard"
    capabilities = ENTRY.capabilities

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self.options = YardOptions.of(options or {})
        self._machines = LocalProvider(root=paths.state_dir() / "yard")

    def check(self) -> None:
        """Nothing can be wrong with a yard."""

    def offers(self, requirements: Requirements) -> Offers:
        """One machine type, at the gate that the run file names."""
        options = YardOptions.of(requirements.provider_options)
        found = self._machines.offers(requirements).offers
        changes = {"provider": "yard", "instance_type": "barrow", "price_usd_per_hour": options.price_usd_per_hour}
        here = [o.model_copy(update=changes) for o in found if o.market == "on-demand"]
        return Offers(
            offers=tuple(o.model_copy(update={"zone": options.gate}) for o in here), source="the yard's board"
        )

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        return self._ours(self._machines.create(_bare(request), offer, token))

    def find(self, intent: Intent) -> Handle | None:
        found = self._machines.find(intent)
        return self._ours(found) if found else None

    def describe(self, handle: Handle) -> FleetState:
        return self._machines.describe(handle)

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        return self._ours(self._machines.repair(handle, missing, _bare(request), offer, token))

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        return tuple(map(self._ours, self._machines.list_owned(owner)))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        return self._machines.destroy(handle, nodes)

    def _ours(self, handle: Handle) -> Handle:
        return handle.model_copy(update={"provider": self.name})


def _bare(request: FleetRequest) -> FleetRequest:
    """Without the yard's own options, which mean nothing to the machines."""
    plain = request.requirements.model_copy(update={"provider_options": {}})
    return request.model_copy(update={"requirements": plain})
