"""What runs have spent, by the time at which they did: from their records, and from what is kept of removed ones.

<backend>/mgpu/removed.json     of each run that was removed: what its record said of money

A month is one of UTC, as providers bill. Plain dataclasses and JSON: `mgpu costs` needs no SDK and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mgpu.backend import objects
from mgpu.fields import plain
from mgpu.run.record.record import Record, every, of_json

_REMOVED = "removed.json"
_KEPT = (
    *("run_id", "name", "project", "project_base", "run_file", "stack", "own_stack", "fleet_name", "provider", "nodes"),
    *("state", "created_at", "created_by", "ended_at", "spending", "price_usd_per_hour", "hard_cap_at"),
)  # of a record


@dataclass(frozen=True)
class Stretch:
    """A time in which a run had the same machines, UNIX seconds. Prices are US dollars per hour for all nodes; None:
    not known."""

    record: Record
    since: float
    until: float
    machines_usd_per_hour: float | None
    other_usd_per_hour: float | None
    provider: str

    @property
    def hours(self) -> float:
        """How long it was."""
        return (self.until - self.since) / 3600

    @property
    def month(self) -> str:
        """In which it begins: `2026-11`."""
        return month(self.since)

    @property
    def project(self) -> str:
        """The name of the folder with the Pulumi program; without one of the user's, of that with the run file."""
        base, program = Path(self.record.project_base), Path(self.record.project)
        return (program if base.is_relative_to(program) else base).name

    @property
    def owner(self) -> str:
        """The user who has begun the run, as their machine names them."""
        return self.record.created_by.partition("@")[0]


@dataclass
class Sum:
    """What belongs together. Dollars are those that are known."""

    key: str
    hours: float = 0.0  # in which a run had machines
    machines_usd: float = 0.0
    other_usd: float = 0.0  # disks and public addresses
    runs: set[str] = field(default_factory=set)
    unpriced: set[str] = field(default_factory=set)  # runs that had machines whose price is not known,
    other_unpriced: set[str] = field(default_factory=set)  # and whose machines had something beside them, perhaps

    @property
    def usd(self) -> float:
        """All of it."""
        return self.machines_usd + self.other_usd

    def add(self, stretch: Stretch) -> None:
        """Counts it, too."""
        run_id = stretch.record.run_id
        self.runs.add(run_id)
        self.hours += stretch.hours
        self.machines_usd += (stretch.machines_usd_per_hour or 0.0) * stretch.hours
        self.other_usd += (stretch.other_usd_per_hour or 0.0) * stretch.hours
        if stretch.machines_usd_per_hour is None:
            self.unpriced.add(run_id)
        elif stretch.other_usd_per_hour is None:
            self.other_unpriced.add(run_id)


KEYS = {
    "project": lambda stretch: stretch.project,
    "run": lambda stretch: stretch.record.run_id,
    "provider": lambda stretch: stretch.provider,
    "owner": lambda stretch: stretch.owner,
    "month": lambda stretch: stretch.month,
}


def stretches(records: Iterable[Record], now: float, since: float = 0.0) -> Iterator[Stretch]:
    """All times from `since` until `now` in which one of these runs had machines; none has two months in it."""
    for record in records:
        for whole in _of(record, now):
            cut = replace(whole, since=max(whole.since, since))
            while cut.since < cut.until and (end := month_ends(cut.since)) < cut.until:
                yield replace(cut, until=end)
                cut = replace(cut, since=end)
            if cut.since < cut.until or whole.since == whole.until >= since:
                yield cut


def _of(record: Record, now: float) -> Iterator[Stretch]:
    for spent in record.spending:
        until = record.billed_until(now) if spent.until is None else spent.until
        prices = (spent.price_usd_per_hour, spent.other_usd_per_hour)
        yield Stretch(record, spent.since, max(spent.since, until), *prices, spent.provider or record.provider)
    if not record.spending and record.price_usd_per_hour:  # of a version that did not write down for how long
        yield Stretch(record, record.created_at, record.created_at, None, None, record.provider)


def sums(found: Iterable[Stretch], by: str) -> list[Sum]:
    """One for each project, run, provider, owner or month; by time where they have one, else the dearest first."""
    known = dict[str, Sum]()
    began = dict[str, float]()
    for stretch in found:
        key = KEYS[by](stretch)
        known.setdefault(key, Sum(key)).add(stretch)
        began[key] = min(stretch.since, began.get(key, stretch.since))
    if by in ("run", "month"):
        return sorted(known.values(), key=lambda each: began[each.key])
    return sorted(known.values(), key=lambda each: (-each.usd, each.key))


def total(found: Iterable[Stretch]) -> Sum:
    """All of it."""
    whole = Sum("total")
    for stretch in found:
        whole.add(stretch)
    return whole


# ---- months


def month(at: float) -> str:
    """The month of UTC in which a moment is: `2026-11`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m")


def month_began(at: float) -> float:
    """When that month began, UNIX seconds."""
    return datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()


def month_ends(at: float) -> float:
    """When that month ends, UNIX seconds."""
    return month_began(month_began(at) + timedelta(days=32).total_seconds())


# ---- all runs


def all_records(*, fresh: bool = False) -> list[Record]:
    """Of all runs that have ever been in the backend. `fresh`: as in `record.every`. Raises StackError."""
    there = every(fresh=fresh)
    known = {record.run_id for record in there}
    return [*(record for record in _removed() if record.run_id not in known), *there]


def _removed() -> list[Record]:
    found = objects.read(_REMOVED)
    records = list[Record]()
    for each in found["runs"].values() if found else ():
        with suppress(ValueError, TypeError, LookupError, AttributeError):  # one that is damaged hides no other
            records.append(of_json(each))
    return records


def remember(records: Iterable[Record]) -> None:
    """Keeps what these runs have spent: their records are about to go. Raises StackError."""
    costly = [plain(record) for record in records if record.spending or record.price_usd_per_hour]
    slim = {each["run_id"]: {name: each[name] for name in _KEPT} for each in costly}
    if slim:
        objects.change(_REMOVED, lambda kept: {"runs": {**(kept or {"runs": {}})["runs"], **slim}})
