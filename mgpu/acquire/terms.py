"""What a search is given, and what it gives back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Required, TypedDict

from mgpu_train.timeouts import Timeouts

from mgpu.events import Emit
from mgpu.plan.model import Offer, Refusal, Requirements
from mgpu.providers.base import FleetState, Handle, Provider

ENDING_S = 60.0  # a machine with less time than this before its hard cap is not worth renting

GANGS = 2  # that one search may wait for, each as long as its machines take to boot

LOOKED_S = 60.0  # for machines that a refused search may be in want of, while the provider does not answer

Meet = Callable[[Handle, FleetState], FleetState]
"""First contact, with machines that run as they are described: answers with the host keys that they have from now on. A
node whose `one_use_key` is still set is asked for again a moment later. Raises Lost: not this gang, another may do."""


def limits(timeouts: Timeouts, provider: Provider, requirements: Requirements) -> Timeouts:
    """The deadlines of a search at this provider, whose machines may be slow to come and to go."""
    able = provider.capabilities
    slowest_s = GANGS * provider.boot_s(requirements)
    return timeouts.at_least(provision_s=slowest_s, destroy_s=able.end_s, listing_s=able.listing_lag_s)


def search_s(times: Timeouts, queue_s: float = 0.0) -> float:
    """Seconds in which a create or a repair has its machines, or makes no further try, by its provider's `limits`: one
    budget for all of it, also where it looks first for what an earlier one has made, waits for machines that end, or
    begins once more because some were in its way. `queue_s`: the provider's."""
    return times.listing_s + times.provision_s + times.destroy_s + GANGS * queue_s


def operation_s(times: Timeouts, queue_s: float = 0.0) -> float:
    """Seconds in which all of it is over. Machines of before that are replaced end first. After the search what the
    last try has made is looked for, of a provider that may be silent, and ended; then all else of the fleet is, so
    patiently as `LOOKED_S` says, and once the provider would show it."""
    undone_s = times.listing_s + 2 * times.destroy_s
    swept_s = LOOKED_S + times.listing_s + times.destroy_s
    return times.destroy_s + search_s(times, queue_s) + undone_s + swept_s


class Lost(Exception):
    """Nodes ended, or stayed silent, before all of them could be used."""


@dataclass(frozen=True)
class Acquired:
    """Machines that run, the offer they were bought under, and the offers that were refused before."""

    handle: Handle
    offer: Offer
    state: FleetState
    tried: tuple[Refusal, ...] = ()


class Terms(TypedDict, total=False):
    """How long a search may take (`timeouts`), who hears of it, what ends it, and who meets the new machines (`meet`;
    without: nobody has to). `hard_cap_at` (UNIX seconds) is that of a fleet that has one already: no machine passes it,
    however long the search takes. A new fleet lives no longer than `max_usd` pays for (0: no limit). `searches`: as
    many for this fleet have come to their end before, on any machine; this one has its own tokens. `until`, by `clock`:
    it makes no try and waits for no machine after that. The clocks are for tests: `clock` and `sleep` in seconds, `now`
    in UNIX seconds."""

    timeouts: Required[Timeouts]
    emit: Emit
    cancelled: threading.Event
    meet: Meet | None
    hard_cap_at: float
    max_usd: float
    searches: int
    until: float
    clock: Callable[[], float]
    sleep: Callable[[float], object]
    now: Callable[[], float]
