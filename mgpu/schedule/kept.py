"""Schedules as they are kept in the backend, one object each, changed only by who has read what is there.

<backend>/mgpu/schedules/<name>.json
<backend>/mgpu/submissions/<name>.<uid>/     run file, code and Pulumi program that every run of it begins with
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from mgpu.backend import location, objects, outbox
from mgpu.errors import InputError, StackError
from mgpu.run.record import files, shared
from mgpu.run.record.record import Record, State, find
from mgpu.schedule.model import Schedule, parsed

_SCHEDULES = "schedules/"
_SUBMISSIONS = "submissions/"
_LARGEST = 16 << 20  # bytes of a schedule
_AT_ONCE = 16  # that are read at the same time
_TRIES = 50
_CLOCKS_S = 60.0  # by which two clocks may differ; an answer of a store takes a moment, too


@dataclass(frozen=True)
class Found:
    """A schedule as it is. `ahead_s`: of the backend's clock, this machine's; 0.0: they agree."""

    schedule: Schedule
    version: str
    ahead_s: float


@dataclass(frozen=True)
class All:
    """All schedules that can be read, by name, and of the others why not; `ahead_s`: see Found."""

    schedules: dict[str, Schedule]
    damaged: list[InputError]
    ahead_s: float


def every() -> All:
    """What is kept. Raises StackError."""
    here = location.current()
    with here.asking("asked for its schedules"):
        shared.require_here(here)
        names = [stat.key.removeprefix(_SCHEDULES).removesuffix(".json") for stat in here.ours.list(_SCHEDULES)]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="mgpu-schedules") as pool:
            found = list(pool.map(_read, names))
    read = [each for each in found if isinstance(each, Found)]
    damaged = [each for each in found if isinstance(each, InputError)]
    ahead_s = min((each.ahead_s for each in read), key=abs, default=0.0)
    return All({each.schedule.name: each.schedule for each in read}, damaged, ahead_s)


def load(name: str) -> Schedule:
    """One schedule. Raises InputError: there is none, or it cannot be read; StackError."""
    return _there(name).schedule


def _there(name: str) -> Found:
    found = _find(name)
    if found is None:
        known = ", ".join(sorted(every().schedules)) or "none yet"
        raise InputError(f"no schedule `{name}`", f"Schedules: {known}.", "See `mgpu schedule ls`.")
    return found


def add(schedule: Schedule) -> None:
    """Keeps a new schedule. Raises InputError: there is one of that name; StackError: it may be kept, if the error says
    so."""
    from mgpu_train.store import Ambiguous

    here = location.current()
    with here.asking("written"), suppress(Ambiguous):  # whoever reads it back finds out
        here.ours.put_if_absent(_key(schedule.name), schedule.to_json())
    try:
        there = _find(schedule.name)
    except StackError as error:
        what = f"schedule {schedule.name} may be kept, and start its runs: nobody has confirmed it"
        cure = (
            f"`mgpu schedule show {schedule.name}` says whether it is, and who has kept it when; "
            f"if it is this one, `mgpu schedule rm {schedule.name}` takes it away."
        )  # it may be somebody else's, who was faster
        raise StackError(what, f"{error.what}: {error.why}", cure) from error
    if there is None or there.schedule.uid != schedule.uid:
        _remove_submission(schedule.submission)
        if there is None:
            why = f"Its write to the backend {here.address} was refused, or somebody has removed it since."
            raise StackError(f"schedule {schedule.name} is not kept", why, "Try it again.")
        raise _taken(there.schedule, schedule.created_by)
    if there.ahead_s:
        now = schedule.created_at - there.ahead_s
        change(schedule.name, lambda found, _: replace(found, created_at=now, decided_until=now))


def require_free(name: str, by: str) -> None:
    """Raises InputError for a name that a schedule has already, `by`: who wants it; StackError."""
    if (there := _find(name)) is not None:
        raise _taken(there.schedule, by)


def _taken(there: Schedule, by: str) -> InputError:
    why, cure = f"{there.created_by} has kept it, of {there.run['run_file']}.", "Give this one another `--name`"
    if there.created_by == by:
        cure += f", or remove that one: `mgpu schedule rm {there.name}`"
    return InputError(f"there is a schedule `{there.name}` already", why, f"{cure}.")


def change(name: str, how: Callable[[Schedule, float], Schedule]) -> Schedule:
    """Writes what `how` makes of a schedule as it is, and of how far this machine's clock is ahead (see Found); where
    somebody else is faster, of what that one has made of it.

    Raises:
        InputError: there is none, or none any more.
        StackError: the backend does not answer, or others never stop writing.
    """
    ahead_s = 0.0

    def look() -> tuple[Schedule, str]:
        nonlocal ahead_s
        found = _there(name)
        ahead_s = found.ahead_s
        return found.schedule, found.version

    def changed(before: Schedule | None) -> Schedule:
        return how(cast(Schedule, before), ahead_s)  # `look` finds one

    return objects.write(_key(name), f"schedule {name}", _TRIES, look, changed, Schedule.to_json)


def run_of(run_id: str, failed: Callable[[InputError], None] = lambda _: None) -> Record | None:
    """The record of a run, None: there is none. One that cannot be read goes on, as far as anybody knows; why not is
    told to `failed`. Raises StackError."""
    try:
        return find(run_id)
    except InputError as error:
        failed(error)
        return Record(run_id, *[""] * 5, own_stack=True, fleet_name="", provider="", nodes=0, state=State.RUNNING)


def remove(schedule: Schedule) -> None:
    """Removes a schedule, and what it submits. Raises StackError."""
    _remove(schedule.name, [schedule.submission])


def remove_damaged(name: str) -> None:
    """Removes a schedule that cannot be read, and what schedules of its name submit. Raises StackError."""
    here, begin = location.current(), f"{_SUBMISSIONS}{name}."  # no name has a dot
    with here.asking("asked for what a schedule submits"):
        keys = [found.key for found in here.ours.list(_SUBMISSIONS) if found.key.startswith(begin)]
    _remove(name, {"/".join(key.split("/")[:2]) for key in keys})


def _remove(name: str, submissions: Iterable[str]) -> None:
    here = location.current()
    with here.asking("written"):
        here.ours.delete(_key(name))
        for submission in submissions:
            outbox.remove(here.ours, submission)
    for submission in submissions:
        _remove_submission(submission)


def _remove_submission(submission: str) -> None:
    files.remove_folder(f"{submission}/")
    shutil.rmtree(location.current().root / submission, ignore_errors=True)


def folder(schedule: Schedule) -> Path:
    """Where what it submits is on this machine."""
    return location.current().root / schedule.submission


def _key(name: str) -> str:
    return f"{_SCHEDULES}{name}.json"


def _find(name: str) -> Found | None:
    from mgpu_train.store import NotFound

    here = location.current()
    try:
        with here.asking("read"):
            found = here.ours.read(_key(name), _LARGEST)
    except NotFound:
        return None
    ahead_s = time.time() - found.now
    return Found(parsed(found.data, name), found.version, ahead_s if abs(ahead_s) > _CLOCKS_S else 0.0)


def _read(name: str) -> Found | InputError | None:
    try:
        return _find(name)
    except InputError as error:  # damaged: it hides no other
        return error
