"""The eight calls over Yard's API, which rents out one machine a request. Nothing is remembered but in labels."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from mgpu.errors import CleanupFailed, Conflict, ProviderError, RateLimited, Transient
from mgpu.plan.model import Offer, Requirements
from mgpu.providers.base import (
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    NodePhase,
    NodeState,
    Offers,
    Provider,
    of_each,
)
from mgpu.providers.start import start_script
from mgpu_yard.api import Api, Instance
from mgpu_yard.options import ENTRY, YardOptions

_PHASES = {
    "starting": NodePhase.PENDING,
    "running": NodePhase.RUNNING,
    "stopping": NodePhase.STOPPING,
    "terminated": NodePhase.TERMINATED,
}


class YardProvider(Provider):
    """Rents machines of Yard."""

    name = YardOptions.block
    capabilities = ENTRY.capabilities

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = YardOptions.of(options or {})
        self._api = Api(self._options, keys=self.capabilities.idempotent_create)

    def configured(self) -> bool:
        """There is a key."""
        return self._options.key in os.environ

    def check(self) -> None:
        self._api.types()

    def offers(self, requirements: Requirements) -> Offers:
        """Each type in each region on each market; Yard has no GPUs."""
        sold = [] if requirements.gpus_per_node or requirements.gpu else self._api.types()
        here = [each for each in sold if not requirements.regions or each["region"] in requirements.regions]
        return Offers(offers=tuple(map(self._offer, here)), source="live")

    def _offer(self, sold: Mapping[str, Any]) -> Offer:
        return Offer(
            provider=self.name,
            instance_type=sold["type"],
            vcpus=sold["vcpus"],
            memory_gib=sold["memory_gib"],
            market=sold["market"],
            price_usd_per_hour=sold["price"],
            region=sold["region"],
            stock=sold["free"],
            quota="instances",
            fetched_at=time.time(),
        )

    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        return self._handle(self._make(request, offer, token, range(request.requirements.nodes)))

    def _make(self, request: FleetRequest, offer: Offer, token: str, ranks: Iterable[int]) -> list[Instance]:
        """The token's machines of these ranks: those that there are, and new ones for the others."""
        asked = _asked(request, offer)
        made = {each["labels"]["rank"]: each for each in self._api.labelled(token=token)}
        if any(each["labels"]["asked"] != asked["labels"]["asked"] for each in made.values()):
            raise Conflict(f"yard: token {token} was used with other parameters", scope="offer")
        for rank in map(str, ranks):
            labels = {**asked["labels"], "token": token, "rank": rank}
            try:
                made[rank] = made.get(rank) or self._api.make({**asked, "labels": labels}, f"{token}-{rank}")
            except (RateLimited, Transient):  # the same call comes again, and goes on
                raise
            except ProviderError as error:  # a refusal says that nothing was made
                self._take_back(made.values(), error)
                raise
        return list(made.values())

    def _take_back(self, made: Iterable[Instance], why: ProviderError) -> None:
        for each in made:
            try:
                self._api.end(each["id"])
            except (RateLimited, Transient):  # the same call comes again
                raise
            except ProviderError as error:
                raise CleanupFailed(f"yard: {each['id']} may be billed", str(error), "Run `mgpu gc`.") from why

    def find(self, intent: Intent) -> Handle | None:
        made = self._api.labelled(token=intent.token)
        return self._handle(made) if made else None

    def describe(self, handle: Handle) -> FleetState:
        found = {each["id"]: each for each in self._api.labelled(fleet=handle.fleet)}
        for name in filter(None, handle.ids):  # too new for the listing, or gone for so long that it is forgotten
            found[name] = found.get(name) or self._api.one(name)
        return FleetState(nodes=tuple(_node(rank, name, found.get(name)) for rank, name in enumerate(handle.ids)))

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        made = {int(each["labels"]["rank"]): each["id"] for each in self._api.labelled(token=token)}
        old = tuple(handle.ids[rank] for rank in missing if handle.ids[rank] != made.get(rank))
        if not self.destroy(handle, old):
            raise Transient("yard: a lost machine has not ended yet", ", ".join(old))
        made = {int(each["labels"]["rank"]): each["id"] for each in self._make(request, offer, token, missing)}
        ids = tuple(made.get(rank, name) for rank, name in enumerate(handle.ids))
        return handle.model_copy(update={"ids": ids, "generation": request.generation, "token": token})

    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        gangs: dict[str, list[Instance]] = {}
        for each in self._api.labelled(owner=owner):
            if each["status"] != "terminated":
                gangs.setdefault(each["labels"]["token"], []).append(each)
        return tuple(map(self._handle, gangs.values()))

    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        ended = of_each(filter(None, handle.ids if nodes is None else nodes), self._api.end)
        return all(each is None or each["status"] == "terminated" for each in ended)

    def _handle(self, made: list[Instance]) -> Handle:
        labels, ids = made[0]["labels"], {int(each["labels"]["rank"]): each["id"] for each in made}
        return Handle(
            provider=self.name,
            region=made[0]["region"],
            fleet=labels["fleet"],
            generation=int(labels["generation"]),
            token=labels["token"],
            ids=tuple(ids.get(rank, "") for rank in range(int(labels["nodes"]))),
            made_at=max(each["created_at"] for each in made),
        )


def _asked(request: FleetRequest, offer: Offer) -> dict[str, Any]:
    """What is asked of Yard, the same for all ranks; its labels are all that tells later whose a machine is."""
    return {
        "type": offer.instance_type,
        "region": offer.region,
        "market": offer.market,
        "disk": YardOptions.of(request.requirements.provider_options).disk,
        "start_script": start_script(request, "yard"),
        "hard_cap_s": request.hard_cap_s,  # Yard ends machines by its own clock, too
        "ends_by": request.ends_by,
        "labels": {
            "owner": request.owner,
            "fleet": request.fleet,
            "generation": str(request.generation),
            "nodes": str(request.requirements.nodes),
            "asked": request.digest(offer)[:16],
        },
    }


def _node(rank: int, name: str, said: Instance | None) -> NodeState:
    if said is None:
        why = "Yard knows no such machine any more" if name else "no machine was made for this rank"
        return NodeState(rank=rank, id=name, phase=NodePhase.TERMINATED, reason=why)
    if said["status"] not in _PHASES:
        raise Transient(f"yard: {name} is {said['status']}", "this version of mgpu-yard knows no such state")
    return NodeState(
        rank=rank,
        id=name,
        phase=_PHASES[said["status"]],
        address=said.get("ip", ""),
        port=said.get("port", 22),
        user=said.get("user", ""),
        host_key=said.get("host_key", ""),
        private_address=said.get("private_ip", ""),
        price_usd_per_hour=said["price"],
        hard_cap_at=said["ends_at"],
        reason=said["reason"],
    )
