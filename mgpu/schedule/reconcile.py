"""One pass over the backend: what is due is submitted, what nobody looks after is looked after, what is left is ended.

Safe to run anywhere, any number at a time, killed at any point: the next pass sees what is there, and goes on. A pass
that has nothing to do imports nothing for it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from mgpu.backend import location
from mgpu.context import Context
from mgpu.errors import InputError, MgpuError, StackError
from mgpu.events import Note, ScheduleMissed, Warned
from mgpu.run.fleet import reuse
from mgpu.run.fleet.reuse import Kept
from mgpu.run.record import shared
from mgpu.run.record.record import Record, every, find, supervised, unsettled
from mgpu.schedule import kept
from mgpu.schedule.decide import Decisions, Need, Seen, advanced, decide, events, since, telling, told
from mgpu.schedule.model import DueTime, Outcome, Schedule
from mgpu.schedule.queue import Queued
from mgpu.schedule.supervisors import Looked, Supervisors
from mgpu.words import duration

if TYPE_CHECKING:
    from mgpu.run.job.git_code import GitCode

SWEEP_EVERY_S = 3600.0  # every provider is asked what is there, which takes seconds
LOOK_EVERY_S = 15.0  # while it watches
BUSY_AGAIN_S = 300.0  # as the next, in a single pass
TELL_AGAIN_S = 300.0  # until an end is told again that could not be, while it watches: as the next pass would
AGAIN_S = 60.0  # until a run that was left is looked after again, while it watches
TURN_S = 3600.0  # that one process watches a run: what hangs is ended some time after that, however long a pass lasts
_OF_A_RUN = re.compile(r"-\d{4}-[a-hjkmnp-z2-9]{5}(-r\d+)?(-[0-9a-f]{8})?$")  # a launch has named it
_SWEPT = "swept"  # in mgpu's folder of a backend: when, by the backend's own clock, it was looked for machines


Done = Callable[[], None]  # called once it is certain that it will be told, whoever dies
Teller = Callable[[ScheduleMissed, Done], None]


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
    waiting: list[Queued] = field(default_factory=list)  # of the newest look
    stopped: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)  # runs of whose end nobody was told by who ended them
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
        clock: Callable[[], float] | None = None,
        teller: Callable[[Schedule], Teller | None] = lambda _: None,
        tell_end: Callable[[Record], None] = lambda _: None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """`teller` gives who tells of a schedule's missed times; None: it cannot be told from here. `tell_end` tells
        that a run is over. `between` is called between passes."""
        self._context, self._clock, self._teller, self._tell_end = context, clock or time.time, teller, tell_end
        self._between = between
        self._supervisors = supervisors or Supervisors(context.emit)
        self._until = self._clock() + watch_s
        self._began: dict[str, float] = {}  # runs that were looked after, and when last
        self._told: dict[str, float] = {}  # runs whose end was told, and when last
        self._sweep_at = 0.0
        self._wrong_clock = False  # and it was said
        self.report = Report()

    def look(self) -> Report:
        """What there is to do now. Changes nothing. Raises StackError."""
        todo = self._decisions()
        self.report.due, self.report.stopped = [*todo.news], [*todo.stop]
        self.report.over = [each.run_id for each in todo.over]
        self.report.waiting = [*todo.waiting]
        self.report.needs = [*todo.needs, *(Need(due.run_id, "queued") for _, due in todo.submit)]
        return self.report

    def _decisions(self) -> Decisions:
        now, found = self._clock(), kept.every()
        self._fail(found.damaged)
        if found.ahead_s and not self._wrong_clock:
            self._wrong_clock, how = True, "ahead of" if found.ahead_s > 0 else "behind"
            by = duration(abs(found.ahead_s))
            self._context.emit(Warned(f"this machine's clock is {by} {how} the backend's, which passes go by: set it"))
        records = unsettled(lambda error: self._fail([error]))
        runs = {each.run_id: Seen(each, supervised(each.run_id)) for each in records}
        now -= found.ahead_s
        fleets = self._kept_fleets(now) if any(seen.in_line for seen in runs.values()) else []
        return decide(found.schedules, runs, self._find, now, fleets)

    def _kept_fleets(self, now: float) -> list[Kept]:
        try:
            return reuse.standing(now)
        except InputError as error:
            self._fail([error])
            return []

    def _find(self, run_id: str) -> Record | None:
        return kept.run_of(run_id, lambda error: self._fail([error]))

    def work(self) -> Report:
        """Passes until nothing is left to do and the time is over. Raises StackError: the backend does not answer; once
        it has, it is waited for."""
        try:
            self._pass()
            while self._supervisors.busy or self._clock() < self._until:
                looked = self._supervisors.ended(LOOK_EVERY_S)
                if looked is not None:
                    self._ended(looked)
                try:
                    self._pass()
                    self._sweep()
                except StackError as error:
                    self._fail([error])
                self._between()
            self._sweep()
        finally:
            self._supervisors.leave()
        return self.report

    # --- a pass -------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        todo = self._decisions()
        for schedule in todo.schedules:
            self._write(schedule)
        if todo.schedules:  # from here on by what is written, whoever has written it
            todo = self._decisions()
        for schedule in todo.missed:
            self._tell_of_missed(schedule)
        for over in todo.over:
            if over.run_id not in self.report.over:
                self.report.over.append(over.run_id)
            last = self._told.get(over.run_id)
            if last is None or self._clock() - last >= TELL_AGAIN_S:
                self._told[over.run_id] = self._clock()
                self._tell_end(over)
        for schedule, due in todo.submit:
            self._submit(schedule, due)
        if todo.submit:  # they are queued now
            todo = self._decisions()
        for run_id in todo.stop:
            if run_id not in self.report.stopped:
                shared.ask_to_stop(run_id)
                self.report.stopped.append(run_id)
        self.report.waiting = [*todo.waiting]
        left_s = max(0.0, self._until - self._clock())
        again_s = AGAIN_S if left_s else BUSY_AGAIN_S  # a single pass goes on while one of its runs takes long
        for need in todo.needs:
            last = self._began.get(need.run_id)
            if last is None or self._clock() - last >= again_s:
                self._began[need.run_id] = self._clock()
                self.report.needs = [each for each in self.report.needs if each.run_id != need.run_id] + [need]
                if need.on_kept:
                    self._claim(need.run_id)
                queue_s = 0.0 if need.give_back else _queue_s(need.run_id)
                self._supervisors.begin(replace(need, queue_s=queue_s), min(left_s, TURN_S))

    def _claim(self, run_id: str) -> None:
        """Its fleet is its own before the next in the line begins; where that cannot be said now, it says so itself."""
        with suppress(InputError, StackError):
            if (record := find(run_id)) is not None:
                reuse.claim(record)

    def _advanced(self, schedule: Schedule, ahead_s: float) -> Schedule:
        return advanced(schedule, self._find, self._clock() - ahead_s)

    def _write(self, wanted: Schedule) -> None:
        """Computed again from what is there: somebody else may have decided meanwhile."""
        news = list[DueTime]()

        def decided(before: Schedule, ahead_s: float) -> Schedule:
            after = self._advanced(before, ahead_s)
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

    def _tell_of_missed(self, schedule: Schedule) -> None:
        """Whoever writes down that it tells of them tells: nobody else does, whatever becomes of the answer, unless
        that one dies before it has made sure."""
        me, tell = secrets.token_hex(8), self._teller(schedule)
        if tell is None:  # another machine's pass may
            return
        now = self._clock()

        def mine(found: Schedule, ahead_s: float) -> Schedule:
            nonlocal now
            now = self._clock() - ahead_s
            return telling(found, me, now)

        try:
            after = kept.change(schedule.name, mine)
        except InputError:  # it was removed
            return
        for whose, event in events(after, me, now):
            tell(event, lambda whose=whose: self._made_sure(schedule.name, whose))

    def _made_sure(self, name: str, whose: str) -> None:
        with suppress(InputError, StackError):  # it was removed; the next pass makes sure
            kept.change(name, lambda found, _: told(found, whose))

    def _submit(self, schedule: Schedule, due: DueTime) -> None:
        """The run of a due time that was decided to start; whoever has done it already, there is one."""
        from mgpu.run.lifecycle.submit import submit_kept
        from mgpu.schedule.nights import compared_with

        folder, at = kept.folder(schedule), f"{schedule.submission}/"
        try:
            more = {"schedule": schedule.name, "due_at": due.at, "earlier": compared_with(schedule, every)}
            if self._is_starting(kept.load(schedule.name), due):
                code = self._code(schedule, due) if schedule.code_from else None
                submit_kept(folder, at, schedule.run, due.run_id, code, **more)
                after = kept.change(schedule.name, self._advanced)
                if not any(each.run_id == due.run_id and each.under_way for each in after.history):
                    shared.ask_to_stop(due.run_id)  # something else became of its time meanwhile
        except (MgpuError, OSError) as error:
            what = f"schedule {schedule.name}: the run of {schedule.times.words(due.at)} could not be submitted"
            kind = StackError if isinstance(error, StackError) else InputError
            self._fail([kind(what, str(error), "The next pass tries again.")])
            with suppress(MgpuError):
                self._reason(schedule, due, str(error))

    def _code(self, schedule: Schedule, due: DueTime) -> GitCode:
        """The commit of a due time: the first one that a pass has found, for all of them."""
        from mgpu.run.job.git_code import GitCode

        source = GitCode.of(schedule.code_from)
        commit = due.code or source.commit()

        def decided(now: Schedule, _ahead_s: float) -> Schedule:
            history = [replace(each, code=each.code or commit) if each.at == due.at else each for each in now.history]
            return replace(now, history=history)

        after = kept.change(schedule.name, decided)
        return replace(source, ref=next((each.code for each in after.history if each.at == due.at), commit))

    def _is_starting(self, schedule: Schedule, due: DueTime) -> bool:
        same = (each for each in schedule.history if each.at == due.at and each.run_id == due.run_id)
        return any(each.outcome is Outcome.STARTING and not each.replaced for each in same)

    def _reason(self, schedule: Schedule, due: DueTime, reason: str) -> None:
        def said(now: Schedule, ahead_s: float) -> Schedule:
            after = self._advanced(now, ahead_s)
            for each in after.history:
                if each.at == due.at and each.outcome is Outcome.STARTING:
                    each.reason = reason
            return after

        kept.change(schedule.name, said)

    def _ended(self, looked: Looked) -> None:
        others = [each for each in self.report.looked if each.need.run_id != looked.need.run_id]
        self.report.looked = [*others, looked]

    def _fail(self, errors: Iterable[MgpuError]) -> None:
        for error in errors:
            if all(error.what != known.what for known in self.report.failures):
                self.report.failures.append(error)

    # --- machines that nothing stands for -----------------------------------------------------------------------

    def _sweep(self) -> None:
        """Ends them, where nobody has looked for an hour."""
        if self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + SWEEP_EVERY_S / 4
        if not _claimed():
            return
        from mgpu.run.fleet import inventory
        from mgpu.run.lifecycle.gc import end_all

        survey = inventory.survey(lambda: [record for record in unsettled() if not record.settled])
        for error in survey.unused:  # credentials may be there for something else: for a store that is not the cloud's
            self._context.emit(Warned(f"it was not looked for machines where no run has any: {error.what}"))
        survey.warn(self._context.emit)
        self._fail(error for error in survey.failures if error not in survey.unused)
        found = [fleet for fleet in survey.fleets if not fleet.used_by and not fleet.left_by]
        loose = [fleet for fleet in found if _OF_A_RUN.search(fleet.name)]
        for fleet in found:
            if fleet not in loose:  # perhaps of a stack whose state lies where mgpu does not look: its owner decides
                self._context.emit(Warned(f"fleet {fleet.name}: nothing is known to stand for it; see `mgpu gc`"))
        for fleet, error in end_all(loose, self._context):
            if error is not None:
                self._fail([error])
            else:
                self.report.swept.append(fleet.name)
                self._context.emit(Warned(f"fleet {fleet.name}: nothing stood for it; ended, the provider says so"))


def _queue_s(run_id: str) -> float:
    """Seconds that a run's machines may wait in its providers' queues, as far as that can be said here."""
    from mgpu.acquire.terms import GANGS
    from mgpu.spec.provider import installed

    with suppress(InputError, StackError):
        record = find(run_id)
        asked = (record.candidates or record.sellers) if record else {}
        known = [(each.options, asked[name]) for name, each in installed().found.items() if name in asked]
        return GANGS * sum(options.of(given).queue_s() for options, given in known)
    return 0.0


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
