"""`mgpu reconcile`: one pass over the backend."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mgpu.cli.common import parameters, wiring
from mgpu.console import Console
from mgpu.errors import InputError, Interrupted, MgpuError, TeardownIncomplete
from mgpu.events import Warned

if TYPE_CHECKING:
    from mgpu.cli.results import Reconciled
    from mgpu.run.record.record import Record
    from mgpu.schedule.model import Schedule
    from mgpu.schedule.reconcile import Report, Teller
    from mgpu.sinks.delivery import Makers

_ALWAYS_S = 10 * 365 * 86400.0
TELL_EVERY_S = 3600.0  # between two tries of what could not be delivered, while it goes on
TELL_WITHIN_S = 15.0  # at the end: longer than a webhook is waited for


@click.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option(
    "--for", "watch_s", type=parameters.Span(), help="Go on for this time, `50m`: runs are watched until then."
)
@click.option("--watch", is_flag=True, help="Go on until it is interrupted.")
@parameters.json_option
def reconcile(dry_run: bool, watch_s: float | None, watch: bool, as_json: bool) -> int:
    """Do what is due now: start the runs of schedules and of `mgpu submit`, look after runs whose supervisor is gone,
    give back what was left behind.

    Call it from cron, a systemd timer or a CI job, on any machine that shares the backend; any number may run at once.
    A signal ends it, and no run. The exit code is 0 unless something could not be done: how a run ends is its own.
    """
    from mgpu.run.record.signals import Interrupts
    from mgpu.schedule.reconcile import Reconciler
    from mgpu.sinks.delivery import Delivery, of_record, tell_again

    given = {"--dry-run": dry_run, "--for": watch_s is not None, "--watch": watch}
    if len(names := [name for name, each in given.items() if each]) > 1:
        raise InputError(f"either {' or '.join(names)} is given, not both", "", "Give one of them.")
    console = Console(as_json=as_json)
    delivery = Delivery(console.emit)

    def teller(schedule: Schedule) -> Teller | None:
        whose = f"schedule {schedule.name}"
        try:  # all of them: what cannot be told from here is told by a pass that can
            sinks = {name: make() for name, make in _sinks_of(schedule).items()}
        except Exception as error:  # noqa: BLE001  no sink is worth a pass
            console.emit(Warned(f"{whose}: nobody is told from here that it has missed a time: {error}"))
            return None
        makers = {name: lambda made=made: made for name, made in sinks.items()}
        return lambda event, done: delivery.tell(whose, lambda: makers, event, done)

    def tell_end(record: Record) -> None:
        from mgpu.run.lifecycle.outcome import endings  # takes long to import

        for event in endings(record):
            delivery.tell(f"run {record.run_id}", lambda: of_record(record.run_id, once=True), event)

    context, lasts_s = wiring.context(console), _ALWAYS_S if watch else watch_s or 0.0
    told_at = time.monotonic()

    def between() -> None:
        """Of a pass that lasts: what is told counts as told now, and what waits is not left to another machine."""
        nonlocal told_at
        delivery.settle()
        if time.monotonic() - told_at >= TELL_EVERY_S:
            told_at = time.monotonic()
            tell_again(console.emit, _sinks_by_key)

    reconciler = Reconciler(context, lasts_s, teller=teller, tell_end=tell_end, between=between)
    try:
        with Interrupts(leave=True).installed():
            report = reconciler.look() if dry_run else reconciler.work()
            if not dry_run:
                tell_again(console.emit, _sinks_by_key)
    except KeyboardInterrupt:
        console.done()
        console.say("left: runs are as they are", "yellow")
        return Interrupted.exit_code
    finally:
        delivery.close(TELL_WITHIN_S)
    console.done()
    if as_json:
        console.result(_result(report, dry_run=dry_run))
    else:
        _show(console, report, dry_run=dry_run)
    errors = [*report.failures, *(_of(each.error) for each in report.looked if each.error is not None)]
    for error in errors:
        console.error(error)
    left = [each.need.run_id for each in report.looked if each.exit_code == TeardownIncomplete.exit_code]
    console.next(*(f"mgpu down {run}    give back what may still be billed" for run in left))
    codes = [error.exit_code for error in errors]
    return TeardownIncomplete.exit_code if left or TeardownIncomplete.exit_code in codes else max(codes, default=0)


def _sinks_of(schedule: Schedule) -> Makers:
    """Who hears that a time of a schedule was missed."""
    from mgpu.run.record import files
    from mgpu.schedule import kept
    from mgpu.sinks.delivery import of_submission

    folder = kept.folder(schedule)
    if not (folder / files.RUN_FILE).exists():
        files.bring_run_file(folder, f"{schedule.submission}/")
    return of_submission(folder, schedule.submission, Path(schedule.run["project_base"]))


def _sinks_by_key(whose: str) -> Makers:
    from mgpu.schedule import kept

    found = next((each for each in kept.every().schedules.values() if each.submission == whose), None)
    return _sinks_of(found) if found else {}


class _Told(MgpuError):
    """The error of another process."""


def _of(error: dict[str, Any]) -> MgpuError:
    told = _Told(*(str(error.get(part) or "") for part in ("what", "why", "next_step")))
    told.__dict__["exit_code"] = int(error.get("exit_code") or 1)
    return told


def _show(console: Console, report: Report, *, dry_run: bool) -> None:
    ends = {each.need.run_id: each.state or "not looked after" for each in report.looked}
    waits = {each.need.run_id: each.said.get("reason") for each in report.looked if each.state == "queued"}
    rows = [(f"schedule {s.name}", f"{s.times.words(due.at)}: {due.outcome}", due.reason) for s, due in report.due]
    rows += [(f"run {run}", "asked to end", "a later time of its schedule is due") for run in report.stopped]
    rows += [(f"run {run}", "told", "it is over, and who ended it has not told it") for run in report.over]
    rows += [
        (f"run {each.run_id}", ends.get(each.run_id, "to be looked after"), waits.get(each.run_id) or each.why)
        for each in report.needs
    ]
    rows += [(f"run {each.record.run_id}", "queued", f"waits for {each.waits_for}") for each in report.waiting]
    rows += [(f"fleet {name}", "ended", "nothing stood for it") for name in report.swept]
    if rows:
        console.table(("what", "would be done" if dry_run else "now", "because"), rows)
    elif not report.failures:
        console.prose("nothing to do")


def _result(report: Report, *, dry_run: bool) -> Reconciled:
    from mgpu.cli import results

    looked = {each.need.run_id: each for each in report.looked}
    runs = []
    for need in report.needs:
        found = looked.get(need.run_id)
        said = {"state": found.state, "exit_code": found.exit_code, "error": found.error} if found else {}
        runs.append(results.LookedAfter(run_id=need.run_id, why=need.why, **said))
    return results.Reconciled(
        dry_run=dry_run,
        due=[results.Due.of(schedule.name, due) for schedule, due in report.due],
        stopped=report.stopped,
        told=report.over,
        runs=runs,
        queued=[results.QueuedRun.of(each) for each in report.waiting],
        swept=report.swept,
        failures=[each.to_json() for each in report.failures],
    )
