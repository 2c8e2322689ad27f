"""What has to happen now. Pure: from what is kept and seen, and the time, follows what is to be done; nothing else.

Every pass computes it anew, on however many machines. What becomes of a due time is written into its schedule before
anything is done, and only by who has read the schedule as it is: of two that decide at once one is refused, and looks
again. A run's id follows from its due time: whoever submits it submits the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from mgpu.events import ScheduleMissed
from mgpu.run.fleet.reuse import Kept
from mgpu.run.record.record import Record, State
from mgpu.schedule.model import DueTime, IfMissed, IfRunning, Outcome, Schedule
from mgpu.schedule.queue import Queued, line_up
from mgpu.words import duration

NEWS_S = 86400.0  # so long it is told that a time was missed
SURE_S = 120.0  # within which a pass has made sure of what it tells; else it has died
HISTORY = 400  # due times that are kept: more than a year of nights
_OF_STATE = {State.SUCCEEDED: Outcome.SUCCEEDED, State.FAILED: Outcome.FAILED, State.STOPPED: Outcome.STOPPED}


@dataclass(frozen=True)
class Seen:
    """A run that may need something. `supervised`: somebody looks after it."""

    record: Record
    supervised: bool

    @property
    def at_work(self) -> bool:
        """True from when somebody has begun with it until it is over."""
        return not self.record.state.final and (self.supervised or self.record.state is not State.QUEUED)

    @property
    def in_line(self) -> bool:
        """True while nobody has begun with it."""
        return self.record.state is State.QUEUED and not self.supervised


@dataclass(frozen=True)
class Need:
    """A run that somebody has to look after now."""

    run_id: str
    why: str
    give_back: bool = False  # it is over, and what it has left is not: only that is to be done
    on_kept: bool = False  # it begins on a kept fleet
    queue_s: float = 0.0  # that its machines may wait in queues of their providers


@dataclass(frozen=True)
class Decisions:
    """All that is to be done. `schedules`: as they are to be, those that change, `news` what became of which of their
    times; `missed`: schedules with times that were missed and that nobody was told of; `over`: runs of whose end nobody
    was told; `submit`: due times whose runs are not there yet, each with its schedule; `stop`: runs that make room;
    `waiting`: those that stay queued."""

    schedules: tuple[Schedule, ...] = ()
    news: tuple[tuple[Schedule, DueTime], ...] = ()
    missed: tuple[Schedule, ...] = ()
    over: tuple[Record, ...] = ()
    submit: tuple[tuple[Schedule, DueTime], ...] = ()
    stop: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    waiting: tuple[Queued, ...] = ()


def decide(
    schedules: Mapping[str, Schedule],
    runs: Mapping[str, Seen],
    ended: Callable[[str], Record | None],
    now: float,
    fleets: Sequence[Kept] = (),
) -> Decisions:
    """What is to be done at `now`, UNIX seconds. `runs`: all that may need something, by id; `ended`: the record of one
    that is not among them, None: there is none; `fleets`: those that are kept."""

    def found(run_id: str) -> Record | None:
        return runs[run_id].record if run_id in runs else ended(run_id)

    changed, submit, stop = list[Schedule](), list[tuple[Schedule, DueTime]](), list[str]()
    news = list[tuple[Schedule, DueTime]]()
    missed = tuple(each for each in schedules.values() if untold(each, now) or unsure(each, now))
    over = tuple(seen.record for seen in runs.values() if seen.record.untold and not seen.supervised)
    for schedule in schedules.values():
        after = advanced(schedule, found, now)
        if after != schedule:
            changed.append(after)
            news += ((after, due) for due in since(schedule, after))
        for due in after.history:
            if due.outcome is Outcome.STARTING:
                submit.append((after, due))
            if due.replaced and due.under_way and due.run_id in runs:
                stop.append(due.run_id)
    stop += [
        seen.record.run_id for seen in runs.values() if _is_late(schedules.get(seen.record.schedule), seen.record, now)
    ]
    line = queue(runs.values(), found, fleets, now)
    waiting = tuple(each for each in line if each.waits_for and each.record.run_id not in stop)
    left = {each.record.run_id for each in waiting}
    begun = (need for seen in runs.values() if not seen.in_line and (need := needed(seen)) is not None)
    next_ones = (_begins(each) for each in line if each.record.run_id not in left)
    needs = (*begun, *next_ones)
    return Decisions(tuple(changed), tuple(news), missed, over, tuple(submit), tuple(stop), needs, waiting)


def _begins(queued: Queued) -> Need:
    why = f"queued: starts on kept fleet {queued.starts_on}" if queued.starts_on else "queued"
    return Need(queued.record.run_id, why, on_kept=bool(queued.starts_on))


def queue(
    runs: Collection[Seen], found: Callable[[str], Record | None], fleets: Sequence[Kept] = (), now: float = 0.0
) -> list[Queued]:
    """The runs that nobody has begun with, in their order. `found`, `fleets`, `now`: see `line_up`."""
    queued = (seen.record for seen in runs if seen.in_line)
    return line_up(queued, (seen.record for seen in runs if seen.at_work), found, fleets, now)


def since(before: Schedule, after: Schedule) -> list[DueTime]:
    """The due times of which something has become."""
    known = {(due.at, due.outcome) for due in before.history}
    return [due for due in after.history if (due.at, due.outcome) not in known]


def untold(schedule: Schedule, now: float) -> list[DueTime]:
    """The times that were missed and that nobody was told of. What is older than a day is no news any more."""
    return [
        due
        for due in schedule.history
        if due.outcome is Outcome.MISSED and not due.told and now - due.decided_at < NEWS_S
    ]


def unsure(schedule: Schedule, now: float) -> list[DueTime]:
    """The times whose teller has not made sure that it is told: it died."""
    return [
        due
        for due in schedule.history
        if due.telling_since and now - due.telling_since > SURE_S and now - due.decided_at < NEWS_S
    ]


def telling(schedule: Schedule, by: str, now: float) -> Schedule:
    """The schedule with these times told `by` whoever writes this, and by nobody else."""
    new = {due.at for due in untold(schedule, now)}
    return _with(schedule, new, told=by, telling_since=now)


def told(schedule: Schedule, by: str) -> Schedule:
    """The schedule once it is certain that who was to hear it from `by` does."""
    return _with(schedule, {due.at for due in schedule.history if due.told == by}, telling_since=0.0)


def events(schedule: Schedule, by: str, now: float) -> list[tuple[str, ScheduleMissed]]:
    """What `by` tells of the times that were missed, and what others died with: the same again; each with whose it
    is."""
    whose = dict.fromkeys(due.told for due in unsure(schedule, now)) | {by: None}
    found = []
    for each in whose:
        if missed := [due for due in schedule.history if due.told == each]:
            newest = max(missed, key=lambda due: due.at)
            at = max(due.decided_at for due in missed)
            found.append((each, ScheduleMissed(schedule.name, at, newest.at, len(missed), newest.reason)))
    return found


def _with(schedule: Schedule, at: set[float], **changes: Any) -> Schedule:
    history = [replace(due, **changes) if due.at in at else due for due in schedule.history]
    return replace(schedule, history=history)


def _is_late(schedule: Schedule | None, record: Record, now: float) -> bool:
    """Whether a run was submitted for a due time of which something else became meanwhile, or could not begin until it
    is too late. One that is queued again, because its kept fleet has lost a machine, has begun in time."""
    if schedule is None or record.state.final:
        return False
    in_time = record.state is not State.QUEUED or record.attempt  # it has begun: it may be queued again
    queued_s = 0.0 if in_time else now - max(record.due_at, record.created_at)
    decided = (due for due in schedule.history if due.at == record.due_at)
    return queued_s > schedule.start_within_s or any(due.outcome.final or not due.run_id for due in decided)


def needed(seen: Seen) -> Need | None:
    """What a run needs that was begun and that nobody looks after; None: nothing."""
    record = seen.record
    if seen.supervised or record.settled:
        return None
    if record.state.final:
        return Need(record.run_id, "it is over, and has left something", give_back=True)
    return Need(record.run_id, f"{record.state}, no supervisor")


def advanced(schedule: Schedule, record: Callable[[str], Record | None], now: float) -> Schedule:
    """The schedule with what became of its times until `now`."""
    after = replace(schedule, history=[replace(due) for due in schedule.history])
    for due in after.history:
        if due.under_way:
            _close(after, due, record(due.run_id), now)
        elif due.owes and ((over := record(due.run_id)) is None or over.settled):
            due.owes, due.spent_usd = False, _cost(over, now) if over else due.spent_usd
    for due in [*_arrived(after, now)]:
        _place(after, due, now)
    _free_one(after, now)
    kept = [due for due in after.history[:-HISTORY] if not due.outcome.final]
    after.history = kept + after.history[-HISTORY:]
    return after


def by_hand(schedule: Schedule, record: Callable[[str], Record | None], now: float) -> Schedule:
    """The schedule with `now` as a time of its own, which is last in its history. While the schedule is paused it does
    not wait."""
    after = advanced(schedule, record, now)
    _place(after, DueTime(now, Outcome.STARTING, now, by_hand=True), now)
    _free_one(after, now)
    return after


def _close(schedule: Schedule, due: DueTime, record: Record | None, now: float) -> None:
    """Writes down how its run has ended, if it has."""
    if record is None:
        if due.outcome is Outcome.RUNNING:
            due.outcome, due.reason = Outcome.STOPPED, "the record of its run was removed"
        elif now - max(due.at, due.decided_at) > schedule.start_within_s:
            due.outcome, due.reason = Outcome.FAILED, due.reason or "its run was not submitted in time"
        return
    due.outcome = Outcome.RUNNING
    if not record.state.final:
        return
    due.outcome = Outcome.REPLACED if due.replaced and record.state is State.STOPPED else _OF_STATE[record.state]
    due.reason = due.reason if due.replaced else record.reason
    due.ended_at, due.exit_code, due.recoveries = record.ended_at, record.exit_code, record.recoveries
    due.owes, due.spent_usd = not record.settled, _cost(record, record.ended_at or now)
    due.step, due.metrics, due.checks = record.step, dict(record.metrics), list(record.checks)


def _cost(record: Record, now: float) -> float | None:
    return round(record.spent_usd(now), 4) if record.spending else None


def _arrived(schedule: Schedule, now: float) -> Iterator[DueTime]:
    """The times that have come since it was looked last: the newest of those that are not too late is to be started,
    and stands last; where all are, it is if the schedule says so."""
    known = schedule.decided_until
    arrived, before = schedule.times.between(known, now, HISTORY)
    arrived = [*takewhile(lambda at: schedule.start_at(at) <= now, arrived)]
    if arrived:
        schedule.decided_until = arrived[-1]
    for at in arrived:
        due = DueTime(at, Outcome.STARTING, now)
        if schedule.paused:
            due.outcome, due.reason = Outcome.SKIPPED, "the schedule was paused"
        elif now - at > schedule.start_within_s and at == arrived[-1] and schedule.if_missed is IfMissed.LATEST:
            due.caught_up, due.reason = True, f"nobody looked until {duration(now - at)} later"
        elif now - at > schedule.start_within_s:
            due.outcome, due.reason = Outcome.MISSED, _late(schedule, now - at)
            if before and at == arrived[0]:
                due.reason += f"; so are {before} before it"
        elif at != arrived[-1]:
            due.outcome, due.reason = Outcome.MISSED, "a later time was due as well when somebody looked"
        yield due


def _late(schedule: Schedule, late_s: float) -> str:
    return f"nobody looked until {duration(late_s)} later; it starts within {duration(schedule.start_within_s)}"


def _place(schedule: Schedule, due: DueTime, now: float) -> None:
    """Puts a time into the history: what becomes of it depends on those before it."""
    earlier = [each for each in schedule.history if not each.outcome.final]
    schedule.history.append(due)
    if due.outcome.final:
        return
    due.run_id = schedule.run_id(due.at)
    if not earlier:
        return
    first = earlier[0]
    skips = schedule.if_running is IfRunning.SKIP
    if skips or schedule.paused:
        due.outcome, due.run_id = Outcome.SKIPPED, ""
        due.reason = f"run {first.run_id} was not over"
        due.reason += "" if skips else ", and nothing waits while the schedule is paused"
        return
    due.outcome = Outcome.WAITING
    due.reason = f"for run {first.run_id} to end"
    if schedule.if_running is IfRunning.REPLACE:
        for each in earlier:
            each.reason = f"by the time of {schedule.times.words(due.at)}"
            each.replaced = True
            if each.outcome is Outcome.WAITING:  # it has no run; one that is starting may have got one meanwhile
                each.run_id = ""
            if each.outcome is not Outcome.RUNNING:
                each.outcome = Outcome.REPLACED


def _free_one(schedule: Schedule, now: float) -> None:
    """The first that waits starts once nothing is under way; one that has waited for too long is missed."""
    busy = next((due for due in schedule.history if due.under_way), None)
    for due in schedule.history:
        if due.outcome is not Outcome.WAITING:
            continue
        if schedule.paused:
            due.outcome, due.reason, due.run_id = Outcome.SKIPPED, "the schedule was paused", ""
        elif now - (due.decided_at if due.caught_up else due.at) > schedule.start_within_s:
            over = f"run {busy.run_id} was not over" if busy else _late(schedule, now - due.at)
            due.outcome, due.reason, due.run_id = Outcome.MISSED, f"{over} in time", ""
            due.decided_at = now
        elif busy is None:
            due.outcome, due.reason, busy = Outcome.STARTING, "", due
