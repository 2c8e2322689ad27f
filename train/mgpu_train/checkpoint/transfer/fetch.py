"""From the store to a folder on disk, every byte checked before the folder has its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mgpu_train.checkpoint.local import write_aside
from mgpu_train.checkpoint.log.manifest import FileEntry, Manifest
from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.checkpoint.transfer.pack import Stored, objects, read
from mgpu_train.store import disk
from mgpu_train.store.base import Damaged, NoRoom, Progress, Store
from mgpu_train.store.listed import surely, twice

SHARDS = ".distcp"  # what names of DCP's data end with
_THREADS = 8  # objects in flight; of each, a pack at most is held in memory

# Which shards are wanted, by path, once all other files are in the folder that it is given, verified. None: all.
Choose = Callable[[Path], Collection[str] | None]


@dataclass(frozen=True)
class FetchReport:
    """What a folder holds now: `files` and `bytes` in all, of which `reused` files were on this disk already."""

    files: int
    bytes: int
    reused: int


def fetch(
    store: Store,
    run_id: str,
    manifest: Manifest,
    dest: Path,
    *,
    local: Sequence[Path] = (),
    progress: Progress | None = None,
    durable: bool = True,
    link: bool = False,
    choose: Choose | None = None,
) -> FetchReport:
    """Make `dest` hold exactly the files of a checkpoint, of all nodes. A folder of that name is replaced.

    A file that one of the `local` folders, or `dest` itself, has with the right checksum is copied from there; with
    `link` it gets a second name instead, for folders that nobody writes to and that are deleted next.
    `progress` is told of the bytes, `manifest.bytes` in all. Without `durable` nothing waits for the disk: for a folder
    that is fetched anew after a crash of the machine. With `choose` the folder lacks the shards that nobody wants.

    Raises StoreError: NotFound or Damaged when the checkpoint is not what its manifest says, others when the store or
    the disk does not work. Then `dest` is as it was.
    """
    if manifest.run_id != run_id:
        raise Damaged(f"the manifest is of run {manifest.run_id}, not of {run_id}")
    reused, there = 0, list[FileEntry]()
    try:
        with write_aside(dest, durable=durable) as aside:
            to = _Target(store, aside, manifest.checkpoint_id, (*local, dest), progress, link)
            for wanted in _rounds(objects(run_id, manifest), choose, aside):
                reused += to.fill(wanted)
                there += (file for stored in wanted for file in stored.files)
    except OSError as error:  # never NotFound: what this disk lacks, the store may have
        raise disk.meaning(f"cannot write {dest}", error) from error
    return FetchReport(len(there), sum(file.size for file in there), reused)


def _rounds(everything: list[Stored], choose: Choose | None, folder: Path) -> Iterator[list[Stored]]:
    """What is fetched in one go: everything, or what is more than shards and then those that are chosen by it."""
    if choose is None:
        yield everything
        return
    first, shards = list[Stored](), list[Stored]()
    for stored in everything:
        (shards if all(file.path.endswith(SHARDS) for file in stored.files) else first).append(stored)
    yield first
    chosen = choose(folder)
    yield [each for each in shards if chosen is None or any(file.path in chosen for file in each.files)]


@dataclass(frozen=True)
class _Target:
    """The folder that is filled, and where its files come from."""

    store: Store
    folder: Path
    named: str  # the checkpoint
    local: Sequence[Path]
    progress: Progress | None
    link: bool

    def fill(self, wanted: Sequence[Stored]) -> int:
        """Everything that these objects hold; returns how many files were on this disk already."""
        files = [file for stored in wanted for file in stored.files]
        self._check_room(sum(file.size for file in files if not (self.link and self._seems_here(file))))
        for folder in sorted({(self.folder / file.path).parent for file in files}):
            folder.mkdir(parents=True, exist_ok=True)
        return sum(in_threads(self._bring, wanted, _THREADS))

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise NoRoom(
                f"{self.named} takes {needed / 2**30:.1f} GiB more, and {self.folder.parent} has only "
                f"{free / 2**30:.1f} GiB of free space. Free some, or use a larger disk."
            )

    def _seems_here(self, file: FileEntry) -> bool:
        """Whether a local folder has such a file, by its size."""
        return any(_size(folder / file.path) == file.size for folder in self.local)

    def _bring(self, stored: Stored) -> int:
        missing = [file for file in stored.files if not self._taken(file)]
        if missing and stored.packed:
            wanted = {file.path for file in missing}
            for file, data in twice(self.store, stored.key, partial(read, self.store, stored)):
                if file.path in wanted:
                    _write(self.folder / file.path, data)
                    self._told(file.size)
        elif missing:
            get = partial(self.store.get_file, stored.key, self.folder / missing[0].path, progress=self.progress)
            whole = partial(get, size=stored.size, crc64nvme=stored.crc64nvme)
            twice(self.store, stored.key, lambda: surely(self.store, stored.key, whole))
        return len(stored.files) - len(missing)

    def _taken(self, file: FileEntry) -> bool:
        """True: a local copy was as good."""
        for folder in self.local:
            if _take(folder / file.path, file, self.folder / file.path, link=self.link):
                self._told(file.size)
                return True
        return False

    def _told(self, count: int) -> None:
        if self.progress:
            self.progress(count)


def _take(source: Path, file: FileEntry, to: Path, *, link: bool) -> bool:
    """A file that is surely the same, copied or linked; False, and nothing is there, when it is not, or the disk does
    not do it. Whatever is wrong with it, the store has another."""
    try:
        with disk.opened(source) as opened:
            if os.fstat(opened).st_size != file.size:
                return False
            if not link:
                with disk.written(to, durable=False) as target:
                    _check(disk.copy(opened, target), file)
                return True
            _check(disk.copy(opened, None), file)
            os.link(source, to, follow_symlinks=False)
            if os.path.samestat(os.fstat(opened), to.lstat()):
                return True
            to.unlink()
    except (OSError, Damaged):
        pass
    return False


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return -1


def _check(found: tuple[int, str], file: FileEntry) -> None:
    if found != (file.size, file.crc64nvme):
        raise Damaged(file.path)


def _write(path: Path, data: bytes | memoryview) -> None:
    """A new file; its folder has no name yet, so it needs no other one meanwhile. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        disk.write_all(descriptor, data)
    finally:
        os.close(descriptor)
