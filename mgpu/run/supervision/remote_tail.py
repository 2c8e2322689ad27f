"""Growing files of a node, copied here byte for byte, whoever copies them and however often the line breaks.

But for the values of the run's secrets: what a program prints of them is as many asterisks here, on disk and screen.
A file that is emptied on its node goes on in another copy here: what was in it before is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from mgpu.remote.node import Node
from mgpu.run.record.folder import newest_part, next_part

PIECE = 1 << 20  # bytes in memory at a time
COMPARED = 4 << 10  # bytes of a file's beginning by which it is known
SHORTEST = 8  # characters of a secret; a shorter value would be met by chance


class RemoteTail:
    """One file of a node and its copy. The copy's size says where to go on: nothing else is remembered.

    What was read at an offset is written at that offset: a supervisor that was stopped, and wakes up beside the one
    that has its place, writes the same bytes to the same place.
    """

    def __init__(
        self,
        remote: str,
        local: Path,
        *,
        tell: Callable[[int, bytes], None],
        warn: Callable[[str], None],
        hidden: Sequence[bytes] = (),
    ) -> None:
        """`local`: by `of_instance`. `tell` is given every new piece and its offset, `warn` why the copy cannot be
        written, and where it goes on; `hidden` are values that are not to be seen here."""
        self._remote, self._local = remote, newest_part(local)
        self._tell, self._warn, self._hidden = tell, warn, hidden
        self._waits: tuple[int, int] | None = None  # for the rest of what may be a secret: from where, how many bytes
        self._compared = False  # with what was here before this one: nobody may have looked for long

    def follow(self, node: Node, go_on: Callable[[], bool]) -> bool:
        """Takes what is new, piece by piece; True: all of it. `go_on` says after each piece whether there is time.

        Raises RemoteError.
        """
        offset = self._size()
        new = node.read_from(self._remote, offset, PIECE)
        if offset and (new is None or not self._compared) and self._emptied(node):
            self._local, self._waits = next_part(self._local), None
            self._warn(f"{self._remote} was emptied on the node: its copy goes on in {self._local}")
            offset = self._size()
            new = node.read_from(self._remote, offset, PIECE)
        self._compared, waited = True, self._waits
        while data := self._shown(offset, new or b"", waited):
            try:
                _write_at(self._local, offset, data)
            except OSError as error:  # this machine's disk: no fault of the node
                self._warn(f"{self._local} cannot be written: {error.strerror}")
                return True
            self._tell(offset, data)
            offset += len(data)
            if not go_on():
                return False
            new = node.read_from(self._remote, offset, PIECE)
        return True

    def _size(self) -> int:
        return self._local.stat().st_size if self._local.exists() else 0

    def _emptied(self, node: Node) -> bool:
        """Whether a file begins otherwise than its copy. One that is shorter may also have lost its end, on a machine
        that crashed, or be seen as it was, in a folder that machines share."""
        begin = node.read_from(self._remote, 0, COMPARED) or b""
        with self._local.open("rb") as file:
            known = file.read(len(begin))
        return any(one != other and one != ord("*") for one, other in zip(known, begin, strict=False))

    def _shown(self, offset: int, data: bytes, waited: tuple[int, int] | None) -> bytes:
        """What of new bytes may be seen. The beginning of a secret waits for its rest, until the next look."""
        data, begun = masked(data, self._hidden)
        held = (offset + len(data) - begun, begun)
        if not begun or waited == held:
            return data
        self._waits = held
        return data[:-begun]


def untold(_offset: int, _data: bytes) -> None:
    """Is told of what is not shown as it comes."""


def values(names: Iterable[str], environ: Mapping[str, str]) -> tuple[bytes, ...]:
    """What is to be hidden of these variables, the longest first."""
    found = {environ.get(name, "").strip().encode("utf-8", "surrogateescape") for name in names}
    return tuple(sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True))


def masked(data: bytes, hidden: Sequence[bytes]) -> tuple[bytes, int]:
    """`data` with as many asterisks for each value; and how many bytes at its end may be the beginning of one."""
    for value in hidden:
        data = data.replace(value, b"*" * len(value))
    ends = (size for value in hidden for size in range(1, len(value)) if data.endswith(value[:size]))
    return data, max(ends, default=0)


def _write_at(path: Path, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            done = os.pwrite(fd, left, offset)
            left, offset = left[done:], offset + done
    finally:
        os.close(fd)
