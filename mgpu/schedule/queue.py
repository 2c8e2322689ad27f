"""Which of the queued runs begin now, and what the others wait for. Pure: every pass, on whichever machine, finds the
same.

One that was at work before, and whose time is over, begins at once: to be ended.

Order: the higher priority; of one priority the run of who has the fewest at work; of these the oldest. In that order
they get the kept fleets that fit and that nobody uses; the others get new machines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mgpu.run.fleet import reuse
from mgpu.run.fleet.reuse import Kept
from mgpu.run.record.record import Record, State
from mgpu.words import count


@dataclass(frozen=True)
class Queued:
    """A queued run. `waits_for`: in words; empty: for nothing, a pass begins with it. `starts_on`: the stack of a kept
    fleet; empty: on new machines."""

    record: Record
    waits_for: str = ""
    starts_on: str = ""


def line_up(
    queued: Iterable[Record],
    at_work: Iterable[Record],
    known: Callable[[str], Record | None],
    fleets: Sequence[Kept] = (),
    now: float = 0.0,
) -> list[Queued]:
    """The queued runs in their order. `at_work`: those that have begun and are not over; `known`: the record of a run,
    None: there is none; `fleets`: those that are kept at `now`, UNIX seconds."""
    kept = {each.name: each for each in fleets}
    by_owner, by_sweep = Counter[str](), Counter[str]()

    def begins(record: Record) -> None:
        by_owner[record.created_by] += 1
        by_sweep[record.sweep] += 1

    for record in at_work:
        begins(record)
    left, line = list(queued), list[Queued]()
    while left:
        first = min(left, key=lambda each: (-each.priority, by_owner[each.created_by], each.created_at, each.run_id))
        left.remove(first)
        if 0 < first.ends_at <= now:
            line.append(Queued(first))
            continue
        waits = _before(first, known) or _of_its_sweep(first, by_sweep)
        fleet = None if waits else reuse.choice(kept.values(), first, now)
        if not waits and fleet is None and first.machines == "kept":
            waits = reuse.waits_for(kept.values(), first, now)
        line.append(Queued(first, waits, fleet.stack if fleet else ""))
        if fleet is not None:
            kept[fleet.name] = fleet  # with this run on it
        if not waits:
            begins(first)
    return line


def _before(record: Record, known: Callable[[str], Record | None]) -> str:
    for run_id in record.after:
        before = known(run_id)
        if before is None:
            return f"run {run_id}, whose record was removed"
        if before.state is not State.SUCCEEDED:
            over = f", which {_ENDED[before.state]}: it may be resumed" if before.state.final else " to succeed"
            return f"run {run_id}{over}"
    return ""


_ENDED = {State.FAILED: "has failed", State.STOPPED: "was stopped"}


def _of_its_sweep(record: Record, by_sweep: Counter[str]) -> str:
    if record.max_parallel and by_sweep[record.sweep] >= record.max_parallel:
        return f"its sweep, which has {count(record.max_parallel, 'run')} at a time"
    return ""
