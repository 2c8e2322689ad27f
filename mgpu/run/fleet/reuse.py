"""Fleets that runs have kept: on which of them a queued run begins in place of new machines, and that no two have the
same place.

<backend>/mgpu/fleets.json     by fleet, the runs that were put on it, before their records say so

What is kept stands in the records of runs that are over, and nowhere else. Whoever puts a run on a fleet claims that
first, in one object that is replaced only by who has read it as it is: of two that come at once one sees the other. A
claim lapses with its run. Plain dataclasses and JSON: a pass, and `mgpu queue ls`, need no SDK and no models for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
Slots = tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """A fleet that stands under its lease. `maker`: the run whose stack it is; `newest`: the last that has kept it;
    `lease_until`: UNIX seconds; `uses`: the runs that have it, or are about to, each with its slots of every node:
    numbers of GPUs, or of places where it has none; none: it has all of it."""

    maker: Record
    newest: Record
    lease_until: float
    uses: Mapping[str, Slots] = field(default_factory=dict[str, Slots])

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

    @property
    def slots(self) -> int:
        """Of each node: its GPUs; without any, the processes that it was rented for."""
        return int(self.output["gpus_per_node"] or self.maker.needs["processes_per_node"])


# ---- pure: what stands, and what fits


def kept(records: Iterable[Record], claims: Mapping[str, Sequence[Claim]], now: float) -> list[Kept]:
    """What stands at `now`, UNIX seconds, by these records of all runs and these claims."""
    known = {record.run_id: record for record in records}
    uses: dict[str, dict[str, Slots]] = {}
    for name, each in _living(claims, known, now).items():
        uses[name] = {claim["run"]: tuple(claim["slots"]) for claim in each}
    for run, record in known.items():
        if record.fleet and not record.state.final:
            uses.setdefault(record.fleet["fleet"], {})[run] = tuple(record.slots)
    found: dict[str, Kept] = {}
    for record in sorted(known.values(), key=lambda each: (each.ended_at or 0.0, each.run_id)):
        maker = known.get(record.kept_by or record.run_id)
        if record.teardown == "kept" and record.fleet and maker is not None:
            name = record.fleet["fleet"]
            earlier = found[name].lease_until if name in found else 0.0
            found[name] = Kept(maker, record, max(record.lease_until, earlier), uses.get(name, {}))
    return [each for _, each in sorted(found.items()) if each.uses or each.lease_until > now]


def _living(claims: Mapping[str, Sequence[Claim]], records: Mapping[str, Record], now: float) -> dict[str, list[Claim]]:
    """Claims of runs that are not over, and that are on that fleet, or were put there a moment ago."""

    def lives(name: str, claim: Claim) -> bool:
        record, recent = records.get(claim["run"]), now - claim["at"] < _WRITTEN_S
        if record is None or record.state.final:
            return recent and (record is None or (record.ended_at or 0.0) < claim["at"])
        return recent or (record.fleet or {}).get("fleet") == name

    living = ((name, [each for each in those if lives(name, each)]) for name, those in claims.items())
    return {name: those for name, those in living if those}


def refusal(fleet: Kept, run: Record, now: float) -> str | None:
    """Why the run does not begin on this fleet, whoever uses it now; None: it may. A fleet fits that the run could have
    rented, and that lasts for what is left of its `max_hours`."""
    if not run.needs or not fleet.maker.needs:
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


def _of_slots(fleet: Kept, run: Record) -> str:
    there, wanted = fleet.output["gpus_per_node"], run.needs["gpus_per_node"]
    if not _share(fleet, run) or bool(there) != bool(wanted):
        return _has("number of GPUs a node", there, wanted)
    what = "GPUs" if there else "processes"
    return "" if _wanted(run) <= fleet.slots else f"it has {fleet.slots} {what} a node, not {_wanted(run)}"


def _share(fleet: Kept, run: Record) -> bool:
    return fleet.maker.share and run.share


def _wanted(run: Record) -> int:
    """How many slots of each node a run that shares them needs."""
    return int(run.needs["gpus_per_node"] or run.needs["processes_per_node"])


def _of_price(fleet: Kept, run: Record, _: float) -> str:
    part = _wanted(run) / fleet.slots if _share(fleet, run) else 1.0
    price, most = fleet.output["price_usd_per_hour"] * part, run.needs["max_price_usd_per_hour"]
    return "" if price <= most * (1 + 1e-9) else f"it costs ${price:,.2f} per hour, above the cap of ${most:,.2f}"


def _of_time(fleet: Kept, run: Record, now: float) -> str:
    """A run that takes kept fleets alone is content with less than what is left of its `max_hours`."""
    cap, may_take_s = fleet.output["hard_cap_at"], run.needs["max_hours"] * 3600
    if run.ends_at:  # it was at work before
        may_take_s = min(may_take_s, max(0.0, run.ends_at - now))
    wanted_s = min(_LEAST_S, may_take_s) if run.machines == "kept" else may_take_s
    left_s = max(0.0, cap - now) if cap else wanted_s
    return "" if left_s >= wanted_s else f"it ends in {duration(left_s)}, and the run may take {duration(may_take_s)}"


def _of_lease(fleet: Kept, _: Record, now: float) -> str:
    return "" if fleet.uses or fleet.lease_until - now >= _LEAST_LEASE_S else "its lease ends in a moment"


def _asks(run: Record, provider: str) -> Mapping[str, str] | None:
    """The settings with which the run asks this provider; None: it does not."""
    if provider == run.needs["provider"]:
        return run.needs["provider_options"]
    return run.candidates.get(provider)


def _of_provider(fleet: Kept, run: Record, _: float) -> str:
    provider = fleet.output["provider"]
    wanted = _asks(run, provider)
    if wanted is None:
        return _has("provider", provider, " or ".join(run.candidates or [run.needs["provider"]]))
    return "" if _asks(fleet.maker, provider) == wanted else "it has other settings of its provider"


def _user(record: Record) -> str:
    return record.created_by.partition("@")[0]


_CHECKS: tuple[Callable[[Kept, Record, float], str], ...] = (
    lambda _, run, __: "the run asks for new machines" if run.machines == "new" else "",
    lambda fleet, run, _: "the run could not begin on it" if fleet.name in run.avoid else "",
    lambda fleet, run, _: _has("owner", _user(fleet.maker), _user(run)),
    _of_provider,
    lambda fleet, run, _: _has("number of nodes", len(fleet.output["nodes"]), run.needs["nodes"]),
    lambda fleet, run, _: _of_slots(fleet, run),
    lambda fleet, run, _: _one_of("GPU", fleet.output["gpu"] or "", run.needs["gpu"]),
    lambda fleet, run, _: _one_of("region", fleet.output["region"], run.needs["regions"]),
    _of_market,
    lambda fleet, run, _: _at_least("disk in GiB", fleet.maker.needs["disk_gib"], run.needs["disk_gib"]),
    # what its machines have is not known, but for what they were chosen
    lambda fleet, run, _: _at_least("memory in GiB", fleet.maker.needs["memory_gib"], run.needs["memory_gib"]),
    lambda fleet, run, _: _has("image", fleet.output["image"], run.image),
    _of_price,
    _of_time,
    _of_lease,
)


def choice(fleets: Iterable[Kept], run: Record, now: float) -> Kept | None:
    """The fleet that the run begins on, with it among its `uses`; None: there is none. It fits, and has room: the run
    was put there before, or nobody has it, or it shares. Of several one that others share, then the cheapest."""
    found: list[tuple[tuple[object, ...], Kept]] = []
    for each in fleets:
        if refusal(each, run, now) is None and (slots := _room(each, run)) is not None:
            placed = replace(each, uses={**each.uses, run.run_id: slots})
            found.append(((run.run_id not in each.uses, not each.uses, _price(each), each.name), placed))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _price(fleet: Kept) -> float:
    return float(fleet.output["price_usd_per_hour"])


def _room(fleet: Kept, run: Record) -> Slots | None:
    """The slots that are free for the run; none: all of the fleet; None: there is no room."""
    others = [slots for other, slots in fleet.uses.items() if other != run.run_id]
    if not _share(fleet, run):
        return None if others else ()
    if not all(others):  # one of them has all of it
        return None
    if mine := fleet.uses.get(run.run_id):
        return mine
    taken = {slot for slots in others for slot in slots}
    free = [slot for slot in range(fleet.slots) if slot not in taken][: _wanted(run)]
    return tuple(free) if len(free) == _wanted(run) else None


def waits_for(fleets: Iterable[Kept], run: Record, now: float) -> str:
    """For what a run waits that takes kept fleets alone, where there is none for it now."""
    reasons = [(each, refusal(each, run, now)) for each in fleets]
    used = next((each for each, why in reasons if why is None and each.uses), None)
    if used is not None:
        names = ", ".join(sorted(used.uses))
        who = f"run {names} uses" if len(used.uses) == 1 else f"runs {names} use"
        return f"kept fleet {used.stack}, which {who}"
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
        if chosen is None:
            return {"claims": _but(lives, run.run_id)}
        before = next((each for each in lives.get(chosen.name, ()) if each["run"] == run.run_id), None)
        fresh = before is not None and now - before["at"] < _RENEW_S
        mine_now = before if before and fresh else _of(run.run_id, now, chosen.uses[run.run_id])
        return {"claims": _with(lives, chosen.name, mine_now)}

    if choice(standing(now), run, now) is None:
        return None
    objects.change(_CLAIMS, claimed)
    return mine[0]


def take(fleet: str, run_id: str) -> str:
    """Claims all of this very fleet for a run; a run that has claimed it before, empty: none has. Raises as
    `standing`."""
    now, other = time.time(), [""]

    def taken(found: Mapping[str, Any] | None) -> dict[str, Any]:
        _, lives = _look(found, now)
        other[0] = _other(lives, fleet, run_id)
        return {"claims": lives if other[0] else _with(lives, fleet, _of(run_id, now, ()))}

    objects.change(_CLAIMS, taken)
    return other[0]


def claimed_by(fleet: str, but: str = "", beside: Slots = ()) -> str:
    """A run that was put on this fleet, other than that one, which has the slots `beside`; empty: none that is in its
    way. Raises as `standing`."""
    found = objects.read(_CLAIMS)
    return _other(_look(found, time.time())[1], fleet, but, beside) if fleet in _claims(found) else ""


def collide(some: Slots, others: Slots) -> bool:
    """Whether two runs cannot have these slots of one fleet at once; none: all of it."""
    return not some or not others or not {*some}.isdisjoint(others)


def _look(found: Mapping[str, Any] | None, now: float) -> tuple[list[Record], dict[str, list[Claim]]]:
    """All records, and the claims that have not lapsed."""
    records = every(fresh=True)
    return records, _living(_claims(found), {record.run_id: record for record in records}, now)


def _other(claims: Mapping[str, Sequence[Claim]], fleet: str, but: str, beside: Slots = ()) -> str:
    others = (each for each in claims.get(fleet, ()) if each["run"] != but)
    return next((str(each["run"]) for each in others if collide(beside, tuple(each["slots"]))), "")


def _of(run_id: str, now: float, slots: Slots) -> Claim:
    return {"run": run_id, "at": now, "slots": [*slots]}


def _but(claims: Mapping[str, Sequence[Claim]], run_id: str) -> dict[str, list[Claim]]:
    left = {name: [each for each in those if each["run"] != run_id] for name, those in claims.items()}
    return {name: those for name, those in left.items() if those}


def _with(claims: Mapping[str, Sequence[Claim]], fleet: str, mine: Claim) -> dict[str, list[Claim]]:
    others = _but(claims, mine["run"])
    return {**others, fleet: sorted([*others.get(fleet, []), mine], key=lambda each: str(each["run"]))}


def let_go(run_id: str) -> None:
    """Gives up what the run has claimed; where the backend does not answer, it lapses."""
    with suppress(StackError):
        objects.change(_CLAIMS, lambda found: {"claims": _but(_claims(found), run_id)})


def _claims(found: Mapping[str, Any] | None) -> dict[str, list[Claim]]:
    return dict(found["claims"]) if found else {}
