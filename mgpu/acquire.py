"""Offers -> machines that run, or nothing at all: failover, deadlines, undo, and "what was tried".

One try: the intent is journalled, the gang is asked for, and it is waited for until every node can be reached. A try
that does not get there is undone before the next one begins. What a refusal blocks:

    NoCapacity, BidTooLow       this machine type on this market, within the error's scope; the next offer is tried
    QuotaExceeded               this family on this market, within the error's scope or region; the next offer is tried
    a node lost while starting  nothing; the same offer is asked again under a new token, a few times
    RateLimited, Transient      nothing; the same call again after a jittered pause
    AmbiguousCreate             nothing; what was made is looked for, and only then asked for again, by the same token
                                (by a provider that does not promise what tokens promise: once it would show it)
    all other errors            everything: the search ends with them

Journal entries, each with the `token`: `intent` (before the create; all of `Intent`, and `hard_cap_s`), `created` (the
handle), then `acquired` (all nodes run) or `undone` (nothing of it is left). An intent that is not undone may have
machines, also where the provider does not show them yet (`listing_lag_s`).
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Required, TypedDict, TypeVar, Unpack

from mgpu_train.timeouts import Timeouts

from mgpu import journal as journals
from mgpu.errors import (
    AmbiguousCreate,
    BidTooLow,
    CleanupFailed,
    Conflict,
    Interrupted,
    MgpuError,
    NoCapacity,
    NoOffer,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Emit, Note, OfferTried, Warned, ignore
from mgpu.journal import Journal
from mgpu.plan.model import Offer, Refusal
from mgpu.providers.base import FleetRequest, FleetState, Handle, Intent, NodePhase, NodeState, Provider, create_token

ENDING_S = 60.0  # a machine with less time than this before its hard cap is not worth renting
_TRIES = 3  # of one offer whose nodes were lost while they started
_BACKOFF_S, _BACKOFF_MAX_S = 1.0, 30.0
_PLACES = {
    "offer": ("region", "zone"),
    "zone": ("region", "zone"),
    "region": ("region",),
    "provider": (),
    "account": (),
}
_Refused = (NoCapacity, BidTooLow, QuotaExceeded)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Acquired:
    """Machines that run, the offer they were bought under, and the offers that were refused before."""

    handle: Handle
    offer: Offer
    state: FleetState
    tried: tuple[Refusal, ...] = ()


class _Lost(Exception):
    """Nodes ended before all of them ran."""


class Terms(TypedDict, total=False):
    """How long a search may take (`timeouts`), who hears of it, and what ends it. The clocks are for tests: `clock`
    and `sleep` in seconds, `now` in UNIX seconds."""

    timeouts: Required[Timeouts]
    emit: Emit
    cancelled: threading.Event
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    now: Callable[[], float]


def acquire(
    provider: Provider, request: FleetRequest, offers: Sequence[Offer], journal: Journal, **terms: Unpack[Terms]
) -> Acquired:
    """Rents the gang that is asked for, from the first of the offers (best first) that grants it.

    What an earlier process has journalled for this generation and not brought to an end is adopted first.

    Raises:
        NoOffer, NoCapacity, QuotaExceeded, BidTooLow: nothing was granted; `why` tells what was tried.
        Transient: not every node was ready within `provision_s`; what was made has been ended.
        Interrupted: `cancelled` was set; what was made has been ended.
        TeardownIncomplete: something was made that could not be ended.
        ProviderError: what no other offer would change.
    """

    def make(intent: Intent, asked: FleetRequest) -> Handle:
        return provider.create(asked, intent.offer, intent.token)

    ranks = tuple(range(request.requirements.nodes))
    return _Search(provider, request, journal, ranks, make, lambda found: found, **terms).run(offers)


def repair(
    provider: Provider,
    handle: Handle,
    missing: tuple[int, ...],
    request: FleetRequest,
    offers: Sequence[Offer],
    journal: Journal,
    **terms: Unpack[Terms],
) -> Acquired:
    """Gives the `missing` ranks of a fleet new machines, in the fleet's region; the others are not touched.

    `handle.ids` has a place for every rank, empty where there was no machine. The new state tells of all ranks; only
    the new ones are waited for, and ended when it fails. Raises what `acquire` raises.
    """

    def make(intent: Intent, asked: FleetRequest) -> Handle:
        return provider.repair(handle, missing, asked, intent.offer, intent.token)

    def whole(found: Handle) -> Handle:
        ids = tuple(found.ids[rank] if rank in missing else old for rank, old in enumerate(handle.ids))
        return handle.model_copy(update={"ids": ids, "generation": found.generation, "token": found.token})

    search = _Search(provider, request, journal, missing, make, whole, **terms)
    return search.run([offer for offer in offers if offer.region == handle.region])


def destroy(
    provider: Provider,
    handle: Handle,
    *,
    timeouts: Timeouts,
    emit: Emit = ignore,
    nodes: tuple[str, ...] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Ends these machines (default: all of the handle) and returns when the provider says that they are gone.

    Raises:
        TeardownIncomplete: it did not say so within `destroy_s`, or refused; the ids are named.
    """
    ids = ", ".join(name for name in (handle.ids if nodes is None else nodes) if name)
    deadline, pauses, trouble = clock() + timeouts.destroy_s, _pauses(timeouts.describe_every_s), _Backoff()
    why: ProviderError | None = None
    while True:
        try:
            if provider.destroy(handle, nodes):
                return
            why, pause = None, next(pauses)
        except (RateLimited, Transient) as error:
            if why is None:
                emit(Warned(f"ending {ids}: {error.what}; trying again"))
            why, pause = error, trouble.next(error)
        except ProviderError as error:
            raise _incomplete(handle, ids, str(error)) from error
        if clock() + pause > deadline:
            reason = str(why or f"asked for {timeouts.destroy_s:.0f} s, the provider does not say that they are gone")
            raise _incomplete(handle, ids, reason) from why
        sleep(pause)


def _incomplete(handle: Handle, ids: str, why: str) -> TeardownIncomplete:
    return TeardownIncomplete(
        f"fleet {handle.fleet}: {ids} at {handle.provider} {handle.region} may still be billed",
        why,
        "Run `mgpu gc`; whatever happens, the machines end at their hard cap.",
    )


def _pauses(longest_s: float) -> Iterator[float]:
    """Seconds between two looks: short at first, because the nearest machines are quick."""
    pause = longest_s / 8
    while True:
        yield pause
        pause = min(longest_s, pause * 2)


class _Backoff:
    """Growing, jittered pauses between calls that fail; a provider's own `retry_after` is the least."""

    def __init__(self) -> None:
        self._longest = _BACKOFF_S

    def next(self, error: ProviderError) -> float:
        pause = max(error.retry_after or 0.0, random.uniform(self._longest / 2, self._longest))
        self._longest = min(_BACKOFF_MAX_S, self._longest * 2)
        return pause


@dataclass(frozen=True)
class _Begun:
    """An intent that was journalled `at` (UNIX seconds) for machines with this hard cap."""

    intent: Intent
    at: float
    hard_cap_s: float


@dataclass
class _Search:
    provider: Provider
    request: FleetRequest
    journal: Journal
    ranks: tuple[int, ...]  # the ones that this search has to fill
    make: Callable[[Intent, FleetRequest], Handle]
    whole: Callable[[Handle], Handle]  # the fleet's handle with what `find` has found
    timeouts: Timeouts
    emit: Emit = ignore
    cancelled: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] | None = None
    now: Callable[[], float] = time.time
    earlier: dict[str, _Begun] = field(default_factory=dict)  # by token: what a process that died has made
    asked: set[str] = field(default_factory=set)  # tokens by which this process has asked for machines
    spent: set[str] = field(default_factory=set)  # tokens of tries that were undone: no gang comes of them any more
    tried: list[Refusal] = field(default_factory=list)
    refusals: list[ProviderError] = field(default_factory=list)
    blocks: list[Callable[[Offer], bool]] = field(default_factory=list)
    deadline: float = 0.0

    def run(self, offers: Sequence[Offer]) -> Acquired:
        self.deadline = self.clock() + self.timeouts.provision_s
        unfinished, self.spent = _history(self.journal, self.request)
        self.earlier = {begun.intent.token: begun for begun in unfinished if self._exists(begun)}
        for intent in self._intents(offers):
            made = self._try(intent)
            if made is not None:
                return made
        raise self._nothing()

    def _intents(self, offers: Sequence[Offer]) -> Iterator[Intent]:
        yield from [begun.intent for begun in self.earlier.values()]
        for offer in offers:
            attempts = (self._intent(offer, number) for number in itertools.count())
            for intent in itertools.islice((i for i in attempts if i.token not in self.spent), _TRIES):
                if not any(blocks(offer) for blocks in self.blocks):
                    yield intent

    def _exists(self, begun: _Begun) -> bool:
        patience_s = begun.at + self.provider.caps.listing_lag_s - self.now()
        if self._look_for(begun.intent, patience_s) is not None:
            return True
        self.journal.append("undone", token=begun.intent.token, why="nothing was made")
        return False

    def _look_for(self, intent: Intent, patience_s: float) -> Handle | None:
        """What the intent has made; None: nothing, as far as the provider shows it `patience_s` seconds from now."""
        sure_at = self.clock() + patience_s
        for pause in _pauses(self.timeouts.describe_every_s):
            found = self._insist(lambda: self.provider.find(intent))
            if found is not None or self.clock() >= sure_at:
                return found
            self._pause(min(pause, sure_at - self.clock()))
        raise AssertionError("the pauses never end")

    def _intent(self, offer: Offer, attempt: int) -> Intent:
        fleet, generation, owner = self.request.fleet, self.request.generation, self.request.owner
        token = create_token(fleet, generation, offer, attempt)
        return Intent(fleet=fleet, generation=generation, owner=owner, token=token, offer=offer)

    def _try(self, intent: Intent) -> Acquired | None:
        """One try from intent to nodes that can be reached; None: undone, and another one may do better."""
        handle: Handle | None = None
        self._go_on()
        asked = self._asked_for(intent)
        self.journal.append("intent", **intent.model_dump(mode="json"), hard_cap_s=asked.hard_cap_s)
        try:
            handle = self._create(intent, asked)
            self.journal.append("created", token=intent.token, handle=handle.model_dump(mode="json"))
            state = self._wait(handle)
        except BaseException as error:  # noqa: BLE001 - whatever it was is undone here, and raised by _judge
            if handle is not None or not self._made_nothing(intent, error):
                self._undo(intent, handle)
            self.journal.append("undone", token=intent.token, why=str(error))
            self._judge(intent, error)
            return None
        self.journal.append("acquired", token=intent.token)
        self.emit(OfferTried(intent.offer.label))
        return Acquired(handle, intent.offer, state, tuple(self.tried))

    def _asked_for(self, intent: Intent) -> FleetRequest:
        """The request; for what an earlier process has made, with the hard cap that it has: a request that differs
        would not be granted by the same token. Each repair asks for what is left until the fleet's own."""
        begun = self.earlier.get(intent.token)
        return self.request.model_copy(update={"hard_cap_s": begun.hard_cap_s}) if begun else self.request

    def _create(self, intent: Intent, asked: FleetRequest) -> Handle:
        trouble, caps = _Backoff(), self.provider.caps
        patience_s = 0 if caps.idempotent_create else caps.listing_lag_s
        while True:
            try:
                return self._insist(lambda: self._ask(intent, asked))
            except AmbiguousCreate as error:
                self.emit(Note(f"{error.what}; looking for what it made"))
                self._pause(trouble.next(error))
            found = self._look_for(intent, patience_s)
            if found is not None:
                return self.whole(found)

    def _ask(self, intent: Intent, asked: FleetRequest) -> Handle:
        self.asked.add(intent.token)
        return self.make(intent, asked)

    def _wait(self, handle: Handle) -> FleetState:
        for pause in _pauses(self.timeouts.describe_every_s):
            state = self._insist(lambda: self.provider.describe(handle))
            asked = tuple(node for node in state.nodes if node.rank in self.ranks)
            lost = [node for node in asked if node.phase in (NodePhase.STOPPING, NodePhase.TERMINATED)]
            if lost:
                raise _Lost("; ".join(map(_obituary, lost)))
            if len(asked) < len(self.ranks):
                raise _Lost(f"{len(asked)} of {len(self.ranks)} nodes were granted")
            if FleetState(nodes=asked).ready:
                return state
            self._pause(pause)
        raise AssertionError("the pauses never end")

    def _insist(self, call: Callable[[], _T]) -> _T:
        """The call's answer; again and again while the provider is busy or does not answer."""
        trouble, last = _Backoff(), ""
        while True:
            self._go_on(last)
            try:
                return call()
            except (RateLimited, Transient) as error:
                last = error.what
                self._pause(trouble.next(error))

    def _go_on(self, last: str = "") -> None:
        """Raises when the search was cancelled or its time is up; `last` is the newest trouble."""
        if self.cancelled.is_set():
            raise Interrupted(f"provisioning of fleet {self.request.fleet} was cancelled", "", "Nothing was left.")
        if self.clock() >= self.deadline:
            raise Transient(
                f"fleet {self.request.fleet}: not every node was ready within {self.timeouts.provision_s:.0f} s",
                "\n".join(filter(None, (self._table(), last))),
                "Try again, or allow other regions, GPU types or markets in the run file.",
            )

    def _pause(self, seconds: float) -> None:
        seconds = max(0.0, min(seconds, self.deadline - self.clock()))
        (self.sleep or self.cancelled.wait)(seconds)

    def _undo(self, intent: Intent, handle: Handle | None) -> None:
        """Ends what the try has made, whether or not anybody has heard of it."""
        fresh = tuple(name for rank, name in enumerate(handle.ids) if rank in self.ranks and name) if handle else None
        try:
            handle = handle or self._left_behind(intent)
        except ProviderError as error:
            raise TeardownIncomplete(
                f"fleet {intent.fleet}: a create at {intent.offer.label} may have made machines that are billed",
                str(error),
                "Run `mgpu gc`; whatever happens, the machines end at their hard cap.",
            ) from error
        if handle is not None:
            destroy(
                self.provider,
                handle,
                timeouts=self.timeouts,
                emit=self.emit,
                nodes=fresh,
                clock=self.clock,
                sleep=self.sleep or time.sleep,
            )

    def _left_behind(self, intent: Intent) -> Handle | None:
        """What a create made whose answer was lost. No cancel and no deadline of the search cuts this short."""
        sure_at, trouble = self.clock() + self.provider.caps.listing_lag_s, _Backoff()
        deadline, pauses = sure_at + self.timeouts.destroy_s, _pauses(self.timeouts.describe_every_s)
        while True:
            try:
                found = self.provider.find(intent)
                if found is not None or self.clock() >= sure_at:
                    return found
                pause = min(next(pauses), sure_at - self.clock())
            except (RateLimited, Transient) as error:
                pause = trouble.next(error)
                if self.clock() + pause > deadline:
                    raise
            (self.sleep or time.sleep)(pause)

    def _made_nothing(self, intent: Intent, error: BaseException) -> bool:
        """True for the answers by which a provider says so. A conflict over an intent of ours is none of them."""
        if intent.token not in self.asked and intent.token not in self.earlier:
            return True
        if isinstance(error, Conflict):
            return intent.token not in self.earlier
        return isinstance(error, ProviderError) and not isinstance(error, (Transient, RateLimited, AmbiguousCreate))

    def _judge(self, intent: Intent, error: BaseException) -> None:
        """Notes a refusal and what it blocks; raises what ends the search."""
        if isinstance(error, CleanupFailed):
            raise TeardownIncomplete(error.what, error.why, error.next_step) from error
        if isinstance(error, _Refused):
            self.blocks.append(_blocks(error, intent.offer))
            self.refusals.append(error)
        elif not isinstance(error, (_Lost, Conflict)) or (isinstance(error, Conflict) and self._lives(intent)):
            raise error
        reason = error.what if isinstance(error, MgpuError) else str(error)
        self.tried.append(Refusal(offer=intent.offer, reason=reason))
        self.emit(OfferTried(intent.offer.label, reason))

    def _lives(self, intent: Intent) -> bool:
        """A token that was used with other parameters is spent when its machines are gone; else it is a conflict."""
        handle = self._insist(lambda: self.provider.find(intent))
        if handle is None:
            return False
        state = self._insist(lambda: self.provider.describe(handle))
        return any(node.id and node.phase is not NodePhase.TERMINATED for node in state.nodes)

    def _table(self) -> str:
        return "\n".join(f"{refusal.offer.label}: {refusal.reason}" for refusal in self.tried)

    def _nothing(self) -> ProviderError:
        if not self.tried:
            return NoOffer(f"fleet {self.request.fleet}: there is no offer to try")
        kinds = {type(error) for error in self.refusals}
        cls = kinds.pop() if len(kinds) == 1 else NoCapacity
        steps = [error.next_step for error in self.refusals if error.next_step]
        return cls(
            f"fleet {self.request.fleet}: none of the offers was granted",
            self._table(),
            steps[-1] if steps else "Allow other regions, GPU types or markets in the run file, or try later.",
        )


def _obituary(node: NodeState) -> str:
    return f"node {node.rank} ({node.id}) ended while it started: {node.reason or 'no reason given'}"


def _history(journal: Journal, request: FleetRequest) -> tuple[list[_Begun], set[str]]:
    """Intents of this generation without an end, which a process that died may have carried out; tokens undone."""
    begun: dict[str, _Begun] = {}
    spent: set[str] = set()
    for entry in journals.read(journal.path):
        if entry["kind"] == "intent" and (entry["fleet"], entry["generation"]) == (request.fleet, request.generation):
            intent = Intent.model_validate({name: entry[name] for name in Intent.model_fields})
            begun[intent.token] = _Begun(intent, entry["at"], entry.get("hard_cap_s", request.hard_cap_s))
        elif entry["kind"] == "undone":
            begun.pop(entry["token"], None)
            spent.add(entry["token"])
    return list(begun.values()), spent


def _blocks(error: ProviderError, offer: Offer) -> Callable[[Offer], bool]:
    quota = isinstance(error, QuotaExceeded)
    place = ("region",) if quota and error.scope in ("offer", "zone") else _PLACES[error.scope]

    def key(other: Offer) -> tuple[object, ...]:
        kind = other.instance_type.partition(".")[0] if quota else other.instance_type
        return kind, other.market, *(getattr(other, name) for name in place)

    blocked = key(offer)
    return lambda other: key(other) == blocked
