"""Machines are ended, and the provider has to say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from mgpu_train.timeouts import Timeouts

from mgpu.acquire.pauses import Backoff, pauses
from mgpu.errors import ProviderError, RateLimited, TeardownIncomplete, Transient
from mgpu.events import Emit, Note, Warned, ignore
from mgpu.providers.base import UNBILLED, Handle, Provider

CURE = "Run `mgpu gc`; whatever happens, the machines end at their hard cap."


def destroy(
    provider: Provider,
    handle: Handle,
    *,
    timeouts: Timeouts,
    emit: Emit = ignore,
    nodes: tuple[str, ...] | None = None,
    unbilled: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Ends these machines (default: all of the handle) and returns when the provider says that they are gone, or
    with `unbilled` that they are on their way out for good and cost nothing more.

    Raises:
        TeardownIncomplete: it did not say so within `destroy_s`, or what the provider needs; or it refused. The ids are
            named.
    """
    asked = tuple(name for name in (handle.ids if nodes is None else nodes) if name)
    ids, limit_s = ", ".join(asked), timeouts.at_least(destroy_s=provider.capabilities.end_s).destroy_s
    deadline, looks, trouble = clock() + limit_s, pauses(timeouts.describe_every_s), Backoff()
    why: ProviderError | None = None
    slow, told = provider.capabilities.end_s > 0, False
    while True:
        try:
            if provider.destroy(handle, nodes):
                return
            why, pause = None, next(looks)
            if (unbilled or (slow and not told)) and _cost_nothing(provider, handle, asked):
                if unbilled:
                    return
                told = True
                emit(Note(f"{ids}: billed no more; waiting until {handle.provider} says that they are gone"))
        except (RateLimited, Transient) as error:
            if why is None:
                emit(Warned(f"ending {ids}: {error.what}; trying again"))
            why, pause = error, trouble.next(error)
        except ProviderError as error:
            raise _incomplete(handle, ids, str(error)) from error
        if clock() + pause > deadline:
            reason = str(why or f"asked for {limit_s:.0f} s, the provider does not say that they are gone")
            raise _incomplete(handle, ids, reason, billed=not told) from why
        sleep(pause)


def destroy_all(
    provider: Provider,
    handles: Iterable[Handle],
    *,
    timeouts: Timeouts,
    emit: Emit = ignore,
    gone: Callable[[Handle], object] = lambda _: None,
) -> None:
    """Ends each of these fleets or parts of one, also beside one that the provider does not end. All are asked to end
    before any is waited for; `gone` hears of each.

    Raises:
        TeardownIncomplete: some may still be billed; it says of each why.
    """
    handles, failures = tuple(handles), list[TeardownIncomplete]()
    for handle in handles if len(handles) > 1 else ():  # one may take half an hour until it is gone
        with suppress(ProviderError):
            provider.destroy(handle)
    for handle in handles:
        try:
            destroy(provider, handle, timeouts=timeouts, emit=emit)
            gone(handle)
        except TeardownIncomplete as error:
            failures.append(error)
    if failures:
        raise in_one(failures) from failures[0]


def in_one(failures: Sequence[TeardownIncomplete]) -> TeardownIncomplete:
    """The first of these errors, with the words and next steps of the others."""
    first, *others = failures
    why = (first.why, *(text for each in others for text in (each.what, each.why)))
    steps = dict.fromkeys(each.next_step for each in failures)
    return TeardownIncomplete(first.what, "\n".join(filter(None, why)), " ".join(filter(None, steps)))


def _cost_nothing(provider: Provider, handle: Handle, ids: tuple[str, ...]) -> bool:
    nodes = provider.describe(handle.model_copy(update={"ids": ids})).nodes
    return all(node.phase in UNBILLED for node in nodes)


def _incomplete(handle: Handle, ids: str, why: str, *, billed: bool = True) -> TeardownIncomplete:
    state = "may still be billed" if billed else "are billed no more, but are not gone"
    what = f"fleet {handle.fleet}: {ids} at {handle.provider} {handle.region} {state}"
    return TeardownIncomplete(what, why, CURE)
