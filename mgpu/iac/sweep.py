"""Ends machines of a fleet that no state knows: what a crash in the middle of a create or a repair left behind."""

from __future__ import annotations

from collections.abc import Collection

from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.events import Warned
from mgpu.iac import generations
from mgpu.iac.handler import Call
from mgpu.providers.base import Provider


def sweep(
    call: Call, provider: Provider, owner: str, fleet: str, timeouts: Timeouts, keep: Collection[str] = ()
) -> None:
    """Ends everything that the provider lists under this owner and fleet, but the machines in `keep`.

    Raises:
        ProviderError: something was not confirmed gone.
    """
    for handle in provider.list_owned(owner):
        strays = tuple(machine for machine in handle.ids if machine and machine not in keep)
        if handle.fleet != fleet or not strays:
            continue
        call.emit(Warned(f"ending {', '.join(strays)}: an interrupted operation left them outside the state"))
        acquire.destroy(provider, handle.model_copy(update={"ids": strays}), timeouts=timeouts, emit=call.emit)
        generations.used(call.settings.state_dir, fleet, handle.generation)
