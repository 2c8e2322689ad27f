"""Offers -> machines that run, or nothing at all: failover, deadlines, undo, and "what was tried".

One try: the intent is journalled, the gang is asked for, and it is waited for until every node can be reached; where
machines come with a host key for one use, until each has a new one (`Terms.meet`). A try that does not get there is
undone before the next one begins. What a refusal blocks:

    NoCapacity, BidTooLow       this machine type on this market, within the error's scope; the next offer is tried
    QuotaExceeded               this family on this market, within the error's scope or region; the next offer is tried
    NoOffer                     all that is in the error's scope: there is nothing to be had; the next offer is tried
    AuthError, PermissionDenied of scope region   the same; of any other scope, as below
    a node lost while starting  nothing; the same offer is asked again under a new token, a few times
    RateLimited, Transient      nothing; the same call again after a jittered pause
    AmbiguousCreate             nothing; what was made is looked for, and only then asked for again, by the same token
                                (by a provider that does not promise what tokens promise: once it would show it)
    all other errors            everything: the search ends with them

Where an answer was lost and the search ends, or its process has died, the provider is asked what the token has made
(`Recalls`); without its word its listings are looked at until they would show it.

Journal entries, each with the `token`: `intent` (before the create; all of `Intent`, and `hard_cap_s`), `created` (the
handle), then `acquired` (all nodes run) or `undone` (nothing of it is left). An intent that is not undone may have
machines, also where the provider does not show them yet (`listing_lag_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from mgpu.acquire.ending import destroy as destroy
from mgpu.acquire.ending import destroy_all as destroy_all
from mgpu.acquire.ending import in_one as in_one
from mgpu.acquire.pauses import ANSWER_S as ANSWER_S
from mgpu.acquire.pauses import Backoff as Backoff
from mgpu.acquire.pauses import patiently as patiently
from mgpu.acquire.search import Search
from mgpu.acquire.terms import ENDING_S as ENDING_S
from mgpu.acquire.terms import GANGS as GANGS
from mgpu.acquire.terms import LOOKED_S as LOOKED_S
from mgpu.acquire.terms import Acquired as Acquired
from mgpu.acquire.terms import Lost as Lost
from mgpu.acquire.terms import Meet as Meet
from mgpu.acquire.terms import Terms as Terms
from mgpu.acquire.terms import limits as limits
from mgpu.acquire.terms import operation_s as operation_s
from mgpu.acquire.terms import search_s as search_s
from mgpu.journal import Journal
from mgpu.plan.model import Offer
from mgpu.providers.base import FleetRequest, Handle, Intent, Provider


def acquire(
    provider: Provider, request: FleetRequest, offers: Sequence[Offer], journal: Journal, **terms: Unpack[Terms]
) -> Acquired:
    """Rents the gang that is asked for, from the first of the offers (best first) that grants it.

    What an earlier process has journalled for this generation and not brought to an end is adopted first.

    Raises:
        NoOffer, NoCapacity, QuotaExceeded, BidTooLow: nothing was granted; `why` tells what was tried.
        Transient: not every node was ready within `provision_s`, or by `until`; what was made has been ended.
        Interrupted: `cancelled` was set; what was made has been ended.
        TeardownIncomplete: something was made that could not be ended.
        HostKeyMismatch: a node shows a host key that is not its own; what was made has been ended.
        ProviderError: what no other offer would change.
    """

    def make(intent: Intent, asked: FleetRequest) -> Handle:
        return provider.create(asked, intent.offer, intent.token)

    ranks = frozenset(range(request.requirements.nodes))
    return Search(provider, request, journal, ranks, make, lambda found: found, **terms).run(offers)


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
        new = dict(enumerate(found.ids))  # it may have fewer places than the fleet
        ids = tuple(new.get(rank, "") if rank in ranks else old for rank, old in enumerate(handle.ids))
        return found.model_copy(update={"ids": ids})

    ranks = frozenset(missing)
    search = Search(provider, request, journal, ranks, make, whole, **terms)
    return search.run([offer for offer in offers if offer.region == handle.region])
