"""Ends machines that nothing stands for: many fleets at a time, each confirmed by its provider."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

from mgpu import acquire
from mgpu.context import Context
from mgpu.errors import MgpuError
from mgpu.providers import registry
from mgpu.run.fleet.inventory import StandingFleet
from mgpu.run.lifecycle.down import down, keep
from mgpu.run.lifecycle.outcome import revoke_store
from mgpu.run.record.record import every, load, supervising

_AT_ONCE = 16  # fleets that are ended at the same time


def end_all(found: Sequence[StandingFleet], context: Context) -> Iterator[tuple[StandingFleet, MgpuError | None]]:
    """Ends fleets, many at a time, since each waits for its provider; of each, once it is known, why it did not end
    (None: it did). Runs are closed one after the other: the engine is in it."""
    waiting, done = SimpleQueue[StandingFleet](), SimpleQueue[_Ended]()
    loose = [fleet for fleet in found if not fleet.left_by]
    for fleet in loose:
        waiting.put(fleet)
    for _ in loose[:_AT_ONCE]:  # daemons: nobody who interrupts this waits for them
        threading.Thread(target=_end_each, args=(waiting, done, context), name="mgpu-end", daemon=True).start()
    ended = itertools.chain((done.get() for _ in loose), (_end(fleet, context) for fleet in found if fleet.left_by))
    for fleet, error in ended:
        if error is not None and not isinstance(error, MgpuError):
            raise error
        yield fleet, error


_Ended = tuple[StandingFleet, BaseException | None]


def _end_each(waiting: SimpleQueue[StandingFleet], done: SimpleQueue[_Ended], context: Context) -> None:
    while True:
        try:
            fleet = waiting.get_nowait()
        except Empty:
            return
        done.put(_end(fleet, context))


def _end(fleet: StandingFleet, context: Context) -> _Ended:
    try:
        end(fleet, context)
    except BaseException as error:  # noqa: BLE001 - end_all raises what is no MgpuError
        return fleet, error
    return fleet, None


def end(fleet: StandingFleet, context: Context) -> None:
    """Ends a fleet's machines, and believes it only when the provider says so; a run that left them is closed.

    Raises:
        InputError: somebody supervises that run now, or it trains.
        TeardownIncomplete: something may still be billed.
    """
    if not fleet.left_by:
        provider = registry.get(fleet.provider, fleet.options)
        acquire.destroy(provider, fleet.handle, timeouts=context.timeouts, emit=context.emit)
        return
    down(load(fleet.left_by), context, left=True)


def take_rights_away(context: Context) -> None:
    """What machines of runs that are over may still do in their stores, because it could not be taken away at the end.
    What stays is told."""
    for record in every():
        if not (record.state.final and record.store_granted and record.teardown == "confirmed"):
            continue
        with supervising(record.run_id) as token:
            if token:
                left = load(record.run_id)
                left.supervisor = token
                revoke_store(left, context.emit)
                keep(left, context)
