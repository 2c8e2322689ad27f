"""Growing files of a node, copied here byte for byte, whoever copies them and however often the line breaks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mgpu.remote.node import Node

PIECE = 1 << 20  # bytes in memory at a time


class Copy:
    """One file of a node and its copy. The copy's size says where to go on: nothing else is remembered.

    What was read at an offset is written at that offset: a supervisor that was stopped, and wakes up beside the one
    that has its place, writes the same bytes to the same place.
    """

    def __init__(
        self, remote: str, local: Path, *, tell: Callable[[int, bytes], None], warn: Callable[[str], None]
    ) -> None:
        """`tell` is given every new piece and its offset, `warn` why the copy cannot be written."""
        self._remote, self._local = remote, local
        self._tell, self._warn = tell, warn

    def follow(self, node: Node, go_on: Callable[[], bool]) -> bool:
        """Takes what is new, piece by piece; True: all of it. `go_on` says after each piece whether there is time.

        Raises RemoteError.
        """
        offset = self._local.stat().st_size if self._local.exists() else 0
        while data := node.read_from(self._remote, offset, PIECE):
            try:
                _write_at(self._local, offset, data)
            except OSError as error:  # this machine's disk: no fault of the node
                self._warn(f"{self._local} cannot be written: {error.strerror}")
                return True
            self._tell(offset, data)
            offset += len(data)
            if not go_on():
                return False
        return True


def _write_at(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            done = os.pwrite(fd, left, offset)
            left, offset = left[done:], offset + done
    finally:
        os.close(fd)
