"""One pass over the backend: what is due is submitted, what nobody looks after is looked after, what is left is ended.

Safe to run anywhere, any number at a time, killed at any point: the next pass sees what is there, and goes on. A pass
that has nothing to do imports nothing for it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from mgpu.backend import location
from mgpu.context import Context
from mgpu.errors import InputError, MgpuError
from mgpu.events import Note, Warned
from mgpu.run.record import shared
from mgpu.run.record.record import find, supervised, unsettled
from mgpu.schedule import kept
from mgpu.schedule.decide import Decisions, Need, Seen, advanced, decide, since
from mgpu.schedule.model import DueTime, Outcome, Schedule
from mgpu.schedule.supervisors import Looked, Supervisors

SWEEP_EVERY_S = 3600.0  # every provider is asked what is there, which takes seconds
LOOK_EVERY_S = 15.0  # while it watches
_SWEPT = "swept"  # in mgpu's folder of a backend: when, by the backend's own clock, it was looked for machines


class Looks(Protocol):
    """Who looks after runs: `mgpu.schedule.supervisors`."""

    @property
    def busy(self) -> bool:
        """See Supervisors."""
        ...

    def begin(self, need: Need, watch_s: float) -> None:
        """See Supervisors."""
        ...

    def ended(self, wait_s: float) -> Looked | None:
        """See Supervisors."""
        ...

    def leave(self) -> None:
        """See Supervisors."""
        ...


@dataclass
class Report:
    """What was found, and done."""

    due: list[tuple[Schedule, DueTime]] = field(default_factory=list)  # of which something became
    needs: list[Need] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    looked: list[Looked] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)  # fleets that nothing stood for, and that are gone now
    failures: list[MgpuError] = field(default_factory=list)


class Reconciler:
    """Passes over one backend. `clock`: UNIX seconds; `watch_s`: for how long it watches, 0 is a single pass."""

    def __init__(
        self,
        context: Context,
        watch_s: float = 0.0,
        *,
        supervisors: Looks | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._context, self._clock = context, clock
        self._supervisors = supervisors or Supervisors(context.emit)
        self._until = clock() + watch_s
        self._began: set[str] = set()  # runs that this pass has looked after
        self.report = Report()

    def look(self) -> Report:
        """What there is to do now. Changes nothing. Raises StackError."""
        todo = self._decisions()
        self.report.due, self.report.stopped = [*todo.news], [*todo.stop]
        self.report.needs = [*todo.needs, *(Need(due.run_id, "queued") for _, due in todo.submit)]
        return self.report

    def _decisions(self) -> Decisions:
        now = self._clock()
        schedules, damaged = kept.every()
        self._fail(damaged)
        runs = {each.run_id: Seen(each, supervised(each.run_id)) for each in unsettled()}
        return decide(schedules, runs, find, now)

    def work(self) -> Report:
        """Passes until nothing is left to do and the time is over. Raises StackError: the backend does not answer."""
        try:
            self._pass()
            while self._supervisors.busy or self._clock() < self._until:
                looked = self._supervisors.ended(LOOK_EVERY_S)
                if looked is not None:
                    self._ended(looked)
                self._pass()
            self._sweep()
        finally:
            self._supervisors.leave()
        return self.report

    # --- a pass -------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        todo = self._decisions()
        for schedule in todo.schedules:
            self._write(schedule)
        for schedule, due in todo.submit:
            self._submit(schedule, due)
        for run_id in todo.stop:
            if run_id not in self.report.stopped:
                shared.ask_to_stop(run_id)
                self.report.stopped.append(run_id)
        if todo.submit:  # they are queued now
            todo = self._decisions()
        left_s = max(0.0, self._until - self._clock())
        for need in todo.needs:
            if need.run_id not in self._began:
                self._began.add(need.run_id)
                self.report.needs.append(need)
                self._supervisors.begin(need, left_s)

    def _write(self, wanted: Schedule) -> None:
        """Computed again from what is there: somebody else may have decided meanwhile."""
        news = list[DueTime]()

        def decided(before: Schedule) -> Schedule:
            after = advanced(before, find, self._clock())
            news[:] = since(before, after)
            return after

        try:
            after = kept.change(wanted.name, decided)
        except InputError as error:  # it was removed
            self._context.emit(Note(error.what))
            return
        for due in news:
            self.report.due.append((after, due))
            self._tell(after, due)

    def _tell(self, schedule: Schedule, due: DueTime) -> None:
        run = f" {due.run_id}" if due.run_id else ""
        why = f": {due.reason}" if due.reason else ""
        self._context.emit(Note(f"schedule {schedule.name}, {schedule.times.words(due.at)}: {due.outcome}{run}{why}"))

    def _submit(self, schedule: Schedule, due: DueTime) -> None:
        """The run of a due time that was decided to start; whoever has done it already, there is one."""
        from mgpu.run.lifecycle.submit import submit_kept

        folder, at = kept.folder(schedule), f"{schedule.submission}/"
        more = {"schedule": schedule.name, "due_at": due.at}
        try:
            submit_kept(folder, at, schedule.run, due.run_id, **more)
        except (MgpuError, OSError) as error:
            what = f"schedule {schedule.name}: the run of {schedule.times.words(due.at)} could not be submitted"
            self._fail([InputError(what, str(error), "The next pass tries again.")])
            self._reason(schedule, due, str(error))
            return
        kept.change(schedule.name, lambda now: advanced(now, find, self._clock()))

    def _reason(self, schedule: Schedule, due: DueTime, reason: str) -> None:
        def said(now: Schedule) -> Schedule:
            after = advanced(now, find, self._clock())
            for each in after.history:
                if each.at == due.at and each.outcome is Outcome.STARTING:
                    each.reason = reason
            return after

        kept.change(schedule.name, said)

    def _ended(self, looked: Looked) -> None:
        self.report.looked.append(looked)
        if self._clock() < self._until:  # what is left over may be looked after again
            self._began.discard(looked.need.run_id)

    def _fail(self, errors: Iterable[MgpuError]) -> None:
        for error in errors:
            if all(error.what != known.what for known in self.report.failures):
                self.report.failures.append(error)

    # --- machines that nothing stands for -----------------------------------------------------------------------

    def _sweep(self) -> None:
        """Ends them, where nobody has looked for an hour."""
        if not _claimed():
            return
        from mgpu.run.fleet import inventory
        from mgpu.run.lifecycle.gc import end_all

        survey = inventory.survey(unsettled)
        self._fail(survey.failures)
        loose = [fleet for fleet in survey.fleets if not fleet.used_by and not fleet.left_by]
        for fleet, error in end_all(loose, self._context):
            if error is not None:
                self._fail([error])
            else:
                self.report.swept.append(fleet.name)
                self._context.emit(Warned(f"fleet {fleet.name}: nothing stood for it; ended, the provider says so"))


def _claimed() -> bool:
    """Whether it is this process that looks for machines now: one in an hour does."""
    from mgpu_train.store import Ambiguous, NotFound

    here, mine = location.current(), secrets.token_bytes(8)
    with here.asking("asked when machines were looked for"):
        try:
            found = here.ours.read(_SWEPT, 1 << 10)
        except NotFound:
            found = None
        try:
            if found is None:
                return here.ours.put_if_absent(_SWEPT, mine)
            return found.age_s >= SWEEP_EVERY_S and here.ours.replace(_SWEPT, mine, found.version)
        except Ambiguous:  # the next hour's does it
            return False
