"""When a schedule is due: the clocks of its zone, as Debian's cron reads them."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from mgpu.errors import InputError
from mgpu.schedule.times import Times


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%m-%d %H:%M")


def due(cron: str, zone: str, after: str, until: str) -> list[str]:
    found, before = Times(cron, zone).between(at(after), at(until), 1000)
    assert before == 0
    return [utc(each) for each in found]


@pytest.mark.parametrize(
    ("cron", "after", "until", "expected"),
    [
        # 02:30 does not exist on 28 March 2027 in Berlin: it is due when the clocks have jumped to 03:00
        ("30 2 * * *", "2027-03-27 00:00", "2027-03-30 00:00", ["03-27 01:30", "03-28 01:00", "03-29 00:30"]),
        # it comes twice on 31 October: the first one counts
        ("30 2 * * *", "2027-10-30 00:00", "2027-11-02 00:00", ["10-30 00:30", "10-31 00:30", "11-01 01:30"]),
        # every half hour goes by the time that passes
        ("*/30 * * * *", "2027-10-31 00:00", "2027-10-31 01:30", ["10-31 00:30", "10-31 01:00", "10-31 01:30"]),
        ("*/30 * * * *", "2027-03-28 00:15", "2027-03-28 01:40", ["03-28 00:30", "03-28 01:00", "03-28 01:30"]),
        # looked at in the middle of the hour that comes twice, nothing is due again
        ("30 2 * * *", "2027-10-31 00:30", "2027-10-31 23:00", []),
        ("30 2 * * *", "2027-10-31 01:15", "2027-10-31 23:00", []),
        ("30 2 * * *", "2027-10-31 00:15", "2027-10-31 00:45", ["10-31 00:30"]),
    ],
)  # fmt: skip
def test_where_the_clocks_change(cron: str, after: str, until: str, expected: list[str]):
    assert due(cron, "Europe/Berlin", after, until) == expected


def test_a_year_of_nights_has_each_night_once_and_a_leap_day_only_where_there_is_one():
    nights = Times("30 2 * * *", "Europe/Berlin").between(at("2027-01-01"), at("2028-01-01"), 1000)[0]
    days = {datetime.fromtimestamp(each, ZoneInfo("Europe/Berlin")).date() for each in nights}
    assert len(nights) == len(days) == 365
    leap = Times("0 4 29 2 *", "UTC")
    assert [datetime.fromtimestamp(each, UTC).year for each in islice(leap.after(at("2027-01-01")), 2)] == [2028, 2032]


def test_of_many_the_newest_are_told_and_the_others_counted():
    found, before = Times("0 * * * *", "UTC").between(at("2027-05-01"), at("2027-05-02"), 5)
    assert ([utc(each) for each in found], before) == (
        [f"05-01 {h}:00" for h in (20, 21, 22, 23)] + ["05-02 00:00"],
        19,
    )
    long_ago = Times("0 2 * * *", "UTC").between(at("2000-01-01"), at("2027-05-02"), 5)
    assert long_ago[1] < 366, "no more than a year is looked back"


def test_times_are_told_as_the_clocks_show_them_and_the_change_is_named():
    times = Times("30 2 * * *", "Europe/Berlin")
    told = [(times.words(each), times.change(each)) for each in islice(times.after(at("2027-03-27")), 2)]
    assert told == [
        ("Sat 2027-03-27 02:30 CET", ""),
        ("Sun 2027-03-28 03:00 CEST", "the clocks go forward 1 h that day"),
    ]
    assert "back 30 min" in Times("0 12 * * *", "Australia/Lord_Howe").change(at("2027-04-04 02:00"))


@pytest.mark.parametrize(
    ("cron", "zone", "after", "changes"),
    [
        ("0 1 * * *", "Europe/Berlin", "2027-03-27", [(28, "forward 1 h"), (29, "")]),  # an hour before they do
        ("30 2 * * *", "Europe/Berlin", "2027-10-30 12:00", [(31, "back 1 h"), (1, "")]),  # the first of two half past
        ("0 0 * * *", "Africa/Cairo", "2027-04-29 12:00", [(30, "forward 1 h"), (1, "")]),  # there is no midnight
        ("0 22 * * *", "Africa/Cairo", "2027-10-28", [(28, "back 1 h"), (29, "")]),  # from midnight to eleven
    ],
)
def test_a_change_is_named_on_its_own_day(cron: str, zone: str, after: str, changes: list[tuple[int, str]]):
    times = Times(cron, zone)
    for due, (day, words) in zip(islice(times.after(at(after)), 2), changes, strict=True):
        assert datetime.fromtimestamp(due, ZoneInfo(zone)).day == day
        assert times.change(due) == (words and f"the clocks go {words} that day")


@pytest.mark.parametrize(
    ("cron", "zone", "words"),
    [
        ("0 2 * *", "UTC", "Five fields"),
        ("0 0 2 * * *", "UTC", "Five fields"),
        ("0 25 * * *", "UTC", "hour"),
        ("0 2 30 2 *", "UTC", "day-of-month"),
        ("0 2 * * *", "Europe/Bärlin", "IANA"),
        ("0 2 * * *", "../etc/passwd", "IANA"),
    ],
)
def test_what_is_no_time_is_refused(cron: str, zone: str, words: str):
    with pytest.raises(InputError, match=words):
        Times(cron, zone)


@pytest.mark.parametrize("zone", ["localtime", "posix/Europe/Berlin", "Factory"])
def test_a_zone_that_is_a_machines_own_is_none_for_a_schedule(zone: str):
    found = Times("0 2 * * *", "UTC")
    found.require_same_everywhere()
    object.__setattr__(found, "timezone", zone)  # not every system has it
    with pytest.raises(InputError, match=f"--timezone {zone}"):
        found.require_same_everywhere()
