"""From the store to a folder on disk, every byte checked before the folder has its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.checkpoint import keys
from mgpu_train.checkpoint.commitlog import CommitLog, Unreadable, standing
from mgpu_train.checkpoint.local import write_aside
from mgpu_train.checkpoint.manifest import CheckpointEntry, FileEntry, Manifest
from mgpu_train.checkpoint.verify import verify
from mgpu_train.store import disk
from mgpu_train.store.base import Damaged, Store, Unavailable

_THREADS = 4  # files in flight


@dataclass(frozen=True)
class FetchReport:
    """What a folder holds now: `files` and `bytes` in all, of which `reused` files were on this disk already."""

    files: int
    bytes: int
    reused: int


def fetch(store: Store, run_id: str, manifest: Manifest, dest: Path, *, local: Sequence[Path] = ()) -> FetchReport:
    """Make `dest` hold exactly the files of a checkpoint, of all nodes. A folder of that name is replaced.

    A file that one of the `local` folders, or `dest` itself, has with the right checksum is copied from there.

    Raises StoreError: NotFound or Damaged when the checkpoint is not what its manifest says, others when the store or
    the disk does not work. Then `dest` is as it was.
    """
    if manifest.run_id != run_id:
        raise Damaged(f"the manifest is of run {manifest.run_id}, not of {run_id}")

    with disk.translated(f"cannot write {dest}"), write_aside(dest) as aside:
        _check_room(aside, manifest)

        def one(file: FileEntry) -> bool:
            return _fetch_file(store, run_id, manifest.checkpoint_id, file, aside / file.path, [*local, dest])

        with ThreadPoolExecutor(_THREADS, "fetch") as pool:
            try:
                reused = sum(pool.map(one, manifest.files))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return FetchReport(len(manifest.files), manifest.bytes, reused)


def newest_verified(
    store: Store, run_id: str, *, deep: bool = False, report: Callable[[str], None]
) -> CheckpointEntry | None:
    """The newest committed checkpoint that verifies; None: the run has committed none.

    Every step back is told to `report`.

    Raises:
        Damaged: checkpoints were committed, and not one of them verifies: starting from zero is not decided here.
        StoreError: the store cannot be read: that says nothing of its checkpoints.
    """
    log = CommitLog(store, run_id).read()
    stand = {entry.seq: entry for entry in standing(log)}
    bad = []
    for each in reversed(log):
        if isinstance(each, Unreadable):
            problems: tuple[str, ...] = (each.problem,)
        elif each.seq in stand:
            problems = verify(store, run_id, stand[each.seq].manifest, deep=deep)
            if not problems:
                return stand[each.seq]
            name = stand[each.seq].manifest.checkpoint_id
            bad.append(name)
            problems = (f"{name} does not verify: {problems[0]}", *problems[1:])
        else:
            continue
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        report(f"{problems[0]}{more}; looking at what was committed before")
    if bad:
        raise Damaged(
            f"run {run_id}: none of its {len(bad)} committed checkpoints verifies. "
            "Mend the store, or start a new run to train from the beginning."
        )
    return None


def _fetch_file(store: Store, run_id: str, name: str, file: FileEntry, to: Path, local: Sequence[Path]) -> bool:
    """True: a local copy was as good."""
    for folder in local:
        if _take(folder / file.path, file, to):
            return True
    store.get_file(keys.file(run_id, name, file.node, file.path), to, size=file.size, crc64nvme=file.crc64nvme)
    return False


def _take(source: Path, file: FileEntry, to: Path) -> bool:
    """Copies a file that is surely the same; False, and nothing is there, when it is not."""
    try:
        if source.is_symlink() or source.stat().st_size != file.size:
            return False
        with disk.opened(source) as opened, disk.written(to) as target:
            if disk.copy(opened, target) != (file.size, file.crc64nvme):
                raise Damaged(str(source))
    except (OSError, Damaged):  # whatever is wrong with the copy, the store has another
        return False
    return True


def _check_room(folder: Path, manifest: Manifest) -> None:
    free = shutil.disk_usage(folder).free
    if free < manifest.bytes:
        raise Unavailable(
            f"{manifest.checkpoint_id} has {manifest.bytes / 2**30:.1f} GiB, and {folder.parent} only "
            f"{free / 2**30:.1f} GiB of free space. Free some, or use a larger disk."
        )
