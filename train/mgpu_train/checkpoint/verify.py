"""Does the store still hold what a manifest says?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from mgpu_train.checkpoint import keys
from mgpu_train.checkpoint.manifest import FileEntry, Manifest
from mgpu_train.store.base import Damaged, NotFound, Store

_THREADS = 8  # files looked at in parallel


def verify(store: Store, run_id: str, manifest: Manifest, *, deep: bool) -> tuple[str, ...]:
    """The problems of a checkpoint in the store, in the order of its files; none: it verifies.

    Without `deep`: existence, size, and the store's own checksum where it keeps one. With it: every byte is read.

    Raises StoreError when the store cannot be read: that says nothing of the checkpoint.
    """
    if manifest.run_id != run_id:
        return (f"the manifest is of run {manifest.run_id}, not of {run_id}",)

    def look(file: FileEntry) -> str | None:
        key = keys.file(run_id, manifest.checkpoint_id, file.node, file.path)
        try:
            return _read(store, key, file) if deep else _ask(store, key, file)
        except (NotFound, Damaged) as error:
            return str(error)

    with ThreadPoolExecutor(_THREADS, "verify") as pool:
        try:
            return tuple(problem for problem in pool.map(look, manifest.files) if problem)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _ask(store: Store, key: str, file: FileEntry) -> str | None:
    stat = store.stat(key)
    if stat is None:
        return f"{key} is missing"
    if stat.size != file.size:
        return f"{key} has {stat.size} bytes, not {file.size}"
    return _differs(key, stat.crc64nvme or file.crc64nvme, file)


def _read(store: Store, key: str, file: FileEntry) -> str | None:
    return _differs(key, store.checksum(key, file.size), file)


def _differs(key: str, found: str, file: FileEntry) -> str | None:
    return None if found == file.crc64nvme else f"{key}: its checksum is {found}, not {file.crc64nvme}"
