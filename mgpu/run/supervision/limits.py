"""What may end a run from outside: one list. A limit looks at the clock and at what is written down."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from mgpu_train.agent.attempt.save_budget import need
from mgpu_train.timeouts import Timeouts

from mgpu.errors import InputError, StackError
from mgpu.run.budget.account import Month, of_month
from mgpu.run.budget.costs import month as month_of
from mgpu.run.budget.costs import month_ends
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record
from mgpu.run.supervision.background_calls import BackgroundCalls

_TOLD_OF = (0.5, 0.8, 1.0)  # of a budget
_LOOK_EVERY_S = 240.0  # what the other runs have spent
_ANSWER_S = 1.0  # for the backend to say so, before the supervisor goes on without
_ROOM_S = 30.0  # for the upload of the last save, beside the grace of the stop
_NEARLY = 0.98  # of a budget: a fleet's clock begins with its search, what it costs with its machines
_ROOM, _MOST_ROOM = 0.1, 0.5  # of max_hours: a short run is not all room


class StopReason(StrEnum):
    """Which limit has ended a run."""

    USER = "user"  # `mgpu stop`, or a signal
    HARD_CAP = "hard_cap"  # of the fleet: its machines end then, whatever happens
    BUDGET = "budget"  # max_usd, by the prices of what it has rented
    MONTH = "month"  # what all runs of the backend may spend in a month
    DEADLINE = "deadline"  # of the run, on machines that may live longer

    @property
    def words(self) -> str:
        """Why the run stops, for people."""
        return {
            StopReason.USER: "`mgpu stop` asked for the end",
            StopReason.HARD_CAP: "the hard cap is reached",
            StopReason.BUDGET: "max_usd is spent but for the last save",
            StopReason.MONTH: "the month's budget is spent but for the last save",
            StopReason.DEADLINE: "max_hours are over",
        }[self]


@dataclass(frozen=True)
class Spending:
    """What of a budget is spent, US dollars. `key`: by which it is remembered what was told of it."""

    limit: str
    key: str
    spent_usd: float
    max_usd: float

    def news(self, record: Record) -> bool:
        """Whether another part of it is spent of which nobody was told; from here on somebody was."""
        parts = [part for part in _TOLD_OF if record.told_of.get(self.key, 0.0) < part <= self.spent_usd / self.max_usd]
        if parts:
            record.told_of[self.key] = parts[-1]
        return bool(parts)


class Limit(Protocol):
    """One thing that may end a run."""

    def check(self, now: float, record: Record) -> StopReason | None:
        """Whether the run is to end: the training is asked to save and to stop. `now`: UNIX seconds."""
        ...


@dataclass(frozen=True)
class Asked:
    """`mgpu stop`, from whichever terminal."""

    file: Path

    def check(self, now: float, record: Record) -> StopReason | None:
        """Whether somebody has asked."""
        return StopReason.USER if self.file.exists() else None


@dataclass(frozen=True)
class HardCap:
    """The machines' end, early enough that a last save and its upload fit before it."""

    room_s: float
    most_room_s: float = 0.0  # where a save is known to take longer

    def check(self, now: float, record: Record) -> StopReason | None:
        """Whether it is near."""
        save_s, room_s = last_save_s(record), self.room_s
        if save_s:
            room_s = max(room_s, min(save_s + _ROOM_S, self.most_room_s))
        return cap_reason(record) if record.hard_cap_at and now > record.hard_cap_at - room_s else None


@dataclass(frozen=True)
class Budget:
    """What the run may spend in all, early enough that a last save and its upload fit."""

    room_s: float

    def check(self, now: float, record: Record) -> StopReason | None:
        """Whether it is nearly spent."""
        return StopReason.BUDGET if record.max_usd and record.spent_usd(now + self.room_s) >= record.max_usd else None

    def spent(self, now: float, record: Record) -> Spending | None:
        """What of it is spent."""
        return Spending("max_usd", "max_usd", record.spent_usd(now), record.max_usd) if record.max_usd else None


@dataclass
class MonthBudget:
    """What all runs of the backend may spend in a month. What the others have spent is looked up now and then, and goes
    on by their prices in between. A backend that does not answer ends no run, and holds up no supervisor."""

    room_s: float
    look: Callable[[str, float], Month | None] = of_month
    _known: Month | None = field(default=None, init=False)
    _look_at: float = field(default=0.0, init=False)
    _calls: BackgroundCalls = field(default_factory=BackgroundCalls, init=False)

    def check(self, now: float, record: Record) -> StopReason | None:
        """Whether it is nearly spent."""
        month = self._month(now, record)
        by = min(now + self.room_s, month_ends(now))  # then there is another one
        return StopReason.MONTH if month and month.spent_usd(record, by) >= month.most_usd else None

    def spent(self, now: float, record: Record) -> Spending | None:
        """What of it is spent."""
        month = self._month(now, record)
        key = f"usd_per_month {month_of(now)}"
        return Spending("usd_per_month", key, month.spent_usd(record, now), month.most_usd) if month else None

    def _month(self, now: float, record: Record) -> Month | None:
        due = now >= self._look_at or _is_old(self._known, now)
        begun = due and self._calls.begin("look", lambda: self._find(record.run_id, now))
        if begun:
            self._look_at = now + _LOOK_EVERY_S
        self._calls.wait(_ANSWER_S if begun else 0.0)
        known = self._known  # a look that is under way changes it
        return None if _is_old(known, now) else known

    def _find(self, run_id: str, now: float) -> None:
        found = None
        with suppress(StackError, InputError):  # a file that somebody has damaged ends none either
            found = self.look(run_id, now)
        self._known = found


def _is_old(month: Month | None, now: float) -> bool:
    return month is not None and month_of(now) != month_of(month.others.at)


@dataclass(frozen=True)
class Deadline:
    """The run's own end, where its machines may live longer: a kept fleet, or another program's."""

    at: float  # UNIX seconds

    def check(self, now: float, record: Record) -> StopReason | None:
        """Whether it has passed."""
        return StopReason.DEADLINE if now > self.at else None


def limits(record: Record, timeouts: Timeouts) -> tuple[Limit, ...]:
    """All that may end this run."""
    most_s = record.max_hours * 3600
    room_s = min(timeouts.stop_grace_s + _ROOM_S, most_s * _ROOM)
    cap, deadline = HardCap(room_s, most_s * _MOST_ROOM), Deadline((record.deadline_at or math.inf) - room_s)
    return Asked(Folder(record.run_id).stop), Budget(room_s), MonthBudget(room_s), cap, deadline


def cap_reason(record: Record) -> StopReason:
    """What has set the hard cap of the run's machines: their hours, or what a budget pays for."""
    spent_usd = record.spent_usd(record.hard_cap_at)
    for paid, reason in ((record.max_usd, StopReason.BUDGET), (record.month_usd, StopReason.MONTH)):
        if paid and spent_usd >= paid * _NEARLY:
            return reason
    return StopReason.HARD_CAP


def last_save_s(record: Record) -> float:
    """What one more save may take by what the last one took; 0: there was none."""
    lasted_s = record.saves.get("save_s", 0.0)
    return need([lasted_s], 0.0, None).save_s if lasted_s else 0.0


def drain_s(record: Record, times: Timeouts) -> float:
    """What the agents have for the uploads that are left: `drain_s`, or more where uploads are known to take longer."""
    return max(times.drain_s, record.saves.get("drain_s", 0.0))
