"""Machines are ended, and the provider has to say so."""

from __future__ import annotations

import time
from collections.abc import Callable

from mgpu_train.timeouts import Timeouts

from mgpu.acquire.pauses import Backoff, pauses
from mgpu.errors import ProviderError, RateLimited, TeardownIncomplete, Transient
from mgpu.events import Emit, Warned, ignore
from mgpu.providers.base import Handle, Provider

CURE = "Run `mgpu gc`; whatever happens, the machines end at their hard cap."


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
    deadline, looks, trouble = clock() + timeouts.destroy_s, pauses(timeouts.describe_every_s), Backoff()
    why: ProviderError | None = None
    while True:
        try:
            if provider.destroy(handle, nodes):
                return
            why, pause = None, next(looks)
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
    what = f"fleet {handle.fleet}: {ids} at {handle.provider} {handle.region} may still be billed"
    return TeardownIncomplete(what, why, CURE)
