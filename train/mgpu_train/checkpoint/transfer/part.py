"""One node's files on the way to the store: which there are, what they are, and in which objects they travel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from queue import SimpleQueue

from pydantic import ValidationError

from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.manifest import MAX_FILES, MAX_PACK_BYTES, FileEntry, PackEntry, build_checks
from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.checkpoint.transfer.pack import Load, build, loads
from mgpu_train.store import crc, disk
from mgpu_train.store.base import Changed, Damaged, Store, StoreError

_THREADS = 4  # objects in flight
_PACKS = 2  # ... of which packs, which are held in memory


class Unkeepable(StoreError):
    """What a program has left is no checkpoint that can be kept; it would leave the same again."""


Sent = tuple[list[FileEntry], PackEntry | None]  # what one object's files are


@dataclass(frozen=True)
class NodePart:
    """One node's files, on its disk and in the store. Its calls raise StoreError."""

    store: Store
    run_id: str
    checkpoint_id: str
    folder: Path
    node: int
    there: dict[str, int] = field(default_factory=dict)  # what an interrupted upload left: bytes by key
    buffers: SimpleQueue[mmap] = field(default_factory=lambda: _buffers())  # each is one pack's at a time

    def find(self) -> None:
        """Sees what is in the store already."""
        for prefix in (keys.part, keys.packs):
            found = self.store.list(prefix(self.run_id, self.checkpoint_id, self.node))
            self.there.update((stat.key, stat.size) for stat in found)

    def each(
        self, work: Callable[[Load], Sent], files: Sequence[tuple[str, int]]
    ) -> tuple[list[FileEntry], list[PackEntry]]:
        """Does `work` for every object; returns the files in the order of their paths, and the packs."""
        done = in_threads(work, loads(files), _THREADS)
        described = [file for found, _ in done for file in found]
        return sorted(described, key=lambda file: file.path), [pack for _, pack in done if pack]

    def look(self, load: Load) -> Sent:
        """What the files on disk are."""
        if load.number is not None:
            with self._built(load) as data:
                return self._packed(load.number, load, data)
        path = self.folder / load.files[0][0]
        with disk.translated(f"cannot read {path}"):
            size, crc64nvme = disk.checksum(path)
        return [_entry(load.files[0][0], size, crc64nvme, self.node)], None

    def send(self, load: Load) -> Sent:
        """Puts them into the store, unless they are there."""
        return self._send_file(load) if load.number is None else self._send_pack(load.number, load)

    def _send_pack(self, number: int, load: Load) -> Sent:
        key = keys.pack(self.run_id, self.checkpoint_id, self.node, number)
        with self._built(load) as data:
            files, pack = self._packed(number, load, data)
            if not self._stands(key, pack.size, pack.crc64nvme):
                self.store.put(key, data)
        return files, pack

    def _send_file(self, load: Load) -> Sent:
        ((path, size),) = load.files
        key = keys.file(self.run_id, self.checkpoint_id, self.node, path)
        if self.there.get(key) == size:
            sent = self.look(load)
            if self._stands(key, size, sent[0][0].crc64nvme):
                return sent
        stat = self.store.put_file(key, self.folder / path)
        if stat.crc64nvme is None:
            raise Damaged(f"{self.store.url} does not say what it was sent of {key}")
        return [_entry(path, stat.size, stat.crc64nvme, self.node)], None

    def _stands(self, key: str, size: int, crc64nvme: str) -> bool:
        stat = self.store.stat(key) if self.there.get(key) == size else None
        return stat is not None and stat.crc64nvme == crc64nvme

    @contextmanager
    def _built(self, load: Load) -> Iterator[memoryview]:
        """The bytes of a pack, for as long as the block lasts."""
        buffer = self.buffers.get()
        try:
            data = memoryview(buffer)[: load.size]
            with disk.translated(f"cannot read {self.folder}"):
                build(self.folder, load, data)
            yield data
        finally:
            self.buffers.put(buffer)

    def _packed(self, number: int, load: Load, data: memoryview) -> tuple[list[FileEntry], PackEntry]:
        offset, files = 0, list[FileEntry]()
        for path, size in load.files:
            own = crc.of_bytes(data[offset : offset + size])
            files.append(_entry(path, size, own, self.node, pack=number, offset=offset))
            offset += size
        return files, PackEntry(node=self.node, number=number, size=len(data), crc64nvme=crc.of_bytes(data))


def _buffers() -> SimpleQueue[mmap]:
    """Memory that goes back to the system: what malloc is given back in pieces of this size, it keeps."""
    made: SimpleQueue[mmap] = SimpleQueue()
    for _ in range(_PACKS):
        made.put(mmap(-1, MAX_PACK_BYTES, flags=MAP_PRIVATE | MAP_ANONYMOUS))
    return made


def files_of(folder: Path, node: int) -> list[tuple[str, int]]:
    """The files below a folder as (path in it, bytes), by path.

    Raises Unkeepable; Changed when one of them goes meanwhile; StoreError when the folder is gone, or the disk fails.
    """
    found: list[tuple[str, int]] = []
    with disk.translated(f"cannot read {folder}"), _there(folder):
        for path, entry in _entries(folder, ""):
            if not entry.is_file(follow_symlinks=False):
                raise Unkeepable(
                    f"{entry.path} cannot be kept: it is no regular file. A checkpoint holds real files only."
                )
            size = entry.stat(follow_symlinks=False).st_size
            _entry(path, size, "0" * 16, node)  # raises for a name that is none everywhere
            found.append((path, size))
            if len(found) > MAX_FILES:
                raise Unkeepable(
                    f"{folder} cannot be kept: it has more than {MAX_FILES} files. Write fewer, larger ones."
                )
    return sorted(found)


def changed(folder: Path) -> Changed:
    """The error for one that is written while it is read."""
    return Changed(f"{folder} was changed while it was uploaded. A finished checkpoint never changes.")


@contextmanager
def _there(folder: Path) -> Iterator[None]:
    """What is missing in a folder that is there was renamed, or deleted, since it was listed."""
    try:
        yield
    except FileNotFoundError as error:
        if folder.is_dir():
            raise changed(folder) from error
        raise


def _entries(folder: str | Path, above: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a folder that is no folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path, f"{above}{entry.name}/")
            else:
                yield above + entry.name, entry


def _entry(path: str, size: int, crc64nvme: str, node: int, **packed: int) -> FileEntry:
    build_checks(FileEntry)
    try:
        return FileEntry(path=path, size=size, crc64nvme=crc64nvme, node=node, **packed)
    except ValidationError as error:
        raise Unkeepable(
            f"the checkpoint cannot be kept: {first_problem(error)}. Give the file another name."
        ) from error


def first_problem(error: ValidationError) -> str:
    """What pydantic has to say first, in its words."""
    return error.errors(include_url=False, include_input=False)[0]["msg"]
