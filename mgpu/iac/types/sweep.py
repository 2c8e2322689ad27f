"""Ends machines of a fleet that no state knows: what a crash in the middle of a create or a repair left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.acquire.ending import CURE
from mgpu.acquire.pauses import pauses
from mgpu.errors import TeardownIncomplete
from mgpu.events import Note, Warned
from mgpu.iac.protocol.handler import Call
from mgpu.iac.types import generations
from mgpu.iac.types.generations import Begun
from mgpu.providers.base import Handle, Provider, listed

_LISTING_PAUSE = 60  # times `describe_every_s`: a listing asks all regions


def sweep(
    call: Call,
    provider: Provider,
    owner: str,
    fleet: str,
    timeouts: Timeouts,
    keep: Collection[str] = (),
    now: Callable[[], float] = time.time,
) -> bool:
    """Ends everything that the provider lists under this owner and fleet, but the machines in `keep`: at once what is
    listed now, and what is listed later, as long as something may be that was asked for last. `now` is in UNIX seconds.
    Whether there was something, or may have been.

    Raises:
        TeardownIncomplete: it was cancelled before that.
        ProviderError: something was not confirmed gone.
    """
    folder = call.settings.state_dir
    begun = [each for each in generations.begun(folder, owner, fleet) if each.provider in ("", provider.name)]
    sure_at, told, ended = _listed_at(provider, begun, timeouts, now()), False, False
    for pause in pauses(_LISTING_PAUSE * timeouts.describe_every_s):
        left_s = sure_at - now()  # read before the listing: what is shown only after that comes next time
        ended |= _end_listed(call, provider, owner, fleet, timeouts, keep, {each.region for each in begun})
        if left_s <= 0:
            break
        if not told:
            call.emit(Note(f"what was asked for last may not be listed yet: looking for {left_s:.0f} s more"))
            told = True
        if call.cancelled.wait(min(pause, left_s)):
            what = f"fleet {fleet}: machines that were asked for last may not be listed yet"
            raise TeardownIncomplete(what, f"looking for them was cancelled {left_s:.0f} s too early", CURE)
    if begun:
        generations.swept(folder, owner, fleet, begun)
    return ended or bool(begun)


def _end_listed(
    call: Call,
    provider: Provider,
    owner: str,
    fleet: str,
    timeouts: Timeouts,
    keep: Collection[str],
    regions: Collection[str],
) -> bool:
    kept, left = frozenset(keep), list[Handle]()
    look, limit_s = partial(listed, provider, owner, regions), min(acquire.ANSWER_S, timeouts.destroy_s)
    for handle in acquire.patiently(look, limit_s, call.cancelled.wait, call.emit):
        strays = tuple(machine for machine in handle.ids if machine and machine not in kept)
        if handle.fleet != fleet or not strays:
            continue
        call.emit(Warned(f"ending {', '.join(strays)}: an interrupted operation left them outside the state"))
        left.append(handle.model_copy(update={"ids": strays}))

    gone = list[Handle]()
    try:
        acquire.destroy_all(provider, left, timeouts=timeouts, emit=call.emit, gone=gone.append)
    finally:  # a full disk, which takes no note, keeps no machine alive
        for handle in gone:
            generations.used(call.settings.state_dir, owner, fleet, handle.generation)
    return bool(left)


def _listed_at(provider: Provider, begun: Sequence[Begun], timeouts: Timeouts, now: float) -> float:
    """UNIX seconds at which the provider lists all that was asked for, and of which nobody has seen what came. Whoever
    wrote an intent down may have asked at any time since, as long as a search may last."""
    able = provider.capabilities
    longest = timeouts.at_least(provision_s=acquire.GANGS * able.boot_s, listing_s=able.listing_lag_s)
    asked_at = [min(each.at if each.answered else each.at + longest.provision_s, now) for each in begun]
    return max(asked_at, default=0.0) + longest.listing_s
