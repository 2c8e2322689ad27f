"""What the next run of a schedule is compared with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mgpu.run.record import checks
from mgpu.run.record.record import Record
from mgpu.schedule.model import Outcome, Schedule


def compared_with(schedule: Schedule, records: Callable[[], Iterable[Record]]) -> dict[str, list[float]]:
    """What the next run of a schedule is compared with: its nights so far. While there are too few of them, runs of an
    earlier schedule of this name count, too, as far as `records` (asked for only then, oldest first) has them."""
    return checks.earlier(schedule.expect, _nights(schedule, records))


def _nights(schedule: Schedule, records: Callable[[], Iterable[Record]]) -> Iterator[dict[str, float]]:
    known = set[str]()
    for due in reversed(schedule.history):
        known.add(due.run_id)
        if due.outcome is Outcome.SUCCEEDED:
            yield {each.metric: each.value for each in due.checks if each.met and each.value is not None}
    for record in reversed([*records()]):
        if record.schedule == schedule.name and record.run_id not in known:
            yield checks.good(record)
