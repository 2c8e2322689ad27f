"""What is on sale for a run: the offers of its provider, or of all providers that its run file names, in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from textwrap import shorten
from types import MappingProxyType

from mgpu.acquire import fit
from mgpu.acquire.fit import Machines
from mgpu.acquire.pauses import patiently
from mgpu.errors import AuthError, InputError, MgpuError, NoOffer, ProviderError, RateLimited, Transient
from mgpu.events import Emit, Warned
from mgpu.plan import rank
from mgpu.plan.model import Offer, Plan
from mgpu.providers import registry
from mgpu.providers.base import other_usd_per_hour
from mgpu.spec.model import ANY, RunSpec
from mgpu.spec.rules import mistakes

_WHY_CHARACTERS = 200  # of why one of several has nothing
ASKED_S = 60.0  # for the price at one provider, while it is busy or does not answer


def sellers(spec: RunSpec) -> tuple[str, ...]:
    """The providers that a run file names; of `any` those that are set up here, and that it has no mistakes for.

    Raises:
        InputError: none is.
    """
    if ANY not in spec.providers:
        return spec.candidates
    fit = [name for name in spec.candidates if not any(mistakes(spec.of(name)))]
    found = tuple(name for name in fit if spec.of(name).options or _set_up(name))
    if not found:
        what = f"provider: {ANY}: none of {', '.join(fit)} is set up here"
        raise InputError(what, "", "`mgpu check PROVIDER` says what each needs.")
    return found


def _set_up(name: str) -> bool:
    try:
        return registry.get(name).configured()
    except InputError:  # a package that does not work
        return False


def plan(spec: RunSpec) -> Plan:
    """The offers of all providers that the run file names, ranked. One that has none, or does not answer, hides no
    other. Rents nothing.

    Raises:
        ProviderError, InputError: what the only one says.
        NoOffer: none of several has any that fits.
        Transient, RateLimited: the same, and one of them may have, when it answers.
    """
    names = sellers(spec)
    if len(names) == 1:
        return _of(spec.of(names[0]))
    plans, failures = list[Plan](), dict[str, MgpuError]()
    for name in names:
        try:
            plans.append(_of(spec.of(name)))
        except (ProviderError, InputError) as error:
            failures[name] = error
    said = [f"{name}: {_in_a_line(error)}" for name, error in failures.items()]
    if not plans:
        for error in failures.values():
            if isinstance(error, Transient | RateLimited):
                raise error
        what = f"none of {', '.join(names)} has an offer that meets the run file"
        why = "\n".join(
            f"{line.removesuffix('.')}. {error.next_step}".rstrip()
            for line, error in zip(said, failures.values(), strict=True)
        )
        cure = f"`mgpu plan --set provider={names[0]}` says which offers come near; `mgpu check` what it lacks."
        raise NoOffer(what, why, cure)
    return rank.merged(plans, said)


def _in_a_line(error: MgpuError) -> str:
    return ": ".join(filter(None, (error.what, shorten(error.why, _WHY_CHARACTERS, placeholder=" ..."))))


def _of(spec: RunSpec) -> Plan:
    needed = rank.requirements(spec)
    answer = registry.get(spec.provider, needed.provider_options).offers(needed)
    return rank.plan(needed, answer.offers, answer.notes)


@dataclass(frozen=True)
class Priced:
    """The most that a fleet may cost by the hour, with what it has beside its machines, if it is of one of `providers`;
    None: they have nothing on sale for it, as whoever tries to rent it is told. `without`: why the others cost nobody
    knows what."""

    usd_per_hour: float | None
    providers: tuple[str, ...]
    without: Mapping[str, MgpuError]

    def warn(self, emit: Emit) -> None:
        """Says of whom the run has to do without: for all that is known their machines may be over a limit."""
        for name, error in self.without.items():
            what = f"what machines of {name} cost is not known, and there are limits: the run does without"
            emit(Warned(f"{what}: {error.what}"))


def priced(
    spec: RunSpec, cancelled: Callable[[float], bool], emit: Emit, labels: Mapping[str, str] = MappingProxyType({})
) -> Priced:
    """What a run file's fleet may cost, by the providers that say so within `ASKED_S`. Of several those that do not,
    lack credentials here, or have nothing on sale now, may have dear machines later, or elsewhere: they are left out.
    `cancelled` and `emit`: as of `patiently`; `labels`: of the run's image, which not all GPUs run.

    Raises:
        ProviderError, InputError: none says what it costs, and one of them may later; or none can be asked.
    """
    prices, without = dict[str, float](), dict[str, MgpuError]()
    for name in sellers(spec):
        try:
            prices[name] = patiently(partial(_most_of, spec.of(name), labels), ASKED_S, cancelled, emit)
        except (ProviderError, InputError) as error:
            without[name] = error
    if prices:
        return Priced(max(prices.values()), tuple(prices), without)
    nothing = {name: error for name, error in without.items() if isinstance(error, NoOffer)}
    others = {name: error for name, error in without.items() if name not in nothing}
    mute = [error for error in others.values() if not isinstance(error, AuthError | InputError)]
    if mute or not nothing:
        raise next(iter(mute or others.values()))
    return Priced(None, tuple(nothing), others)


def _most_of(spec: RunSpec, labels: Mapping[str, str]) -> float:
    found = _of(spec)
    return most_usd_per_hour(spec, fit.fitting(labels, found, Machines.on_offer(None, found)))


def most_usd_per_hour(spec: RunSpec, plan: Plan, beside: Mapping[str, float] = MappingProxyType({})) -> float:
    """US dollars per hour of all nodes with what they have beside them, whichever offer of the plan is taken. `beside`:
    what that is at a provider, where it is known already. Raises InputError."""

    def whole(offer: Offer) -> float:
        other = beside.get(offer.provider)
        if other is None:
            needed = rank.requirements(spec.of(offer.provider))
            other = other_usd_per_hour(registry.get(offer.provider, needed.provider_options), needed, offer)
        return offer.billed_at_most * plan.requirements.nodes + other

    by_price = sorted(plan.offers, key=lambda offer: offer.billed_at_most)
    return max(map(whole, {offer.provider: offer for offer in by_price}.values()))  # of each provider its dearest


def elsewhere(spec: RunSpec, provider: str) -> bool:
    """Whether a run whose machines this provider has may have others, of another type, in another place or of another
    provider; False where nobody can say."""
    try:
        offers = plan(spec).offers
    except (ProviderError, InputError):
        return False
    kinds = {(offer.provider, offer.instance_type, offer.region, offer.zone) for offer in offers}
    return len(kinds) > 1 or all(kind[0] != provider for kind in kinds)
