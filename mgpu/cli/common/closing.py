"""What a command says of a run at its end, to people and as JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mgpu import paths
from mgpu.cli import trials
from mgpu.cli.common import wiring
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Interruption, Record, State
from mgpu.words import amount, count, duration, usd

if TYPE_CHECKING:
    from mgpu.cli.results import Run
    from mgpu.run.lifecycle.outcome import Outcome

INTERRUPTIONS_SHOWN = 5  # the newest; `mgpu status --json` has all


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
    try:
        if console.as_json:
            console.result(result_of(record))
        else:
            console.table(("run", record.run_id), summary(record))
            trials.show(console, record)
    except OSError:  # its reader has left, or a full disk: how the run has ended is told all the same
        if not outcome.exit_code:
            raise
    finally:
        if outcome.error is not None:
            console.error(outcome.error)
    said = outcome.error is None or "--resume" in outcome.error.next_step
    console.next(*next_lines(record, resume=not said))
    return outcome.exit_code


def when(at: float) -> str:
    """UNIX seconds as a date and a time of day here."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def clock(at: float) -> str:
    """A time of day, from UNIX seconds; with its date where that is not today's."""
    then, now = time.localtime(at), time.localtime(time.time())
    return time.strftime("%H:%M" if then[:3] == now[:3] else "%Y-%m-%d %H:%M", then)


def _left(console: Console, record: Record) -> None:
    end = clock(record.hard_cap_at or record.created_at + record.max_hours * 3600)
    price = f"${record.price_usd_per_hour:.2f} per hour" if record.price_usd_per_hour else "at the price shown above"
    if record.state in (State.PROVISIONING, State.TEARDOWN):
        console.say(
            f"left before its machines were seen to be gone: {price} until they are, at the latest {end}", "yellow"
        )
        console.next(f"mgpu down {record.run_id}    end them", "mgpu ls    what is billed now")
        return
    wanted, times = _wants_outputs(record), wiring.timeouts()
    lease_s = times.lease_s + (times.outputs_s if wanted else 0)  # it is as long while they come
    after = f"until the run ends, or up to {lease_s / 60:.0f} min longer if nobody is back by then (attach, reconcile)"
    console.say(f"left running: {price} {after}, at the latest {end}", "yellow")
    lost = "" if record.store else "; if nobody does in time, they go with the machines (`checkpoint: none`)"
    brought = f", and outputs come home then{lost}" if wanted else ""
    console.say(f"nobody replaces a lost machine until then{brought}", "yellow")
    console.next(
        f"mgpu attach {record.run_id}    follow it",
        f"mgpu stop {record.run_id}      end it",
        "mgpu reconcile    see to all runs, now and then: from cron, for example",
    )


def _wants_outputs(record: Record) -> bool:
    """Whether its run file names any; not where the record is damaged: nothing is promised then."""
    from mgpu.spec.load import accepted

    kept = Folder(record.run_id).run_file
    try:
        return bool(accepted(kept.read_text(encoding="utf-8"), str(kept)).outputs)
    except (InputError, OSError):
        return False


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
    beside = f"; {usd(other)} beside them" if other else ""
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
    run, kept = record.run_id, record.teardown == "kept"
    if record.teardown == "asked":
        return [f"mgpu down {run}    give back what may still be billed", "mgpu ls    what is billed now"]
    spoken = record.attempt or record.checkpoint_id  # a node has
    if record.own_stack and record.state.final and not (spoken or kept):
        return [f"mgpu launch{record.file_argument}    once more"]
    from mgpu.run.view import lasts, resumes

    lines, on_them = [f"mgpu logs {run}"], kept and lasts(record)
    if record.checkpoint_id:
        lines.append(f"mgpu checkpoints pull {run}")
    if kept and not on_them:  # it gets no others before
        lines.append(f"mgpu down {run}    give its machines back")
    if resume and record.checkpoint_id and record.state in ("failed", "stopped") and (kept or record.own_stack):
        lines.append(f"{resumes(record, kept=on_them)}    go on from its newest checkpoint")
    if on_them:
        stack = f" --stack {record.stack}"
        lines += [f"mgpu run{record.file_argument}{stack}    again on this fleet", f"mgpu down{stack}    give it back"]
    return lines
