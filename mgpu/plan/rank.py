"""Requirements and offers -> a plan: which offers will be asked for, in which order, and why the others will not.

The order: spot before on-demand, then the user's ranking of GPUs, then the price, where a region without the run's
stores counts as a few percent dearer: traffic costs money, too. Everything that is set aside has a reason, and where
nothing is left the error says which key of the run file would change that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from mgpu_train.config import FP8_CAPABILITY

from mgpu.errors import NoOffer
from mgpu.plan import room
from mgpu.plan.model import Offer, Plan, Refusal, Requirements, Saves
from mgpu.spec.block import WORD, MachineKeys
from mgpu.spec.gpus import capability_of
from mgpu.spec.model import RunSpec

_SHOWN = 12  # refusals that an error lists one by one
_FAR = 1.05  # how much dearer machines count whose region has none of the run's stores
_ROUNDING = 1 + 1e-9  # three nodes at 0.1 are not above a cap of 0.3


class Rank(NamedTuple):
    """Of an offer: spot first, then the user's order of GPUs, then US dollars per hour and machine, weighed."""

    on_demand: bool
    preference: int
    usd_per_hour: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Rank:
        """One that was written as a list."""
        on_demand, preference, usd_per_hour = values
        return cls(bool(on_demand), int(preference), usd_per_hour)


class Turn(NamedTuple):
    """A provider that is asked; `up_to`: only for offers that rank up to this, because another one's follow then."""

    provider: str
    up_to: Rank | None = None


def requirements(spec: RunSpec) -> Requirements:
    """What a run needs of its machines; nothing in it depends on what is on sale."""
    return Requirements(
        **spec.model_dump(include=set(MachineKeys.model_fields)),
        provider=spec.provider,
        processes_per_node=spec.processes,
        provider_options=spec.options.flat() if spec.options else {},
        stores=tuple(dict.fromkeys(each for each in _stores(spec) if each.startswith("s3://"))),
        memory_gib=round(room.save_gib(spec), 1),
        compute_capability=FP8_CAPABILITY if spec.train is not None and spec.train.precision == "fp8" else 0,
    )


def saves(spec: RunSpec) -> Saves | None:
    """What the run file's retention keeps in an object store; None: nothing."""
    wanted = spec.checkpoint
    if wanted == "none" or not (wanted.to or "").startswith("s3://"):
        return None
    spaced = math.floor(spec.max_hours / wanted.keep_every_hours) if wanted.keep_every_hours else 0
    minutes = None if wanted.every_steps else wanted.every_minutes  # how long a step takes nobody knows
    made = math.ceil(spec.max_hours * 60 / minutes) if minutes else None  # the last one is made at the end
    return Saves(to=wanted.to or "", kept=wanted.keep_last + (wanted.keep_best or 0) + spaced, made=made)


def _stores(spec: RunSpec) -> Iterator[str]:
    if spec.checkpoint != "none":
        yield spec.checkpoint.to or ""
    yield from (item.source for item in spec.data)


def plan(needed: Requirements, offers: Iterable[Offer], notes: Iterable[str] = ()) -> Plan:
    """Ranks the offers that meet the requirements, cheapest fleet first within market and GPU; what does not meet them
    is listed nearest first; `notes` are passed on.

    Raises:
        NoOffer: none does; `why` lists the refusals, `next_step` names the key to change.
    """
    taken: list[Offer] = []
    refused: list[tuple[Refusal, _Check]] = []
    for offer in offers:
        failed = next((check for check in _CHECKS if check.fails(needed, offer)), None)
        if failed is None:
            taken.append(offer)
        else:
            refused.append((Refusal(offer=offer, reason=failed.reason(needed, offer)), failed))
    refused.sort(key=lambda pair: (-_CHECKS.index(pair[1]), pair[0].offer.price_usd_per_hour))
    if not taken:
        raise _no_offer(needed, refused, tuple(notes))
    ranked = sorted(taken, key=lambda offer: _rank(needed, offer))
    asides = tuple(refusal for refusal, _ in refused)
    return Plan(requirements=needed, offers=tuple(ranked), refused=asides, notes=tuple(notes))


def merged(plans: Sequence[Plan], notes: Iterable[str] = ()) -> Plan:
    """One plan of those of several providers for the same run; its requirements are those of the best offer. Of equals
    the first provider's come first."""
    order = {plan.requirements.provider: place for place, plan in enumerate(plans)}
    ranked = sorted(
        ((offer, plan.requirements) for plan in plans for offer in plan.offers),
        key=lambda pair: (rank(pair[1], pair[0]), order[pair[0].provider], _rank(pair[1], pair[0])),
    )
    told = (f"{plan.requirements.provider}: {note}" for plan in plans for note in plan.notes)
    return Plan(
        requirements=ranked[0][1],
        offers=tuple(offer for offer, _ in ranked),
        refused=tuple(refusal for plan in plans for refusal in plan.refused),
        notes=(*told, *notes),
    )


def turns(plan: Plan, order: Sequence[str]) -> list[Turn]:
    """In which order the providers of a plan are asked, each as long as its offers are the best of those left. `order`:
    which of them comes first where their offers are equal."""
    found = list[Turn]()
    last = {offer.provider: index for index, offer in enumerate(plan.offers)}
    for index, offer in enumerate(plan.offers):
        follows = plan.offers[index + 1] if index + 1 < len(plan.offers) else None
        if follows is not None and follows.provider == offer.provider:
            continue
        more = follows is not None and last[offer.provider] > index
        found.append(Turn(offer.provider, _before(plan, offer, follows, order) if more and follows else None))
    return found


def _before(plan: Plan, offer: Offer, other: Offer, order: Sequence[str]) -> Rank:
    """Up to where offers of a provider come before another one's: its equals do if it is named first."""
    limit = rank(plan.requirements, other)
    if order.index(offer.provider) < order.index(other.provider):
        return limit
    return limit._replace(usd_per_hour=math.nextafter(limit.usd_per_hour, -math.inf))


def rank(needed: Requirements, offer: Offer) -> Rank:
    """By what an offer comes before others, whoever sells them; the least is asked for first."""
    wanted = [gpu.casefold() for gpu in needed.gpu]
    preference = wanted.index((offer.gpu or "").casefold()) if wanted else 0
    weighed = offer.price_usd_per_hour * (_FAR if offer.near_stores is False else 1)
    return Rank(offer.market != "spot", preference, weighed)


def up_to(plan: Plan, limit: Rank) -> Plan:
    """The plan with those offers alone that rank up to `limit`, it included, where another provider's follow.

    Raises:
        NoOffer: none does any more; prices have changed.
    """
    offers = tuple(offer for offer in plan.offers if rank(plan.requirements, offer) <= limit)
    if offers:
        return plan.model_copy(update={"offers": offers})
    what = f"no offer of provider {plan.requirements.provider} is better than another provider's any more"
    raise NoOffer(what, "Prices have changed since the plan was made.", "")


def _rank(needed: Requirements, offer: Offer) -> tuple[object, ...]:
    return *rank(needed, offer), offer.region, offer.zone or "", offer.instance_type


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.1 else f"${amount:.4f}"


def _price(needed: Requirements, offer: Offer) -> float:
    return offer.price_usd_per_hour * needed.nodes


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("" if count == 1 else "s")


def _names(values: Iterable[object]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


class _Check(NamedTuple):
    """One condition: when it fails, the reason in words, and what to change given the offers that came this far."""

    fails: Callable[[Requirements, Offer], bool]
    reason: Callable[[Requirements, Offer], str]
    cure: Callable[[Requirements, list[Offer]], str]


def _too_dear(needed: Requirements, offer: Offer) -> str:
    cap = _dollars(needed.max_price_usd_per_hour)
    return f"{_dollars(_price(needed, offer))}/h for all nodes, above the cap of {cap}/h"


def _price_cure(needed: Requirements, near: list[Offer]) -> str:
    least = math.ceil(min(_price(needed, offer) for offer in near) * 100 / _ROUNDING) / 100
    return f"Raise `max_price_usd_per_hour` to {least:.2f}, or ask for fewer `nodes`."


def _region_cure(needed: Requirements, near: list[Offer]) -> str:
    if can_be_named := [offer.region for offer in near if re.fullmatch(WORD, offer.region)]:
        return f"On offer in these `regions`: {_names(can_be_named)}."
    return f"Leave `regions` out: there are none of provider {needed.provider}."  # a cluster's user@host


def _stock_cure(needed: Requirements, near: list[Offer]) -> str:
    most = max(offer.stock or 0 for offer in near)
    fewer = f"Ask for at most {most} `nodes`, allow" if most else "Allow"
    return f"{fewer} more `regions` or `gpu` types, or try again later."


def _vcpus(needed: Requirements, offer: Offer) -> int:
    return offer.vcpus * needed.nodes


def _beyond_quota(needed: Requirements, offer: Offer) -> bool:
    return offer.headroom is not None and _vcpus(needed, offer) > offer.headroom.left_vcpus


def _quota_reason(needed: Requirements, offer: Offer) -> str:
    if offer.headroom is None:
        return ""
    left, limit = offer.headroom.left_vcpus, offer.headroom.limit_vcpus
    room = f"{left} of {limit} vCPUs" if left < limit else f"{limit} vCPUs"
    return (
        f"needs {_vcpus(needed, offer)} vCPUs, quota {offer.quota} ({offer.headroom.name}) "
        f"leaves {room} in {offer.region}"
    )


def _quota_cure(needed: Requirements, near: list[Offer]) -> str:
    least = min(near, key=lambda offer: _vcpus(needed, offer))
    if least.headroom is None:
        return ""
    used = least.headroom.limit_vcpus - least.headroom.left_vcpus
    command = f"{least.headroom.raise_command} {used + _vcpus(needed, least)}"
    return f"Raise the quota: `{command}`, ask for fewer `nodes`, or allow more `regions` or `gpu` types."


# the nearer a check is to the end, the nearer an offer that fails there is to what was asked for
_CHECKS = (
    _Check(
        lambda needed, offer: offer.provider != needed.provider,
        lambda needed, offer: f"is of provider {offer.provider}",
        lambda needed, near: f"Set `provider` to one of these: {_names(offer.provider for offer in near)}.",
    ),
    _Check(
        lambda needed, offer: offer.gpus != needed.gpus_per_node,
        lambda needed, offer: f"has {_gpus(offer.gpus)} a machine, not {needed.gpus_per_node}",
        lambda needed, near: f"On offer for `gpus_per_node`: {_names(offer.gpus for offer in near)} (0: leave it out).",
    ),
    _Check(
        lambda needed, offer: (
            bool(needed.gpu) and (offer.gpu or "").casefold() not in [gpu.casefold() for gpu in needed.gpu]
        ),
        lambda needed, offer: f"GPU is {offer.gpu}, not {' or '.join(needed.gpu)}",
        lambda needed, near: f"On offer for `gpu`: {_names(offer.gpu for offer in near)}.",
    ),
    _Check(
        lambda needed, offer: 0 < capability_of(offer.gpu) < needed.compute_capability,
        lambda needed, offer: (
            f"{offer.gpu} has compute capability {capability_of(offer.gpu):.1f}, and `train.precision` takes "
            f"{needed.compute_capability:.1f}"
        ),
        lambda needed, near: "Name newer ones in `gpu`, or set `train.precision` to bf16.",
    ),
    _Check(
        lambda needed, offer: 0 < offer.memory_gib < needed.memory_gib,
        lambda needed, offer: (
            f"has {offer.memory_gib:g} GiB of memory, and a save copies {needed.memory_gib:g} GiB into it"
        ),
        lambda needed, near: (
            "More `nodes` with `checkpoint: {writers: all}` share it, or take a smaller `train.model`."
        ),
    ),
    _Check(
        lambda needed, offer: bool(needed.regions) and offer.region not in needed.regions,
        lambda needed, offer: f"region is {offer.region}",
        _region_cure,
    ),
    _Check(
        lambda needed, offer: needed.market != "spot-then-on-demand" and offer.market != needed.market,
        lambda needed, offer: f"market is {offer.market}",
        lambda needed, near: f"Set `market` to {_names(offer.market for offer in near)} or spot-then-on-demand.",
    ),
    _Check(
        lambda needed, offer: offer.obstacle is not None,
        lambda needed, offer: offer.obstacle.reason if offer.obstacle else "",
        lambda needed, near: " ".join(dict.fromkeys(offer.obstacle.cure for offer in near if offer.obstacle)),
    ),
    _Check(
        lambda needed, offer: offer.stock is not None and offer.stock < needed.nodes,
        lambda needed, offer: f"only {offer.stock} to be had, {needed.nodes} needed",
        _stock_cure,
    ),
    _Check(_beyond_quota, _quota_reason, _quota_cure),
    _Check(
        lambda needed, offer: _price(needed, offer) > needed.max_price_usd_per_hour * _ROUNDING,
        _too_dear,
        _price_cure,
    ),
)


def _no_offer(needed: Requirements, refused: list[tuple[Refusal, _Check]], notes: tuple[str, ...]) -> NoOffer:
    size = f"{needed.nodes} machine" + ("" if needed.nodes == 1 else "s")
    gpus = f" with {_gpus(needed.gpus_per_node)} each" if needed.gpus_per_node else ""
    where = f" in {', '.join(needed.regions)}" if needed.regions else ""
    what = f"no offer of provider {needed.provider} meets the run file: {size}{gpus}{where}, {needed.market}"
    if not refused:
        why = "\n".join(("It has nothing of this kind on sale.", *notes[:_SHOWN]))
        if not notes:
            return NoOffer(what, why, "Change `gpus_per_node`, `gpu`, `regions` or `provider`.")
        look = f"`mgpu check {needed.provider}` looks closer"
        return NoOffer(what, why, f"Mend what is told here ({look}), or change `gpus_per_node` or `provider`.")
    lines = [f"{refusal.offer.label}: {refusal.reason}" for refusal, _ in refused[:_SHOWN]]
    if len(refused) > _SHOWN:
        lines.append(f"and {len(refused) - _SHOWN} more")
    nearest = refused[0][1]
    near = [refusal.offer for refusal, check in refused if check is nearest]
    return NoOffer(what, "\n".join(lines), nearest.cure(needed, near))
