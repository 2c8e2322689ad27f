"""Reads what is new in the metrics of this node's ranks, by offset, and folds it into what the status file says."""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from mgpu_train.config import MetricName

_PIECE = 1 << 20  # bytes that are in memory at a time
_LONGEST = 1 << 16  # bytes of one line; a longer one is no metric
_METRICS = 256  # names; whoever writes more has meant something else
_NAME = re.compile(get_args(MetricName)[1].pattern)
_RECENT = 5  # what the last ones took says what the next one takes


class MetricsTail:
    """Follows `rank-*.jsonl` of one attempt; what was there before belongs to older attempts and is not read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {path.name: path.stat().st_size for path in folder.glob("rank-*.jsonl")}
        self._torn: dict[str, bytes] = {}

    def poll(self) -> Iterator[dict[str, Any]]:
        """The whole lines that were written since the last call, file by file; torn and foreign ones are left out."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            with suppress(OSError), path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offsets.get(path.name, 0):  # begun anew, as by `open(path, "w")`
                    self._offsets[path.name], self._torn[path.name] = 0, b""
                file.seek(self._offsets.get(path.name, 0))
                while data := file.read(_PIECE):
                    self._offsets[path.name] = file.tell()
                    yield from self._lines(path.name, data)

    def _lines(self, name: str, data: bytes) -> Iterator[dict[str, Any]]:
        *whole, torn = (self._torn.get(name, b"") + data).split(b"\n")
        self._torn[name] = torn[:_LONGEST]
        rank = Path(name).stem.removeprefix("rank-")
        of = {"rank": int(rank)} if rank.isdecimal() else {}
        return (record | of for record in map(_parse, whole) if record is not None)


def _parse(line: bytes) -> dict[str, Any] | None:
    if len(line) >= _LONGEST:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class Saves:
    """What the metrics say of an attempt's saves. Every rank writes a line of each: its step tells one from another."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}  # of the status file's checkpoint part, in the program's words
        self._lasted: dict[int, float] = {}  # step -> seconds, of recent ones
        self._failed: set[int] = set()
        self._skipped: set[int] = set()

    @property
    def lasted(self) -> list[float]:
        """Seconds that each of the recent saves took, from its beginning until it stood on disk."""
        return list(self._lasted.values())

    def stands(self, record: dict[str, Any], step: int) -> None:
        """A save is on disk. A program that does not say how long that took had to stand still for it."""
        stall_s, save_s = _duration(record.get("stall_s")), _duration(record.get("save_s"))
        lasted = stall_s if save_s is None else save_s
        if lasted is None:
            return
        self._lasted[step] = max(lasted, self._lasted.pop(step, 0.0))
        for old in list(self._lasted)[:-_RECENT]:
            del self._lasted[old]
        self.fields |= {"stall_s": stall_s, "save_s": lasted}

    def failed(self, record: dict[str, Any], step: int) -> None:
        """One could not be written; training goes on."""
        if step not in self._failed:
            self._failed.add(step)
            problem = f"step-{step} was not saved: {record.get('reason')}"
            self.fields |= {"save_failed": len(self._failed), "save_problem": problem}

    def skipped(self, _record: dict[str, Any], step: int) -> None:
        """One was due while another was still being written."""
        self._skipped.add(step)
        self.fields["save_skipped"] = len(self._skipped)


class Progress:
    """What the metrics of an attempt say: the fields of the status file that come from them."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {"step": -1}
        self.ended: str | None = None  # the program's own word: "done" or "stopped"
        self.signs = 0  # lines that were taken, but for those that say only that a rank lives
        self.stage: str | None = None  # where the program was by the last of them; a step says that it trains
        self.done: dict[int, tuple[int, int]] = {}  # by rank: its step, and what it has done in that one so far
        self.saves = Saves()
        self._of_saves = {
            "checkpoint": self.saves.stands,
            "save_failed": self.saves.failed,
            "save_skipped": self.saves.skipped,
        }
        self._steps: deque[float] = deque(maxlen=_RECENT)  # seconds that recent steps took
        self._t: float | None = None  # of the newest line, UNIX seconds

    @property
    def step_s(self) -> float:
        """What a step takes at most, of late; 0: none was seen."""
        return max(self._steps, default=0.0)

    def take(self, record: dict[str, Any]) -> bool:
        """Folds one line in; True: a new optimizer step, which is progress."""
        further = self._further(record)
        kind, before = record.get("kind"), self._t
        if kind != "alive" or further:
            self.signs += 1
            if kind == "phase" or (kind == "alive" and "phase" in record):
                self.stage = str(record.get("phase"))
        if kind in ("phase", "alive"):  # no event of its own: the times between steps are those between other lines
            return False
        self._t = _number(record.get("t"))
        if kind == "step":
            self.stage = "training"
            return self._step(record, before)
        if kind == "validation":
            self._validated(record)
        elif kind == "start":
            self._measured(_numbers(record))
        elif isinstance(kind, str) and kind in self._of_saves and type(step := record.get("step")) is int:
            self._of_saves[kind](record, step)
        elif kind == "end":
            self.ended = str(record.get("reason"))
        return False

    def _further(self, record: dict[str, Any]) -> bool:
        """Whether the rank has done more since its last word; one that does not count its work is believed."""
        rank, step, done = record.get("rank"), record.get("step"), record.get("done", 0)
        if not (type(rank) is int and type(step) is int and type(done) is int):
            return True
        before, now = self.done.get(rank, (-1, 0)), (step, done)
        self.done[rank] = max(before, now)
        return now > before or "done" not in record

    def _step(self, record: dict[str, Any], before: float | None) -> bool:
        step = record.get("step")
        if type(step) is not int or step < self.fields["step"]:
            return False
        new = step > self.fields["step"]
        if new and self._t is not None and before is not None:
            steps = step - self.fields["step"] if self.fields["step"] >= 0 else 1
            self._steps.append(max(0.0, self._t - before) / steps)
        self.fields["step"] = step
        if type(record.get("steps")) is int:
            self.fields["steps"] = record["steps"]
        self._measured(_numbers(record))
        return new

    def _validated(self, record: dict[str, Any]) -> None:
        """What was measured beside training: under names of its own, with the step; the first values are kept."""
        found = {f"validation_{name}": value for name, value in _numbers(record).items()}
        if found:
            self._measured(found | {"validation_step": _number(record.get("step"))})
            newest = self.fields["metrics"]
            known = {name: newest[name] for name in found if name in newest}
            self.fields["first_metrics"] = known | self.fields.get("first_metrics", {})

    def _measured(self, values: dict[str, float | None]) -> None:
        """The newest value of each metric; names beyond the first so many are left out."""
        metrics = dict(self.fields.get("metrics", {}))
        for name, value in values.items():
            if value is not None and (name in metrics or len(metrics) < _METRICS):
                metrics[name] = value
        if metrics:
            self.fields["metrics"] = metrics


def _numbers(record: dict[str, Any]) -> dict[str, float | None]:
    """The metrics of a line: its numbers, less those that say what the line is about."""
    about = ("kind", "t", "step", "steps", "attempt", "rank", "world_size", "resumed_step")
    names = (
        name
        for name, value in record.items()
        if name not in about and not isinstance(value, bool) and _NAME.fullmatch(name)
    )
    return {name: number for name in names if (number := _number(record[name])) is not None}


def _duration(value: Any) -> float | None:
    seconds = _number(value)
    return seconds if seconds is not None and seconds >= 0 else None


def _number(value: Any) -> float | None:
    """A finite number; a loss of NaN is no number that JSON could carry."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None
