"""`mgpu:index:Fleet`: N equal nodes. Decides what has to happen; `mgpu.acquire` and the provider do it.

What a changed input does:

    nodes                                 update: new ranks are added, or the surplus ranks ended; no other is touched
    lease, price cap, processes per node  update: recorded; machines that run are left alone
    labels of the image                   the same; an error where those that run cannot run it
    file of the private key               nothing: it says where the key lies, not which one it is
    image                                 replacement, as all others; only a provider whose machines are containers of
                                          it is told which one
    all others                            replacement, the old machines first: a running machine cannot take them over
                                          (`maxHours` too: the hard cap is fixed at create, and nothing extends it)

A node that was lost shows in `read` as a smaller `nodes`; the next update replaces that machine alone. Where all were
lost, or no machine can be replaced alone (`repairs_single_nodes`), the whole fleet is made again; for a run
(`HARD_CAP`) until the hard cap that it has, and not beyond.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from mgpu_train.timeouts import Timeouts

from mgpu import acquire
from mgpu.acquire import Acquired, Terms, fit
from mgpu.acquire.fit import Machines
from mgpu.acquire.refusals import REFUSED
from mgpu.errors import (
    AuthError,
    Conflict,
    InputError,
    MgpuError,
    PermissionDenied,
    RateLimited,
    StackError,
    Transient,
)
from mgpu.events import Note, Warned
from mgpu.iac.protocol.handler import Call, Checked, Difference, Properties, ReadResult, changed
from mgpu.iac.protocol.wire import UNKNOWN, PartialFailure, has_unknown
from mgpu.iac.types import fleet_check, generations, searches
from mgpu.iac.types.fleet_model import FleetInputs, FleetOutputs, bought, full_options
from mgpu.iac.types.sweep import sweep
from mgpu.journal import Journal
from mgpu.plan import rank
from mgpu.plan.model import Offer, Plan, Requirements
from mgpu.providers import registry
from mgpu.providers.base import FleetState, Handle, NodePhase, Provider, Rekeys

_T = TypeVar("_T")
_UPDATES = ("nodes", "processesPerNode", "maxPriceUsdPerHour", "leaseMinutes", "imageLabels")
_REPLACES = (
    *("name", "owner", "provider", "gpu", "gpusPerNode", "market", "regions", "maxHours", "diskGib", "options"),
    *("sshPublicKey", "image"),
)
_BOUGHT = tuple(str(f.alias) for name, f in FleetOutputs.model_fields.items() if name not in FleetInputs.model_fields)


class FleetHandler:
    """Handles Fleet. The id is `<provider>/<name>`."""

    secret: frozenset[str] = frozenset()
    refresh_before_update = True  # so that a plain `up` sees a lost node and repairs it

    def __init__(
        self,
        timeouts: Timeouts,
        hard_cap_at: float = 0.0,
        max_usd: float = 0.0,
        ranked_up_to: Sequence[float] = (),
        ended_searches: int | None = 0,
    ) -> None:
        """See `mgpu.iac.plugin.Handlers`."""
        self._timeouts, self._hard_cap_at, self._max_usd = timeouts, hard_cap_at, max_usd
        self._ranked_up_to, self._known_searches = ranked_up_to, ended_searches

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """Validates everything at once, and fills in every default."""
        return fleet_check.checked(call, old, new)

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """Inputs against inputs, and the count that is wanted against the machines that live; never offers, prices.
        Labels of an image that is yet to be built are no difference: the update looks again. Nor is an option that is
        left out, or added by a newer mgpu, beside one at its default."""
        if has_unknown(new.get("imageLabels")):
            new = {**new, "imageLabels": old_inputs.get("imageLabels")}
        old_inputs = {"image": "", **old_inputs}  # fleets of before have none in state
        old_inputs, new = full_options(old_inputs), full_options(new)
        lives = {**old_inputs, "nodes": old.get("nodes", old_inputs.get("nodes"))}
        return Difference(changed(_UPDATES, lives, new), changed(_REPLACES, old_inputs, new))

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Plans, then rents the whole gang; what an interrupted create of the same generation made is adopted. Where no
        offer fits or is granted, nothing of the fleet is left at the provider."""
        if call.preview:
            return "", _preview(call, inputs)
        wanted = FleetInputs.model_validate(inputs)
        provider = wanted.rented_from()
        terms = self._terms(call, provider, wanted, self._hard_cap_at, time.monotonic())
        made, plan = self._or_swept(call, provider, wanted, lambda: self._rented(call, provider, wanted, terms))
        return f"{wanted.provider}/{wanted.name}", bought(wanted, made, plan.offers, time.time()).to_wire()

    def _or_swept(
        self, call: Call, provider: Provider, wanted: FleetInputs, rent: Callable[[], _T], keep: Sequence[str] = ()
    ) -> _T:
        """What is rented. Where it is refused, all else of the fleet is ended first, but the machines in `keep`: what a
        create or repair that was cut off has made, perhaps on another machine, may be what is missing now, or be of an
        offer that is left out by now. Whoever hears of the refusal asks another provider, or waits; it stays one where
        the provider cannot be asked what is there, and this machine has asked for nothing else."""
        try:
            return self._or_swept_once(call, provider, wanted, rent, keep)
        except REFUSED:
            self._end_search(call, wanted.owner, wanted.name)
            raise

    def _or_swept_once(
        self, call: Call, provider: Provider, wanted: FleetInputs, rent: Callable[[], _T], keep: Sequence[str]
    ) -> _T:
        try:
            return rent()
        except REFUSED as refusal:
            look = partial(sweep, call, provider, wanted.owner, wanted.name, self._timeouts, keep=keep)
            try:
                if not acquire.patiently(look, acquire.LOOKED_S, call.cancelled.wait, call.emit):
                    raise
            except (AuthError, PermissionDenied, RateLimited, Transient) as error:
                if generations.begun(call.settings.state_dir, wanted.owner, wanted.name):
                    raise
                call.emit(Warned(f"fleet {wanted.name}: nobody could look whether it has machines: {error.what}"))
                raise refusal from error
        return rent()

    def _rented(self, call: Call, provider: Provider, wanted: FleetInputs, terms: Terms) -> tuple[Acquired, Plan]:
        plan = self._planned(call, provider, wanted, terms)
        cap_s = self._cap_s(wanted)
        terms["max_usd"] = self._max_usd

        def rent(generation: int, journal: Journal) -> Acquired:
            request = wanted.request(generation, cap_s)
            return acquire.acquire(provider, request, plan.offers, journal, **terms)

        return self._search(call, provider, wanted, rent), plan

    def _planned(self, call: Call, provider: Provider, wanted: FleetInputs, terms: Terms) -> Plan:
        plan = _plan(provider, wanted, _on_sale(call, provider, wanted.requirements(), terms))
        return rank.up_to(plan, rank.Rank.of(self._ranked_up_to)) if self._ranked_up_to else plan

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> ReadResult | None:
        """The machines as the provider sees them now; gone only when it says of every one that it is terminated, and
        of what they had beside them (addresses, say) that it is released: the state forgets where to look for it.

        Raises:
            ProviderError: the provider did not answer, asked again and again: nothing is concluded from that.
            TeardownIncomplete: something that the machines had could not be released.
        """
        if not old:
            return _refuse_import(call, resource_id)
        fleet = FleetOutputs.model_validate(old)
        provider = fleet.rented_from()
        state = self._described(call, provider, fleet.handle)
        if all(node.phase is NodePhase.TERMINATED for node in state.nodes):
            acquire.destroy(provider, fleet.handle, timeouts=self._timeouts, emit=call.emit)
            generations.used(call.settings.state_dir, fleet.owner, fleet.name, fleet.generation)
            self._end_search(call, fleet.owner, fleet.name)
            return None
        seen = fleet.seen(fleet.handle, state)
        return ReadResult(resource_id, {**inputs, "nodes": seen.nodes}, seen.to_wire())

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """Ends surplus ranks, then fills the ranks that have no machine; each step's result reaches state."""
        fleet = FleetOutputs.model_validate(old)
        if call.preview:
            unknown = _BOUGHT if new["nodes"] != fleet.nodes else ()
            return {**fleet.to_wire(), **new, **dict.fromkeys(unknown, UNKNOWN)}
        wanted = FleetInputs.model_validate(new)
        provider = fleet.rented_from()
        if wanted.image_labels != fleet.image_labels:
            fit.require(wanted.image_labels, Machines.standing(fleet.offer.gpu, fleet.handle, provider))
        fleet = fleet.model_copy(update=wanted.model_dump(exclude={"nodes"}))
        if fleet.price_usd_per_hour > wanted.max_price_usd_per_hour:
            call.emit(Warned(_above_cap(fleet, wanted)))
        since = time.monotonic()
        try:
            if provider.capabilities.repairs_single_nodes:
                fleet = self._shrink(call, provider, fleet, wanted.nodes)
                fleet = self._fill(call, provider, fleet, wanted, since)
            elif len(fleet.handle.ids) != wanted.nodes or _missing(
                fleet.handle, self._described(call, provider, fleet.handle)
            ):
                fleet = self._anew(call, provider, fleet, wanted, since)
        except MgpuError as error:
            # state keeps what lives, under the new requirements: the next `up` goes on from there
            raise PartialFailure(resource_id, _now(provider, fleet).to_wire(), error) from error
        return fleet.to_wire()

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Ends every machine and waits until the provider says so."""
        fleet = FleetOutputs.model_validate(old)
        acquire.destroy(fleet.rented_from(), fleet.handle, timeouts=self._timeouts, emit=call.emit)
        generations.used(call.settings.state_dir, fleet.owner, fleet.name, fleet.generation)
        self._end_search(call, fleet.owner, fleet.name)

    def _shrink(self, call: Call, provider: Provider, fleet: FleetOutputs, nodes: int) -> FleetOutputs:
        """Ends the machines of the ranks from `nodes` on; machines lost among them are ended too, which is harmless."""
        surplus = tuple(machine for machine in fleet.handle.ids[nodes:] if machine)
        if len(fleet.handle.ids) <= nodes:
            return fleet
        handle = fleet.handle.model_copy(update={"ids": fleet.handle.ids[:nodes]})
        if surplus:
            acquire.destroy(provider, fleet.handle, nodes=surplus, timeouts=self._timeouts, emit=call.emit)
        return fleet.seen(handle, self._described(call, provider, handle))

    def _fill(
        self, call: Call, provider: Provider, fleet: FleetOutputs, wanted: FleetInputs, since: float
    ) -> FleetOutputs:
        """Rents a machine for every rank that has none that lives: those that were lost, and those that are new."""
        handle = _grown(fleet.handle, wanted.nodes)
        missing = _missing(handle, self._described(call, provider, handle))
        if not missing:
            return fleet
        left_s = _time_left(fleet.name, fleet.hard_cap_at)
        fleet = fleet.seen(handle, self._described(call, provider, handle))
        needed = _needed_beside(fleet, wanted, len(missing))
        terms = self._terms(call, provider, wanted, fleet.hard_cap_at, since)

        def rented() -> Acquired:
            plan = _plan_like(fleet, needed, _on_sale(call, provider, needed, terms))

            def rent(generation: int, journal: Journal) -> Acquired:
                request = wanted.request(generation, left_s)
                return acquire.repair(provider, handle, missing, request, plan.offers, journal, **terms)

            return self._search(call, provider, wanted, rent, fleet)

        made = self._or_swept(call, provider, wanted, rented, keep=handle.ids)
        return fleet.seen(made.handle, made.state)

    def _anew(
        self, call: Call, provider: Provider, fleet: FleetOutputs, wanted: FleetInputs, since: float
    ) -> FleetOutputs:
        """Gives the whole gang back and rents another one, under the hard cap that it had: no machine of it can be
        replaced alone."""
        left_s = _time_left(fleet.name, fleet.hard_cap_at)
        call.emit(Note(f"fleet {fleet.name}: {wanted.provider} replaces no machine alone; all are made anew"))
        acquire.destroy(provider, fleet.handle, unbilled=True, timeouts=self._timeouts, emit=call.emit)
        terms = self._terms(call, provider, wanted, fleet.hard_cap_at, since)

        def rented() -> tuple[Acquired, Plan]:
            plan = _plan(provider, wanted, _on_sale(call, provider, wanted.requirements(), terms))

            def rent(generation: int, journal: Journal) -> Acquired:
                return acquire.acquire(provider, wanted.request(generation, left_s), plan.offers, journal, **terms)

            return self._search(call, provider, wanted, rent, fleet), plan

        made, plan = self._or_swept(call, provider, wanted, rented)
        return bought(wanted, made, plan.offers, time.time())

    def _described(self, call: Call, provider: Provider, handle: Handle) -> FleetState:
        """What the machines are; a provider that is busy for a moment ends neither a refresh nor a repair."""
        limit_s = min(acquire.ANSWER_S, self._timeouts.destroy_s)
        return acquire.patiently(lambda: provider.describe(handle), limit_s, call.cancelled.wait, call.emit)

    def _cap_s(self, wanted: FleetInputs) -> float:
        """Seconds that a new fleet lives; one after a run's earlier one shares that one's hard cap."""
        whole_s = wanted.max_hours * 3600
        return min(whole_s, _time_left(wanted.name, self._hard_cap_at)) if self._hard_cap_at else whole_s

    def _search(
        self,
        call: Call,
        provider: Provider,
        wanted: FleetInputs,
        rent: Callable[[int, Journal], Acquired],
        fleet: FleetOutputs | None = None,
    ) -> Acquired:
        """Rents under the next generation; ends machines in its way of which this machine's journal does not know."""
        fleets = call.settings.state_dir, wanted.owner, wanted.name

        def under_the_next() -> Acquired:
            generation = generations.next_one(*fleets, fleet.generation if fleet else 0)
            with generations.open_journal(*fleets) as journal:
                return rent(generation, journal)

        try:
            return under_the_next()
        except Conflict:
            sweep(call, provider, wanted.owner, wanted.name, self._timeouts, keep=fleet.handle.ids if fleet else ())
        return under_the_next()

    def _terms(self, call: Call, provider: Provider, wanted: FleetInputs, hard_cap_at: float, since: float) -> Terms:
        """Those of one create or repair, made once: its time runs from `since`, seconds of the monotonic clock, when it
        began to end what is in its way, however often it begins to search."""
        terms: Terms = {"timeouts": self._timeouts, "emit": call.emit, "cancelled": call.cancelled}
        terms["hard_cap_at"], terms["searches"] = hard_cap_at, self._ended_searches(call, wanted)
        limits = acquire.limits(self._timeouts, provider, wanted.requirements())
        terms["until"] = since + acquire.search_s(limits, provider.queue_s())
        if isinstance(provider, Rekeys):
            from mgpu.iac.types.contact import Contact  # SSH is slow to import, and most calls do not need it

            key = Path(wanted.ssh_private_key_file).expanduser()
            terms["meet"] = Contact(provider, key, limits, emit=call.emit, cancelled=call.cancelled).meet
        return terms

    def _ended_searches(self, call: Call, wanted: FleetInputs) -> int:
        known = self._known_searches
        return searches.ended(wanted.owner, wanted.name, call.emit) if known is None else known

    def _end_search(self, call: Call, owner: str, fleet: str) -> None:
        if self._known_searches is None:
            searches.end(owner, fleet, call.emit)


def _time_left(name: str, hard_cap_at: float) -> float:
    """Seconds until the hard cap, which machines that are added share with the others."""
    left_s = hard_cap_at - time.time()
    if left_s >= acquire.ENDING_S:
        return left_s
    raise StackError(
        f"fleet {name} is at its hard cap: no machine is added to it",
        f"{max(0, left_s):.0f} s are left, and the hard cap is fixed when a fleet is made.",
        "Run `pulumi destroy`, then `pulumi up` for a new fleet.",
    )


def _on_sale(call: Call, provider: Provider, needed: Requirements, terms: Terms) -> tuple[Offer, ...]:
    """What the provider sells; where it has to be asked, one that does not answer ends no repair."""
    left_s = max(0.0, terms.get("until", math.inf) - time.monotonic())
    patience_s = min(terms["timeouts"].provision_s, left_s)
    return acquire.patiently(lambda: provider.offers(needed).offers, patience_s, call.cancelled.wait, call.emit)


def _plan(provider: Provider, wanted: FleetInputs, offers: tuple[Offer, ...]) -> Plan:
    plan = rank.plan(wanted.requirements(), offers)
    return fit.fitting(wanted.image_labels, plan, Machines.on_offer(provider, plan))


def _needed_beside(fleet: FleetOutputs, wanted: FleetInputs, count: int) -> Requirements:
    """So many machines more, under what the price cap leaves beside those that live."""
    cap = wanted.max_price_usd_per_hour - fleet.price_usd_per_hour
    return wanted.requirements().model_copy(update={"nodes": count, "max_price_usd_per_hour": cap})


def _plan_like(fleet: FleetOutputs, needed: Requirements, offers: tuple[Offer, ...]) -> Plan:
    """Machines of the fleet's own type, in the zone of those that live.

    Between zones traffic costs money and the fastest networks do not reach: the ranks of one fleet never spread.
    """
    same = (fleet.offer.instance_type, fleet.region, fleet.offer.zone)
    here = [o for o in offers if (o.instance_type, o.region, o.zone) == same]
    return rank.plan(needed, here or [fleet.offer])  # what is not on the list any more may still be had


def _preview(call: Call, inputs: Properties) -> Properties:
    """The inputs, and what is known only after an update; says what would be rented, at which price."""
    unknown = {key for key, value in inputs.items() if has_unknown(value)}
    if not unknown - {"sshPublicKey", "sshPrivateKeyFile", "imageLabels", "image"}:
        wanted = FleetInputs.model_validate(inputs | fleet_check.stand_ins(unknown))
        provider = wanted.rented_from()
        plan = _plan(provider, wanted, provider.offers(wanted.requirements()).offers)
        price = f"${plan.best_price_usd_per_hour:.2f}/h, all nodes; ${plan.price_usd_per_hour:.2f}/h at most"
        call.emit(Note(f"would rent {wanted.nodes} x {plan.best.label}: {price}"))
    return {**inputs, **dict.fromkeys(_BOUGHT, UNKNOWN)}


def _now(provider: Provider, fleet: FleetOutputs) -> FleetOutputs:
    try:
        return fleet.seen(fleet.handle, provider.describe(fleet.handle))
    except MgpuError:
        return fleet  # what is known stays; the next refresh looks again


def _grown(handle: Handle, nodes: int) -> Handle:
    return handle.model_copy(update={"ids": handle.ids + ("",) * (nodes - len(handle.ids))})


def _missing(handle: Handle, state: FleetState) -> tuple[int, ...]:
    lost = set(state.lost)
    return tuple(rank for rank, machine in enumerate(handle.ids) if not machine or rank in lost)


def _above_cap(fleet: FleetOutputs, wanted: FleetInputs) -> str:
    return (
        f"fleet {fleet.name} costs ${fleet.price_usd_per_hour:.4f}/h, more than the new cap of "
        f"${wanted.max_price_usd_per_hour:.4f}/h: the cap holds for machines rented from now on; "
        "`pulumi destroy` ends those that run"
    )


def _refuse_import(call: Call, resource_id: str) -> None:
    """An import: nothing by that name answers None; a fleet that exists is refused, its requirements being unknown."""
    provider, _, name = resource_id.partition("/")
    try:
        handles = registry.get(provider).list_owned(call.settings.owner)
    except InputError:
        return
    if any(handle.fleet == name for handle in handles):
        raise InputError(
            f"fleet {resource_id} exists, but a Fleet cannot be imported",
            "Its machines do not know the requirements that they were rented for.",
            "Run `pulumi up` to make a fleet, and `mgpu gc` to end this one.",
        )
