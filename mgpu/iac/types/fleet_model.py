"""The Fleet resource's properties: inputs (the requirements) and outputs (what was bought), camel case on the wire."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from mgpu.acquire import Acquired
from mgpu.errors import InputError
from mgpu.plan.model import BoughtAs, Offer, Requirements
from mgpu.providers import registry
from mgpu.providers.base import (
    FleetRequest,
    FleetState,
    Handle,
    JumpHost,
    NodeState,
    Provider,
    ProxyCommand,
    other_usd_per_hour,
)
from mgpu.spec.block import MachineKeys, Word
from mgpu.spec.provider import installed

_ON_RECORD = 20  # offers; a search over all regions has thousands


class Properties(BaseModel):
    """The base: frozen, no unknown keys, camel case in state."""

    model_config = ConfigDict(
        defer_build=True, frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )

    def to_wire(self) -> dict[str, Any]:
        """As plain data with the wire's names."""
        return self.model_dump(mode="json", by_alias=True)


class FleetInputs(MachineKeys, Properties):
    """What diffs: the requirements, the key that may log in, and the names that machines carry."""

    provider: Word = Field(description="who rents out the machines")
    nodes: int = Field(ge=1, le=1024, description="machines; after a refresh: machines that live")
    processes_per_node: int = Field(default=1, ge=1, le=256, description="processes of a machine")
    options: dict[str, str] = Field(default={}, description="settings of this provider")
    stores: tuple[str, ...] = Field(default=(), description="object stores that machines should be near; never diffs")
    memory_gib: float = Field(default=0, ge=0, description="host memory that a machine has to have; never diffs")
    compute_capability: float = Field(default=0, ge=0, description="the least that GPUs have to have; never diffs")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="fleet name; unique for its owner")
    owner: str = Field(min_length=1, description="owner tag of everything that costs money")
    ssh_public_key: str = Field(pattern=r"^[^\r\n]+$", description="OpenSSH public key that may log in on every node")
    ssh_private_key_file: str = Field(
        default="",
        description="its private half, a 0600 file; for providers whose machines come with a one-use host key",
    )

    image_labels: dict[str, str] = Field(
        default={}, description="what the image that nodes run says it fits; machines that cannot run it are not rented"
    )

    image: str = Field(
        default="", description="digest reference of the image that machines are containers of; empty: they are none"
    )

    @model_validator(mode="before")
    @classmethod
    def _own_names(cls, data: Any) -> Any:
        """Pulumi's SDK turns the names of Fleet's keys into camel case wherever they stand, in options too."""
        options = data.get("options") if isinstance(data, dict) else None
        entry = installed().found.get(str(data.get("provider"))) if isinstance(options, dict) else None
        if entry is None or not isinstance(options, dict):
            return data
        own = {to_camel(name): name for name in entry.options.model_fields}
        return {**data, "options": {own.get(name, name): value for name, value in options.items()}}

    def rented_from(self) -> Provider:
        """The provider, with the settings that the fleet is asked for with."""
        return registry.get(self.provider, self.options)

    def requirements(self) -> Requirements:
        """What the plan and the provider are asked for."""
        return Requirements(**self.model_dump(include=set(Requirements.model_fields)), provider_options=self.options)

    def request(self, generation: int, hard_cap_s: float) -> FleetRequest:
        """What a provider's `create` or `repair` is asked for; machines end after `hard_cap_s` seconds."""
        return FleetRequest(
            fleet=self.name,
            generation=generation,
            owner=self.owner,
            requirements=self.requirements(),
            ssh_public_key=self.ssh_public_key,
            lease_s=self.lease_minutes * 60,
            hard_cap_s=hard_cap_s,
            image=self.image,
        )


class Machine(Properties):
    """One node that lives."""

    rank: int
    id: str
    address: str
    port: int
    user: str
    host_key: str
    private_address: str
    price_usd_per_hour: float
    via: JumpHost | ProxyCommand | None = None
    python: str = "python3"

    @classmethod
    def of(cls, node: NodeState, price: float, pinned: Machine | None = None) -> Machine:
        """The node as described now; the host key and the price stay what they were when it was rented."""
        return cls(
            rank=node.rank,
            id=node.id,
            address=node.address,
            port=node.port,
            user=node.user,
            host_key=pinned.host_key if pinned and pinned.host_key else node.host_key,
            private_address=node.private_address,
            price_usd_per_hour=pinned.price_usd_per_hour if pinned else node.price_usd_per_hour or price,
            via=node.via,
            python=node.python,
        )


class FleetOutputs(FleetInputs):
    """What was bought. `nodes` is the count of machines that live."""

    nodes: int = Field(ge=0, description="machines that live")
    generation: int = Field(ge=1, description="provisionings and repairs of the fleet so far")
    handle: Handle = Field(description="the machines' ids in rank order; an empty id: a rank without a machine")
    machines: tuple[Machine, ...] = Field(description="the nodes that live")
    offer: Offer = Field(description="the offer that was taken")
    offers_considered: tuple[str, ...] = Field((), description="for the record: what was on sale, best first")
    bought_as: BoughtAs = Field(description="spot or on-demand")
    region: str = Field(description="where the machines are")
    price_usd_per_hour: float = Field(description="dollars per hour of the machines that live")
    other_usd_per_hour: float | None = Field(
        None, description="dollars per hour of what they have beside them: disks, addresses"
    )
    hard_cap_at: float = Field(description="UNIX seconds; no machine lives longer")

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks without a machine that lives."""
        live = {machine.rank for machine in self.machines}
        return tuple(rank for rank in range(len(self.handle.ids)) if rank not in live)

    def seen(self, handle: Handle, state: FleetState, **changes: Any) -> FleetOutputs:
        """The fleet with these machines; `changes` are other outputs and inputs that change with them."""
        pinned = {machine.id: machine for machine in self.machines}
        offer = changes.get("offer", self.offer)
        machines = live_machines(state, offer, pinned)
        return self.model_copy(
            update={
                **changes,
                "handle": handle,
                "generation": handle.generation,
                "machines": machines,
                "nodes": len(machines),
                "price_usd_per_hour": sum(machine.price_usd_per_hour for machine in machines),
                "other_usd_per_hour": self._other(offer, len(machines)),
            }
        )

    def _other(self, offer: Offer, machines: int) -> float:
        """As it was bought: whether the provider can say it anew, and here, changes no bill."""
        if self.other_usd_per_hour is None or not self.nodes or offer != self.offer:
            return _beside(self, offer, machines)
        return self.other_usd_per_hour / self.nodes * machines


def live_machines(state: FleetState, offer: Offer, pinned: Mapping[str, Machine]) -> tuple[Machine, ...]:
    """The machines that are not going or gone."""
    lost = set(state.lost)
    return tuple(
        Machine.of(node, offer.price_usd_per_hour, pinned.get(node.id)) for node in state.nodes if node.rank not in lost
    )


def _beside(inputs: FleetInputs, offer: Offer, machines: int) -> float:
    one = inputs.model_copy(update={"nodes": 1}).requirements()  # none may live now, which nobody could ask for
    return machines * other_usd_per_hour(inputs.rented_from(), one, offer)


def bought(inputs: FleetInputs, made: Acquired, considered: tuple[Offer, ...], now: float) -> FleetOutputs:
    """The outputs of a fleet that was just made, at `now` (UNIX seconds)."""
    machines = live_machines(made.state, made.offer, {})
    caps = [node.hard_cap_at for node in made.state.nodes if node.hard_cap_at]
    began = [node.began_at for node in made.state.nodes if node.began_at]  # hours in a queue cost nothing
    refused = tuple(f"{refusal.offer.label}: {refusal.reason}" for refusal in made.tried)
    on_sale = [f"{offer.label}: ${offer.price_usd_per_hour:.4f}/h" for offer in considered[:_ON_RECORD]]
    if len(considered) > _ON_RECORD:
        on_sale.append(f"and {len(considered) - _ON_RECORD} more")
    return FleetOutputs(
        **inputs.model_dump(exclude={"nodes"}),
        nodes=len(machines),
        generation=made.handle.generation,
        handle=made.handle.model_copy(update={"made_at": min(began, default=made.handle.made_at)}),
        machines=machines,
        offer=made.offer,
        offers_considered=(*on_sale, *refused),
        bought_as=made.offer.market,
        region=made.handle.region or made.offer.region,
        price_usd_per_hour=sum(machine.price_usd_per_hour for machine in machines),
        other_usd_per_hour=_beside(inputs, made.offer, len(machines)),
        hard_cap_at=min(caps, default=now + inputs.max_hours * 3600),
    )


def full_options(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A fleet's or a guard's inputs with all options of the provider: one that is left out is one at its default, also
    where an earlier mgpu did not have it. What cannot be read as options stays as it is."""
    entry, options = installed().found.get(str(inputs.get("provider"))), inputs.get("options")
    if entry is None or not isinstance(options, dict):
        return dict(inputs)
    try:
        return {**inputs, "options": entry.options.of(options).flat()}
    except InputError:  # what another mgpu knew, or a value that is not known yet
        return dict(inputs)


def problems(values: Mapping[str, Any], unknown: Collection[str]) -> dict[str, str]:
    """Everything that is wrong with these inputs, property -> reason; those that are not known yet are passed over."""
    try:
        FleetInputs.model_validate({key: value for key, value in values.items() if key not in unknown})
    except ValidationError as error:
        found = [(str(item["loc"][0]), item) for item in error.errors() if item["loc"]]
        return {key: _reason(item) for key, item in found if key not in unknown}
    return {}


def _reason(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "a Fleet has no such property"
    if item["type"] == "missing":
        return "is needed"
    where = ".".join(str(part) for part in item["loc"][1:])
    return f"{where + ': ' if where else ''}{item['msg']} (it is {item['input']!r})"
