"""Whether machines run an image: asked of those on offer, before anything is rented, and of those that stand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mgpu.errors import AuthError, InputError
from mgpu.image import compat
from mgpu.plan.model import Plan, Refusal
from mgpu.providers.base import DriverFacts, Handle, MachineDriver, Provider


@dataclass(frozen=True)
class Machines:
    """What an image has to fit, as far as it is known: GPUs by name, all or, with `choice`, one of them; and the
    driver that machines boot with. `boots` tells that one, or raises ProviderError; it is asked only for an image with
    CUDA, and once."""

    gpus: tuple[str, ...] = ()
    boots: Callable[[], MachineDriver | None] = lambda: None
    choice: bool = False

    @classmethod
    def on_offer(cls, provider: Provider | None, plan: Plan) -> Machines:
        """Those that a plan may take: all of their GPUs where the requirements name these, else one is enough; the
        driver where offers may be taken, the best one's region first. With offers of several `provider` is None: each
        has a driver of its own, which is looked at when it is asked for machines."""
        gpus = dict.fromkeys(offer.gpu for offer in plan.offers if offer.gpu)
        regions = tuple(dict.fromkeys(offer.region for offer in plan.offers))
        facts = provider if isinstance(provider, DriverFacts) else None
        boots = _asking_once(lambda: facts.machine_driver(regions) if facts else None)
        return cls(tuple(gpus), boots, choice=not plan.requirements.gpu)

    @classmethod
    def standing(cls, gpu: str | None, handle: Handle, provider: Provider | None) -> Machines:
        """Those of a fleet; of another program's machines, which no provider describes, only the GPU is known."""
        gpus = (gpu,) if gpu else ()
        facts = provider if isinstance(provider, DriverFacts) else None
        return cls(gpus, _asking_once(lambda: facts.driver_of(handle) if facts else None))


ANY = Machines()  # nothing is known of them


def _asking_once(ask: Callable[[], MachineDriver | None]) -> Callable[[], MachineDriver | None]:
    """Without credentials nothing is known: a plan is made all the same, and whoever rents was told of theirs."""

    @functools.cache
    def asked() -> MachineDriver | None:
        try:
            return ask()
        except AuthError:
            return None

    return asked


def require(labels: Mapping[str, str], machines: Machines) -> dict[str, str]:
    """The GPUs that an image with these labels does not run on, each with the reason; there are some only where another
    one may be taken.

    Raises:
        InputError: it cannot run on these machines.
        ProviderError: nobody can tell their driver.
    """
    driver = machines.boots() if compat.has_cuda(labels) else None
    gpus = machines.gpus or (None,)
    found = ((gpu, compat.check(labels, driver.version if driver else None, gpu)) for gpu in gpus)
    misfits = [(gpu, problems) for gpu, problems in found if problems]
    if misfits and (len(misfits) == len(gpus) or not machines.choice):
        raise _misfit(misfits[0][1], driver)
    return {gpu: problems[0].what for gpu, problems in misfits if gpu}


def fitting(labels: Mapping[str, str], plan: Plan, machines: Machines) -> Plan:
    """The plan without offers that cannot run an image with these labels; `machines` are the plan's. Raises what
    `require` raises."""
    misfits = require(labels, machines)
    aside = [Refusal(offer=offer, reason=misfits[offer.gpu]) for offer in plan.offers if offer.gpu in misfits]
    offers = tuple(offer for offer in plan.offers if offer.gpu not in misfits)
    return plan.model_copy(update={"offers": offers, "refused": (*aside, *plan.refused)})


def _misfit(problems: Sequence[compat.Mismatch], driver: MachineDriver | None) -> InputError:
    first, *others = problems
    told = driver if any(each.of_driver for each in problems) else None
    why = (told.why if told else "", first.why, *(f"{each.what}: {each.why}" for each in others))
    cure = (first.next_step, told.cure if told else "", "`mgpu image inspect` shows what the image fits.")
    return InputError(f"image: {first.what}", "\n".join(filter(None, why)), " ".join(filter(None, cure)))
