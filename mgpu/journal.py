"""Append-only, fsynced JSONL of intents and results; one file per writing process; what a crash leaves to read.

An entry is one line: `{"seq": n, "at": <UNIX seconds>, "kind": "...", ...}`. An intent is written before the act that
it announces, a result after it; a reader of a dead process's journal treats an intent without a result as "may have
happened".
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Journal:
    """A writer of one journal file. Not for two processes at once: every process takes a file of its own."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._seq = sum(1 for _ in read(path)) if path.exists() else 0
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, kind: str, **fields: Any) -> int:
        """Writes one entry and returns its number once it is on disk.

        Raises:
            OSError: the entry may not be on disk; the act it announces must not be started.
        """
        entry = {"seq": self._seq, "at": round(self._clock(), 3), "kind": kind, **fields}
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        self._end_torn_line()
        if os.write(self._fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fsync(self._fd)
        self._seq += 1
        return entry["seq"]

    def close(self) -> None:
        """Closes the file; further appends fail."""
        os.close(self._fd)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _end_torn_line(self) -> None:
        # a crash or a full disk in the middle of a write leaves a line without its end: nothing may be glued to it
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - 1))
            torn = file.read() not in (b"", b"\n")
        if torn:
            os.write(self._fd, b"\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of a journal in order; a torn line (a crash in the middle of a write) is passed over."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry
