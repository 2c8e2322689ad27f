"""Does the store still hold what a manifest says?"""

from __future__ import annotations

from mgpu_train.checkpoint.log.manifest import Manifest
from mgpu_train.checkpoint.threads import in_threads
from mgpu_train.checkpoint.transfer.pack import Stored, objects, read
from mgpu_train.store.base import Damaged, NotFound, Progress, Stat, Store
from mgpu_train.store.listed import surely, twice

_ASKED = 8  # objects that are asked for in parallel
_READ = 4  # ... that are read; a pack is held in memory meanwhile


def verify(
    store: Store, run_id: str, manifest: Manifest, *, deep: bool, progress: Progress | None = None
) -> tuple[str, ...]:
    """The problems of a checkpoint in the store, packs first, then by file; none: it verifies.

    Without `deep`: existence, size, and the store's own checksum where it keeps one. With it: every byte is read, and
    `progress` is told of the bytes, `manifest.bytes` in all where nothing is amiss.

    Raises StoreError when the store cannot be read: that says nothing of the checkpoint.
    """
    if manifest.run_id != run_id:
        return (f"the manifest is of run {manifest.run_id}, not of {run_id}",)

    def look(stored: Stored) -> str | None:
        try:
            return twice(store, stored.key, lambda: _read(store, stored, progress)) if deep else _ask(store, stored)
        except (NotFound, Damaged) as error:
            return str(error)

    problems = in_threads(look, objects(run_id, manifest), _READ if deep else _ASKED)
    return tuple(problem for problem in problems if problem)


def _ask(store: Store, stored: Stored) -> str | None:
    stat = surely(store, stored.key, lambda: _there(store, stored))
    if stat.size != stored.size:
        return f"{stored.named} has {stat.size} bytes, not {stored.size}"
    return _differs(stored, stat.crc64nvme or stored.crc64nvme)


def _there(store: Store, stored: Stored) -> Stat:
    stat = store.stat(stored.key)
    if stat is None:
        raise NotFound(f"{stored.named} is missing")
    return stat


def _read(store: Store, stored: Stored, progress: Progress | None) -> None:
    if not stored.packed:
        found = surely(store, stored.key, lambda: store.checksum(stored.key, stored.size, progress))
        if problem := _differs(stored, found):
            raise Damaged(problem)
        return
    files = read(store, stored)
    if progress:
        progress(sum(file.size for file, _ in files))


def _differs(stored: Stored, found: str) -> str | None:
    return None if found == stored.crc64nvme else f"{stored.named}: its checksum is {found}, not {stored.crc64nvme}"
