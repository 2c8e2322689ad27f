"""Requirements -> offers -> plan. Prices are US dollars per hour; memory is GiB (2^30 bytes)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mgpu.spec.block import MachineKeys, Word

BoughtAs = Literal["spot", "on-demand"]


class Value(BaseModel):
    """The base of the planning values: frozen, no unknown keys."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")


class Requirements(MachineKeys):
    """What a run needs. Only these diff in the Fleet resource; offers never do."""

    provider: Word = Field(description="who rents out the machines")
    processes_per_node: int = Field(default=1, ge=1, le=256, description="processes of a machine")
    provider_options: dict[str, str] = Field(default={}, description="the run file's block of this provider, flattened")
    stores: tuple[str, ...] = Field(default=(), description="object stores that the run reads or writes, s3://...")
    memory_gib: float = Field(
        default=0, ge=0, description="host memory that a machine has to have, for the copy of a save; 0: not known"
    )
    compute_capability: float = Field(
        default=0, ge=0, description="the least that GPUs have to have, for what is computed in: 8.9; 0: any"
    )


class Headroom(Value):
    """What is left of an account's limit, as far as its provider has told."""

    name: str = Field(description="the provider's name of the limit")
    limit_vcpus: int
    left_vcpus: int = Field(description="of the limit, at `at`; the limit itself where the use is not known any more")
    at: float = Field(description="UNIX seconds")
    raise_command: str = Field(description="what asks for more; the number of vCPUs goes at its end")


class Obstacle(Value):
    """Why machines that are on sale cannot be used as the run file stands."""

    reason: str
    cure: str = Field(description="what to change in the run file, a sentence")


class Reservation(Value):
    """Machines of one kind in one place that an account has reserved with its provider."""

    id: str
    kind: str = Field(description="as its provider calls it, e.g. Capacity Block")
    prepaid: bool = Field(description="it was paid for as a whole: its machines cost nothing more by the hour")
    state: str = Field(description="as its provider calls it; machines can be rented while it is `active`")
    instance_type: str
    region: str
    zone: str
    group: str = Field(default="", description="the placement group that its machines stand in; empty: none")
    machines: int
    free: int = Field(description="machines that can be rented in it now; before it begins, all")
    begins_at: float = Field(description="UNIX seconds")
    ends_at: float | None = Field(default=None, description="UNIX seconds; null: when it is cancelled")
    machines_end_at: float | None = Field(
        default=None, description="UNIX seconds: no machine in it lives longer; null: they outlive it"
    )


class Offer(Value):
    """What a provider sells: one kind of machine, in one place, on one market. The price is one machine's."""

    provider: str
    instance_type: str
    gpu: str | None = None
    gpus: int = 0
    gpu_memory_gib: float = 0
    vcpus: int = 0
    memory_gib: float = 0
    nvme_gib: int = Field(default=0, description="local disks, all together")
    interconnect: str = Field(default="", description="between the GPUs of one machine")
    network_gbit_s: float = Field(default=0, description="the most between machines; 0: not known")
    efa_cards: int = Field(default=0, description="network cards that can have an EFA interface")
    market: BoughtAs
    price_usd_per_hour: float = Field(ge=0, description="of one machine")
    price_is_limit: bool = Field(default=False, description="the price is not known, but that it is not above this")
    most_usd_per_hour: float | None = Field(
        default=None, description="of one machine, where its price changes: what it is billed at most; null: its price"
    )
    region: str
    zone: str | None = None
    near_stores: bool | None = Field(
        default=None, description="whether a store of the run's is in this region; null: not known, or it has none"
    )
    stock: int | None = Field(None, description="machines that can be had now; None = not known")
    quota: str = Field(default="", description="the account's limit that it counts against; empty: one a family")
    headroom: Headroom | None = Field(default=None, description="what is left of `quota`; None: not known")
    obstacle: Obstacle | None = Field(default=None, description="why it cannot be used; null: it can")
    reservation: Reservation | None = Field(default=None, description="what it is taken from; null: from what is free")
    fetched_at: float = Field(description="UNIX seconds; the price's age")

    @property
    def billed_at_most(self) -> float:
        """US dollars per hour of one machine, whatever becomes of its price."""
        return self.price_usd_per_hour if self.most_usd_per_hour is None else self.most_usd_per_hour

    @property
    def place(self) -> str:
        """Where its machines are: the zone, or the region; and in which reservation."""
        return f"{self.zone or self.region}" + (f" in {self.reservation.id}" if self.reservation else "")

    @property
    def label(self) -> str:
        """One line that names the offer, e.g. `local cpu-1 spot @ here`."""
        return f"{self.provider} {self.instance_type} {self.market} @ {self.place}"


class Refusal(Value):
    """An offer that was set aside, and why."""

    offer: Offer
    reason: str


class Saves(Value):
    """What a run keeps in its object store, as far as that is known before it runs."""

    to: str = Field(description="s3://...")
    kept: int = Field(description="checkpoints that its retention keeps, at most")
    made: int | None = Field(default=None, description="checkpoints until the hard cap; None: not known")


class CheckpointRoom(Value):
    """What checkpoints take of the machine that has the largest part of them, where the model's size is known."""

    save_gib: float = Field(description="of one: in its memory while it is saved, and on its disk")
    count: int = Field(description="on its disk at a time, at most: finished ones, and one that is being written")
    resumed_gib: float = Field(description="on its disk beside them, after a restart: what is resumed from")
    disk_gib: int = Field(description="of its disk")

    @property
    def kept_gib(self) -> float:
        """On its disk at a time, at most."""
        return self.save_gib * self.count


class Cost(Value):
    """Something that is billed beside the machines."""

    what: str
    usd: float
    per: str = Field(description="`hour` of the whole fleet, or of what else it is the price")
    estimate: bool = Field(default=False, description="the price, or how much it will be of, is not known exactly")
    avoidable: str = Field(default="", description="what would avoid it, a sentence; empty: nothing")


class Plan(Value):
    """The decision: offers that will be asked for, best first, and those that will not."""

    requirements: Requirements
    offers: tuple[Offer, ...]
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = Field(default=(), description="what the provider could not tell")
    checkpoints: CheckpointRoom | None = Field(default=None, description="what they take of a machine; None: not known")

    @property
    def best(self) -> Offer:
        """The offer that is asked for first."""
        return self.offers[0]

    @property
    def best_price_usd_per_hour(self) -> float:
        """Of the whole fleet, at the offer that is asked for first."""
        return self.best.price_usd_per_hour * self.requirements.nodes

    @property
    def price_usd_per_hour(self) -> float:
        """Of the whole fleet, at the dearest offer that may be taken: what the user agrees to."""
        return max(offer.price_usd_per_hour for offer in self.offers) * self.requirements.nodes

    @property
    def hours(self) -> float:
        """Until the hard cap, whichever offer is taken."""
        return max(map(self._hours_of, self.offers))

    @property
    def billed_at_most(self) -> float:
        """US dollars per hour of the whole fleet, whichever offer is taken and whatever becomes of its price."""
        return max(offer.billed_at_most for offer in self.offers) * self.requirements.nodes

    @property
    def max_cost_usd(self) -> float:
        """The most that the machines can cost, whichever offer is taken: its highest price until its hard cap."""
        return max(each.billed_at_most * self._hours_of(each) for each in self.offers) * self.requirements.nodes

    def _hours_of(self, offer: Offer) -> float:
        """`max_hours`, or less where the machines of its reservation end before."""
        reserved = offer.reservation
        if reserved is None or reserved.machines_end_at is None:
            return self.requirements.max_hours
        left_s = reserved.machines_end_at - max(reserved.begins_at, offer.fetched_at)
        return min(self.requirements.max_hours, max(0.0, left_s) / 3600)
