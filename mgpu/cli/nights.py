"""The nights of a schedule as `mgpu schedule show` draws them: a line for each metric of which something is expected,
and a row for each night."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu.words import duration, number, sparkline, wrapped

if TYPE_CHECKING:
    from mgpu.console import Console
    from mgpu.run.record.record import Check
    from mgpu.schedule.model import DueTime, Schedule

_GAP = "   "
_WIDTH = 100  # away from a terminal
_LEAST = 8  # nights of a line, however narrow the terminal is
_FAILED = "!"


def show(console: Console, schedule: Schedule, times: Sequence[DueTime]) -> None:
    """`times`: those that have a row; the lines are of all that are kept, as far as there is room."""
    from mgpu.spec.expect import OF_THE_RUN

    for line in _lines(schedule, _width(), blocks=_has_blocks()):
        console.text(line)
    if not times:
        return
    console.text("")
    metrics = [metric for metric in schedule.expect if metric != "cost_usd"]
    columns = ("due", "outcome", "run", "took", "cost", *metrics, "because")
    rows = [_row(schedule, due, metrics) for due in times]
    least = [metric for metric in metrics if metric in OF_THE_RUN]
    others = [metric for metric in reversed(metrics) if metric not in OF_THE_RUN]  # all are in the lines above, too
    console.table(columns, rows, spare=("took", "cost", *least, *others), whole=("due", "took"))


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH


def _has_blocks() -> bool:
    """Whether what is shown there has more than ASCII. Python writes UTF-8 where LANG is C, too, and says so in
    LC_CTYPE."""
    said = (os.environ.get("LC_ALL"), os.environ.get("LC_CTYPE", "").replace("C.UTF-8", ""), os.environ.get("LANG"))
    return "utf" in next(filter(None, said), "").lower()


def _lines(schedule: Schedule, width: int, *, blocks: bool) -> list[str]:
    nights = [due for due in schedule.history if due.outcome.final and due.run_id]
    metrics = [*schedule.expect] if nights else []
    found = {metric: [_check(due, metric) for due in nights] for metric in metrics}
    words = {metric: _range(checks) for metric, checks in found.items()}
    wide, most = (max(map(len, texts), default=0) for texts in (metrics, words.values()))
    room = max(_LEAST, width - wide - 2 * len(_GAP) - most)  # one for all: what is above each other is of one night
    lines = [""] if metrics else []
    for metric in metrics:
        shown = found[metric][-room:]
        line = sparkline([check.value if check else None for check in shown], blocks=blocks)
        lines.append(f"{metric:{wide}}{_GAP}{line}{_GAP}{words[metric]}")
        failed = [(due, check) for due, check in zip(nights[-room:], shown, strict=True) if check and not check.met]
        if failed:
            marks = "".join(_FAILED if check and not check.met else " " for check in shown)
            due, check = failed[-1]
            reason = f"{_FAILED} {schedule.times.short(due.at)}: {check.said}"
            lines += _marked(marks, reason, " " * wide + _GAP, width)
    return lines


def _range(checks: Sequence[Check | None]) -> str:
    """The least and the greatest value that was ever seen, and the newest."""
    values = [check.value for check in checks if check is not None and check.value is not None]
    newest = checks[-1].value if checks[-1] else None
    said = f"newest {'none' if newest is None else number(newest)}"
    return f"{number(min(values))} .. {number(max(values))}, {said}" if values else said


def _marked(marks: str, reason: str, indent: str, width: int) -> list[str]:
    """The nights that were not as expected, and why the newest of them was not: beside it, or below."""
    beside = f"{indent}{marks}{_GAP}{reason}"
    if len(beside) <= width:
        return [beside]
    return [f"{indent}{marks}".rstrip(), *(indent + line for line in wrapped(reason, max(20, width - len(indent))))]


def _check(due: DueTime, metric: str) -> Check | None:
    return next((each for each in due.checks if each.metric == metric), None)


def _row(schedule: Schedule, due: DueTime, metrics: Sequence[str]) -> tuple[str, ...]:
    took = duration(due.ended_at - due.at) if due.ended_at else ""
    cost = f"{'>' if due.owes else ''}${due.spent_usd:.2f}" if due.spent_usd is not None else ""
    cost += f" {_FAILED}" if any(each.metric == "cost_usd" for each in due.unmet) else ""
    by = "by hand" if due.by_hand and not due.reason else due.reason
    by = by.removeprefix(f"run {due.run_id} ").removeprefix("succeeded, but ")  # as the row says already
    if due.recoveries:
        again = "once" if due.recoveries == 1 else f"{due.recoveries} times"
        by = "; ".join(filter(None, (by, f"interrupted {again}")))
    cells = [_cell(_check(due, metric)) for metric in metrics]
    return (schedule.times.short(due.at), due.outcome, due.run_id, took, cost, *cells, by)


def _cell(check: Check | None) -> str:
    if check is None:
        return ""
    value = "none" if check.value is None else number(check.value)
    return value if check.met else f"{value} {_FAILED}"
