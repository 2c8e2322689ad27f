"""Ends machines of a fleet that no state knows: what a crash in the middle of a create or a repair left behind."""

from __future__ import annotations

import time
from collections.abc import Collection

from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.events import Warned
from mgpu.iac.protocol.handler import Call
from mgpu.iac.types import generations
from mgpu.providers.base import Provider


def sweep(
    call: Call, provider: Provider, owner: str, fleet: str, timeouts: Timeouts, keep: Collection[str] = ()
) -> None:
    """Ends everything that the provider lists under this owner and fleet, but the machines in `keep`.

    Raises:
        ProviderError: something was not confirmed gone.
    """
    time.sleep(max(0.0, _lag_s(call, provider, fleet, timeouts)))
    kept = frozenset(keep)
    for handle in provider.list_owned(owner):
        strays = tuple(machine for machine in handle.ids if machine and machine not in kept)
        if handle.fleet != fleet or not strays:
            continue
        call.emit(Warned(f"ending {', '.join(strays)}: an interrupted operation left them outside the state"))
        acquire.destroy(provider, handle.model_copy(update={"ids": strays}), timeouts=timeouts, emit=call.emit)
        generations.used(call.settings.state_dir, fleet, handle.generation)


def _lag_s(call: Call, provider: Provider, fleet: str, timeouts: Timeouts) -> float:
    """Seconds until the provider lists what was asked for last, where nobody knows what came of it; whoever wrote the
    intent down may have asked at any time since, as long as a search may last."""
    asked_at = generations.unanswered_at(call.settings.state_dir, fleet)
    return min(asked_at + timeouts.provision_s - time.time(), 0) + provider.capabilities.listing_lag_s
