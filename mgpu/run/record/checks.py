"""Whether a run that has succeeded is as its run file expects. Pure: from the record, and the time, follows all of it.

What it is compared with is in the record from the beginning: who judges it, on whichever machine, finds the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mgpu.run.record.record import Check, Record, State
from mgpu.spec.expect import Expectation
from mgpu.words import count, number

_DIGITS = range(4, 18)  # as many as tell a value from its limit


def measured(record: Record, now: float) -> dict[str, float]:
    """All that may be expected of a run at `now`, UNIX seconds: its metrics, by the names that others are shown, and
    what mgpu knows of it."""
    first = {f"first_{name}": value for name, value in record.first_metrics.items()}
    of_the_run = {"duration_s": round(now - record.created_at, 1), "recoveries": float(record.recoveries)}
    cost = {"cost_usd": round(record.spent_usd(now), 4)} if record.spending else {}
    return record.metrics | first | of_the_run | cost


def good(record: Record) -> dict[str, float]:
    """What later runs are compared with: all that was measured of a run that has succeeded, less what was not as it
    should be. So what is bad night after night does not become the measure."""
    if record.state is not State.SUCCEEDED:
        return {}
    bad = {each.metric for each in record.unmet}
    values = measured(record, record.ended_at or record.updated_at)
    return {name: value for name, value in values.items() if name not in bad}


def earlier(expect: Mapping[str, Mapping[str, Any]], runs: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """What a run is compared with: of each metric as many values as are wanted, of `runs`, newest first. No more runs
    than that takes are asked for."""
    wanted: dict[str, int] = {metric: most for metric, each in expect.items() if (most := each.get("median_of"))}
    found: dict[str, list[float]] = {metric: [] for metric in wanted}
    for run in runs if wanted else ():
        for metric, values in found.items():
            if metric in run and len(values) < wanted[metric]:
                values.append(run[metric])
        if all(len(values) == wanted[metric] for metric, values in found.items()):
            break
    return found


def judged(record: Record, now: float) -> list[Check]:
    """What came of everything that is expected of a run which ends at `now`, UNIX seconds."""
    values = measured(record, now)
    return [
        check(metric, _expectation(each), values, record.earlier.get(metric, ()))
        for metric, each in record.expect.items()
    ]


def check(metric: str, wanted: Expectation, values: Mapping[str, float], before: Sequence[float]) -> Check:
    """Whether one metric is as it should be. `before`: its values in earlier runs, newest first."""
    value = values.get(metric)
    if value is None:
        near = get_close_matches(metric, values, 1)
        return Check(metric, False, "was never reported" + (f" ({near[0]} was)" if near else ""))
    limits: list[tuple[float, bool, str]] = []  # each with whether it is an upper one, and what it is
    if wanted.max is not None:
        limits.append((wanted.max, True, ""))
    if wanted.min is not None:
        limits.append((wanted.min, False, ""))
    median = None
    if wanted.median_of is not None and len(before) >= wanted.median_of:
        median = statistics.median(before[: wanted.median_of])
        upper, tolerance = wanted.direction(metric) != "higher", wanted.tolerance_percent or 0.0
        limit = median + (1 if upper else -1) * abs(median) * tolerance / 100
        of = f", the median of {count(wanted.median_of, 'run')} {'+' if upper else '-'} {tolerance:g} %"
        limits.append((limit, upper, of))
    said = [(_holds(value, limit, upper), limit, upper, of) for limit, upper, of in limits]
    met = all(holds for holds, *_ in said)
    words = [_compared(value, limit, upper, holds) + of for holds, limit, upper, of in said if met or not holds]
    if median is None and wanted.median_of is not None:
        words = words or [number(value)]
        words.append(f"not compared yet: {len(before)} of {count(wanted.median_of, 'run')}")
    return Check(metric, met, "; ".join(words), value, median, min(len(before), wanted.median_of or 0))


def _expectation(plain: Mapping[str, Any]) -> Expectation:
    """As a record keeps it, which may be a newer mgpu's."""
    return Expectation.model_validate({key: value for key, value in plain.items() if key in Expectation.model_fields})


def _holds(value: float, limit: float, upper: bool) -> bool:
    return math.isclose(value, limit) or (value < limit if upper else value > limit)


def _compared(value: float, limit: float, upper: bool, holds: bool) -> str:
    """`2.01 > 1.93`: with as many digits as it takes to see it."""
    sign = ("<=" if holds else ">") if upper else (">=" if holds else "<")
    shown = ((number(value, digits), number(limit, digits)) for digits in _DIGITS)
    left, right = next((pair for pair in shown if pair[0] != pair[1]), (number(value), number(limit)))
    return f"{left} {sign} {right}"
