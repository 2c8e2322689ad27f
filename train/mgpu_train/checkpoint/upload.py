"""One node's part of a checkpoint on its way to the store, and the commit once every part is there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mgpu_train.checkpoint import keys
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.checkpoint.manifest import (
    MAX_DOCUMENT_BYTES,
    MAX_FILES,
    CheckpointEntry,
    FileEntry,
    Manifest,
    Sidecar,
    parse_sidecar,
    to_bytes,
)
from mgpu_train.store import disk
from mgpu_train.store.base import Ambiguous, Damaged, NotFound, Store, StoreError, Unavailable

_THREADS = 4  # files in flight


def upload_part(
    store: Store,
    run_id: str,
    checkpoint_id: str,
    *,
    folder: Path,
    attempt: int,
    node: int,
    step: int,
    world_size: int,
    meta: Mapping[str, str | int | float],
) -> Sidecar:
    """Upload every file of `folder` with its checksum, then the sidecar that lists them. A failed call may be repeated.

    Raises StoreError when the store refuses, when `folder` holds what cannot be kept (links, pipes, odd names), and
    when the part stands in the store with other content. Without a sidecar nobody takes the part for whole.
    """
    paths = dict(_files(folder))
    part = keys.part(run_id, checkpoint_id, node)
    described = partial(
        _sidecar,
        checkpoint_id=checkpoint_id,
        attempt=attempt,
        node=node,
        step=step,
        world_size=world_size,
        meta=dict(meta),
    )
    described(
        files=[_entry(path, 0, "0" * 16, node) for path in paths]
    )  # what cannot be kept is refused before all else
    standing = _read_sidecar(store, run_id, checkpoint_id, node)
    if standing is not None:
        return _same(standing, described(files=_map(lambda path: _local(paths[path], path, node), paths)))
    there = {stat.key: stat.size for stat in store.list(part)}  # what an interrupted upload left
    made = described(files=_map(lambda path: _send(store, part + path, paths[path], path, node, there), paths))
    return _publish(store, run_id, made)


def gather(store: Store, run_id: str, checkpoint_id: str, writers: Sequence[int]) -> list[Sidecar] | None:
    """The parts of all `writers`; None: some part is missing yet.

    Raises Damaged when a part is not what its sidecar says, and StoreError when the store cannot be read.
    """
    found = []
    for node in writers:
        sidecar = _read_sidecar(store, run_id, checkpoint_id, node)
        if sidecar is None:
            return None
        found.append(sidecar)
    for sidecar in found:
        _check_there(store, run_id, sidecar)
    return found


def assemble(sidecars: Sequence[Sidecar], *, run_id: str, nodes: int, created_at: float) -> Manifest:
    """The manifest of all parts together. Of a file that several nodes have, byte for byte the same, the first counts.

    Raises Damaged when the parts are not of one checkpoint, or when two nodes have different files of one name.
    """
    parts = sorted(sidecars, key=lambda part: part.node)
    if len({(part.checkpoint_id, part.world_size) for part in parts}) != 1:
        raise Damaged("the parts are not of one checkpoint")
    first, files = parts[0], dict[str, FileEntry]()
    for file in (file for part in parts for file in part.files):
        known = files.setdefault(file.path, file)
        if (known.size, known.crc64nvme) != (file.size, file.crc64nvme):
            raise Damaged(
                f"{first.checkpoint_id}: nodes {known.node} and {file.node} have different files named {file.path!r}. "
                "With `writers: all` each node's files need names of their own."
            )
    try:
        return Manifest(
            run_id=run_id,
            checkpoint_id=first.checkpoint_id,
            attempt=first.attempt,
            step=first.step,
            nodes=nodes,
            world_size=first.world_size,
            writers=tuple(part.node for part in parts),
            files=tuple(files.values()),
            created_at=created_at,
            meta=first.meta,
        )
    except ValidationError as error:
        raise Damaged(f"the parts of {first.checkpoint_id} make no checkpoint: {_first(error)}") from error


def commit_when_complete(
    store: Store,
    run_id: str,
    checkpoint_id: str,
    *,
    writers: Sequence[int],
    nodes: int,
    writer: str,
    clock: Callable[[], float] = time.time,
) -> CheckpointEntry | None:
    """Commit a checkpoint if all parts are there; None: some part is missing yet.

    Raises what `gather`, `assemble` and `CommitLog.commit` raise.
    """
    sidecars = gather(store, run_id, checkpoint_id, writers)
    if sidecars is None:
        return None
    manifest = assemble(sidecars, run_id=run_id, nodes=nodes, created_at=clock())
    return CommitLog(store, run_id, clock).commit(manifest, writer)


def _sidecar(*, files: Sequence[FileEntry], **fields: Any) -> Sidecar:
    try:
        return Sidecar(files=tuple(files), **fields)
    except ValidationError as error:
        raise StoreError(f"the checkpoint cannot be kept: {_first(error)}") from error


def _entry(path: str, size: int, crc: str, node: int) -> FileEntry:
    try:
        return FileEntry(path=path, size=size, crc64nvme=crc, node=node)
    except ValidationError as error:
        raise StoreError(f"the checkpoint cannot be kept: {_first(error)}. Give the file another name.") from error


def _first(error: ValidationError) -> str:
    return error.errors(include_url=False, include_input=False)[0]["msg"]


def _publish(store: Store, run_id: str, made: Sidecar) -> Sidecar:
    """Writes the sidecar, which makes the part whole; the one that stands is believed, no answer."""
    try:
        if store.put_if_absent(keys.sidecar(run_id, made.checkpoint_id, made.node), to_bytes(made)):
            return made
    except Ambiguous:
        pass
    standing = _read_sidecar(store, run_id, made.checkpoint_id, made.node)
    if standing is None:
        raise Unavailable(f"the sidecar of {made.checkpoint_id}, node {made.node}, did not arrive. Upload it again.")
    return _same(standing, made)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """The regular files below a folder by their path in it, in order. Raises StoreError for anything else."""
    count = 0
    with disk.translated(f"cannot read {folder}"):
        for above, folders, names in os.walk(folder, onerror=_fail):
            folders.sort()
            links = [name for name in folders if (Path(above) / name).is_symlink()]
            for name in sorted(names + links):
                path = Path(above) / name
                if not path.is_file() or path.is_symlink():
                    raise StoreError(
                        f"{path} cannot be kept: it is no regular file. A checkpoint holds real files only."
                    )
                count += 1
                if count > MAX_FILES:
                    raise StoreError(
                        f"{folder} cannot be kept: it has more than {MAX_FILES} files. Write fewer, larger ones."
                    )
                yield path.relative_to(folder).as_posix(), path


def _fail(error: OSError) -> None:
    raise error


def _map(work: Callable[[str], FileEntry], paths: Mapping[str, Path]) -> list[FileEntry]:
    with ThreadPoolExecutor(_THREADS, "upload") as pool:
        futures = [pool.submit(work, path) for path in paths]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _send(store: Store, key: str, file: Path, path: str, node: int, there: Mapping[str, int]) -> FileEntry:
    if key in there and there[key] == file.stat().st_size:
        own, stat = _local(file, path, node), store.stat(key)
        if stat is not None and stat.crc64nvme == own.crc64nvme:
            return own
    sent = store.put_file(key, file)
    if sent.crc64nvme is None:
        raise Damaged(f"{store.url} does not say what it was sent of {key}")
    return _entry(path, sent.size, sent.crc64nvme, node)


def _local(file: Path, path: str, node: int) -> FileEntry:
    with disk.translated(f"cannot read {file}"):
        size, crc = disk.checksum(file)
    return _entry(path, size, crc, node)


def _read_sidecar(store: Store, run_id: str, checkpoint_id: str, node: int) -> Sidecar | None:
    key = keys.sidecar(run_id, checkpoint_id, node)
    try:
        sidecar = parse_sidecar(store.get(key, MAX_DOCUMENT_BYTES), key)
    except NotFound:
        return None
    if (sidecar.checkpoint_id, sidecar.node) != (checkpoint_id, node):
        raise Damaged(f"{key} is of another part: {sidecar.checkpoint_id}, node {sidecar.node}")
    return sidecar


def _same(standing: Sidecar, made: Sidecar) -> Sidecar:
    if standing.files != made.files:
        raise StoreError(f"{made.checkpoint_id}, node {made.node}, is in the store already, with other content")
    return standing


def _check_there(store: Store, run_id: str, sidecar: Sidecar) -> None:
    part = keys.part(run_id, sidecar.checkpoint_id, sidecar.node)
    there = {stat.key.removeprefix(part): stat.size for stat in store.list(part)}
    for file in sidecar.files:
        if there.get(file.path) != file.size:
            found = f"has {there[file.path]} bytes" if file.path in there else "is missing"
            raise Damaged(f"{part}{file.path} {found}; the sidecar says {file.size} bytes")
