"""A schedule as it is kept: what it starts, when, and what became of each time. Plain dataclasses and JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mgpu.errors import InputError
from mgpu.fields import Document, known_fields, plain
from mgpu.run.record.record import Check, new_run_id
from mgpu.schedule.times import Times

VERSION = 1


class Damaged(InputError):
    """A schedule that cannot be read here: what is kept is no schedule, or its zone or cron expression is not known."""


class IfRunning(StrEnum):
    """What becomes of a due time while a run of an earlier one is not over."""

    SKIP = "skip"
    QUEUE = "queue"  # it starts when that one is over, if that is soon enough
    REPLACE = "replace"  # as QUEUE, and that one is stopped, with a checkpoint


class IfMissed(StrEnum):
    """What becomes of times that nobody looked at in time."""

    NONE = "none"  # none of them is started
    LATEST = "latest"  # the newest of them is, as soon as somebody looks


class Outcome(StrEnum):
    """What became of a due time. The first three are not final."""

    WAITING = "waiting"  # for an earlier run of the schedule to end
    STARTING = "starting"  # its run has an id, and is about to be submitted
    RUNNING = "running"  # its run was submitted
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    REPLACED = "replaced"  # by a later time
    SKIPPED = "skipped"
    MISSED = "missed"

    @property
    def final(self) -> bool:
        """True when nothing comes of it any more."""
        return self not in (Outcome.WAITING, Outcome.STARTING, Outcome.RUNNING)


@dataclass
class DueTime(Document):
    """One time of a schedule. Times are UNIX seconds."""

    at: float
    outcome: Outcome
    decided_at: float
    run_id: str = ""
    reason: str = ""
    by_hand: bool = False  # `mgpu schedule run-now`
    caught_up: bool = False  # it is started though nobody looked at it in time
    replaced: bool = False  # its run was asked to end, for a later time
    ended_at: float | None = None  # of its run, as all that follows
    exit_code: int | None = None
    spent_usd: float | None = None
    recoveries: int = 0
    step: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    code: str = ""  # the commit that its run has; empty: what the schedule has kept, or none yet
    checks: list[Check] = field(default_factory=list)  # whether it is as expected
    told: str = ""  # that it was missed: which pass tells it
    telling_since: float = 0.0  # and since when, until that pass has made sure of it; 0: it has
    owes: bool = False  # its run has left something to give back: `spent_usd` may not be all yet

    @property
    def unmet(self) -> list[Check]:
        """What was not as expected."""
        return [each for each in self.checks if not each.met]

    @property
    def under_way(self) -> bool:
        """True while it has a run that is not over."""
        return self.outcome in (Outcome.STARTING, Outcome.RUNNING)


@dataclass
class Schedule(Document):
    """A run file, with code and image as they were, and when it is due."""

    name: str
    uid: str  # of this schedule, not of a later one of its name
    cron: str
    timezone: str
    run: dict[str, Any]  # the record that every run of it begins with
    created_at: float
    created_by: str  # user and host
    decided_until: float  # what becomes of the times until then is known
    if_running: IfRunning = IfRunning.SKIP
    start_within_s: float = 4 * 3600.0  # of its time; later it is missed
    if_missed: IfMissed = IfMissed.NONE
    jitter_s: float = 0.0
    code_from: str = ""  # git+URL@REF: each run has the code that it names then; empty: that which was kept
    paused: bool = False
    history: list[DueTime] = field(default_factory=list)  # newest last

    @property
    def times(self) -> Times:
        """Its due times."""
        return Times(self.cron, self.timezone)

    @property
    def expect(self) -> dict[str, dict[str, Any]]:
        """What is expected of each run, by metric."""
        return self.run.get("expect", {})

    @property
    def submission(self) -> str:
        """Where its run file, code and program are, below mgpu's folder of the backend."""
        return f"submissions/{self.name}.{self.uid}"

    def start_at(self, due: float) -> float:
        """When a due time starts: within its jitter, at the same moment on whichever machine that is asked."""
        return due + int.from_bytes(self._mark(due)[:6]) % max(1, int(self.jitter_s))

    def run_id(self, due: float) -> str:
        """The id of a due time's run: the same on whichever machine that starts it."""
        return new_run_id(str(self.run["name"]), due, self._mark(due))

    def _mark(self, due: float) -> bytes:
        return hashlib.sha256(f"{self.uid}/{due}".encode()).digest()

    def to_json(self) -> bytes:
        """As it is kept."""
        return json.dumps({"version": VERSION, **plain(self)}, indent=1).encode()


def parsed(data: bytes, name: str) -> Schedule:
    """A schedule as it was kept. Raises Damaged, and InputError: it is of another version."""
    again = f"remove it (`mgpu schedule rm {name}`), and add it again."
    cure = f"If a newer mgpu has written it, use that; else {again}"
    try:
        whole = json.loads(data)
        if (version := whole.pop("version")) != VERSION:
            raise InputError(
                f"schedule {name} is of another version of mgpu: {version}",
                f"This one reads version {VERSION}.",
                "Use the newest mgpu on every machine that shares a backend.",
            )
        rules = {"if_running": IfRunning(whole["if_running"]), "if_missed": IfMissed(whole.get("if_missed", "none"))}
        history = [_due(each) for each in whole["history"]]
        found = Schedule(**{**known_fields(Schedule, whole), **rules, "history": history})
        found.run["name"]  # whoever decides needs it, for all schedules at once
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Damaged(f"schedule {name} cannot be read", str(error), cure) from error
    try:
        found.times  # noqa: B018  whoever decides needs them, for all schedules at once
    except InputError as error:
        cure = f"Other machines may know it: `pip install --upgrade tzdata` here. If none does, {again}"
        raise Damaged(f"schedule {name} cannot be read here", f"{error.what}: {error.why}", cure) from error
    return found


def _due(each: dict[str, Any]) -> DueTime:
    checks = [Check(**known_fields(Check, check)) for check in each.get("checks", ())]
    parts = {"outcome": Outcome(each["outcome"]), "checks": checks}
    return DueTime(**{**known_fields(DueTime, each), **parts})
