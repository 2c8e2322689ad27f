"""Due times: a cron expression in a time zone, read as Debian's cron reads it. Pure.

A time of day that the clocks jump over is due right after the jump; one that comes twice is due the first time. What is
due every so many minutes or hours goes by the time that really passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from functools import cached_property
from itertools import takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from mgpu.errors import InputError

_FIELDS = 5
_LONGEST_S = 366 * 86400.0  # that is looked back
_OF_A_MACHINE = ("localtime", "posixrules", "Factory", "posix", "right")  # beside the zones, where a system has them


@dataclass(frozen=True)
class Times:
    """All times of a cron expression. Raises InputError: it is none, is never due, or the zone is unknown."""

    cron: str
    timezone: str

    def __post_init__(self) -> None:
        what = f"--cron '{self.cron}'"
        fields = "Five fields: minute, hour, day of month, month, day of week."
        cure = "For example `0 2 * * *`: every night at two; `30 22 * * MON-FRI`: on weekdays at half past ten."
        if len(self.cron.split()) != _FIELDS:
            raise InputError(f"{what} is no cron expression", fields, cure)
        zone = self._zone
        try:
            next(CronSim(self.cron, datetime.now(zone)))
        except CronSimError as error:
            raise InputError(f"{what} is no cron expression: {error}", fields, cure) from error
        except StopIteration:
            raise InputError(f"{what} is never due", "No day that comes fits it.", cure) from None

    def require_same_everywhere(self) -> None:
        """Raises InputError for a zone that is another one, or none, on another machine."""
        if self.timezone.partition("/")[0] in _OF_A_MACHINE:
            why = "It means something else, or nothing, on another machine that looks what is due."
            raise InputError(f"--timezone {self.timezone}", why, "Name one such as Europe/Berlin, or UTC.")

    @cached_property
    def _zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            why = "It is no time zone of the IANA database."
            raise InputError(f"--timezone {self.timezone}", why, "Name one such as Europe/Berlin, or UTC.") from error

    def after(self, at: float) -> Iterator[float]:
        """The due times after `at`, in their order; UNIX seconds."""
        for due in CronSim(self.cron, datetime.fromtimestamp(at, self._zone)):
            if (found := due.timestamp()) > at:  # in an hour that comes twice it may be the first one's
                yield found

    def between(self, after: float, until: float, most: int) -> tuple[list[float], int]:
        """The newest `most` due times after `after` and not after `until`, in their order, and how many there were
        before these. No more than a year back is looked at."""
        found = deque[float](maxlen=most)
        count = 0
        for due in takewhile(lambda due: due <= until, self.after(max(after, until - _LONGEST_S))):
            found.append(due)
            count += 1
        return list(found), count - len(found)

    def words(self, at: float) -> str:
        """A due time as the clocks of the zone show it: `Sun 2027-03-28 03:00 CEST`."""
        return datetime.fromtimestamp(at, self._zone).strftime("%a %Y-%m-%d %H:%M %Z")

    def short(self, at: float) -> str:
        """The same for tables: `Sun 03-28 03:00`."""
        return datetime.fromtimestamp(at, self._zone).strftime("%a %m-%d %H:%M")

    def change(self, at: float) -> str:
        """What the clocks of the zone do on the day of this time, from one midnight to the next; empty: nothing."""
        begins = datetime.combine(datetime.fromtimestamp(at, self._zone), time(), self._zone)
        ends = begins + timedelta(days=1)  # by the calendar, however many hours that is
        moved = (ends.utcoffset() or timedelta()) - (begins.utcoffset() or timedelta())
        if not moved:
            return ""
        minutes = abs(int(moved.total_seconds())) // 60
        span = f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes} min"
        return f"the clocks go {'forward' if moved > timedelta() else 'back'} {span} that day"
