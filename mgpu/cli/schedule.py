"""`mgpu schedule`: run files that are due again and again."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mgpu.backend import location
from mgpu.cli.common import agreement, closing, parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.words import duration

if TYPE_CHECKING:
    from mgpu.cli.results import OneSchedule
    from mgpu.run.job.git_code import GitCode
    from mgpu.schedule.callers import Caller, Command
    from mgpu.schedule.model import Schedule
    from mgpu.schedule.times import Times
    from mgpu.spec.model import RunSpec
    from mgpu.spec.text.change import Change

F = TypeVar("F", bound=Callable[..., Any])
_NAMES_A_USER = re.compile(r"(?:git\+)?https?://[^/]*@")  # whether a branch follows, or was forgotten
_WAYS = {
    "systemd": "A timer of this user's systemd.",
    "cron": "A line of this user's crontab.",
    "github": "A workflow in .github/workflows/ of this folder.",
    "gitlab": "A job in .gitlab/ of this folder, for a pipeline schedule.",
    "kubernetes": "A CronJob of a cluster; its manifest is in kubernetes/ of this folder.",
    "aws": "A schedule in the backend's AWS account, which starts a task of Fargate's; about three dollars a month.",
}
_EVERY_S = {"systemd": 300.0, "cron": 300.0, "github": 1800.0, "gitlab": 1800.0, "kubernetes": 300.0, "aws": 600.0}
_OF = {"namespace": ("kubernetes",), "image": ("kubernetes", "aws"), "permissions-boundary": ("aws",)}
_SHOWN = 20  # due times
_NEXT = 5
_LOOKED_AT = 100  # coming times, for how close two of them come


@click.group()
def schedule() -> None:
    """Run files that are due again and again: every night, every Monday.

    `mgpu reconcile`, called every few minutes on any machine that shares the backend, starts what is due.
    """


@schedule.command()
@parameters.run_file_argument
@parameters.change_options
@click.option("--cron", required=True, help="When: five fields, `0 2 * * *` is every night at two.")
@click.option("--timezone", default="UTC", show_default=True, help="Whose clock: an IANA name, Europe/Berlin.")
@click.option("--name", help="Its name (default: that of the run file).")
@click.option(
    "--if-running",
    type=click.Choice(["skip", "queue", "replace"]),
    default="skip",
    show_default=True,
    help="While an earlier run of it is not over: leave the time out, wait, or stop that run (with a checkpoint).",
)
@click.option(
    "--start-within", type=parameters.Span(), default="4h", show_default=True, help="Later than this it is missed."
)
@click.option(
    "--if-missed",
    type=click.Choice(["none", "latest"]),
    default="none",
    show_default=True,
    help="Of times that were missed start none, or the latest, once, as soon as somebody looks.",
)
@click.option(
    "--jitter", type=parameters.Span(), default="0", help="Start at some moment within this, the same everywhere."
)
@click.option(
    "--code-from",
    metavar="GIT",
    help="Each run has the code as this is then: git+https://host/repository@branch, with #subdirectory=FOLDER where "
    "the run file's folder is not the repository's own.",
)
@parameters.machines_option
@parameters.yes_option
@parameters.json_option
def add(
    run_file: Path,
    changes: list[Change],
    cron: str,
    timezone: str,
    name: str | None,
    if_running: str,
    start_within: float,
    if_missed: str,
    jitter: float,
    code_from: str | None,
    machines: str,
    yes: bool,
    as_json: bool,
) -> int:
    """Keep RUN_FILE, with its code and image as they are, and start it at each time.

    The price of one run is shown and agreed to now.
    """
    from mgpu.run.lifecycle import launch as runs
    from mgpu.run.lifecycle.submit import user
    from mgpu.schedule import kept
    from mgpu.schedule.model import IfMissed, IfRunning, Schedule
    from mgpu.schedule.times import Times
    from mgpu.spec import environment
    from mgpu.spec.load import load

    spec = load(run_file, changes=changes)
    times, console, now = Times(cron, timezone), Console(as_json=as_json), time.time()
    times.require_same_everywhere()
    name = name or spec.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", name):
        raise InputError(f"--name {name}", "A name has small letters, digits and dashes.", "Name another one.")
    if jitter >= start_within:
        why = f"It would be missed by its own jitter: it starts within {duration(start_within)} of its time."
        raise InputError(f"--jitter {duration(jitter)}", why, "Give a shorter one, or a longer --start-within.")
    coming = list(islice(times.after(now), _LOOKED_AT))
    if jitter > (closest := min((b - a for a, b in pairwise(coming)), default=jitter)):
        why = f"Two of its times are {duration(closest)} apart: the later one could come first."
        raise InputError(f"--jitter {duration(jitter)}", why, f"Give at most {duration(closest)}.")
    kept.require_free(name, user())  # before anybody waits for an image
    source = _code_of(spec, code_from)
    for number, line in enumerate(_coming(times)):
        console.say(f"{'next' if number == 0 else '    '}  {line}")
    fits = agreement.agreed(console, run_file, spec, yes, code=str(source or ""))
    made = Schedule(
        name=name,
        uid=secrets.token_hex(4),
        cron=cron,
        timezone=timezone,
        run={},
        created_at=now,
        created_by=user(),
        decided_until=now,
        if_running=IfRunning(if_running),
        start_within_s=start_within,
        if_missed=IfMissed(if_missed),
        jitter_s=jitter,
        code_from=str(source or ""),
    )
    folder, at = kept.folder(made), f"{made.submission}/"
    made.run = runs.kept_for_later(run_file, spec, wiring.context(console), folder, at, fits) | {"machines": machines}
    kept.add(made)
    code = f"run file and image as they are now, and the code of {source}" if source else "run file, code and image"
    console.say(f"schedule {name}: every run of it begins with the {code}" + ("" if source else " as they are now"))
    if as_json:
        console.result(_result(made))
    named = environment.named(spec)
    console.next(
        "mgpu reconcile    starts what is due: call it every few minutes",
        *([f"mgpu schedule install    again, where it was: passes need {', '.join(named)}"] if named else []),
        f"mgpu schedule show {name}",
    )
    return 0


@schedule.command()
@parameters.json_option
def ls(as_json: bool) -> int:
    """List schedules, and when they are due next."""
    from mgpu.schedule import kept

    console = Console(as_json=as_json)
    found = kept.every()
    schedules, damaged = [*found.schedules.values()], found.damaged
    if as_json:
        from mgpu.cli.results import Schedules, ScheduleView

        console.result(Schedules(schedules=[ScheduleView.of(each) for each in schedules]))
    elif schedules:
        rows = [(s.name, s.cron, s.timezone, _next(s), _last(s)) for s in schedules]
        console.table(("schedule", "cron", "zone", "next", "last"), rows, spare=("zone", "cron"))
    elif not damaged:
        console.prose("no schedules yet")
        console.next("mgpu schedule add mgpu.yaml --cron '0 2 * * *'")
    for error in damaged:
        console.error(error)
    return InputError.exit_code if damaged else 0


@schedule.command()
@click.argument("name")
@click.option("--all", "all_times", is_flag=True, help=f"All times that are kept, not only the newest {_SHOWN}.")
@parameters.json_option
def show(name: str, all_times: bool, as_json: bool) -> int:
    """Show a schedule, what became of each of its times, and how what is expected of them has gone over the nights."""
    from mgpu.cli import nights
    from mgpu.schedule import kept

    console, found = Console(as_json=as_json), kept.load(name)
    if as_json:
        console.result(_result(found))
        return 0
    rows = [
        ("due", f"{found.cron} in {found.timezone}" + (", paused" if found.paused else "")),
        *(("next" if number == 0 else "", line) for number, line in enumerate(_coming(found.times))),
        ("while one runs", found.if_running),
        ("starts within", duration(found.start_within_s)),
        *([("if missed", "the latest is started")] if found.if_missed == "latest" else []),
        *([("jitter", duration(found.jitter_s))] if found.jitter_s else []),
        ("run file", str(found.run["run_file"])),
        *([("code", found.code_from)] if found.code_from else []),
        ("kept", f"{closing.when(found.created_at)} by {found.created_by}"),
    ]
    console.table(("schedule", name), rows)
    nights.show(console, found, found.history if all_times else found.history[-_SHOWN:])
    return 0


@schedule.command()
@click.argument("name")
@parameters.json_option
def pause(name: str, as_json: bool) -> int:
    """Start nothing of a schedule until `resume`; its times are kept as skipped."""

    def paused(found: Schedule, ahead_s: float) -> Schedule:
        return _settled(replace(found, paused=True), ahead_s)

    return _set(name, as_json, paused, "is paused: what runs goes on")


@schedule.command()
@click.argument("name")
@parameters.json_option
def resume(name: str, as_json: bool) -> int:
    """Go on with a schedule that was paused."""

    def resumed(found: Schedule, ahead_s: float) -> Schedule:
        return replace(_settled(found, ahead_s), paused=False)

    return _set(name, as_json, resumed, "goes on")


@schedule.command(name="run-now")
@click.argument("name")
@parameters.json_option
def run_now(name: str, as_json: bool) -> int:
    """Make this moment a time of a schedule: the next `mgpu reconcile` starts it."""
    from mgpu.schedule import kept
    from mgpu.schedule.decide import by_hand
    from mgpu.schedule.model import IfRunning, Outcome

    now, tried = time.time(), set[float]()

    def placed(found: Schedule, ahead_s: float) -> Schedule:
        if any(due.at in tried for due in found.history):  # written by a try whose answer was lost
            return found
        tried.add(now - ahead_s)
        after = by_hand(found, kept.run_of, now - ahead_s)
        if after.history[-1].outcome is Outcome.SKIPPED:
            why = f"{after.history[-1].reason[:1].upper()}{after.history[-1].reason[1:]}."
            cure = f"Wait for it, or {_end_of(_busy(after))[1]}"
            if after.paused and after.if_running is not IfRunning.SKIP:
                cure += f"; or `mgpu schedule resume {name}`, and this again"
            raise InputError(f"schedule {name} is not started", why, f"{cure}.")
        return after

    return _set(name, as_json, placed, "is due now: `mgpu reconcile` starts it")


@schedule.command()
@click.argument("name")
@parameters.json_option
def rm(name: str, as_json: bool) -> int:
    """Remove a schedule, and the history of its times; records of its runs stay."""
    from mgpu.schedule import kept
    from mgpu.schedule.model import Damaged

    console, found = Console(as_json=as_json), None
    try:
        found = kept.load(name)
    except Damaged:
        if as_json:  # there is nothing to show of it
            raise
    if run := (found and _busy(_settled(replace(found, paused=True), 0.0))) or _owing(name):
        over, how = _end_of(run)
        left = "has something left to give back" if over else "is not over"
        cure = f"End it first: {how}; `mgpu schedule pause {name}` starts no other."
        raise InputError(f"schedule {name} is not removed: run {run} {left}", "Its code is kept there.", cure)
    kept.remove(found) if found else kept.remove_damaged(name)
    console.say(f"schedule {name} is removed")
    if found and as_json:
        console.result(_result(found))
    return 0


def _code_of(spec: RunSpec, code_from: str | None) -> GitCode | None:
    """Where the code of each run comes from, tried once. Raises InputError, SpecError."""
    if code_from is None:
        return None
    from mgpu.run.job.git_code import GitCode
    from mgpu.run.job.images import in_image
    from mgpu.spec.load import require_files

    if not spec.own_code or in_image(spec):
        why = "The code is in the image." if spec.own_code else "The bundled trainer has no code of yours."
        raise InputError("--code-from has nothing to fetch", why, "Leave it out.")
    if _NAMES_A_USER.match(code_from):  # a token, as pip is given one
        why = "It would stand in the backend, in what commands print and in messages."
        cure = "Leave it out: `git` itself asks ~/.netrc or a credential helper for what opens the repository."
        raise InputError("--code-from has a user, or a password, in its address", why, cure)
    source = GitCode.of(code_from)
    with source.at(source.commit()) as folder:
        require_files(spec, folder, str(source))
    return source


def _way(command: F) -> F:
    """--systemd, --cron, ...: one of them."""
    command = click.option("--namespace", help="With --kubernetes: where the CronJob is (default: default).")(command)
    for way, words in reversed(_WAYS.items()):
        command = click.option(f"--{way}", "way", flag_value=way, help=words)(command)
    return command


@schedule.command()
@_way
@click.option("--every", type=parameters.Span(), help="How often (default: 5m; in CI 30m, at AWS 10m).")
@click.option("--image", help="With --kubernetes or --aws: the image with mgpu, as `mgpu image operator` prints it.")
@click.option(
    "--permissions-boundary", metavar="ARN", help="With --aws: a policy of yours that bounds the roles that are made."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be written and done.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; what is written is still shown.")
@parameters.json_option
def install(
    way: str | None,
    every: float | None,
    namespace: str | None,
    image: str | None,
    permissions_boundary: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Have `mgpu reconcile` called again and again, for this folder's backend: by a timer of yours, a CI, a cluster
    or AWS.

    All that is written and done is shown first.
    """
    from mgpu.schedule import kubernetes

    _require_sense(way, namespace=namespace, image=image, permissions_boundary=permissions_boundary)
    if every == 0:
        raise InputError("--every 0", "A pass begins some time after the one before.", "Give that time: `--every 5m`.")
    console = Console(as_json=as_json)
    if way == "aws":
        return _install_at_aws(console, every or _EVERY_S[way], image, permissions_boundary or "", dry_run, yes)
    if way == "kubernetes":
        found = kubernetes.caller(every or _EVERY_S[way], namespace, kubernetes.require(image))
    else:
        found = _caller(way, every, asked=True)
    files = {**found.files, **{path: text for path, text in found.own.items() if not path.exists()}}
    if not as_json:
        _show(console, found, files)
    if not (dry_run or yes or console.confirm("write it?")):
        raise InputError("not agreed", "Nothing was written.", "Add `--yes` to agree.")
    if not dry_run:
        with wiring.writing(next(iter(found.files)).parent):
            found.install()
        console.say("installed")
    _tell(console, way, files, found.begin, found.by_hand, dry_run=dry_run)
    console.next(*found.by_hand)
    return 0


@schedule.command()
@_way
@parameters.json_option
def uninstall(way: str | None, namespace: str | None, as_json: bool) -> int:
    """Take back what `install` has done; the file or the Secret with your secrets stays, at AWS nothing."""
    from mgpu.schedule import kubernetes

    _require_sense(way, namespace=namespace)
    console = Console(as_json=as_json)
    if way == "aws":
        return _uninstall_at_aws(console)
    with location.using(location.configured().url):  # all of it may have been moved elsewhere
        found = kubernetes.installed(namespace) if way == "kubernetes" else _caller(way, None)
    with wiring.writing(next(iter(found.files)).parent):
        found.remove()
    console.say(f"removed: {', '.join(map(str, found.files))}")
    _tell(console, way, found.files, found.end, found.by_hand_after, dry_run=False)
    console.next(*found.by_hand_after)
    return 0


def _install_at_aws(console: Console, every: float, image: str | None, boundary: str, dry_run: bool, yes: bool) -> int:
    from mgpu.schedule import fargate

    with console.waiting("asking AWS what there is"):
        found = fargate.plan(every, image, boundary)
    stack = found.stack(wiring.context(console))
    with console.waiting(f"looking at what would change in {found.region}"):
        changes = stack.preview()
    lines = [" ".join((each.op, stack.name, *each.properties)) for each in changes]
    console.say(f"account {found.account.id()}, {found.region}:" + ("" if changes else " nothing to change"), "bold")
    for line in lines:
        console.say(f"  {line}")
    every_text, usd = duration(found.every_minutes * 60), found.usd_per_month
    console.say(
        f"a cluster, a task, its log, its schedule and three roles; every {every_text} a pass of {found.image}: about "
        f"${usd:.2f} a month where it takes a minute, by the list prices of us-east-1"
    )
    if found.secrets:
        console.say(f"written to Parameter Store, encrypted: {', '.join(sorted(found.secrets))}")
    agreed = not dry_run and (yes or console.confirm("make it so?"))
    if not agreed:
        stack.forget()
    if not (agreed or dry_run):
        raise InputError("not agreed", "Nothing was made or changed.", "Add `--yes` to agree.")
    if agreed:
        stack.up(found.secrets, found.kept)
        console.done()
        console.say("installed")
    by_hand = [
        f"aws logs tail {stack.name} --follow --region {found.region}    what the passes said",
        *(f"export {name}=..., and this again; without it runs and messages wait" for name in found.missing),
    ]
    _tell(console, "aws", {}, (), by_hand, dry_run=dry_run, changes=lines)
    console.next(*by_hand)
    return 0


def _uninstall_at_aws(console: Console) -> int:
    from mgpu.schedule import fargate

    with console.waiting("asking AWS what there is"):
        stack = fargate.installed(wiring.context(console))
    stack.down()
    console.done()
    console.say(f"removed, confirmed by AWS: {stack.name}, with its cluster, task, log, secrets and roles")
    _tell(console, "aws", {}, (), (), dry_run=False, changes=[f"delete {stack.name}"])
    return 0


def _show(console: Console, found: Caller, files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        console.text(f"{path}:")
        console.text("".join(f"    {line}\n" for line in text.splitlines()))
    for command in found.begin:
        # a crontab has bytes of any encoding
        lines = (command.stdin or "").encode(errors="surrogateescape").decode(errors="replace").splitlines()
        console.text(f"$ {' '.join(command.argv)}" + "".join(f"\n    {line}" for line in lines))


def _tell(
    console: Console,
    way: str | None,
    files: Mapping[Path, str],
    commands: Iterable[Command],
    by_hand: Iterable[str],
    *,
    dry_run: bool,
    changes: Iterable[str] = (),
) -> None:
    if console.as_json:
        from mgpu.cli.results import Installed

        said = {
            "files": {str(path): text for path, text in files.items()},
            "commands": [[*each.argv] for each in commands],
        }
        console.result(Installed(way=way or "", **said, changes=[*changes], by_hand=[*by_hand], dry_run=dry_run))


def _require_sense(way: str | None, **given: str | None) -> None:
    for option, value in given.items():
        name = option.replace("_", "-")
        if value is not None and way not in _OF[name]:
            ways = " and ".join(f"--{each}" for each in _OF[name])
            why = "Nothing else has one."
            raise InputError(f"--{name} belongs to {ways}", why, f"Leave --{name} out, or take that way.")


def _caller(way: str | None, every: float | None, *, asked: bool = False) -> Caller:
    from mgpu.schedule import callers

    if way is None:
        ways = ", ".join(f"--{each}" for each in _WAYS)
        raise InputError(
            "by what is it to be called?", f"One of {ways} says it.", "See `mgpu schedule install --help`."
        )
    if asked and way in callers.OF_A_CI:
        callers.require_bucket(f"--{way}")
    return callers.WAYS[way](every or _EVERY_S[way], callers.Needs.asked() if asked else callers.Needs())


def _set(name: str, as_json: bool, how: Callable[[Schedule, float], Schedule], said: str) -> int:
    from mgpu.schedule import kept

    console = Console(as_json=as_json)
    found = kept.change(name, how)
    console.say(f"schedule {name} {said}")
    if as_json:
        console.result(_result(found))
    return 0


def _owing(name: str) -> str:
    """A run of a schedule that still needs its code: somebody has machines of it to give back."""
    from mgpu.run.record.record import every

    runs = (each for each in every() if each.schedule == name)
    return next((each.run_id for each in runs if not each.settled or each.teardown == "kept"), "")


def _end_of(run_id: str) -> tuple[bool, str]:
    """Whether a run is over, and what ends it, or gives back what it has left."""
    from mgpu.schedule import kept

    record = kept.run_of(run_id)
    if record is None:
        return False, f"`mgpu reconcile` submits it, and `mgpu stop {run_id}` ends it then"
    return record.state.final, f"`mgpu {'down' if record.state.final else 'stop'} {run_id}`"


def _settled(found: Schedule, ahead_s: float) -> Schedule:
    """With what became of its times until now, by the rules that it has had until now."""
    from mgpu.schedule import kept
    from mgpu.schedule.decide import advanced

    return advanced(found, kept.run_of, time.time() - ahead_s)


def _busy(found: Schedule) -> str:
    return next((due.run_id for due in found.history if not due.outcome.final), "")


def _result(found: Schedule) -> OneSchedule:
    from mgpu.cli.results import OneSchedule, ScheduleView

    return OneSchedule.model_validate(dict(ScheduleView.of(found)))


def _coming(times: Times) -> list[str]:
    """The next times, each with what the clocks do that day."""
    coming = list(islice(times.after(time.time()), _NEXT))
    return [times.words(at) + (f" ({times.change(at)})" if times.change(at) else "") for at in coming]


def _next(found: Schedule) -> str:
    return "paused" if found.paused else found.times.short(next(found.times.after(time.time())))


def _last(found: Schedule) -> str:
    if not found.history:
        return ""
    last = found.history[-1]
    return f"{last.outcome}{', not as expected' if last.unmet else ''} {last.run_id}".strip()
