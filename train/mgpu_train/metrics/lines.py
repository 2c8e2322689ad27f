"""Metrics of one rank: a JSON object a line in `rank-<rank>.jsonl`, whole as soon as it is written.

The file is appended to over all attempts; each begins with a `start` line. The fields are in docs/formats.md.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Literal

Kind = Literal["start", "step", "validation", "checkpoint", "end"]
Value = str | int | float | None


class MetricLines:
    """The open file of one rank; without a folder, nothing is written."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{rank}.jsonl"
            torn = _ends_torn(path)
            self._file = path.open("a", encoding="utf-8", buffering=1)
            if torn:  # an attempt was killed while it wrote: its last line must not swallow ours
                self._file.write("\n")

    def write(self, kind: Kind, **values: Value) -> None:
        """Append an event; `t` is UNIX seconds. Raises ValueError for a number that JSON cannot hold."""
        if self._file is not None:
            line = json.dumps({"kind": kind, "t": round(time.time(), 3), **values}, allow_nan=False)
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # absent, or empty: nothing to seek in
        return False
