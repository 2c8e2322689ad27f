"""One search: intents, tries, undo. What it promises is said in `mgpu.acquire`."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mgpu_train.timeouts import Timeouts

from mgpu.acquire.ending import CURE, destroy
from mgpu.acquire.history import Begun, history
from mgpu.acquire.pauses import Backoff, pauses
from mgpu.acquire.refusals import Refusals, refuses, told_of
from mgpu.acquire.terms import ENDING_S, GANGS, Acquired, Lost, Meet, limits
from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    CleanupFailed,
    Conflict,
    Interrupted,
    MgpuError,
    NoCapacity,
    NoOffer,
    ProviderError,
    RateLimited,
    TeardownIncomplete,
    Transient,
)
from mgpu.events import Emit, Note, OfferTried, Warned, ignore
from mgpu.journal import Journal
from mgpu.plan.model import Offer
from mgpu.providers.base import (
    GOING,
    FleetRequest,
    FleetState,
    Handle,
    Intent,
    NodePhase,
    NodeState,
    Provider,
    Recalls,
    create_token,
    other_usd_per_hour,
)

_TRIES = 3  # of one offer whose nodes were lost while they started
_LAG_PAUSE = 10  # times `describe_every_s`: between two looks for what may not be listed for minutes
_LOG_IN_S = 300.0  # between two looks without a log-in: who fails more often is barred
_QUEUE_PAUSE = 20  # times `describe_every_s`: between two looks at a queue, at most
_PASSING = (RateLimited, Transient)  # the same call may be answered later
_IN_QUEUE = (*_PASSING, AuthError)  # nothing is lost by waiting for a log-in, and without one nothing can be undone
_T = TypeVar("_T")


@dataclass
class Search:
    """What `acquire` and `repair` have in common; `run` does it."""

    provider: Provider
    request: FleetRequest
    journal: Journal
    ranks: frozenset[int]  # the ones that this search has to fill
    make: Callable[[Intent, FleetRequest], Handle]
    whole: Callable[[Handle], Handle]  # the fleet's handle with what `find` has found
    timeouts: Timeouts
    emit: Emit = ignore
    cancelled: threading.Event = field(default_factory=threading.Event)
    meet: Meet | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] | None = None
    now: Callable[[], float] = time.time
    earlier: dict[str, Begun] = field(default_factory=dict)  # by token: what a process that died has made
    asked: dict[str, FleetRequest] = field(default_factory=dict)  # by the tokens that this process has asked by
    unsure: set[str] = field(default_factory=set)  # those of them that may have made something without an answer
    spent: set[str] = field(default_factory=set)  # tokens of tries that were undone: no gang comes of them any more
    refusals: Refusals = field(default_factory=Refusals)
    hard_cap_at: float = 0.0
    max_usd: float = 0.0
    searches: int = 0
    until: float = math.inf  # by the clock: no deadline is later
    deadline: float = 0.0
    begun: float = 0.0  # by the clock

    def run(self, offers: Sequence[Offer]) -> Acquired:
        """Adopts what an earlier process has begun, else asks for one offer after the other."""
        self.begun = self.clock()
        self.timeouts = limits(self.timeouts, self.provider, self.request.requirements)
        unfinished, self.spent = history(self.journal, self.request)
        if unfinished:
            self._allow(self.timeouts.listing_s + self.timeouts.provision_s)
        self.earlier = {begun.intent.token: begun for begun in unfinished}
        self.earlier = {token: begun for token, begun in self.earlier.items() if self._exists(begun)}
        self._allow(self.timeouts.provision_s)
        for intent in self._intents(offers):
            made = self._try(intent)
            if made is not None:
                return made
        raise self.refusals.verdict(self.request.fleet)

    def _allow(self, seconds: float) -> None:
        self.deadline = min(self.until, self.clock() + min(seconds, self._left_s() - ENDING_S))

    def _intents(self, offers: Sequence[Offer]) -> Iterator[Intent]:
        yield from [begun.intent for begun in self.earlier.values()]
        for offer in offers:
            if self.refusals.rule_out(offer):
                self.refusals.skipped += 1
                continue
            attempts = (self._intent(offer, number) for number in itertools.count())
            for intent in itertools.islice((i for i in attempts if i.token not in self.spent), _TRIES):
                yield intent
                if self.refusals.rule_out(offer):
                    break

    def _exists(self, begun: Begun) -> bool:
        # whoever has died may have asked for it at any time since, as long as its search may have lasted
        wait_s = min(begun.at + self.timeouts.provision_s - self.now(), 0) + self.timeouts.listing_s
        if self._look_for(begun.intent, wait_s) is not None:
            return True
        self.journal.append("undone", token=begun.intent.token, why="nothing was made")
        self.spent.add(begun.intent.token)
        return False

    def _look_for(self, intent: Intent, wait_s: float) -> Handle | None:
        """What the intent has made; None: nothing, as far as the provider shows it `wait_s` seconds from now."""
        sure_at = self.clock() + wait_s
        for pause in pauses(_LAG_PAUSE * self.timeouts.describe_every_s):
            left_s = sure_at - self.clock()
            known, found = self._insist(lambda: self._known(intent, listed=left_s <= 0))  # noqa: B023  asked at once
            if known:
                return found
            self._pause(min(pause, left_s))
        raise AssertionError("the pauses never end")

    def _known(self, intent: Intent, *, listed: bool) -> tuple[bool, Handle | None]:
        """Whether the provider tells what the intent has made, and that. `listed`: it would be listed by now."""
        found = self.provider.find(intent)
        if found is not None or listed:
            return True, found
        if not isinstance(self.provider, Recalls):
            return False, None
        asked = self.asked.get(intent.token) or self._asked_for(intent)
        try:
            return True, self.provider.recall(asked, intent, tuple(sorted(self.ranks)))
        except ProviderError:  # its listings have to tell
            return False, None

    def _intent(self, offer: Offer, attempt: int) -> Intent:
        fleet, generation, owner = self.request.fleet, self.request.generation, self.request.owner
        token = create_token(owner, fleet, generation, offer, attempt, self.searches)
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
        except BaseException as error:  # whatever it was is undone here, and raised by _judge
            ended = (handle is not None or not self._made_nothing(intent, error)) and self._undo(intent, handle)
            if isinstance(error, CleanupFailed) and not ended:  # it knows of what no listing shows
                raise TeardownIncomplete(error.what, error.why, error.next_step) from error
            self.journal.append("undone", token=intent.token, why=str(error))
            self._judge(intent, error)
            return None
        self.journal.append("acquired", token=intent.token)
        self.emit(OfferTried(intent.offer.label))
        return Acquired(handle, intent.offer, state, tuple(self.refusals.tried))

    def _asked_for(self, intent: Intent) -> FleetRequest:
        """The request; for what an earlier process has made, with the hard cap that it has: a request that differs
        would not be granted by the same token. Each repair asks for what is left until the fleet's own."""
        begun = self.earlier.get(intent.token)
        new_s = min(self.request.hard_cap_s, self._left_s(), self._paid_for_s(intent.offer))
        hard_cap_s = begun.hard_cap_s if begun else new_s
        return self.request.model_copy(update={"hard_cap_s": hard_cap_s, "ends_by": self.hard_cap_at})

    def _paid_for_s(self, offer: Offer) -> float:
        """Seconds that `max_usd` pays for at this offer's highest price, with what is billed beside its machines."""
        if not self.max_usd:
            return math.inf
        needed = self.request.requirements
        usd_per_hour = offer.billed_at_most * needed.nodes + other_usd_per_hour(self.provider, needed, offer)
        return self.max_usd / usd_per_hour * 3600 if usd_per_hour else math.inf

    def _left_s(self) -> float:
        """Seconds until the hard cap that the fleet has already."""
        return self.hard_cap_at - self.now() if self.hard_cap_at else math.inf

    def _create(self, intent: Intent, asked: FleetRequest) -> Handle:
        trouble, caps = Backoff(), self.provider.capabilities
        wait_s = 0 if caps.idempotent_create else self.timeouts.listing_s
        while True:
            try:
                return self._insist(lambda: self._ask(intent, asked))
            except AmbiguousCreate as error:
                self.emit(Note(f"{error.what}; looking for what it made"))
                self._pause(trouble.next(error))
            found = self._look_for(intent, wait_s)
            if found is not None:
                return self.whole(found)

    def _ask(self, intent: Intent, asked: FleetRequest) -> Handle:
        self.asked[intent.token] = asked
        try:
            return self.make(intent, asked)
        except (RateLimited, Transient, AmbiguousCreate):
            self.unsure.add(intent.token)
            raise

    def _wait(self, handle: Handle) -> FleetState:
        trouble = told = queued = ""
        begun = self.clock()
        for pause in pauses(self.timeouts.describe_every_s):
            state = self._insist(lambda: self.provider.describe(handle), trouble, _IN_QUEUE if queued else _PASSING)
            asked = self._asked_of(state)
            before, queued = queued, self._queued(asked, begun, told)
            if before and not queued:
                self._allow(self.timeouts.provision_s)
            told = queued or told
            trouble = next((node.reason for node in asked.nodes if node.reason), "")
            if asked.ready:
                if self.meet is None:
                    return state
                state = self._met(self.meet, handle, state)
                silent = [node for node in self._asked_of(state).nodes if node.one_use_key]
                if not silent:
                    return state
                trouble = silent[0].reason
            # nobody waits for seconds of a queue of hours
            often = min(_QUEUE_PAUSE * self.timeouts.describe_every_s, (self.clock() - begun) / 8) if queued else 0.0
            self._pause(max(pause, often))
        raise AssertionError("the pauses never end")

    def _queued(self, asked: FleetState, begun: float, told: str) -> str:
        """What nodes wait for in the provider's queue, which is said unless it was `told` last; empty: none does. Their
        time to come up has not begun, and the queue has a deadline of its own, from `begun`. Raises NoCapacity: it is
        over."""
        reason = next((node.reason or "queued" for node in asked.nodes if node.queued), "")
        if not reason:
            return ""
        queue_s = self.provider.queue_s()
        left_s = min(begun + queue_s, self.begun + GANGS * queue_s) - self.clock()
        if left_s <= 0:
            waited = f"fleet {self.request.fleet} waited in the queue for {(self.clock() - begun) / 60:.0f} min"
            raise NoCapacity(
                waited, reason, "Wait longer, ask for less, or try again when more is free.", scope="offer"
            )
        if reason != told:
            self.emit(Note(f"in the queue ({reason}); waiting for {left_s / 60:.0f} min at most"))
        self._allow(left_s + self.timeouts.provision_s)
        return reason

    def _asked_of(self, state: FleetState) -> FleetState:
        """The nodes that this search has to bring up. Raises Lost when one is gone, or was never granted; NoOffer where
        its region, or its zone, will start none."""
        asked = tuple(node for node in state.nodes if node.rank in self.ranks)
        for node in asked:
            if node.cure:
                raise NoOffer(_why(node), "", node.cure, scope=node.cure_scope)
        if lost := [node for node in asked if node.phase in GOING]:
            raise Lost("; ".join(map(_why, lost)))
        if len(asked) < len(self.ranks):
            raise Lost(f"{len(asked)} of {len(self.ranks)} nodes were granted")
        return FleetState(nodes=asked)

    def _met(self, meet: Meet, handle: Handle, state: FleetState) -> FleetState:
        return self._insist(lambda: meet(handle, state))

    def _insist(
        self, call: Callable[[], _T], last: str = "", passing: tuple[type[ProviderError], ...] = _PASSING
    ) -> _T:
        """The call's answer; again and again while the provider is busy or does not answer (`passing`: while the errors
        are of these kinds). `last`: as in `_go_on`."""
        trouble, told = Backoff(), ""
        while True:
            self._go_on(last)
            try:
                return call()
            except passing as error:
                last = error.what
                if isinstance(error, AuthError) and told != last:
                    told = last
                    self.emit(Warned(f"{last}; what was asked for stays in the queue. {error.next_step}".rstrip()))
                self._pause(max(trouble.next(error), _LOG_IN_S if isinstance(error, AuthError) else 0.0))

    def _go_on(self, last: str = "") -> None:
        """Raises when the search was cancelled or its time is up; `last` is the newest trouble."""
        if self.cancelled.is_set():
            raise Interrupted(f"provisioning of fleet {self.request.fleet} was cancelled", "", "Nothing was left.")
        if self.clock() >= self.deadline:
            raise Transient(
                f"fleet {self.request.fleet}: not every node was ready within {self.timeouts.provision_s:.0f} s",
                "\n".join(filter(None, (self.refusals.table(), last))),
                "Try again, or allow other regions, GPU types or markets in the run file.",
            )

    def _pause(self, seconds: float) -> None:
        seconds = max(0.0, min(seconds, self.deadline - self.clock()))
        (self.sleep or self.cancelled.wait)(seconds)

    def _undo(self, intent: Intent, handle: Handle | None) -> bool:
        """Ends what the try has made, whether or not anybody has heard of it; False: there is nothing."""
        fresh = tuple(name for rank, name in enumerate(handle.ids) if rank in self.ranks and name) if handle else None
        begun = self.clock()
        try:
            handle = handle or self._left_behind(intent)
        except ProviderError as error:
            raise TeardownIncomplete(
                f"fleet {intent.fleet}: a create at {intent.offer.label} may have made machines that are billed",
                str(error),
                CURE,
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
        # late listings, and machines that end slowly, leave the next ones as much time
        longer = self.deadline + self.clock() - begun
        self.deadline = min(self.until, longer, self.clock() + self._left_s() - ENDING_S)
        return handle is not None

    def _left_behind(self, intent: Intent) -> Handle | None:
        """What a create made whose answer was lost. No cancel and no deadline of the search cuts this short."""
        sure_at, trouble = self.clock() + self.timeouts.listing_s, Backoff()
        deadline, looks = sure_at + self.timeouts.destroy_s, pauses(_LAG_PAUSE * self.timeouts.describe_every_s)
        while True:
            try:
                left_s = sure_at - self.clock()
                known, found = self._known(intent, listed=left_s <= 0)
                if known:
                    return found
                pause = min(next(looks), left_s)
            except (RateLimited, Transient) as error:
                pause = trouble.next(error)
                if self.clock() + pause > deadline:
                    raise
            (self.sleep or time.sleep)(pause)

    def _made_nothing(self, intent: Intent, error: BaseException) -> bool:
        """True for the answers by which a provider says so. No refusal takes back what an answer that was lost may have
        granted, or what an earlier process was seen to have made."""
        if intent.token not in self.asked and intent.token not in self.earlier:
            return True
        if intent.token in self.unsure or intent.token in self.earlier:
            return False
        left = (Transient, RateLimited, AmbiguousCreate, CleanupFailed)
        return isinstance(error, ProviderError) and not isinstance(error, left)

    def _judge(self, intent: Intent, error: BaseException) -> None:
        """Notes a refusal and what it blocks; raises what ends the search."""
        if isinstance(error, CleanupFailed):  # what was left is ended by now: what counts is why it was not to be had
            error = error.__cause__ or error
        refused = error if isinstance(error, ProviderError) and refuses(error) else None
        passing = isinstance(error, Lost) or (isinstance(error, Conflict) and not self._lives(intent))
        if refused is None and not passing:
            raise error
        reason = told_of(intent.offer, error.what if isinstance(error, MgpuError) else str(error))
        self.refusals.add(intent.offer, reason, refused)
        self.emit(OfferTried(intent.offer.label, reason))

    def _lives(self, intent: Intent) -> bool:
        """A token that was used with other parameters is spent when its machines are gone; else it is a conflict."""
        handle = self._insist(lambda: self.provider.find(intent))
        if handle is None:
            return False
        state = self._insist(lambda: self.provider.describe(handle))
        return any(node.id and node.phase is not NodePhase.TERMINATED for node in state.nodes)


def _why(node: NodeState) -> str:
    ended = "ended while it started" if node.phase in GOING else "cannot start"
    return f"node {node.rank} ({node.id}) {ended}: {node.reason or 'no reason given'}"
