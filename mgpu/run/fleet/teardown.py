"""Gives a fleet back, and believes it only when the provider says that every machine is terminated."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from mgpu_train.timeouts import Timeouts

from mgpu import acquire, paths
from mgpu.errors import InputError, MgpuError, ProviderError, StackError, TeardownIncomplete
from mgpu.events import Emit, Warned
from mgpu.iac.engine.stack import Stack
from mgpu.iac.types import generations
from mgpu.providers.base import Handle, NodePhase, Provider, listed, listing

Seller = Callable[[], Provider]


def owned(provider: Provider, owner: str, fleet: str | None = None) -> tuple[Handle, ...]:
    """The owner's handles (of one fleet) that have a machine which is not terminated."""
    return _owned(provider, owner, None if fleet is None else {fleet}, ())


def _owned(provider: Provider, owner: str, fleets: set[str] | None, regions: Collection[str]) -> tuple[Handle, ...]:
    """`regions`: where something of these fleets may be."""
    handles = [h for h in listed(provider, owner, regions) if fleets is None or h.fleet in fleets]
    states = zip(handles, provider.describe_all(handles), strict=True)
    return tuple(h for h, state in states if any(n.phase is not NodePhase.TERMINATED for n in state.nodes))


def give_back(
    stack: Stack,
    sellers: Sequence[Seller],
    owner: str,
    timeouts: Timeouts,
    emit: Emit,
    *,
    remove: bool,
    fleet: str | None = None,
    region: str = "",
) -> None:
    """Destroys the stack's resources, then sweeps what the sellers still list; `remove` drops the empty stack too.

    `fleet` is the name in the stack's output, or in the record: a program of the user's may give its fleet another one
    than the stack's, and the project's folder may be gone. `region` is where its machines were; empty: not known.

    Raises:
        TeardownIncomplete: something may still be billed, or the stack could not be emptied.
    """
    failure: MgpuError | None = None
    names = names_of(stack, fleet)
    try:
        stack.destroy()
    except (MgpuError, OSError) as error:  # a full disk of this machine, too, keeps no machine alive
        failure = error if isinstance(error, MgpuError) else StackError(str(error))
        emit(Warned(f"pulumi destroy failed, ending the machines directly: {failure.what}"))
    left, unseen = list[Handle](), list[MgpuError]()
    for seller in sellers:
        try:
            left += _swept(seller(), owner, names, {region, *_asked_in(owner, names)}, timeouts, emit)
        except (ProviderError, InputError, TeardownIncomplete) as error:  # the others are looked at all the same
            unseen.append(error)
    if unseen or left:
        raise _may_be_billed(f"fleet {', '.join(sorted(names))}", unseen, left) from next(iter(unseen), None)
    if failure is not None:
        unasked = list(_unasked(sellers, owner))
        gone = "some machines cannot be asked, and" if unasked else "the machines are gone, but"
        raise TeardownIncomplete(
            f"stack {stack.name}: {gone} Pulumi could not empty the stack",
            "\n".join(dict.fromkeys([str(failure), *unasked])),
            f"Run `mgpu down --stack {stack.name}` once the cause is mended.",
        ) from failure
    if remove:
        stack.remove()


def _may_be_billed(fleet: str, unseen: Sequence[MgpuError], left: Sequence[Handle]) -> TeardownIncomplete:
    """What each seller said, or still lists, in one error: each has machines of its own."""
    told = [error for error in unseen if isinstance(error, TeardownIncomplete)]
    silent = [error for error in unseen if error not in told]
    if left:
        what = f"{fleet}: {', '.join(i for handle in left for i in handle.ids if i)} may still be billed"
        why = "The provider does not say that they are terminated."
        told.append(TeardownIncomplete(what, why, "Run `mgpu gc --yes`, and look at the provider's own console."))
    if silent:
        who = "the provider" if len(silent) == 1 else f"{len(silent)} providers"
        what = f"{fleet} may still be billed: {who} cannot be asked"
        cure = "Run `mgpu gc` once each answers; whatever happens, the machines end at their hard cap."
        told.append(TeardownIncomplete(what, "\n".join(map(str, silent)), cure))
    return acquire.in_one(told)


def _swept(
    provider: Provider, owner: str, names: set[str], regions: Collection[str], timeouts: Timeouts, emit: Emit
) -> tuple[Handle, ...]:
    """Ends what the provider lists under these names; returns what it lists afterwards. One that is busy, or silent for
    a moment, is asked again: it has the last word on what is billed."""

    def look() -> tuple[Handle, ...]:
        limit_s = min(acquire.ANSWER_S, timeouts.destroy_s)
        return acquire.patiently(partial(_owned, provider, owner, names, regions), limit_s, _slept, emit)

    left = look()
    acquire.destroy_all(provider, left, timeouts=timeouts, emit=emit)
    return look() if left else left  # all regions: not asked twice for nothing


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _unasked(sellers: Sequence[Seller], owner: str) -> Iterator[str]:
    """What of the sellers cannot say whether the owner has something there."""
    for seller in sellers:
        try:
            yield from map(str, listing(seller(), owner).failures)
        except (ProviderError, InputError) as error:
            yield str(error)


def _asked_in(owner: str, names: set[str]) -> Iterator[str]:
    """The regions where these fleets were asked for, and nobody has seen yet what came of it."""
    return (each.region for name in names for each in generations.begun(paths.state_dir(), owner, name))


def names_of(stack: Stack, fleet: str | None) -> set[str]:
    """The names under which the stack's machines may be listed; the one that is remembered alone, where the backend
    does not answer. Raises StackError: none is."""
    try:
        return {stack.fleet, fleet or stack.fleet}
    except StackError:
        if fleet is None:
            raise
        return {fleet}
