"""What several commands share: options, the run file's plan, the closing lines of a run."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from mgpu import paths
from mgpu.backend import location
from mgpu.cli import complete, trials
from mgpu.console import Console
from mgpu.errors import InputError, MgpuError, NoCapacity, ProviderError, StackError
from mgpu.run.record import shared
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Interruption, Record, State, load
from mgpu.words import amount, count, duration, seconds_of, utc

if TYPE_CHECKING:
    from mgpu_train.timeouts import Timeouts

    from mgpu.acquire.fit import Machines
    from mgpu.cli.results import Run
    from mgpu.context import Context
    from mgpu.plan.model import Cost, Offer, Plan
    from mgpu.run.fleet.inventory import Fleet, Survey
    from mgpu.run.job.images import Looked
    from mgpu.run.lifecycle.outcome import Outcome
    from mgpu.run.nodes.ssh_config import SshRoute
    from mgpu.spec.model import RunSpec
    from mgpu.spec.text.change import Change

F = TypeVar("F", bound=Callable[..., Any])

RUN_FILE = "mgpu.yaml"
INTERRUPTIONS_SHOWN = 5  # the newest; `mgpu status --json` has all
ASKING = "asking every provider, in all its regions, what you have there"
PREFLIGHT = "asking the provider and the store, before anything is rented"
_LEAST_S = 300.0  # that a budget has to pay for
ANSWER_S = 60.0  # to say whether a run is to stop; nobody watches it meanwhile


def run_file_argument(command: F) -> F:
    """RUN_FILE, by default the one of this folder."""
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.argument("run_file", type=kind, default=Path(RUN_FILE), callback=_of_its_project)(command)


def _of_its_project(_context: click.Context, _argument: click.Parameter, run_file: Path) -> Path:
    choose_backend(run_file.parent)
    return run_file


def choose_backend(folder: Path) -> None:
    """Until this command ends its backend is that of the project in `folder`."""
    location.choose(folder)
    click.get_current_context().call_on_close(lambda: location.choose(None))


@contextmanager
def as_known(console: Console) -> Iterator[float | None]:
    """For commands that only look: where the backend does not answer they see what this machine knows of it, while the
    block runs. That is said, and how many seconds old it is is yielded; None: it answers. Raises StackError: nothing is
    known."""
    age_s = None
    with ExitStack() as stack:
        try:
            shared.pull()
        except StackError as error:
            if (age_s := shared.known_s_ago()) is None:
                raise
            stack.enter_context(shared.as_known())
            why = error.why.partition("\n")[0]
            console.say(f"{error.what} ({why}); this is what this machine knew {duration(age_s)} ago", "yellow")
        yield age_s


def change_options(command: F) -> F:
    """--set and --env: the command is given `changes`."""

    @functools.wraps(command)
    def told(*args: Any, keys: list[Change], env: list[Change], **rest: Any) -> Any:
        return command(*args, changes=[*keys, *env], **rest)

    words = "Change the run file: `--set train.steps=100`; several times for several."
    keys = click.option("--set", "keys", multiple=True, metavar="KEY=VALUE", callback=_changes, help=words)
    words = "Set a variable of the program; several times for several."
    env = click.option("--env", multiple=True, metavar="NAME=VALUE", callback=_changes, help=words)
    return cast(F, keys(env(told)))


def _changes(_context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> list[Change]:
    from mgpu.spec.text.change import Change

    try:
        return [Change.of(option.opts[0], each) for each in given]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def run_argument(command: F) -> F:
    """RUN, by default the newest; the beginning of an id is enough."""
    return click.argument("run", default="last", shell_complete=complete.runs)(command)


class AfterDashes(click.Command):
    """What follows `--` is a command of the user's, also where no RUN stands before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with the newest run put where none is named."""
        if "--" in args:
            at = args.index("--")
            named, _, _ = self.make_parser(ctx).parse_args(list(args[:at]))
            if not isinstance(named["run"], str):
                args = [*args[:at], "last", *args[at:]]
        return super().parse_args(ctx, args)


def ssh_route_to(run: str, stack: str | None) -> SshRoute:
    """How to get to the machines of a run, or of a stack, which is given instead. Raises InputError."""
    from mgpu.run.fleet import key
    from mgpu.run.fleet.stack import project_of
    from mgpu.run.nodes import ssh_config

    if stack is None:
        record = load(run)
        key.bring(record, context(Console()))
        return ssh_config.to_run(record)
    if run != "last":
        raise InputError(
            "either RUN or --stack is given, not both", f"`{run}` is a run, `{stack}` a stack.", "Give one of them."
        )
    return ssh_config.to_stack(project_of(Path(RUN_FILE)), stack, context(Console()))


def json_option(command: F) -> F:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def resume_option(command: F) -> F:
    """--resume RUN."""
    words = "Go on with this run from its newest checkpoint that verifies."
    return click.option("--resume", metavar="RUN", shell_complete=complete.runs, help=words)(command)


def detach_option(command: F) -> F:
    """--detach."""
    words = "Leave once it trains: until `mgpu attach` nobody replaces a lost machine."
    return click.option("--detach", "-d", is_flag=True, help=words)(command)


def machines_option(command: F) -> F:
    """--machines."""
    words = "A kept fleet that fits and that nobody uses, else new ones; a kept one, which is waited for; or new ones."
    kinds = click.Choice(["any", "kept", "new"])
    return click.option("--machines", type=kinds, default="any", show_default=True, help=words)(command)


def yes_option(command: F) -> F:
    """--yes."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask; the price is still shown.")(command)


class Span(click.ParamType):
    """A length of time, in seconds: `50m`, `4h`."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As seconds."""
        try:
            return value if isinstance(value, float) else seconds_of(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def context(console: Console, *, watch_s: float | None = None, leave: bool = False) -> Context:
    """What a run is given by this command: its console, its deadlines, and how to ask on a terminal."""
    from mgpu.context import Context
    from mgpu.sinks.delivery import Delivery

    ask, delivery = None, Delivery(console.emit)
    if command := click.get_current_context(silent=True):
        command.call_on_close(delivery.close)
    if sys.stdin.isatty() and sys.stderr.isatty():
        ask = lambda first: console.answer(f"stop the run ({first}, then teardown)? `n` leaves it running", ANSWER_S)  # noqa: E731
    return Context(delivery.emit, timeouts(), ask, watch_s, leave)


def timeouts() -> Timeouts:
    """All deadlines, as this process's environment may change them.

    Raises:
        InputError: MGPU_TIMEOUTS holds something else.
    """
    from mgpu_train.timeouts import VARIABLE, Timeouts
    from pydantic import ValidationError

    try:
        return Timeouts.of_environment(os.environ)
    except ValidationError as error:
        wrong = "\n".join(f"{'.'.join(map(str, e['loc'])) or 'the value'}: {e['msg']}" for e in error.errors())
        raise InputError(
            f"{VARIABLE} in the environment cannot be used", wrong, 'It is a JSON object: {"silence_s": 300}.'
        ) from error


def made(folder: Path) -> Path:
    """The folder that a command is to write into.

    Raises:
        InputError: it is not there and cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}."
        raise InputError(f"{folder}: the folder cannot be made", why, "Name another one; nothing was done.") from error
    return folder


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Files are written into `folder` meanwhile.

    Raises:
        InputError: one cannot be.
    """
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}: {error.filename}." if error.filename else f"{error}."
        cure = "Mend that, or name another folder; what was written stays."
        raise InputError(f"{folder}: a file cannot be written", why, cure) from error


def make_plan(spec: RunSpec) -> Plan:
    """Offers of the run file's provider, ranked. Rents nothing."""
    from mgpu.plan import rank
    from mgpu.providers import registry

    wanted = rank.requirements(spec)
    provider = registry.get(spec.provider, wanted.provider_options)
    on_sale = provider.offers(wanted)
    return rank.plan(wanted, on_sale.offers, on_sale.notes)


def with_profile(provider: str, options: dict[str, str], profile: str, instead: str) -> dict[str, str]:
    """A provider's options with another profile; `instead`: what to do where it has none. Raises InputError."""
    from mgpu.spec.provider import entry

    if "profile" not in entry(provider).options.model_fields:
        raise InputError(f"--profile: provider {provider} has no profiles", "", instead)
    return {**options, "profile": profile}


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

    provider = registry.get(spec.provider, plan.requirements.provider_options)
    known = isinstance(provider, OtherCosts)
    return provider.other_costs(plan.requirements, plan.best, rank.saves(spec)) if known else ()


def show_plan(console: Console, plan: Plan, costs: Iterable[Cost] = (), max_usd: float | None = None) -> None:
    """The price of all nodes, before anything is rented; `max_usd`: the run's own limit."""
    need, best, costs = plan.requirements, plan.best, tuple(costs)
    price, dearest = (f"${usd:.2f}" for usd in (plan.best_price_usd_per_hour, plan.price_usd_per_hour))
    instead = "" if price == dearest else f", up to {dearest} if another offer has to be taken"
    console.say(
        f"{need.nodes} x {best.instance_type} ({best.market}) at {best.provider} {best.place}: "
        f"{price} per hour for all nodes{instead}; "
        f"{_at_most(plan, max_usd, _hourly(costs))}"
    )
    for line in _beside(costs):
        console.say(line)
    for cost in costs:
        if cost.avoidable:
            console.say(f"warning: {cost.what}: {_price_of(cost)}; {cost.avoidable}", "yellow")
    for note in (*plan.notes, old_prices(plan.offers)):
        if note:
            console.say(note, "yellow")


def _at_most(plan: Plan, max_usd: float | None, beside: float) -> str:
    if max_usd is None or max_usd >= plan.max_cost_usd + beside * plan.hours:
        return f"at most ${plan.max_cost_usd:.2f} until the hard cap of {plan.hours:.4g} h"
    last_s = max_usd / (plan.best_price_usd_per_hour + beside) * 3600
    return f"at most ${max_usd:.2f} (max_usd), which pays for {duration(last_s)} of them"


def require_paid(plan: Plan, max_usd: float | None, costs: Iterable[Cost] = ()) -> None:
    """Raises InputError: what the run may spend pays for no training. `costs`: beside the machines."""
    usd_per_hour = plan.price_usd_per_hour + _hourly(costs)
    paid_s = max_usd / usd_per_hour * 3600 if max_usd and usd_per_hour else _LEAST_S
    if paid_s < _LEAST_S:
        what = f"max_usd: ${max_usd:.2f} pays for {duration(paid_s)} of these machines"
        why = f"They cost ${usd_per_hour:.2f} per hour, and take minutes to come, to save and to go."
        raise InputError(what, why, "Raise it, or ask for cheaper machines. Nothing was rented.")


def require_begun(plan: Plan, wait_minutes: float) -> None:
    """Raises NoCapacity: the reservation begins later than a launch waits for."""
    reserved = plan.best.reservation
    left_s = reserved.begins_at - time.time() if reserved else 0
    if reserved and left_s > wait_minutes * 60:
        what = f"{reserved.id} begins {utc(reserved.begins_at)}, in {duration(left_s)}"
        why = f"A launch waits {wait_minutes:g} min (`recovery.wait_minutes`). Nothing was rented."
        raise NoCapacity(what, why, "Launch then, or let it wait longer.")


def _beside(costs: tuple[Cost, ...]) -> Iterator[str]:
    """What is billed beside the machines: by the hour in one line, the rest in one each; not what is warned of."""
    hourly = [cost for cost in costs if cost.per == "hour" and not cost.avoidable]
    if hourly:
        parts = "; ".join(f"{cost.what}: {_usd(cost.usd)}" for cost in hourly)
        about = "about " if any(cost.estimate for cost in hourly) else ""
        yield f"beside the machines {about}{_usd(sum(cost.usd for cost in hourly))} per hour ({parts})"
    yield from (f"{cost.what}: {_price_of(cost)}" for cost in costs if cost.per != "hour" and not cost.avoidable)


def _hourly(costs: Iterable[Cost]) -> float:
    return sum(cost.usd for cost in costs if cost.per == "hour")


def _price_of(cost: Cost) -> str:
    return ("about " if cost.estimate else "") + f"{_usd(cost.usd)} per {cost.per}"


def _usd(amount: float) -> str:
    return f"${amount:.2f}" if amount >= 0.1 or not amount else f"${amount:.3f}"


def machines_of(spec: RunSpec, plan: Plan) -> Machines:
    """What the image of a run has to fit: the machines that this plan may take."""
    from mgpu.acquire.fit import Machines
    from mgpu.run.job.stack_output import provider_for

    return Machines.on_offer(provider_for(spec), plan)


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
    machines = looked_at(console, run_file, spec, begins=begins, code=code)
    if before is not None:
        show_changes(console, before, spec)
    agree(console, yes)
    return machines


def looked_at(console: Console, run_file: Path, spec: RunSpec, *, begins: bool = False, code: str = "") -> Machines:
    """All of `agreed` but its question."""
    from mgpu.run.budget import account
    from mgpu.run.lifecycle.launch import preflight

    with console.waiting(PREFLIGHT):
        preflight(run_file, spec, console.emit, code)
    plan, costs = make_plan(spec), ()
    machines = machines_of(spec, plan)
    try:
        image, plan = look_at_image(console, spec, run_file, plan, machines)
    finally:  # the price is known all the same
        costs = other_costs(spec, plan)
        show_plan(console, plan, costs, spec.max_usd)
    require_paid(plan, spec.max_usd, costs)
    require_begun(plan, spec.recovery.wait_minutes)
    if begins:
        account.require_room(plan.price_usd_per_hour + _hourly(costs))
    if image is not None:
        console.say(str(image))
    return machines


def agree(console: Console, yes: bool) -> None:
    """Asks before money is spent.

    Raises:
        InputError: the answer is no, or there is nobody to ask.
    """
    if yes or console.confirm("rent it?"):
        return
    if sys.stdin.isatty():
        raise InputError("not agreed", "Nothing was rented.")
    raise InputError(
        "this command spends money and nobody can be asked",
        "Standard input is not a terminal. Nothing was rented.",
        "Add `--yes` to agree to the price above.",
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


def finish(console: Console, outcome: Outcome) -> int:
    """The closing lines of a run: its result on stdout, the error if there is one, what to type next."""
    console.done()
    record = outcome.record
    if outcome.left:
        tell_as_json(console, record)
        if record.state is State.QUEUED:
            console.say(f"run {record.run_id} stays queued: {record.reason}", "yellow")
            why = (
                "mgpu ls    what stands" if record.machines == "kept" else "mgpu limits show    what all runs may spend"
            )
            console.next(why, f"mgpu stop {record.run_id}    give it up")
            return outcome.exit_code
        if outcome.error is not None:  # another supervisor has it
            console.error(outcome.error)
        else:
            _left(console, record)
        return outcome.exit_code
    if console.as_json:
        console.result(result_of(record))
    else:
        console.table(("run", record.run_id), summary(record))
        trials.show(console, record)
    if outcome.error is not None:
        console.error(outcome.error)
    said = outcome.error is None or "--resume" in outcome.error.next_step
    console.next(*next_lines(record, resume=not said))
    return outcome.exit_code


def when(at: float) -> str:
    """UNIX seconds as a date and a time of day here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def clock(at: float) -> str:
    """A time of day, from UNIX seconds."""
    return time.strftime("%H:%M", time.localtime(at))


def _left(console: Console, record: Record) -> None:
    end = clock(record.hard_cap_at or record.created_at + record.max_hours * 3600)
    price = f"${record.price_usd_per_hour:.2f} per hour" if record.price_usd_per_hour else "at the price shown above"
    if record.state in (State.PROVISIONING, State.TEARDOWN):
        console.say(
            f"left before its machines were seen to be gone: {price} until they are, at the latest {end}", "yellow"
        )
        console.next(f"mgpu down {record.run_id}    end them", "mgpu ls    what is billed now")
        return
    lease = f"{timeouts().lease_s / 60:.0f} min"
    after = f"until the run ends, or {lease} longer if nobody is back by then (attach, reconcile)"
    console.say(f"left running: {price} {after}, at the latest {end}", "yellow")
    console.say(f"nobody replaces a lost machine until then{_outputs_wait(record)}", "yellow")
    console.next(
        f"mgpu attach {record.run_id}    follow it",
        f"mgpu stop {record.run_id}      end it",
        "mgpu reconcile    see to all runs, now and then: from cron, for example",
    )


def _outputs_wait(record: Record) -> str:
    """What becomes of the outputs of a run that is left running; no more than can."""
    from mgpu.spec.load import loads

    kept = Folder(record.run_id).run_file
    try:
        wanted = loads(kept.read_text(), str(kept)).outputs
    except (InputError, OSError):  # the record is damaged: nothing is promised
        return ""
    if not wanted:
        return ""
    lost = "" if record.store else "; if nobody does in time, they go with the machines (`checkpoint: none`)"
    return f", and outputs come home then{lost}"


def summary(record: Record) -> list[tuple[str, str]]:
    """A run as lines of a table."""
    reason = _reason(record)
    rows = [("state", str(record.state) + (f"{', ' if record.unmet else ': '}{reason}" if reason else ""))]
    if record.checks:
        rows.append(("expectations", f"{len(record.checks) - len(record.unmet)} of {len(record.checks)} met"))
        rows += [(f"  {each.metric}", ("" if each.met else "NOT MET: ") + each.said) for each in record.checks]
    if record.setting:
        rows.append(("setting", ", ".join(f"{key} {value}" for key, value in record.setting.items())))
    if record.step >= 0:
        rows.append(("step", f"{record.step}" + (f" of {record.steps}" if record.steps else "")))
    if (loss := record.metrics.get("validation_loss")) is not None:
        before = record.first_metrics.get("validation_loss", loss)
        rows.append(("validation loss", f"{loss:.4f}" + (f" (first {before:.4f})" if before != loss else "")))
    if record.checkpoint_id:
        rows.append(("checkpoint", f"step {record.checkpoint_step} in {record.store}/{record.run_id}"))
    if record.saves:
        rows.append(("saves", saves(record)))
    if record.outputs:
        rows.append(("outputs", outputs(record.outputs)))
    rows += _interruptions(record)
    seconds = (record.ended_at or time.time()) - record.created_at
    by_phase = phases(record)
    rows.append(("wall time", _seconds(seconds) + (f": {by_phase}" if by_phase else "")))
    if record.price_usd_per_hour:
        rows.append(("price", f"${record.price_usd_per_hour:.2f} per hour, all nodes{_spent(record)}"))
    rows.append(("machines", machines(record)))
    if record.image:
        rows.append(("image", record.image))
    return rows


def _spent(record: Record) -> str:
    """What it has beside its machines, by the hour, and what all of it has cost."""
    other = record.spending[-1].other_usd_per_hour if record.spending else None
    beside = f"; {_usd(other)} beside them" if other else ""
    if not record.spending:
        return beside
    most = f" of ${record.max_usd:.2f} (max_usd)" if record.max_usd else ""
    return f"{beside}; spent ${record.spent_usd(time.time()):.2f}{most}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 3600 else duration(seconds)


def saves(record: Record) -> str:
    """How the saves of the newest attempt went, in words."""
    known = record.saves
    newest = [
        f"{what} {known[name]:.2f} s"
        for name, what in (("stall_s", "training stood still for"), ("save_s", "on disk after"))
        if name in known
    ]
    lost = [f"{known[name]:.0f} {name}" for name in ("failed", "skipped") if name in known]
    return "; ".join(([f"the newest: {', '.join(newest)}"] if newest else []) + lost)


def outputs(known: dict[str, Any]) -> str:
    """What came home, in words."""
    missing = f"; {known['missing']} did not come" if known["missing"] else ""
    return f"{count(known['files'], 'file')} ({amount(known['bytes'])}) in {paths.near(known['folder'])}{missing}"


def _interruptions(record: Record) -> list[tuple[str, str]]:
    """What broke the line, and how the run came back; nothing where nothing did."""
    broken = record.interruptions
    if not broken:
        return []
    rows = [("interruptions", str(len(broken)))]
    earlier = len(broken) - INTERRUPTIONS_SHOWN
    if earlier > 0:
        rows.append(("  earlier", f"{earlier}, see `mgpu status --json`"))
    for each in broken[-INTERRUPTIONS_SHOWN:]:
        way = recovery(each)
        rows.append((f"  of attempt {each.attempt}", each.reason.replace("; ", " and ") + (f"; {way}" if way else "")))
    lost = [each.steps_lost for each in broken]
    known = [steps for steps in lost if steps is not None]
    if known and record.step >= 0:  # a program that says no steps may have been further than its newest checkpoint
        later = " so far" if len(known) < len(lost) else ""
        rows.append(("steps done again", f"{sum(known)}{later}"))
    return rows


def recovery(each: Interruption) -> str:
    """The way back of one interruption, in seconds, as far as it went."""
    marks = (
        ("detected", each.heard_at, each.noticed_at),
        ("stopped", each.noticed_at, each.ended_at),
        ("repaired", each.ended_at, each.repaired_at),
        ("resumed", each.repaired_at, each.resumed_at),
    )
    way = ", ".join(f"{name} {max(0.0, end - begin):.1f} s" for name, begin, end in marks if begin and end)
    return f"back after {each.resumed_at - each.heard_at:.1f} s: {way}" if each.resumed_at else way


def _reason(record: Record) -> str:
    """Why the run ended, without what the line says already."""
    if record.unmet:  # each has its own line
        return "but not as expected"
    reason = record.reason.removeprefix(f"run {record.run_id} ")
    return "" if reason == "was stopped" else reason.removeprefix("failed: ").removeprefix("stopped ")


def user_of(fleet: Fleet) -> str:
    """What uses a fleet, in words."""
    return fleet.used_by or (f"nothing: left by run {fleet.left_by}" if fleet.left_by else "nothing")


def not_asked(console: Console, survey: Survey) -> int:
    """Shows who could not be asked what is billed; returns the exit code that follows."""
    for error in survey.failures:
        console.error(error)
    return ProviderError.exit_code if survey.failures else 0


def phases(record: Record) -> str:
    """Seconds by phase; within training, by the phases of node 0 in the newest attempt."""
    inside = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record.agent_seconds.items() if seconds >= 0.1)
    inside = f"of attempt {record.attempt}: {inside}" if inside and record.attempt > 1 else inside
    parts = [
        f"{name} {f'{seconds:.1f}' if seconds < 3600 else duration(seconds)}"
        + (f" ({inside})" if name == "training" and inside else "")
        for name, seconds in record.phase_seconds.items()
    ]
    return ", ".join(parts)


def machines(record: Record) -> str:
    """What is known of the machines, in words."""
    return {
        "confirmed": ("given back" if record.fleet else "none left") + ", confirmed by the provider",
        "kept": _kept(record),
        "not ours": "not made by mgpu, left as they are",
        "asked": "being given back, not confirmed yet",
    }.get(record.teardown, f"{record.nodes} rented" if record.fleet else "none yet")


def _kept(record: Record) -> str:
    if not record.lease_until:
        return f"kept under their lease until its end: ${record.price_usd_per_hour:.2f} per hour"
    until = clock(record.lease_until)
    if record.lease_until < time.time():
        return f"kept under their lease, which ended at {until}; `mgpu ls` shows what is billed now"
    return f"kept under their lease until {until}: ${record.price_usd_per_hour:.2f} per hour"


def tell_as_json(console: Console, record: Record) -> None:
    """A run as the result of a command with --json; without, nothing."""
    if console.as_json:
        console.result(result_of(record))


def result_of(record: Record, **more: Any) -> Run:
    """A run as it is shown in JSON; `more`: what one command alone says of it."""
    from mgpu.cli import results
    from mgpu.run.view import RunView

    result = results.Status if more else results.Run
    return result.model_validate({**dict(RunView.of(record)), **more})


def next_lines(record: Record, *, resume: bool = False) -> list[str]:
    """What to type after a run; `resume`: also how to go on with one that did not succeed."""
    run = record.run_id
    if record.teardown == "asked":
        return [f"mgpu down {run}    give back what may still be billed", "mgpu ls    what is billed now"]
    if record.own_stack and record.state.final and not (record.attempt or record.checkpoint_id):  # no node has spoken
        return [f"mgpu launch{record.file_argument}    once more"]
    lines = [f"mgpu logs {run}"]
    if record.checkpoint_id:
        lines.append(f"mgpu checkpoints pull {run}")
        if resume and record.state in ("failed", "stopped") and record.own_stack:
            lines.append(f"mgpu launch{record.file_argument} --resume {run}    go on from its newest checkpoint")
    if record.teardown == "kept":
        stack = f" --stack {record.stack}"
        lines += [f"mgpu run{record.file_argument}{stack}    again on this fleet", f"mgpu down{stack}    give it back"]
    return lines


def exit_with(console: Console, error: MgpuError) -> int:
    """Shows an error and gives its exit code."""
    console.error(error)
    return error.exit_code
