"""Fleets that runs have kept: on which of them a queued run begins in place of new machines, and that no two begin on
one.

<backend>/mgpu/fleets.json     by fleet, the run that was put on it, before that run's record says so

What is kept stands in the records of runs that are over, and nowhere else. Whoever puts a run on a fleet claims that
first, in one object that is replaced only by who has read it as it is: of two that come at once one sees the other. A
claim lapses with its run. Plain dataclasses and JSON: a pass, and `mgpu queue ls`, need no SDK and no models for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mgpu.backend import objects
from mgpu.errors import StackError
from mgpu.run.record.record import Record, every
from mgpu.words import duration

_CLAIMS = "fleets.json"
_WRITTEN_S = 600.0  # within which a run that was put on a fleet says so in its record
_RENEW_S = 60.0  # so old a claim is written anew by its run
_LEAST_LEASE_S = 60.0  # that is left of a lease: the nodes have to be reached before it ends
_LEAST_S = 600.0  # until the hard cap, for a run that takes a kept fleet as it is

Claim = Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """A fleet that stands under its lease. `keeper`: the run whose stack it is; `newest`: the last that has kept it;
    `lease_until`: UNIX seconds; `used_by`: the run that has it, or is about to."""

    keeper: Record
    newest: Record
    lease_until: float
    used_by: str = ""

    @property
    def name(self) -> str:
        """The fleet's, which no other has."""
        return str(self.output["fleet"])

    @property
    def stack(self) -> str:
        """The stack's, by which people know it."""
        return self.newest.stack

    @property
    def output(self) -> Mapping[str, Any]:
        """The stack output `mgpu`, as it was read last."""
        return self.newest.fleet or {}


# ---- pure: what stands, and what fits


def kept(records: Iterable[Record], claims: Mapping[str, Claim], now: float) -> list[Kept]:
    """What stands at `now`, UNIX seconds, by these records of all runs and these claims."""
    known = {record.run_id: record for record in records}
    uses = {name: each["run"] for name, each in _living(claims, known, now).items()}
    uses |= {record.fleet["fleet"]: run for run, record in known.items() if record.fleet and not record.state.final}
    found: dict[str, Kept] = {}
    for record in sorted(known.values(), key=lambda each: (each.ended_at or 0.0, each.run_id)):
        keeper = known.get(record.kept_by or record.run_id)
        if record.teardown == "kept" and record.fleet and keeper is not None:
            name = record.fleet["fleet"]
            earlier = found[name].lease_until if name in found else 0.0
            found[name] = Kept(keeper, record, max(record.lease_until, earlier), uses.get(name, ""))
    return [each for _, each in sorted(found.items()) if each.used_by or each.lease_until > now]


def _living(claims: Mapping[str, Claim], records: Mapping[str, Record], now: float) -> dict[str, Claim]:
    """Claims of runs that are not over, and that are on that fleet, or were put there a moment ago."""

    def lives(name: str, claim: Claim) -> bool:
        record, recent = records.get(claim["run"]), now - claim["at"] < _WRITTEN_S
        if record is None or record.state.final:
            return recent and (record is None or (record.ended_at or 0.0) < claim["at"])
        return recent or (record.fleet or {}).get("fleet") == name

    return {name: each for name, each in claims.items() if lives(name, each)}


def refusal(fleet: Kept, run: Record, now: float) -> str | None:
    """Why the run does not begin on this fleet, whoever uses it now; None: it may. A fleet fits that the run could have
    rented, and that lasts for its `max_hours`."""
    if not run.needs or not fleet.keeper.needs:
        return "an earlier mgpu has not written down what it needs"
    return next((why for check in _CHECKS if (why := check(fleet, run, now))), None)


def _has(of: str, there: object, wanted: object) -> str:
    return "" if there == wanted else f"its {of} is {there or 'none'}, not {wanted or 'none'}"


def _one_of(of: str, there: str, wanted: Sequence[str]) -> str:
    fits = not wanted or there.casefold() in [each.casefold() for each in wanted]
    return "" if fits else f"its {of} is {there or 'none'}, not {' or '.join(wanted)}"


def _at_least(of: str, there: float, wanted: float) -> str:
    return "" if there >= wanted else f"its {of} is {there:g}, and {wanted:g} are asked for"


def _of_market(fleet: Kept, run: Record, _: float) -> str:
    wanted = run.needs["market"]
    return "" if wanted == "spot-then-on-demand" else _has("market", fleet.output["market"], wanted)


def _of_price(fleet: Kept, run: Record, _: float) -> str:
    price, most = fleet.output["price_usd_per_hour"], run.needs["max_price_usd_per_hour"]
    return "" if price <= most * (1 + 1e-9) else f"it costs ${price:,.2f} per hour, above the cap of ${most:,.2f}"


def _of_time(fleet: Kept, run: Record, now: float) -> str:
    """A run that takes kept fleets alone is content with less than its `max_hours`."""
    cap = fleet.output["hard_cap_at"]
    wanted_s = _LEAST_S if run.machines == "kept" else run.needs["max_hours"] * 3600
    left_s = cap - now if cap else wanted_s
    return "" if left_s >= wanted_s else f"it ends in {duration(max(0.0, left_s))}, and the run may take {_span(run)}"


def _span(run: Record) -> str:
    return duration(run.needs["max_hours"] * 3600)


def _of_lease(fleet: Kept, _: Record, now: float) -> str:
    return "" if fleet.used_by or fleet.lease_until - now >= _LEAST_LEASE_S else "its lease ends in a moment"


def _options(record: Record) -> Mapping[str, str]:
    return record.needs["provider_options"]


def _user(record: Record) -> str:
    return record.created_by.partition("@")[0]


_CHECKS: tuple[Callable[[Kept, Record, float], str], ...] = (
    lambda _, run, __: "the run asks for new machines" if run.machines == "new" else "",
    lambda fleet, run, _: "the run could not begin on it" if fleet.name in run.avoid else "",
    lambda fleet, run, _: _has("owner", _user(fleet.keeper), _user(run)),
    lambda fleet, run, _: _has("provider", fleet.output["provider"], run.needs["provider"]),
    lambda fleet, run, _: "" if _options(fleet.keeper) == _options(run) else "it has other settings of its provider",
    lambda fleet, run, _: _has("number of nodes", len(fleet.output["nodes"]), run.needs["nodes"]),
    lambda fleet, run, _: _has("number of GPUs a node", fleet.output["gpus_per_node"], run.needs["gpus_per_node"]),
    lambda fleet, run, _: _one_of("GPU", fleet.output["gpu"] or "", run.needs["gpu"]),
    lambda fleet, run, _: _one_of("region", fleet.output["region"], run.needs["regions"]),
    _of_market,
    lambda fleet, run, _: _at_least("disk in GiB", fleet.keeper.needs["disk_gib"], run.needs["disk_gib"]),
    # what its machines have is not known, but for what they were chosen
    lambda fleet, run, _: _at_least("memory in GiB", fleet.keeper.needs["memory_gib"], run.needs["memory_gib"]),
    lambda fleet, run, _: _has("image", fleet.output["image"], run.image),
    _of_price,
    _of_time,
    _of_lease,
)


def choice(fleets: Iterable[Kept], run: Record, now: float) -> Kept | None:
    """On which of these fleets the run begins: one that fits, which it was put on or that nobody uses, the cheapest;
    None: on none."""
    free = (each for each in fleets if each.used_by in ("", run.run_id) and refusal(each, run, now) is None)
    return min(free, key=lambda each: (not each.used_by, each.output["price_usd_per_hour"], each.name), default=None)


def waits_for(fleets: Iterable[Kept], run: Record, now: float) -> str:
    """For what a run waits that takes kept fleets alone, where there is none for it now."""
    reasons = [(each, refusal(each, run, now)) for each in fleets]
    used = next((each for each, why in reasons if why is None and each.used_by), None)
    if used is not None:
        return f"kept fleet {used.stack}, which run {used.used_by} uses"
    told = "; ".join(f"{each.stack}: {why}" for each, why in reasons[:3])
    return "a kept fleet that fits" + (f" ({told})" if told else ", and none is kept")


# ---- who has which


def standing(now: float) -> list[Kept]:
    """All kept fleets as the backend has them. Raises StackError; InputError: `fleets.json` cannot be read."""
    return kept(every(fresh=True), _claims(objects.read(_CLAIMS)), now)


def claim(run: Record) -> Kept | None:
    """Puts the run on a kept fleet, in the eyes of all others: on the one that it was put on before, where that still
    fits; None: there is none for it. Raises what `standing` raises."""
    now, mine = time.time(), list[Kept | None]()

    def claimed(found: Mapping[str, Any] | None) -> dict[str, Any]:
        records, lives = _look(found, now)
        mine[:] = [chosen := choice(kept(records, lives, now), run, now)]
        others = {name: each for name, each in lives.items() if each["run"] != run.run_id}
        if chosen is None:
            return _plain(others)
        recent = lives.get(chosen.name, {"at": 0.0})
        return _plain({**others, chosen.name: recent if now - recent["at"] < _RENEW_S else _of(run.run_id, now)})

    if choice(standing(now), run, now) is None:
        return None
    objects.change(_CLAIMS, claimed)
    return mine[0]


def take(fleet: str, run_id: str) -> str:
    """Claims this very fleet for a run; the run that has claimed it before, empty: none has. Raises as `standing`."""
    now, other = time.time(), [""]

    def taken(found: Mapping[str, Any] | None) -> dict[str, Any]:
        _, lives = _look(found, now)
        other[0] = _run_of(lives, fleet, but=run_id)
        return _plain(lives if other[0] else {**lives, fleet: _of(run_id, now)})

    objects.change(_CLAIMS, taken)
    return other[0]


def claimed_by(fleet: str, but: str = "") -> str:
    """The run that was put on this fleet, other than that one; empty: none. Raises as `standing`."""
    found = objects.read(_CLAIMS)
    return _run_of(_look(found, time.time())[1], fleet, but) if fleet in _claims(found) else ""


def _look(found: Mapping[str, Any] | None, now: float) -> tuple[list[Record], dict[str, Claim]]:
    """All records, and the claims that have not lapsed."""
    records = every(fresh=True)
    return records, _living(_claims(found), {record.run_id: record for record in records}, now)


def _run_of(claims: Mapping[str, Claim], fleet: str, but: str) -> str:
    run = str(claims[fleet]["run"]) if fleet in claims else ""
    return "" if run == but else run


def _of(run_id: str, now: float) -> Claim:
    return {"run": run_id, "at": now}


def let_go(run_id: str) -> None:
    """Gives up what the run has claimed; where the backend does not answer, it lapses."""

    def without(found: Mapping[str, Any] | None) -> dict[str, Any]:
        return _plain({name: each for name, each in _claims(found).items() if each["run"] != run_id})

    with suppress(StackError):
        objects.change(_CLAIMS, without)


def _claims(found: Mapping[str, Any] | None) -> dict[str, Claim]:
    return dict(found["claims"]) if found else {}


def _plain(claims: Mapping[str, Claim]) -> dict[str, Any]:
    return {"version": 1, "claims": dict(claims)}
