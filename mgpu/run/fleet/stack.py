"""A run's stack: found, brought up, read, given back. What is not mgpu's, or is in use, is left alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from mgpu_train.timeouts import Timeouts

from mgpu import acquire, paths
from mgpu.acquire.refusals import REFUSED
from mgpu.backend.owner import owner
from mgpu.context import Context
from mgpu.errors import (
    AmbiguousCreate,
    BidTooLow,
    CleanupFailed,
    InputError,
    MgpuError,
    NoCapacity,
    NoOffer,
    ProviderError,
    QuotaExceeded,
    StackError,
    Stopped,
    TakenOver,
    TeardownIncomplete,
)
from mgpu.events import Event, Note, Warned
from mgpu.iac.engine.project import program, project_name, settle
from mgpu.iac.engine.stack import Stack
from mgpu.iac.naming import RUNS_PROJECT
from mgpu.iac.outputs import StackOutput
from mgpu.plan.rank import Rank, Turn
from mgpu.providers import registry
from mgpu.run.budget import account
from mgpu.run.fleet import reuse
from mgpu.run.fleet.teardown import Seller, give_back, names_of
from mgpu.run.job.stack_output import handle_of, provider_of
from mgpu.run.record import files
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record, State, every, find, write
from mgpu.run.record.session import Session
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import installed


class InUse(InputError):
    """A run that is not over uses machines of the fleet: nobody else changes them, or gives them back."""


def project_of(run_file: Path) -> Path:
    """The folder with Pulumi.yaml: the run file's own, the nearest above it, or a copy of what mgpu carries."""
    return program(run_file.resolve().parent)


def stack_of(record: Record, context: Context) -> Stack:
    """The stack of a run; of one that was put on a kept fleet, that of the run that has kept it."""
    record = maker(record)
    folder, project = Folder(record.run_id), Path(record.project)
    log_dir = folder.pulumi if record.own_stack else None
    if folder.program.is_dir():  # it was kept when the run was submitted, perhaps by another machine
        project = folder.program
        settle(project)
    base = Path(record.project_base)
    sellers = record.candidates or {record.provider: record.options}
    stack = open_stack(project, record.stack, folder.run_file, log_dir, context, base, sellers)
    if record.candidates and record.own_stack:
        stack.choose(record.provider)
    return stack


def maker(record: Record) -> Record:
    """The run whose stack a run is on: its own record, or that of the run that has kept the fleet."""
    if not record.kept_by:
        return record
    files.bring(record.kept_by)
    return find(record.kept_by) or record


def sellers_of(record: Record) -> list[Seller]:
    """All providers where the run may have machines, with the settings of those that it is known to have; each raises
    InputError if it cannot be used here."""
    known = record.sellers
    if record.fleet:
        fleet = record.fleet_output()
        known |= {fleet.provider: fleet.options}
    return [partial(registry.get, name, options) for name, options in known.items()]


def open_stack(
    project: Path,
    name: str,
    run_file: Path,
    log_dir: Path | None,
    context: Context,
    folder: Path | None = None,
    sellers: Mapping[str, Mapping[str, str]] | None = None,
) -> Stack:
    """A stack by name. `log_dir`: where a stack of mgpu's own keeps configuration and logs; None: the user's stack.
    `folder`: what the run file's paths are relative to; None: its own. `sellers`: whose machines it may have, with
    their settings; None: any's.
    """
    return Stack(
        project,
        name,
        run_file,
        folder=folder,
        log_dir=log_dir or paths.state_dir() / "stacks" / name,
        emit=context.emit,
        timeouts=_engine_limits(context.timeouts, sellers),
        own_config=log_dir is not None,
    )


def _engine_limits(timeouts: Timeouts, sellers: Mapping[str, Mapping[str, str]] | None) -> Timeouts:
    """The deadlines of an engine whose machines may be slow to come and to go."""
    found = installed().found
    able = [entry.capabilities for name, entry in found.items() if sellers is None or name in sellers]
    slowest = (max((getattr(each, name) for each in able), default=0) for name in ("boot_s", "end_s", "listing_lag_s"))
    boot_s, end_s, lag_s = slowest
    limits = timeouts.at_least(provision_s=acquire.GANGS * boot_s, destroy_s=end_s, listing_s=lag_s)
    known = [(found[name].options, options) for name, options in (sellers or {}).items() if name in found]
    queue_s = max((kind.of(options).queue_s() for kind, options in known), default=0.0)
    return limits.model_copy(update={"provision_s": limits.provision_s + acquire.GANGS * queue_s})


def move(session: Session, stack: Stack, make: Callable[[Session, Stack], StackOutput] | None = None) -> StackOutput:
    """Gives all machines of the stack's fleet back, and makes it anew wherever the run file allows, under the hard cap
    that the run has; `make` does it (default: `bring_up`), and what it raises is raised."""
    fleet = session.record.fleet_output()
    session.emit(Warned(f"{fleet.region} has no machine for this fleet now: it moves, all nodes are replaced"))
    session.journal.append("move", stack=stack.name)
    session.record.moves = True
    session.save()
    _end(session, fleet, tuple(node.id for node in fleet.nodes if node.id), unbilled=False)
    return (make or bring_up)(session, stack)


def bring_up_anywhere(session: Session, stack: Stack, turns: Callable[[], Sequence[Turn]]) -> StackOutput:
    """As `bring_up`, at the first of several providers that has machines. Where a supervisor died, the one that it was
    asking, or whose machines it had, is asked first, for what that one has asked it: those are found.

    Raises:
        ProviderError, InputError: none of them has; what time may mend, where one said so.
    """
    record, refusals = session.record, list[MgpuError]()
    stands = record.provider if record.fleet and record.state is State.PROVISIONING else ""
    first = record.asking or stands
    again = Turn(first, Rank.of(record.up_to) if record.up_to else None)
    for turn in chain([again] * bool(first), _later(turns)):
        new = turn.provider not in record.asked
        record.goes_to(turn.provider, turn.up_to or ())
        session.save()  # whoever ends the run looks for its machines there
        stack.choose(turn.provider)
        try:
            return bring_up(session, stack, up_to=turn.up_to)
        except InUse:
            raise
        except (ProviderError, InputError) as error:
            if isinstance(error, AmbiguousCreate | CleanupFailed) or (first and not _hopeless(error) < len(_MENDED)):
                raise  # something may be there: nothing is asked for beside it
            refusals.append(error)
            session.emit(Note(f"{turn.provider}: {error.what}"))
            first = record.asking = ""
            if new:  # it has made nothing: its answer is not needed in the end
                record.asked.remove(turn.provider)
    raise min(refusals, key=_hopeless)


def _later(turns: Callable[[], Sequence[Turn]]) -> Iterator[Turn]:
    """Not asked for before they are needed."""
    yield from turns()


_MENDED = (NoCapacity | BidTooLow, QuotaExceeded, NoOffer)  # by time, the sooner the further in front


def _hopeless(refusal: MgpuError) -> int:
    """The less, the likelier time mends it."""
    return next((place for place, kind in enumerate(_MENDED) if isinstance(refusal, kind)), len(_MENDED))


def bring_up(session: Session, stack: Stack, lost: tuple[int, ...] = (), up_to: Rank | None = None) -> StackOutput:
    """Makes, or repairs, the stack's fleet, and remembers it. What stands already is adopted. A fleet that is made is
    of an offer `up_to` that rank.

    The machines of the ranks in `lost` are ended first, and confirmed so: one that is only silent, or about to be
    taken, is replaced too, and never beside its replacement.

    Raises:
        StackError, ProviderError: it could not be made.
        Interrupted: the end was asked for; what was begun is undone.
        Stopped: the hard cap of the fleet that the run had is too near, or nothing is left of `max_usd`, or of the
            month's budget.
        TakenOver: another process supervises the run now.
        OSError: the intent could not be journalled; nothing was asked for.
    """
    session.check()
    require_time(session.record)
    left_usd = _require_money(session.record)
    month_usd = _require_months_money(session)
    session.journal.append("up", stack=stack.name, lost=lost)  # the undo is known before the machines are asked for
    if lost:
        _end_lost(session, lost)
    asked_at = time.time()
    with session.undoing(stack.interrupt, stack.abandon):
        stack.init()
        files.send(session.record.run_id, small=True)  # before there is anything to be ended with it
        most_usd = min(filter(None, (left_usd, month_usd)), default=0.0)
        try:
            with stack.telling(partial(_remember, session)):
                _up(session, stack, most_usd, up_to)
        finally:
            session.record.reason = ""
    fleet = stack.outputs()
    if fleet is None:
        raise StackError(
            f"stack {stack.name} has no output `mgpu`",
            "The Pulumi program in infra/ ran, but did not export it.",
            'Export it: pulumi.export("mgpu", fleet.output); docs/formats.md describes it.',
        )
    record = session.record
    record.fleet = fleet.model_dump(mode="json")
    if record.hard_cap_at != fleet.hard_cap_at:
        record.month_usd = month_usd and record.spent_usd(time.time()) + month_usd
    record.price_usd_per_hour, record.hard_cap_at = fleet.price_usd_per_hour, fleet.hard_cap_at
    if _made_whole(record, fleet):
        record.costs_no_more(asked_at)
    record.costs(fleet.generation, fleet.machines_usd_per_hour, fleet.made_at or time.time(), fleet.other_usd_per_hour)
    record.asking, record.moves = "", False
    if record.under_repair is not None:
        record.under_repair.repaired_at = time.time()  # with the fleet: whoever takes over ends no new machine
    session.save()
    return fleet


def _made_whole(record: Record, fleet: StackOutput) -> bool:
    """Whether none of the machines that the run had before is in the fleet: a gang comes and ends as one."""
    seller, newest = provider_of(fleet), record.spending[-1] if record.spending else None
    if seller is None or newest is None or seller.capabilities.repairs_single_nodes:
        return False
    return newest.generation != fleet.generation or newest.provider not in ("", record.provider)


def _up(session: Session, stack: Stack, most_usd: float, up_to: Rank | None) -> None:
    """`Stack.up`, as one more search for the run's machines, of which the record counts those that have come to their
    end. One that was cut off, or whose end nobody knows, counts for none: the next one asks by the same tokens, on
    whichever machine, and so finds what it may have made."""
    record = session.record
    try:
        stack.up(record.hard_cap_at, record.image or "", most_usd, up_to or (), record.searches)
    except REFUSED:
        record.searches += 1
        session.save()
        raise
    record.searches += 1  # saved with the fleet


def _remember(session: Session, event: Event) -> None:
    """What the run waits for, as the engine says it: `mgpu status` reads it."""
    if isinstance(event, Note) and session.record.reason != event.text:
        session.record.reason = event.text
        with suppress(TakenOver):  # `undoing` sees it, too, and undoes what was begun
            session.save(soon=True)


def require_time(record: Record) -> None:
    """The hard cap is the run's, whatever becomes of its machines, and so are its max_hours. Raises Stopped."""
    if record.ends_at and record.ends_at - time.time() < acquire.ENDING_S:
        raise Stopped(f"run {record.run_id} stopped at its hard cap (max_hours)", "No machine is rented so near to it.")


def _require_money(record: Record) -> float:
    """What is left of `max_usd`, US dollars; 0: there is no limit. Raises Stopped: nothing is."""
    if not record.max_usd:
        return 0.0
    spent = record.spent_usd(time.time())
    if spent >= record.max_usd:
        what = f"run {record.run_id} stopped at its budget: ${spent:.2f} of ${record.max_usd:.2f} (max_usd) are spent"
        raise Stopped(what, "No machine is rented for it any more.", "Raise `max_usd` to go on with it.")
    return record.max_usd - spent


def _require_months_money(session: Session) -> float:
    """What the month's budget leaves for this run beside the others, US dollars; 0: no limit, or none that would be
    reached in this month. A backend that does not answer is told, and ends no run. Raises Stopped: nothing is left."""
    record, now = session.record, time.time()
    try:
        month = account.of_month(record.run_id, now)
        claimed = account.claimed_usd_per_hour(record.run_id) if month else None
    except (StackError, InputError) as error:
        session.emit(Warned(f"the limits are not known ({error.what}): the month's budget is not looked at"))
        return 0.0
    if month is None:
        return 0.0
    newest = record.spending[-1] if record.spending else None
    left = month.left_usd(record, newest.usd_per_hour if newest and newest.until is None else claimed, now)
    if left <= 0:
        spent = f"${month.spent_usd(record, now):.2f} of ${month.most_usd:.2f}"
        what = f"run {record.run_id} stopped at the month's budget: {spent} (usd_per_month) are spent by all runs"
        cure = "Raise it (`mgpu limits set --usd-per-month`), or go on with it next month."
        raise Stopped(what, "No machine is rented for it any more.", cure)
    return 0.0 if left == math.inf else left


def _end_lost(session: Session, lost: tuple[int, ...]) -> None:
    """Ends the machines of these ranks at their provider, which has to say that they cost nothing more."""
    if not session.record.fleet:
        return
    fleet = session.record.fleet_output()
    _end(session, fleet, tuple(node.id for node in fleet.nodes if node.rank in lost and node.id), unbilled=True)


def _end(session: Session, fleet: StackOutput, ids: tuple[str, ...], *, unbilled: bool) -> None:
    """Ends machines; `unbilled`: waits only until they cost nothing more. Raises ProviderError."""

    def pause(seconds: float) -> None:
        session.check()
        time.sleep(seconds)

    provider = registry.get(fleet.provider, fleet.options)
    try:
        with session.interrupts.leaving():
            acquire.destroy(
                provider,
                handle_of(fleet),
                nodes=ids,
                unbilled=unbilled,
                timeouts=session.timeouts,
                emit=session.emit,
                sleep=pause,
            )
    except TeardownIncomplete as error:
        # the teardown, which follows, has the last word on what is billed
        raise ProviderError(error.what, error.why, "No replacement was asked for while it may live.") from error
    if not provider.capabilities.repairs_single_nodes:  # all have gone, and the next ones may be long in a queue
        session.record.costs_no_more(time.time())
        session.save()


def how_to_rent(project: Path) -> str:
    """How a fleet comes to be: with Pulumi in the user's own hands, where the program is the user's."""
    if project_name(project) == RUNS_PROJECT:
        return (
            "Use `mgpu launch`, which rents a fleet; with `teardown: keep` in the run file it stays for the next run."
        )
    return "Run `. .mgpu/env && pulumi up` first, or use `mgpu launch`, which does both halves."


def standing(stack: Stack, spec: RunSpec) -> StackOutput:
    """The fleet of a stack that is up.

    Raises:
        StackError: there is none.
        InputError: it is not what the run file asks for.
    """
    fleet = stack.outputs()
    if fleet is None:
        raise StackError(
            f"stack {stack.name} has no fleet",
            "It has no output `mgpu`: it was never brought up, or was destroyed.",
            how_to_rent(stack.project),
        )
    if len(fleet.nodes) != spec.nodes or fleet.provider not in spec.candidates:
        raise InputError(
            f"stack {stack.name} has {len(fleet.nodes)} nodes of {fleet.provider}, "
            f"the run file wants {spec.nodes} of {' or '.join(spec.candidates)}",
            "The fleet was made from another run file, or before it was changed.",
            "Run `pulumi up` to bring the fleet in line with the run file.",
        )
    return fleet


def require_ours(stack: str, fleet: StackOutput) -> None:
    """Raises InputError for a fleet that a program not mgpu's made."""
    if not fleet.owner:
        raise InputError(f"stack {stack} is not made by mgpu", "Its output names no owner.", "Use `pulumi destroy`.")


def refuse_used(fleet: StackOutput, but: str = "", slots: Sequence[int] = ()) -> None:
    """Raises InUse when a run that is not over uses machines of this fleet, or was put on it; `but` is a run that may,
    and where it has `slots` of them, others may have other ones. Runs of other backends are seen on the nodes alone
    (`agent_client.Used`)."""
    ids = {node.id for node in fleet.nodes}
    for record in every():
        theirs = record.fleet or {}
        same = ids & {node.get("id") for node in theirs.get("nodes", ())}
        ends = record.state.final or record.run_id == but or not reuse.collide(tuple(slots), tuple(record.slots))
        if not ends and (same or _is(fleet, theirs.get("fleet"))):
            raise _used(fleet, record.run_id, str(record.state))
    if fleet.owner and (run := reuse.claimed_by(fleet.fleet, but, tuple(slots))):
        raise _used(fleet, run, "about to begin there")


def take(fleet: StackOutput, run_id: str) -> None:
    """Puts a run on this fleet in the eyes of all others, before its record says so. Raises InUse: another one was."""
    if fleet.owner and (run := reuse.take(fleet.fleet, run_id)):  # of a program not mgpu's, names may not be unique
        raise _used(fleet, run, "about to begin there")


def _is(fleet: StackOutput, name: str | None) -> bool:
    return bool(fleet.owner) and fleet.fleet == name


def _used(fleet: StackOutput, run_id: str, how: str) -> InUse:
    return InUse(
        f"fleet {fleet.fleet} is used by run {run_id}",
        f"That run is not over: {how}.",
        f"Follow it with `mgpu attach {run_id}`, or end it with `mgpu stop {run_id}`.",
    )


def give_back_fleet(
    stack: Stack,
    sellers: Sequence[Seller],
    fleet: StackOutput | None,
    context: Context,
    *,
    remove: bool,
    name: str | None = None,
) -> None:
    """Gives a stack's fleet back; `remove`: the empty stack goes too. `name` is the fleet's, where it is remembered.

    Raises what `give_back` raises.
    """
    known = fleet.fleet if fleet else name
    names = names_of(stack, known)
    give_back(
        stack,
        sellers,
        fleet.owner if fleet else owner(),
        context.timeouts,
        context.emit,
        remove=remove,
        fleet=known,
        region=fleet.region if fleet else "",
    )
    try:
        _kept_no_more(names)
    except (StackError, OSError) as error:  # the machines are gone, whoever says that they are kept
        what = error.what if isinstance(error, StackError) else error
        context.emit(Warned(f"runs that kept this fleet before may say so until its lease is over: {what}"))


def _kept_no_more(names: set[str]) -> None:
    """What records of earlier runs that kept this fleet say of it is not true any more. Raises StackError, OSError."""
    for record in every():
        if record.teardown == "kept" and (record.fleet or {}).get("fleet") in names:
            record.teardown = "confirmed"
            write(record)
