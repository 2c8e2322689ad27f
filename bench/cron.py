"""Due times where clocks change: cronsim, which mgpu takes, beside croniter. `python -m bench cron`.

What is right is computed from the rules of Debian's cron(8), minute by minute: a job with a `*` in minute or hour goes
by the time that really passes; any other runs right after a jump over its time, and once where its time comes twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from statistics import median
from zoneinfo import ZoneInfo

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe")  # the last one's clocks move half an hour
YEARS = range(2026, 2032)
AT_A_TIME = (
    *("0 1 * * *", "30 1 * * *", "45 1 * * *", "0 2 * * *", "15 2 * * *", "30 2 * * *", "0 3 * * *"),
    "30 2 * * SUN",
)
ANY = ("*/30 * * * *", "15 * * * *", "0 */2 * * *", "*/20 2 * * *")
MINUTE = timedelta(minutes=1)
PEER = {"croniter": ("croniter==7.0.0", "python")}
Next = Callable[[str, datetime], Iterator[datetime]]


def cronsim(cron: str, start: datetime) -> Iterator[datetime]:
    """Times after `start`."""
    from cronsim import CronSim

    return CronSim(cron, start)


def croniter(cron: str, start: datetime) -> Iterator[datetime]:
    """Times after `start`."""
    from croniter import croniter as library  # pyright: ignore[reportMissingModuleSource]

    return iter(library(cron, start, ret_type=datetime).get_next, None)


LIBRARIES: dict[str, Next] = {"cronsim": cronsim, "croniter": croniter}


def main() -> None:
    """Prints how many of the weeks in which clocks change each has right, what it costs, and what is wrong."""
    from bench.tools import peer  # needs mgpu, which a peer's environment has not

    root = Path(__file__).parent.parent
    for name in LIBRARIES:
        python = sys.executable if name == "cronsim" else peer(name, PEER)
        if python is None:
            continue
        command = [str(python), "-m", "bench.cron", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
        said = json.loads(done.stdout)
        import_ms = 1000 * median(_cpu_s(str(python), f"import {name}") - _cpu_s(str(python), "pass") for _ in range(9))
        print(f"{name}: {import_ms:.0f} ms of CPU to import, {said['year_s']:.1f} s for a year of every five minutes")
        for zone, found in said["zones"].items():
            print(f"  {zone}: {found['right']} of {found['all']} right", *found["wrong"], sep="\n    ")


def _cpu_s(python: str, code: str) -> float:
    before = os.times()
    subprocess.run([python, "-c", code], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measured(library: Next) -> dict[str, object]:
    """Of each zone how many weeks are right, and what is wrong in those of the first year."""
    zones = {name: _zone(library, ZoneInfo(name)) for name in ZONES}
    start, begin = datetime(2027, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")), time.process_time()
    for due in library("*/5 * * * *", start):
        if due > start + timedelta(days=365):
            break
    return {"zones": zones, "year_s": time.process_time() - begin}


def _zone(library: Next, zone: ZoneInfo) -> dict[str, object]:
    right, total, wrong = 0, 0, list[str]()
    for at in (change for year in YEARS for change in changes(zone, year)):
        begin, end = at - timedelta(days=3, minutes=7), at + timedelta(days=4)
        for cron in (*AT_A_TIME, *ANY):
            want, have = {*expected(cron, zone, begin, end)}, {*_until(library(cron, begin.astimezone(zone)), end)}
            total, right = total + 1, right + (want == have)
            if at.year == YEARS[0]:
                for kind, times in (("leaves out", want - have), ("adds", have - want)):
                    wrong += [f"`{cron}` {kind} {due.astimezone(zone):%Y-%m-%d %H:%M %z}" for due in sorted(times)]
    return {"right": right, "all": total, "wrong": wrong}


def _until(times: Iterator[datetime], end: datetime) -> Iterator[datetime]:
    for due in times:
        if (at := due.astimezone(UTC)) > end:
            return
        yield at


def changes(zone: ZoneInfo, year: int) -> Iterator[datetime]:
    """The moments of a year at which the zone's clocks change."""
    at = datetime(year, 1, 1, tzinfo=UTC)
    while at.year == year:
        if at.astimezone(zone).utcoffset() != (at + timedelta(minutes=30)).astimezone(zone).utcoffset():
            yield at + timedelta(minutes=30)
        at += timedelta(minutes=30)


def expected(cron: str, zone: ZoneInfo, begin: datetime, end: datetime) -> Iterator[datetime]:
    """The times after `begin` until `end`, by the rules above."""
    minute, hour, _, _, weekday = cron.split()
    if minute.startswith("*") or hour.startswith("*"):
        at = begin
        while (at := at + MINUTE) <= end:
            local = at.astimezone(zone)
            if _fits(minute, local.minute) and _fits(hour, local.hour):
                yield at
        return
    day = begin.astimezone(zone).date()
    while day <= end.astimezone(zone).date():
        if weekday == "*" or day.weekday() == 6:
            at = _moment(day, int(hour), int(minute), zone)
            if begin < at <= end:
                yield at
        day += timedelta(days=1)


def _fits(field: str, value: int) -> bool:
    return field == "*" or (value % int(field[2:]) == 0 if field.startswith("*/") else value == int(field))


def _moment(day: date, hour: int, minute: int, zone: ZoneInfo) -> datetime:
    """When the zone's clocks show it: the first time, and where they never do, right after the jump."""
    wall = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)  # fold=0: the first one
    at = wall.astimezone(UTC)
    if at.astimezone(zone).replace(tzinfo=None) == wall.replace(tzinfo=None):
        return at
    at = wall.replace(hour=0, minute=0).astimezone(UTC)
    before = at.astimezone(zone).utcoffset()
    while at.astimezone(zone).utcoffset() == before:
        at += MINUTE
    return at


if __name__ == "__main__":
    print(json.dumps(measured(LIBRARIES[sys.argv[1]])))
