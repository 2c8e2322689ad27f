"""The log of a node as it was received, with the times at which its bytes were written.

<record>/logs/node-<rank>.<n>.<instance>.log     byte for byte what that instance wrote
<record>/logs/node-<rank>.<n>.<instance>.times   when it had which size: `RunLayout.log_times`

A log that was emptied on its node goes on in one with another <n>, of which no times are known.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from mgpu.run.record.folder import Folder

_BLOCK = 1 << 20
_MARK = re.compile(rb"(\d{1,18}) (\d{1,12}(?:\.\d{1,6})?)")


def times_of(log: Path) -> Path:
    """Where the times of a copied log are."""
    return log.with_suffix(".times")


class NodeLog:
    """The logs of all instances that had a node_rank, read from where the last reading ended."""

    def __init__(self, folder: Folder, node_rank: int) -> None:
        self._folder, self._rank = folder, node_rank
        self._files: dict[Path, _File] = {}

    def new(self) -> Iterator[tuple[float, int, bytes]]:
        """What has come since: bytes, their offset in their instance's log, and first when they had been written, in
        UNIX seconds of the node's clock. What no time is known of, which ended its node or came this second, is as old
        as its copy."""
        for path in self._folder.logs(self._rank):
            yield from self._files.setdefault(path, _File(path)).new()


class _File:
    """One instance's log."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._times_offset = 0
        self._marks: deque[tuple[int, float]] = deque()  # those beyond `_offset`

    def new(self) -> Iterator[tuple[float, int, bytes]]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(_BLOCK):
                self._read_times()
                yield from self._split(data)

    def _split(self, data: bytes) -> Iterator[tuple[float, int, bytes]]:
        """`data` cut where the time is another."""
        while data:
            while self._marks and self._marks[0][0] <= self._offset:
                self._marks.popleft()
            size, at = self._marks[0] if self._marks else (self._offset + len(data), self._path.stat().st_mtime)
            piece, data = data[: size - self._offset], data[size - self._offset :]
            begin, self._offset = self._offset, self._offset + len(piece)
            yield at, begin, piece

    def _read_times(self) -> None:
        path = times_of(self._path)
        if not path.exists():  # of an agent that wrote none
            return
        with path.open("rb") as file:
            file.seek(self._times_offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._times_offset += len(line)
                if found := _MARK.fullmatch(line.rstrip(b"\n")):
                    self._marks.append((int(found[1]), float(found[2])))
