"""Small files travel together: thousands of requests cost more than their bytes, so many files share one object.

A pack is nothing but its files one behind the other; where each begins stands in the sidecar and the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.manifest import MAX_PACK_BYTES, FileEntry, Manifest, Sidecar
from mgpu_train.store import crc, disk
from mgpu_train.store.base import Changed, Damaged, NotFound, Store
from mgpu_train.store.listed import surely

SMALL_BYTES = 1 << 20  # a file up to this size is packed
_NAMED = 3  # files of a pack that a message names


@dataclass(frozen=True)
class Load:
    """What goes to the store as one object: the files of pack `number`, or one file alone (None). Sizes in bytes."""

    number: int | None
    files: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(size for _, size in self.files)


@dataclass(frozen=True)
class Stored:
    """One object of a checkpoint in the store: `size` bytes that hold `files`."""

    key: str
    size: int
    crc64nvme: str
    packed: bool
    files: tuple[FileEntry, ...]

    @property
    def named(self) -> str:
        """For messages: the key, and of a pack what it holds."""
        return f"{self.key} ({_names([file.path for file in self.files])})" if self.packed else self.key


def loads(files: Iterable[tuple[str, int]]) -> Iterator[Load]:
    """How files, given as (path, bytes), are shared out to objects; the same files always give the same."""
    number, waiting, size = 0, list[tuple[str, int]](), 0
    for path, length in files:
        if length > SMALL_BYTES:
            yield Load(None, ((path, length),))
            continue
        if size + length > MAX_PACK_BYTES:
            yield Load(number, tuple(waiting))
            number, waiting, size = number + 1, [], 0
        waiting.append((path, length))
        size += length
    if waiting:
        yield Load(number, tuple(waiting))


def build(folder: Path, load: Load, into: memoryview) -> None:
    """Fills `into`, which is as long as they are together, with the files of a pack.

    Raises OSError, and Changed when a file does not have the size that it had a moment ago.
    """
    offset = 0
    for path, size in load.files:
        with disk.opened(folder / path) as source:
            whole = os.fstat(source).st_size == size == os.readv(source, [into[offset : offset + size]])
        if not whole:
            raise Changed(f"{folder / path} was changed while it was uploaded. A finished checkpoint never changes.")
        offset += size


def objects(run_id: str, document: Manifest | Sidecar) -> list[Stored]:
    """Everything that the store holds of a checkpoint, or of a part: packs first, then files that are objects."""
    name = document.checkpoint_id
    inside: dict[tuple[int, int], list[FileEntry]] = {(pack.node, pack.number): [] for pack in document.packs}
    alone = []
    for file in document.files:
        if file.pack is None:
            key = keys.file(run_id, name, file.node, file.path)
            alone.append(Stored(key, file.size, file.crc64nvme, packed=False, files=(file,)))
        else:
            inside[file.node, file.pack].append(file)
    packs = []
    for pack in document.packs:
        key, files = keys.pack(run_id, name, pack.node, pack.number), tuple(inside[pack.node, pack.number])
        packs.append(Stored(key, pack.size, pack.crc64nvme, packed=True, files=files))
    return packs + alone


def read(store: Store, stored: Stored) -> list[tuple[FileEntry, memoryview]]:
    """The files of a pack, each one checked.

    Raises NotFound, Damaged with the names of files that are not what they were, and StoreError.
    """
    try:
        data = surely(store, stored.key, lambda: store.get(stored.key, MAX_PACK_BYTES))
    except NotFound as error:
        raise NotFound(f"{stored.named} is missing") from error
    if len(data) != stored.size:
        raise Damaged(f"{stored.named} has {len(data)} bytes, not {stored.size}")
    view = memoryview(data)
    found = [(file, view[file.offset or 0 :][: file.size]) for file in stored.files]
    damaged = [file.path for file, piece in found if crc.of_bytes(piece) != file.crc64nvme]
    if damaged:
        raise Damaged(f"{stored.key} ({_names(damaged)}): the checksum is not the manifest's")
    if (whole := crc.of_bytes(data)) != stored.crc64nvme:
        raise Damaged(f"{stored.named}: its checksum is {whole}, not {stored.crc64nvme}")
    return found


def _names(paths: list[str]) -> str:
    return ", ".join(paths[:_NAMED]) + (f" and {len(paths) - _NAMED} more files" if len(paths) > _NAMED else "")
