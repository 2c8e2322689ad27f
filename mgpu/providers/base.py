"""The provider contract: the calls, and what each promises. Errors are `mgpu.errors.ProviderError`s alone."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from textwrap import shorten
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import ConfigDict, Field

from mgpu.errors import InvalidRequest, MgpuError, ProviderError, RateLimited, Transient
from mgpu.plan.model import Cost, Offer, Requirements, Reservation, Saves, Value
from mgpu.spec.provider import Capabilities

_WHY_CHARACTERS = 200  # of an error, in a table
_TOLD = 8  # errors, beside itself, that one speaks for
_T = TypeVar("_T")
_R = TypeVar("_R")
_AGE = {"stock", "fetched_at", "most_usd_per_hour"}  # what differs between two looks at one offer


class Offers(Value):
    """What is on sale, and where it was looked up."""

    offers: tuple[Offer, ...]
    source: str = Field(description="e.g. `live`, `snapshot 2026-11-01`")
    notes: tuple[str, ...] = Field(default=(), description="what could not be told, and what would change that")


class Refreshed(Value):
    """What a refresh of the offers has found."""

    regions: tuple[str, ...] = Field(description="that answered")
    failed: dict[str, str] = Field(default={}, description="region -> why it keeps its old prices")


class Finding(Value):
    """One line of `Provider.findings`: something that renting needs, and whether it is there."""

    subject: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    cure: str = Field(default="", description="what to do, where it is not ok")
    document: dict[str, Any] | None = Field(default=None, description="what the cure says to paste")

    @classmethod
    def of(cls, subject: str, error: MgpuError) -> Finding:
        """A finding that failed by this error."""
        why = shorten(error.why, _WHY_CHARACTERS, placeholder=" ...")
        detail = ": ".join(filter(None, (error.what, why)))
        return cls(subject=subject, status="failed", detail=detail, cure=error.next_step)


class FleetRequest(Value):
    """What `create` is asked for: a gang of equal nodes of one generation of a fleet."""

    fleet: str = Field(description="fleet name; unique per stack: `<stack>`")
    generation: int = Field(ge=1)
    owner: str = Field(description="who pays: the tag that list_owned and gc go by")
    requirements: Requirements
    ssh_public_key: str = Field(description="OpenSSH format, one line; may log in on every node")
    lease_s: float = Field(description="seconds a node lives before any run renews its lease")
    hard_cap_s: float = Field(description="seconds a node lives at most, from its start")
    ends_by: float = Field(
        default=0, description="UNIX seconds; no node lives longer, however late it starts; 0: nothing says so"
    )
    image: str = Field(
        default="", description="repository@sha256:... that nodes are containers of (`Capabilities.starts_from_image`)"
    )

    def digest(self, offer: Offer) -> str:
        """Of all that is asked for, but not of how old a price list is: a token is for nothing else. 64 hexadecimal
        characters."""
        asked = self.model_dump(mode="json") | {"offer": offer.model_dump(mode="json", exclude=_AGE)}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class Intent(Value):
    """What is journalled before `create`; enough to find what it may have made."""

    fleet: str
    generation: int
    owner: str
    token: str
    offer: Offer


class Handle(Value):
    """Machines that exist or may exist, by id; `ids` is in rank order (an empty string: rank without a machine)."""

    provider: str
    region: str
    fleet: str
    generation: int
    token: str
    ids: tuple[str, ...]
    made_at: float = Field(default=0, description="UNIX seconds of the newest create; 0: not known")
    account: str = Field(default="", description="whose machines they are; empty: the provider has but one, or unknown")


class Listing(Value):
    """What an owner has where it could be looked for."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    handles: tuple[Handle, ...]
    failures: tuple[MgpuError, ...] = Field(default=(), description="of those that could not be asked what they have")
    closed: dict[str, MgpuError] = Field(
        default={},
        description="region -> why it cannot be looked there: an account's organization forbids it, or the "
        "region does not take credentials that others take",
    )


class NodePhase(StrEnum):
    """A machine's life as its provider tells it."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"  # asked to end, may still be billed
    ENDING = "ending"  # on its way out for good, and billed no more
    TERMINATED = "terminated"  # the provider says that it is gone


GOING = (NodePhase.STOPPING, NodePhase.ENDING, NodePhase.TERMINATED)
UNBILLED = (NodePhase.ENDING, NodePhase.TERMINATED)


class JumpHost(Value):
    """A machine that SSH goes through, because the node has no address of its own that can be reached."""

    address: str
    port: int = 22
    user: str
    host_key: str = Field(description="OpenSSH public key line, pinned")


class ProxyCommand(Value):
    """A program that carries SSH to the node: its standard input and output are the connection to the SSH server.

    The operator's machine starts it anew for each connection. What it writes before the server greets is passed over,
    and told where no greeting comes; it has to end when its input does."""

    command: tuple[str, ...] = Field(
        min_length=1, description="argument list; an argument `{python}` stands for the interpreter that mgpu runs in"
    )
    in_process: bool = Field(
        default=False,
        description="it is `{python} -P -m MODULE ARGUMENT...`, and MODULE.connect(arguments, seconds) makes the same "
        "connection without a program",
    )


NETWORK = "MGPU_NETWORK"
"""Names the network of a provider's that this machine is in, by the provider's own id (vpc-...): nodes are dialled at
their private addresses, because no rule that lets a group of machines in holds for public ones."""


def dialled(address: str, private_address: str, via: object) -> str:
    """The address of a node at which this machine dials it; through something else, that one's."""
    return private_address if os.environ.get(NETWORK) and private_address and via is None else address


class NodeState(Value):
    """One machine, as its provider describes it now."""

    rank: int
    id: str
    phase: NodePhase
    address: str = ""
    port: int = 22
    user: str = ""
    host_key: str = Field(default="", description="OpenSSH public key line; what the operator pins")
    one_use_key: str = Field(
        default="", description="the key that came with user data, as long as the node may show it; `rekeyed` ends that"
    )
    via: JumpHost | ProxyCommand | None = Field(
        default=None, description="how SSH gets there; None: by TCP to `address` and `port`"
    )
    python: str = Field(default="python3", description="the interpreter on the node that runs programs; has torch")
    private_address: str = Field(default="", description="as the other nodes reach it")
    price_usd_per_hour: float = 0
    began_at: float = Field(
        default=0, description="UNIX seconds: since when it costs, where it has waited in a queue; 0: since its create"
    )
    hard_cap_at: float = Field(default=0, description="UNIX seconds; the machine ends then, whatever happens")
    queued: bool = Field(
        default=False, description="pending in a queue of the provider's: it has not started, and costs nothing yet"
    )
    reason: str = Field(default="", description="why it is not running, or cannot be reached yet, where known")
    cure: str = Field(
        default="",
        description="what would let it start, where its region starts none; empty: a new try may do better",
    )
    cure_scope: Literal["zone", "region"] = Field(
        default="region", description="where none starts without the cure: other zones of its region may do"
    )


class FleetState(Value):
    """All machines of a handle, in rank order."""

    nodes: tuple[NodeState, ...]

    @property
    def ready(self) -> bool:
        """True when every node runs and says how to reach it."""
        return all(n.phase is NodePhase.RUNNING and n.host_key for n in self.nodes)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks whose machine is going or gone."""
        return tuple(n.rank for n in self.nodes if n.phase in GOING)


class ReservationRequest(Value):
    """What `find_reservations` is asked for: equal machines, together, for a time."""

    gpu: tuple[str, ...] = Field(default=(), description="types, as run files name them; empty: any")
    gpus_per_node: int = Field(default=0, description="GPUs of a machine; 0: any number")
    nodes: int = Field(ge=1)
    hours: float = Field(gt=0, description="at least so long")
    regions: tuple[str, ...] = Field(default=(), description="empty: all")
    begins_after: float | None = Field(default=None, description="UNIX seconds; null: as soon as possible")
    ends_before: float | None = Field(default=None, description="UNIX seconds; null: at any time")


class ReservationOffer(Value):
    """Machines that can be reserved for a time, at a price that is paid at once."""

    id: str = Field(description="by which it is bought")
    kind: str = Field(description="as its provider calls it, e.g. Capacity Block")
    instance_type: str
    gpu: str
    gpus: int = Field(description="of one machine")
    machines: int
    region: str
    zone: str
    begins_at: float = Field(description="UNIX seconds")
    ends_at: float = Field(description="UNIX seconds")
    machines_end_at: float = Field(description="UNIX seconds: no machine in it lives longer")
    usd: float = Field(description="of all of it")
    account: str = Field(default="", description="who was offered it; empty: the provider has but one account")

    @property
    def hours(self) -> float:
        """From its beginning to its end."""
        return (self.ends_at - self.begins_at) / 3600

    @property
    def usd_per_gpu_hour(self) -> float:
        """Of each GPU in each of these hours."""
        return self.usd / (self.machines * self.gpus * self.hours)

    def same(self, other: ReservationOffer) -> bool:
        """Whether both are the same machines at the same time and price, under whichever id."""
        return self.model_copy(update={"id": other.id}) == other


class ReservationOffers(Value):
    """What can be reserved."""

    offers: tuple[ReservationOffer, ...]
    notes: tuple[str, ...] = Field(default=(), description="what is otherwise than it was asked for")
    failed: dict[str, str] = Field(default={}, description="region -> why nothing is known of it")


class Reservations(Value):
    """What an account has reserved."""

    reservations: tuple[Reservation, ...]
    failed: dict[str, str] = Field(default={}, description="region -> why nothing is known of it")


class MachineDriver(Value):
    """NVIDIA's driver that machines boot with."""

    version: str = Field(description="as nvidia-smi prints it")
    why: str = Field(description="one sentence: what brings it, as a user can find it")
    cure: str = Field(description="one sentence: how machines get another one")


class Provider(ABC):
    """One provider: eight calls, and defaults for what only some can do better. Every call may be made from any thread
    and any process; nothing is remembered between calls.

    What only some providers have are protocols of their own: `Findings`, `RefreshesOffers`, `SellsReservations`,
    `OtherCosts`, `Recalls`, `ListsReached`, `Rekeys`, `StoreAccess`, `StoreRole`, `DriverFacts`, and
    `mgpu.image.place.ImageHost`.
    Callers ask for them by `isinstance`.
    """

    name: str
    capabilities: Capabilities

    @abstractmethod
    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        """`options`: the run file's block, flattened. Raises InputError: an option that means nothing."""

    @abstractmethod
    def check(self) -> None:
        """Tests the credentials and one cheap permission. Raises AuthError, PermissionDenied: what is missing."""

    @abstractmethod
    def offers(self, requirements: Requirements) -> Offers:
        """What is on sale for these requirements: GPUs, markets and regions; none, and no error, where nothing is. The
        plan weighs prices, stock and the number of nodes, and says why an offer does not do."""

    @abstractmethod
    def create(self, request: FleetRequest, offer: Offer, token: str) -> Handle:
        """Asks for the whole gang and returns at once. One token makes at most one gang: a second call with the
        same token returns the first one's handle, also when its machines have ended, and completes a gang of which only
        a part was made. A price list's age (`fetched_at`, `stock`) makes no other parameters.

        Raises:
            NoCapacity, QuotaExceeded, BidTooLow, NoOffer: refused, and nothing is left of the gang: machines that this
                token has made were asked to end. `scope` says which other offers it rules out.
            Conflict: the token was used with other parameters.
            RateLimited, Transient: refused for now, or no answer; a part of the gang, or all of it, may have been made.
                The same call comes again, after `retry_after`, and goes on.
            AmbiguousCreate: it may have made machines, and the same call could make them twice: `find` is asked first,
                for as long as `listing_lag_s`.
            CleanupFailed: it was refused, and something of the gang is left; the refusal is its `__cause__`. The search
                ends what `find` shows of it, and goes on as after the refusal.
            ProviderError: anything else, and nothing is left of the gang; it ends the search.
        """

    @abstractmethod
    def find(self, intent: Intent) -> Handle | None:
        """What a `create`, or a `repair`, whose answer was lost has made by the intent's token, as far as listings show
        it: `ids` has a place for each rank up to the last one made, or all; None: nothing."""

    @abstractmethod
    def describe(self, handle: Handle) -> FleetState:
        """The machines as they are now, and why one does not run (`reason`). A machine is TERMINATED only when the
        provider says so; a rank without one (an empty id) is. Raises Transient: no answer, or a machine is too new to
        be known; nothing is concluded from that."""

    def repair(
        self, handle: Handle, missing: tuple[int, ...], request: FleetRequest, offer: Offer, token: str
    ) -> Handle:
        """Replaces the machines of these ranks by new ones of `request.generation`; the lost ones are confirmed
        stopping first, by whoever calls or by this call: Transient, as long as one is not. The other machines are not
        touched. Idempotent by token, with the old handle and with the one that it has returned. Raises what `create`
        raises. Nobody calls it where a gang comes and ends as one (`Capabilities.repairs_single_nodes`)."""
        cure = "Give the whole fleet back, and make it anew."
        raise InvalidRequest(f"provider {self.name} replaces no single machine of fleet {handle.fleet}", "", cure)

    @abstractmethod
    def list_owned(self, owner: str) -> tuple[Handle, ...]:
        """Everything that costs money and carries this owner, exactly: all regions, all pages; a handle for each token,
        with an empty id for what has ended. Raises ProviderError where a part of it could not be asked for: half a list
        would pass for all of it (`ListsReached` says what may be left out)."""

    @abstractmethod
    def destroy(self, handle: Handle, nodes: tuple[str, ...] | None = None) -> bool:
        """Ends these machines (default: all; all in any case where a gang ends as one). True: gone (absent counts);
        False: call again. Absent never raises."""

    def boot_s(self, requirements: Requirements) -> float:
        """Seconds from the grant until machines for these requirements answer by SSH, at the worst; 0: not known."""
        return self.capabilities.boot_s

    def queue_s(self) -> float:
        """Seconds that a request may wait in the provider's queue before it is given up; 0: it has none."""
        return 0.0

    def configured(self) -> bool:
        """Whether this user has set the provider up at all; looks at files and variables, and asks nobody but this
        machine. Commands that ask every provider (`mgpu gc`, `mgpu ls`) leave out one that is not."""
        return True

    def describe_all(self, handles: Sequence[Handle]) -> tuple[FleetState, ...]:
        """`describe` for each of many handles; better in no more calls than their machines need."""
        return tuple(map(self.describe, handles))


@runtime_checkable
class Findings(Protocol):
    """A provider that can say more than `check` about what renting needs."""

    def findings(self, requirements: Requirements | None, here: Callable[[], str]) -> tuple[Finding, ...]:
        """All that renting needs, looked at; for these requirements where there are any. `here` says which address
        others see this machine at, CIDR, and raises InputError where that is not known. Raises no ProviderError."""
        ...


@runtime_checkable
class RefreshesOffers(Protocol):
    """A provider whose `offers` come from what was asked for earlier."""

    def refresh_offers(self) -> Refreshed:
        """Asks for what is on sale now, and keeps it for `offers`; partial failures are told, not raised."""
        ...


@runtime_checkable
class SellsReservations(Protocol):
    """A provider that reserves machines for a time. Its block of the run file has the key `reservation`: the id of the
    one that machines are rented in."""

    def find_reservations(self, wanted: ReservationRequest) -> ReservationOffers:
        """What can be bought now. Raises InputError, ProviderError."""
        ...

    def buy_reservation(self, offer: ReservationOffer, owner: str, token: str) -> Reservation:
        """Buys it, once, marked with both words. Raises AmbiguousCreate: nobody knows whether it was bought, and a
        second call could buy a second one; any other ProviderError: nothing was bought."""
        ...

    def bought_reservation(self, offer: ReservationOffer, token: str, at: float) -> Reservation | None:
        """What a purchase by this token, asked for at `at` (UNIX seconds), has bought, as far as the provider shows it
        now. Raises ProviderError."""
        ...

    def list_reservations(self, regions: Sequence[str]) -> Reservations:
        """What this account has reserved in these regions (none: all) and is not over. Raises InputError: there is no
        such region; ProviderError."""
        ...


@runtime_checkable
class OtherCosts(Protocol):
    """A provider that bills more than machines."""

    def other_costs(self, requirements: Requirements, offer: Offer, saves: Saves | None) -> tuple[Cost, ...]:
        """What is billed beside machines of this offer. What is not known is left out. Raises InputError."""
        ...


@runtime_checkable
class Recalls(Protocol):
    """A provider that tells what a token has made before its listings show it."""

    def recall(self, request: FleetRequest, intent: Intent, ranks: tuple[int, ...]) -> Handle | None:
        """What a `create`, or a `repair`, of this request by the intent's token has made for these ranks; None:
        nothing, and from now on the token makes nothing, not by a call that is still on its way either. Makes nothing.

        Raises ProviderError: the provider has no word on it; its listings alone can tell, in `listing_lag_s`.
        """
        ...


@runtime_checkable
class ListsReached(Protocol):
    """A provider whose `list_owned` leaves something out, and that says what: machines that are asked one by one what
    they carry, do not answer, and are not billed; regions that an account's organization has closed, or that do not
    take credentials yet. Whoever knows that something may be in such a region has to take it for one that did not
    answer (`listed`)."""

    def list_reached(self, owner: str) -> Listing:
        """What `list_owned` lists, and what it leaves out. Raises ProviderError."""
        ...


@runtime_checkable
class Rekeys(Protocol):
    """A provider whose machines get their host key with user data, which others can read: it is replaced at first
    contact."""

    def rekeyed(self, handle: Handle, node: str, host_key: str, *, used: bool) -> None:
        """Remembers a machine's new host key, for every other process to find; once before the machine shows it
        (`used` false: both keys may be met from now on) and once when it does."""
        ...


@runtime_checkable
class StoreAccess(Protocol):
    """A provider whose block of the run file says how the operator opens object stores, too."""

    def store_environment(self, environ: Mapping[str, str]) -> Mapping[str, str] | None:
        """The variables that open them, made from the operator's; None: its environment as it is."""
        ...


@runtime_checkable
class StoreRole(Protocol):
    """A provider that gives the machines of a run rights of their own in object stores: no credentials of the
    operator travel to them, and they open no more than the run names."""

    def require_store(self, urls: Sequence[str]) -> None:
        """Returns where machines can be given rights at all of these addresses; makes nothing. Raises InputError: what
        cannot be opened to them, and the cure; ProviderError."""
        ...

    def grant_store(self, run_id: str, reads: Sequence[str], writes: Sequence[str]) -> Mapping[str, str]:
        """Gives the machines of this run the right to read below some addresses, and to keep checkpoints below others;
        again is the same. What their store client needs for it, as variables. Raises what `require_store` raises."""
        ...

    def revoke_store(self, run_id: str) -> None:
        """Takes these rights away; absent is success. Raises ProviderError."""
        ...


@runtime_checkable
class DriverFacts(Protocol):
    """A provider that knows NVIDIA's driver of its machines beforehand."""

    def machine_driver(self, regions: Sequence[str]) -> MachineDriver | None:
        """The driver that a machine rented in one of these regions boots with; None: not known. A region that can rent
        none is no error here."""
        ...

    def driver_of(self, handle: Handle) -> MachineDriver | None:
        """The driver that these machines have booted with; None: not known."""
        ...


def of_each(items: Iterable[_T], ask: Callable[[_T], _R]) -> list[_R]:
    """What `ask` says of each, in their order; for what is given back: a machine that stays because another one does
    costs money. Raises the ProviderErrors as one (`as_one`) once all were asked."""
    said, failed = list[_R](), list[ProviderError]()
    for item in items:
        try:
            said.append(ask(item))
        except ProviderError as error:
            failed.append(error)
    if failed:
        raise as_one(failed)
    return said


def as_one(failed: Sequence[ProviderError]) -> ProviderError:
    """The first of these errors, with the words of the others and the longest `retry_after`; one that passes comes
    before others, because the same call is made again after it."""
    first = next((error for error in failed if isinstance(error, Transient | RateLimited)), failed[0])
    others = [error for error in failed if error is not first]
    lines = list(dict.fromkeys(": ".join(filter(None, (error.what, error.why))) for error in others))
    more = [f"and {len(lines) - _TOLD} more"] if len(lines) > _TOLD else []
    first.why = "\n".join(filter(None, (first.why, *lines[:_TOLD], *more)))
    steps = list(dict.fromkeys(filter(None, (error.next_step for error in (first, *others)))))
    first.retry_after = max((error.retry_after for error in failed if error.retry_after is not None), default=None)
    first.next_step = " ".join(steps[: _TOLD + 1])
    return first


def listing(provider: Provider, owner: str) -> Listing:
    """What the provider lists, and what it leaves out. Raises ProviderError."""
    if isinstance(provider, ListsReached):
        return provider.list_reached(owner)
    return Listing(handles=provider.list_owned(owner))


def listed(provider: Provider, owner: str, regions: Collection[str]) -> tuple[Handle, ...]:
    """What the provider lists; in `regions` something of the owner's may be. Raises ProviderError: one of them is
    closed, too."""
    found = listing(provider, owner)
    for region, error in found.closed.items():
        if region in regions:
            raise error
    return found.handles


def other_usd_per_hour(provider: Provider, requirements: Requirements, offer: Offer) -> float:
    """What is billed by the hour beside these machines of this offer, all nodes, in US dollars. Raises InputError."""
    if not isinstance(provider, OtherCosts):
        return 0.0
    alone = requirements.model_copy(update={"stores": ()})  # traffic has no hours, and stores would be asked for theirs
    return sum(cost.usd for cost in provider.other_costs(alone, offer, None) if cost.per == "hour")


def create_token(owner: str, fleet: str, generation: int, offer: Offer, attempt: int, searches: int = 0) -> str:
    """The idempotency token of one try: at most one gang is ever made from it. 40 hexadecimal characters.

    The same on every machine: whoever goes on where a search was cut off asks by its tokens. `searches`: how many for
    this fleet have come to their end before; a provider may answer for days to their tokens what it has answered then.
    """
    place = (offer.provider, offer.instance_type, offer.market, offer.region, offer.zone or "")
    parts = (owner, fleet, str(generation), *place, str(attempt), *([str(searches)] if searches else []))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:40]
