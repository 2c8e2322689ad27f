"""The plan of a run file: shown, held against its limits, and agreed to before anything is rented."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mgpu.console import Console
from mgpu.errors import InputError, MgpuError, NoCapacity
from mgpu.run.record.record import Record
from mgpu.words import count, duration, usd, utc

if TYPE_CHECKING:
    from mgpu.acquire.fit import Machines
    from mgpu.plan.model import Cost, Offer, Plan
    from mgpu.run.job.images import Looked
    from mgpu.spec.model import RunSpec

LIMIT = "<: the spot price is not known, but that it is not above this"
PREFLIGHT = "asking the provider and the store, before anything is rented"
_LEAST_S = 300.0  # that a budget has to pay for


def make_plan(spec: RunSpec) -> Plan:
    """Offers of the run file's providers, ranked. Rents nothing.

    Raises:
        InputError: the disk that is asked for does not hold the run's checkpoints, whatever else is in the way: that is
            told along with it, and no provider mends it.
        ProviderError: none answers, or has an offer that fits.
    """
    from mgpu.plan import room
    from mgpu.run.job import on_sale

    small = room.too_small(spec)
    try:
        plan = on_sale.plan(spec)
    except MgpuError as error:
        if small is None:
            raise
        why = "\n".join(filter(None, (error.why, small.what, small.why)))
        raise InputError(error.what, why, f"{error.next_step} {small.next_step}".lstrip()) from error
    if small is not None:
        raise small
    return plan.model_copy(update={"checkpoints": room.of(spec)})


def with_profile(provider: str, options: dict[str, str], profile: str, instead: str) -> dict[str, str]:
    """A provider's options with another profile; `instead`: what to do where it has none. Raises InputError."""
    from mgpu.spec.provider import entry

    if "profile" not in entry(provider).options.model_fields:
        raise InputError(f"--profile: provider {provider} has no profiles", "", instead)
    return {**options, "profile": profile}


def require_for(spec: RunSpec, provider: str, path: Path, command: str) -> None:
    """Raises InputError: the run file at `path` is for other providers; `command` takes both."""
    if provider not in spec.candidates:
        names, cure = ", ".join(spec.candidates), f"`mgpu {command} {spec.provider} {path}`"
        raise InputError(f"{path} is for provider {names}, not for {provider}", "", cure)


def mark(offer: Offer) -> str:
    """What stands before the price of an offer; see `LIMIT`."""
    return "< " if offer.price_is_limit else ""


def cents(amount: float) -> str:
    """Dollars as they are paid; what is less than a cent is not shown as nothing."""
    return usd(amount) if amount < 0.01 else f"${amount:.2f}"


def old_prices(offers: Iterable[Offer]) -> str:
    """How old the oldest of these prices is, and what renews it; empty where all are younger than a day."""
    oldest = min(offers, key=lambda offer: offer.fetched_at, default=None)
    days = (time.time() - oldest.fetched_at) / 86400 if oldest else 0
    if oldest is None or days < 1:
        return ""
    day = time.strftime("%Y-%m-%d", time.gmtime(oldest.fetched_at))
    return f"prices of {day}: {count(int(days), 'day')} old; `mgpu offers {oldest.provider} --refresh`"


def other_costs(spec: RunSpec, plan: Plan) -> tuple[Cost, ...]:
    """What the provider bills beside the machines of the plan's first offer, as far as it tells."""
    from mgpu.plan import rank
    from mgpu.providers import registry
    from mgpu.providers.base import OtherCosts

    needed = rank.requirements(spec.of(plan.best.provider))
    provider = registry.get(needed.provider, needed.provider_options)
    known = isinstance(provider, OtherCosts)
    return provider.other_costs(needed, plan.best, rank.saves(spec)) if known else ()


class Budget(NamedTuple):
    """What a run may spend: `max_usd`, less what it has `spent` before it is resumed, in US dollars."""

    max_usd: float | None = None
    spent: float = 0.0

    @property
    def left(self) -> float:
        """Infinite where there is no limit."""
        return math.inf if self.max_usd is None else max(0.0, self.max_usd - self.spent)

    def __str__(self) -> str:
        return f"{cents(self.left)} ({'what is left of max_usd' if self.spent else 'max_usd'})"


NO_LIMIT = Budget()


def show_plan(console: Console, plan: Plan, costs: Iterable[Cost] = (), budget: Budget = NO_LIMIT) -> None:
    """The price of all nodes, before anything is rented, and what of a machine checkpoints take."""
    from mgpu.plan import room

    need, best, costs = plan.requirements, plan.best, tuple(costs)
    price, dearest = map(cents, (plan.best_price_usd_per_hour, plan.price_usd_per_hour))
    instead = "" if price == dearest else f", up to {dearest} if another offer has to be taken"
    console.say(
        f"{need.nodes} x {best.instance_type} ({best.market}) at {best.provider} {best.place}: "
        f"{mark(best)}{price} per hour for all nodes{instead}; "
        f"{_at_most(plan, budget, _hourly(costs))}"
    )
    if any(offer.price_is_limit for offer in plan.offers):
        console.say(LIMIT)
    for line in _beside(costs):
        console.say(line)
    checkpoints = room.words(plan.checkpoints) if plan.checkpoints else ""
    if checkpoints:
        console.say(checkpoints)
    for cost in costs:
        if cost.avoidable:
            console.say(f"warning: {cost.what}: {_price_of(cost)}; {cost.avoidable}", "yellow")
    if plan.checkpoints and (doubt := room.doubt(plan.checkpoints)):
        console.say(f"warning: {doubt}", "yellow")
    for note in (*plan.notes, old_prices(plan.offers)):
        if note:
            console.say(note, "yellow")


def _at_most(plan: Plan, budget: Budget, beside: float) -> str:
    if budget.left >= plan.max_cost_usd + beside * plan.hours:
        return f"at most {cents(plan.max_cost_usd)} until the hard cap of {plan.hours:.4g} h"
    usd_per_hour = plan.best.billed_at_most * plan.requirements.nodes + beside
    # the first offer may cost little or nothing by the hour, where another one does not
    lasts = budget.left / usd_per_hour if usd_per_hour else math.inf
    pays = f", which pays for {duration(lasts * 3600)} of them" if lasts < plan.hours else ""
    return f"at most {budget}{pays}"


def most_usd_per_hour(spec: RunSpec, plan: Plan, costs: Iterable[Cost]) -> float:
    """Of all nodes with what they have beside them, whichever offer is taken. `costs`: beside those of the first
    one's provider."""
    from mgpu.run.job import on_sale

    return on_sale.most_usd_per_hour(spec, plan, {plan.best.provider: _hourly(costs)})


def require_paid(plan: Plan, budget: Budget, usd_per_hour: float) -> None:
    """Raises InputError: what the run may spend pays for no training. `usd_per_hour`: as `most_usd_per_hour` says."""
    paid_s = budget.left / usd_per_hour * 3600 if usd_per_hour else _LEAST_S
    if paid_s < _LEAST_S:
        left = f"{cents(budget.left)}{', which is left of it,' if budget.spent else ''}"
        what = f"max_usd: {left} pays for {duration(paid_s)} of these machines"
        most = "" if plan.billed_at_most == plan.price_usd_per_hour else " at most"
        why = f"They cost{most} {cents(usd_per_hour)} per hour, and take minutes to come, to save and to go."
        cure = ", lower `max_price_usd_per_hour`, which is what spot machines cost at most," if most else ","
        raise InputError(what, why, f"Raise it{cure} or ask for cheaper machines. Nothing was rented.")


def require_begun(plan: Plan, wait_minutes: float) -> None:
    """Raises NoCapacity: the reservation begins later than a launch waits for, and there is nothing else to take."""
    reserved = plan.best.reservation
    left_s = reserved.begins_at - time.time() if reserved else 0
    alone = all(offer.reservation for offer in plan.offers)
    if reserved and alone and left_s > wait_minutes * 60:
        what = f"{reserved.id} begins {utc(reserved.begins_at)}, in {duration(left_s)}"
        why = f"A launch waits {wait_minutes:g} min (`recovery.wait_minutes`). Nothing was rented."
        raise NoCapacity(what, why, "Launch then, or let it wait longer.")


def _beside(costs: tuple[Cost, ...]) -> Iterator[str]:
    """What is billed beside the machines: by the hour in one line, the rest in one each; not what is warned of."""
    hourly = [cost for cost in costs if cost.per == "hour" and not cost.avoidable]
    if hourly:
        parts = "; ".join(f"{cost.what}: {usd(cost.usd)}" for cost in hourly)
        about = "about " if any(cost.estimate for cost in hourly) else ""
        yield f"beside the machines {about}{usd(sum(cost.usd for cost in hourly))} per hour ({parts})"
    yield from (f"{cost.what}: {_price_of(cost)}" for cost in costs if cost.per != "hour" and not cost.avoidable)


def _hourly(costs: Iterable[Cost]) -> float:
    return sum(cost.usd for cost in costs if cost.per == "hour")


def _price_of(cost: Cost) -> str:
    return ("about " if cost.estimate else "") + f"{usd(cost.usd)} per {cost.per}"


def machines_of(spec: RunSpec, plan: Plan) -> Machines:
    """What the image of a run has to fit: the machines that this plan may take."""
    from mgpu.acquire.fit import Machines
    from mgpu.run.job.stack_output import provider_for

    sellers = {offer.provider for offer in plan.offers}
    return Machines.on_offer(provider_for(spec.of(*sellers)) if len(sellers) == 1 else None, plan)


def look_at_image(
    console: Console, spec: RunSpec, run_file: Path, plan: Plan, machines: Machines
) -> tuple[Looked | None, Plan]:
    """What the run file's image is now, None: it names none; and the plan without offers that cannot run it.

    Raises:
        ImageError: a registry does not answer, or lacks what should exist.
        InputError: it cannot be built as the run file says, or does not fit.
        ProviderError: nobody can tell the driver of the machines.
    """
    if spec.image is None:
        return None, plan
    from mgpu.acquire import fit
    from mgpu.run.job import images

    with console.waiting("asking for the image"):
        looked = images.look(spec, run_file.resolve().parent)
        if looked is not None and looked.there is not None:
            plan = fit.fitting(looked.there.labels, plan, machines)
    return looked, plan


def agreed(
    console: Console,
    run_file: Path,
    spec: RunSpec,
    yes: bool,
    before: Record | None = None,
    *,
    begins: bool = False,
    code: str = "",
) -> Machines:
    """Looks at all that can be known before machines are rented, shows the price and asks; `before`: the run that is
    gone on with, `begins`: it is not queued, `code`: see `preflight`. Returns what the image has to fit. Raises what it
    finds, and InputError: nobody agrees, or a limit leaves no room for it now."""
    spent = before.spent_usd(time.time()) if before is not None else 0.0
    machines = looked_at(console, run_file, spec, begins=begins, code=code, spent=spent)
    if before is not None:
        show_changes(console, before, spec)
    agree(console, yes)
    return machines


def looked_at(
    console: Console, run_file: Path, spec: RunSpec, *, begins: bool = False, code: str = "", spent: float = 0.0
) -> Machines:
    """All of `agreed` but its question; `spent`: US dollars, by the run so far."""
    from mgpu.run.budget import account
    from mgpu.run.lifecycle.launch import preflight

    with console.waiting(PREFLIGHT):
        preflight(run_file, spec, console.emit, code)
    plan, costs, budget = make_plan(spec), (), Budget(spec.max_usd, spent)
    machines = machines_of(spec, plan)
    try:
        image, plan = look_at_image(console, spec, run_file, plan, machines)
    finally:  # the price is known all the same
        costs = other_costs(spec, plan)
        show_plan(console, plan, costs, budget)
    most = most_usd_per_hour(spec, plan, costs)
    require_paid(plan, budget, most)
    require_begun(plan, spec.recovery.wait_minutes)
    if begins:
        account.require_room(most)
    if image is not None:
        console.say(str(image))
    return machines


def agree(console: Console, yes: bool) -> None:
    """Asks before money is spent.

    Raises:
        InputError: the answer is no, or there is nobody to ask.
    """
    consent(console, yes, "rent it?", "Nothing was rented.", "Add `--yes` to agree to the price above.")


def consent(console: Console, yes: bool, question: str, undone: str, cure: str) -> None:
    """Asks before money is spent. `undone` says that it was not; `cure` what to do where nobody can be asked.

    Raises:
        InputError: the answer is no, or there is nobody to ask.
    """
    if yes or console.confirm(question):
        return
    if sys.stdin.isatty():
        raise InputError("not agreed", undone)
    raise InputError(
        "this command spends money and nobody can be asked", f"Standard input is not a terminal. {undone}", cure
    )


def show_changes(console: Console, before: Record, spec: RunSpec) -> bool:
    """Shows what a resumed run's file says otherwise than at its beginning; False: nothing.

    It also says that the run may begin from zero, before that is paid for.
    """
    from mgpu.run.lifecycle.resume import changes

    if before.checkpoint_id is None:
        words = "no checkpoint is known here; if its store has none, it begins from zero"
        console.say(f"run {before.run_id}: {words}", "yellow")
    changed = changes(before, spec)
    if changed:
        console.say(f"changed since run {before.run_id} began:", "yellow")
    for line in changed:
        console.say(f"  {line}", "yellow")
    return bool(changed)


def agree_to_changes(console: Console) -> None:
    """Asks before a run goes on otherwise than it began.

    Raises:
        InputError: the answer is no, or there is nobody to ask.
    """
    if not console.confirm("go on with it?"):
        cure = "Take the run file as it was, or add `--yes` to agree to the changes above."
        raise InputError("not agreed", "The run file has changed since the run began. Nothing was started.", cure)
