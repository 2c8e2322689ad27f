"""What all runs of a backend may spend together, and how many there may be at once.

<backend>/mgpu/limits.json     as `mgpu limits set` has set them
<backend>/mgpu/claims.json     runs that were let in, before their records say what they cost

Whoever begins with a run claims its place first, in one object that is replaced only by who has read it as it is: of
two that come at once one sees the other. A claim lapses with its run. Without limits nothing is claimed; runs that were
begun then are counted by their records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from mgpu.backend import objects
from mgpu.errors import OverLimit, StackError
from mgpu.run.budget.costs import all_records, month, month_began, month_ends, stretches, total
from mgpu.run.record.record import Record, State
from mgpu.words import count, duration

_LIMITS, _CLAIMS = "limits.json", "claims.json"
_LEAST_S = 300.0  # that the rest of a month's budget has to pay for
_SUBMITTED_S = 600.0  # within which a run that has claimed its place has a record

Claim = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """US dollars, and runs; 0: no limit."""

    usd_per_month: float = 0.0  # of UTC
    usd_per_hour: float = 0.0
    runs: int = 0  # at once

    def __bool__(self) -> bool:
        return bool(self.usd_per_month or self.usd_per_hour or self.runs)


@dataclass(frozen=True)
class Usage:
    """What runs of the backend have and spend at a moment, UNIX seconds. `rates`: dollars per hour of each run that has
    machines, or is about to have them; None: not known."""

    at: float
    month_usd: float = 0.0
    runs: tuple[str, ...] = ()
    rates: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def usd_per_hour(self) -> float:
        """All of it, as far as it is known."""
        return sum(rate or 0.0 for rate in self.rates.values())

    @property
    def unpriced(self) -> list[str]:
        """Runs whose price is not known."""
        return sorted(run for run, rate in self.rates.items() if rate is None)


# ---- the limits


def limits() -> Limits:
    """As they are set now. Raises StackError."""
    return _limits(objects.read(_LIMITS))


def change(**wanted: float) -> Limits:
    """Sets some of the limits; 0: none any more. Raises StackError."""
    return _limits(
        objects.change(_LIMITS, lambda kept: asdict(replace(_limits(kept), **wanted)))  # type: ignore[arg-type]
    )


def _limits(kept: Mapping[str, Any] | None) -> Limits:
    known = {each.name: (kept or {}).get(each.name, 0) for each in fields(Limits)}
    return Limits(**{name: limit for name, limit in known.items() if math.isfinite(limit)})  # once nan could be set


# ---- what is in use


def in_use(now: float) -> Usage:
    """What all runs have and spend at `now`. Raises StackError."""
    return _in_use(_claims(objects.read(_CLAIMS)), now)[0]


def _in_use(
    claims: Mapping[str, Claim], now: float, but: str = "", *, spent_too: bool = False
) -> tuple[Usage, dict[str, Claim]]:
    """By all but one; `spent_too`: what that one has spent earlier is not counted either. And the claims that have not
    lapsed."""
    records = {record.run_id: record for record in all_records(fresh=True)}
    lives = _living(claims, records, now)
    billed = {run: each for run, each in records.items() if _within_cap(each, now)}
    alive = {run: each for run, each in billed.items() if not each.state.final and each.state is not State.QUEUED}
    rates = {run: _rate(each, lives.get(run)) for run, each in alive.items()}
    rates |= {run: each["usd_per_hour"] for run, each in lives.items() if run not in alive}
    runs = tuple(sorted(run for run in rates if run != but))
    # over, and perhaps not given back
    rates |= {run: _rate(each, None) for run, each in billed.items() if each.state.final and each.teardown == "asked"}
    rates.pop(but, None)
    spenders = (record for run, record in records.items() if run != but or not spent_too)
    spent = total(stretches(spenders, now, month_began(now))).usd
    return Usage(now, spent, runs, rates), lives


def _living(claims: Mapping[str, Claim], records: Mapping[str, Record], now: float) -> dict[str, Claim]:
    """Claims whose run is not over; it may have no record yet, or one of an earlier use."""

    def lives(run: str, at: float) -> bool:
        record = records.get(run)
        if record is not None and not record.state.final:
            return _within_cap(record, now)
        ended_since = record is not None and (record.ended_at or 0.0) >= at
        return not ended_since and now - at < _SUBMITTED_S

    return {run: each for run, each in claims.items() if lives(run, each["at"])}


def _within_cap(record: Record, now: float) -> bool:
    """Past its hard cap a run has no machines, whoever has forgotten it."""
    return now < record.hard_cap_at or not record.hard_cap_at


def _rate(record: Record, claim: Claim | None) -> float | None:
    newest = record.spending[-1] if record.spending else None
    if newest is not None and newest.until is None:
        return None if newest.price_usd_per_hour is None else newest.usd_per_hour
    return claim["usd_per_hour"] if claim else None


def _claims(kept: Mapping[str, Any] | None) -> dict[str, Claim]:
    return dict(kept["claims"]) if kept else {}


# ---- whether there is room


def over(wanted: Limits, used: Usage, usd_per_hour: float | None) -> list[str]:
    """What one more run would be over, and by how much; `usd_per_hour`: of its machines, None: not known."""
    found = list[str]()
    more, left = usd_per_hour or 0.0, wanted.usd_per_month - used.month_usd
    if wanted.runs and len(used.runs) >= wanted.runs:
        names = ", ".join(used.runs[:5]) + (", ..." if len(used.runs) > 5 else "")
        found.append(f"runs at once: {count(len(used.runs), 'run')} of {wanted.runs} ({names})")
    if wanted.usd_per_hour and used.usd_per_hour + more > wanted.usd_per_hour:
        excess = used.usd_per_hour + more - wanted.usd_per_hour
        parts = f"${used.usd_per_hour:,.2f} are in use, and up to ${more:,.2f} would come"
        found.append(f"dollars per hour: {parts}, of ${wanted.usd_per_hour:,.2f}: ${excess:,.2f} too much")
    if wanted.usd_per_month:
        needed = _LEAST_S / 3600 * (used.usd_per_hour + more)
        if left <= 0 or left < needed:
            spent = f"${used.month_usd:,.2f} of ${wanted.usd_per_month:,.2f} are spent"
            short = f"${needed - left:,.2f} too much for {duration(_LEAST_S)} of all that runs"
            found.append(f"dollars in {month(used.at)}: {spent}: {short}")
    if found and used.unpriced and (wanted.usd_per_hour or wanted.usd_per_month):
        found.append(f"not counted, for the price is not known: {', '.join(used.unpriced)}")
    return found


def require_room(usd_per_hour: float) -> None:
    """Raises OverLimit: one more run, at this price, would be over a limit; StackError."""
    if wanted := limits():
        _require(wanted, in_use(time.time()), usd_per_hour)


def _require(wanted: Limits, used: Usage, usd_per_hour: float | None) -> None:
    if found := over(wanted, used, usd_per_hour):
        raise OverLimit(
            "one more run would be over a limit (`mgpu limits show`)",
            "\n".join((*found, "Nothing was rented.")),
            "Wait, stop another one, or raise the limit (`mgpu limits set`); `mgpu submit` queues until there is room.",
            over=found,
        )


@contextmanager
def place(run_id: str, usd_per_hour: Callable[[], float | None]) -> Iterator[None]:
    """As `claim`; the claim is let go at the end of the block, when the run's record says all that it has said."""
    if not claim(run_id, usd_per_hour):
        yield
        return
    try:
        yield
    finally:
        let_go(run_id)


def let_go(run_id: str) -> None:
    """Gives the run's place up; where the backend does not answer, it lapses."""
    with suppress(StackError):
        objects.change(_CLAIMS, lambda kept: _but(kept, run_id))


def claim(run_id: str, usd_per_hour: Callable[[], float | None]) -> bool:
    """Claims a place for a run that is about to begin, at this price for all nodes, None: not known; False: there are
    no limits. Where none is of money, the price is not asked for.

    Raises:
        OverLimit: there is no room for it; nothing was claimed.
        StackError: the backend does not answer.
    """
    wanted = limits()
    if not wanted:
        return False
    price = usd_per_hour() if wanted.usd_per_hour or wanted.usd_per_month else None
    now = time.time()

    def claimed(kept: Mapping[str, Any] | None) -> dict[str, Any]:
        used, lives = _in_use(_claims(kept), now, run_id)
        _require(wanted, used, price)
        return {"claims": {**lives, run_id: {"usd_per_hour": price, "at": now}}}

    objects.change(_CLAIMS, claimed)
    return True


def _but(kept: Mapping[str, Any] | None, run_id: str) -> dict[str, Any]:
    return {"claims": {run: each for run, each in _claims(kept).items() if run != run_id}}


# ---- the month's budget


@dataclass(frozen=True)
class Month:
    """What all other runs have spent in a month, and go on spending, as it was at a moment, UNIX seconds."""

    most_usd: float  # that all may spend
    others: Usage

    def spent_usd(self, record: Record, now: float) -> float:
        """By all of them and this one until `now`, in the month of the moment at which it was looked."""
        since = self.others.usd_per_hour * max(0.0, now - self.others.at) / 3600
        mine = total(stretches([record], now, month_began(self.others.at))).usd
        return self.others.month_usd + since + mine

    def left_usd(self, record: Record, usd_per_hour: float | None, now: float) -> float:
        """What is left for this run, if all go on as they do; infinite where that lasts until the month is over."""
        left = self.most_usd - self.spent_usd(record, now)
        if left <= 0 or not usd_per_hour:
            return left
        hours = left / (usd_per_hour + self.others.usd_per_hour)
        return math.inf if hours * 3600 >= month_ends(now) - now else hours * usd_per_hour


def of_month(run_id: str, now: float) -> Month | None:
    """The month's budget as it stands beside this run; None: there is no such limit. Raises StackError."""
    most = limits().usd_per_month
    return Month(most, _in_use(_claims(objects.read(_CLAIMS)), now, run_id, spent_too=True)[0]) if most else None


def claimed_usd_per_hour(run_id: str) -> float | None:
    """What a run has claimed to cost; None: nothing, or it is not known. Raises StackError."""
    return _claims(objects.read(_CLAIMS)).get(run_id, {}).get("usd_per_hour")
