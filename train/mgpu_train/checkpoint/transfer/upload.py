"""One node's part of a checkpoint on its way to the store, and the commit once every part is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.log.manifest import (
    MAX_DOCUMENT_BYTES,
    FileEntry,
    Manifest,
    PackEntry,
    Sidecar,
    parse_sidecar,
    to_bytes,
)
from mgpu_train.checkpoint.transfer.pack import objects
from mgpu_train.checkpoint.transfer.part import NodePart, Unkeepable, changed, files_of, first_problem
from mgpu_train.store.base import Ambiguous, Damaged, NotFound, Store, StoreError, Unavailable


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
    """Upload every file of `folder` with its checksum, small ones packed, then the sidecar that lists them.

    A failed call may be repeated. Raises Unkeepable for what `folder` holds (links, pipes, odd names), Changed when it
    is written meanwhile, and StoreError when the store refuses, and when the part stands in the store with other
    content. Without a sidecar nobody takes the part for whole.
    """
    files = files_of(folder, node)
    described = partial(
        _sidecar,
        checkpoint_id=checkpoint_id,
        attempt=attempt,
        node=node,
        step=step,
        world_size=world_size,
        meta=dict(meta),
    )
    described([], [])  # what cannot be kept is refused before all else
    part = NodePart(store, run_id, checkpoint_id, folder, node)
    standing = _read_sidecar(store, run_id, checkpoint_id, node)
    if standing is not None:
        return _same(standing, described(*part.each(part.look, files)))
    part.find()
    try:
        made = described(*part.each(part.send, files))
    finally:
        if files_of(folder, node) != files:  # it had its name before it was whole, whatever came of that
            raise changed(folder)
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
    _check_there(store, run_id, checkpoint_id, found)
    return found


def assemble(sidecars: Sequence[Sidecar], *, run_id: str, nodes: int, created_at: float) -> Manifest:
    """The manifest of all parts together. Of a file that several nodes have, byte for byte the same, the first counts.

    Raises Damaged when the parts are not of one checkpoint; Unkeepable when they have no file, or when two nodes have
    different files of one name.
    """
    parts = sorted(sidecars, key=lambda part: part.node)
    if len({(part.checkpoint_id, part.world_size) for part in parts}) != 1:
        raise Damaged("the parts are not of one checkpoint")
    first, files = parts[0], dict[str, FileEntry]()  # by path
    for file in (file for part in parts for file in part.files):
        known = files.setdefault(file.path, file)
        if (known.size, known.crc64nvme) != (file.size, file.crc64nvme):
            raise Unkeepable(
                f"{first.checkpoint_id}: nodes {known.node} and {file.node} have different files named {file.path!r}. "
                "With `writers: all` each node's files need names of their own."
            )
    if not files:
        raise Unkeepable(
            f"{first.checkpoint_id} has no file: `step-{first.step}` is to hold what a program goes on from"
        )
    needed = {(file.node, file.pack) for file in files.values()}
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
            packs=tuple(pack for part in parts for pack in part.packs if (pack.node, pack.number) in needed),
            created_at=created_at,
            meta=first.meta,
        )
    except ValidationError as error:
        raise Damaged(f"the parts of {first.checkpoint_id} make no checkpoint: {first_problem(error)}") from error


def commit_when_complete(
    store: Store,
    run_id: str,
    checkpoint_id: str,
    *,
    writers: Sequence[int],
    nodes: int,
    writer: str,
    clock: Callable[[], float] = time.time,
    log: CommitLog | None = None,
) -> Commit | None:
    """Commit a checkpoint if all parts are there; None: some part is missing yet. `log`: one that was read before.

    Raises what `gather`, `assemble` and `CommitLog.commit` raise.
    """
    sidecars = gather(store, run_id, checkpoint_id, writers)
    if sidecars is None:
        return None
    manifest = assemble(sidecars, run_id=run_id, nodes=nodes, created_at=clock())
    return (log or CommitLog(store, run_id, clock)).commit(manifest, writer)


def _sidecar(files: Sequence[FileEntry], packs: Sequence[PackEntry], **fields: Any) -> Sidecar:
    try:
        return Sidecar(files=tuple(files), packs=tuple(packs), **fields)
    except ValidationError as error:
        raise Unkeepable(f"the checkpoint cannot be kept: {first_problem(error)}") from error


def _publish(store: Store, run_id: str, made: Sidecar) -> Sidecar:
    """Writes the sidecar, which makes the part whole; the one that stands is believed, no answer."""
    data = to_bytes(made)
    if len(data) > MAX_DOCUMENT_BYTES:  # nobody could read it
        raise Unkeepable(
            f"{made.checkpoint_id} cannot be kept: its list of files is too long. Write fewer, larger ones."
        )
    try:
        if store.put_if_absent(keys.sidecar(run_id, made.checkpoint_id, made.node), data):
            return made
    except Ambiguous:
        pass
    standing = _read_sidecar(store, run_id, made.checkpoint_id, made.node)
    if standing is None:
        raise Unavailable(f"the sidecar of {made.checkpoint_id}, node {made.node}, did not arrive. Upload it again.")
    return _same(standing, made)


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
    if (standing.files, standing.packs) != (made.files, made.packs):
        raise StoreError(f"{made.checkpoint_id}, node {made.node}, is in the store already, with other content")
    return standing


def _check_there(store: Store, run_id: str, checkpoint_id: str, sidecars: Sequence[Sidecar]) -> None:
    """Every object that the sidecars speak of is in the store. One listing for all. Raises Damaged."""
    there = {stat.key: stat.size for stat in store.list(keys.checkpoint(run_id, checkpoint_id))}
    for stored in (stored for sidecar in sidecars for stored in objects(run_id, sidecar)):
        if there.get(stored.key) != stored.size:
            found = f"has {there[stored.key]} bytes" if stored.key in there else "is missing"
            raise Damaged(f"{stored.named} {found}; the sidecar says {stored.size} bytes")
