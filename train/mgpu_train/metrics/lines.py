"""Metrics of one rank: a JSON object a line in `rank-<rank>.jsonl`, whole as soon as it is written.

The file is appended to over all attempts; each begins with a `start` line. The fields are in docs/formats.md.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Literal

Kind = Literal[
    "start", "phase", "alive", "step", "validation", "checkpoint", "save_failed", "save_skipped", "step_skipped", "end"
]
Value = str | int | float | None
_KEPT = 1 << 20  # bytes of lines that a disk did not take


class MetricLines:
    """The open file of one rank; without a folder, nothing is written."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file: FileIO | None = None
        self._left = b""
        self._lock = threading.Lock()  # a thread of its own says that the rank lives
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{rank}.jsonl"
            self._left = b"\n" if _ends_torn(path) else b""  # a killed attempt's last line must not swallow ours
            self._file = path.open("ab", buffering=0)

    def write(self, kind: Kind, **values: Value) -> None:
        """Append an event; `t` is UNIX seconds. A number that JSON cannot hold is left out.

        A full disk ends no training: what it does not take is written with a later event, once there is room.
        """
        if self._file is not None:
            line = json.dumps({"kind": kind, "t": round(time.time(), 3), **finite(values)}, allow_nan=False)
            with self._lock:
                if len(self._left) < _KEPT:
                    self._left += line.encode() + b"\n"
                self._flush(self._file)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _flush(self, file: FileIO) -> None:
        with suppress(OSError):
            while self._left:
                self._left = self._left[file.write(self._left) or 0 :]


def finite(values: Mapping[str, Value]) -> dict[str, Value]:
    """Without numbers that JSON cannot hold: no training ends because a task's own value is none."""
    return {name: value for name, value in values.items() if not isinstance(value, float) or math.isfinite(value)}


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # absent, or empty: nothing to seek in
        return False
