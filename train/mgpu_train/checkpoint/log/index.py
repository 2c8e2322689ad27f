"""The index of the commit log: the beginning of it in one object, so that nobody reads 10,000 entries one by one.

It is derived and may go at any time: the log alone is the truth. Its name has its checksum, and who takes it reads at
least its last entry from the log itself. That entry tells the newest attempt, so no index hides one from a writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.lines import Readable
from mgpu_train.checkpoint.log.manifest import FORMAT, MAX_DOCUMENT_BYTES, Document, Seq, to_bytes
from mgpu_train.config import RunId
from mgpu_train.store.base import Damaged, NotFound, Store

EVERY = 64  # entries that are read one by one at most, where nothing is damaged
_KEPT = 2  # the newest, and the one that somebody may be about to read
_TRIED = 4


class Index(Document):
    """Entries 0 to `upto` of a run's commit log, in short: for each checkpoint what is said of it beside its files."""

    version: Literal[2] = FORMAT
    run_id: RunId
    upto: Seq = Field(description="number of the last entry")
    lines: tuple[Annotated[Readable, Field(discriminator="kind")], ...]

    @model_validator(mode="after")
    def _consistent(self) -> Index:
        if [line.seq for line in self.lines] != list(range(self.upto + 1)):
            raise ValueError(f"its lines are not the entries 0 to {self.upto}")
        return self


def load(store: Store, run_id: str) -> Index | None:
    """The newest index that is whole; None: there is none. Raises StoreError when the store cannot be read."""
    for key in _named(store, run_id)[: -_TRIED - 1 : -1]:
        try:
            return _read(store, run_id, key)
        except (NotFound, Damaged):  # somebody has tidied up, or a disk is bad: another one, or none
            continue
    return None


def save(store: Store, run_id: str, lines: Sequence[Readable]) -> None:
    """Write the index of the entries 0, 1, 2, ... and remove those that nobody needs any more. Raises StoreError."""
    data = to_bytes(Index(run_id=run_id, upto=len(lines) - 1, lines=tuple(lines)))
    if len(data) > MAX_DOCUMENT_BYTES:  # an earlier one goes on to serve
        return
    store.put(keys.index(run_id, len(lines) - 1, _digest(data)), data)
    for key in _named(store, run_id)[:-_KEPT]:
        store.delete(key)


def _named(store: Store, run_id: str) -> list[str]:
    """The keys of all indexes, the one with the most entries last."""
    return [stat.key for stat in store.list(keys.indexes(run_id)) if keys.index_of(stat.key)]


def _read(store: Store, run_id: str, key: str) -> Index:
    data, named = store.get(key, MAX_DOCUMENT_BYTES), keys.index_of(key)
    try:
        index = Index.model_validate_json(data)
    except ValidationError as error:
        raise Damaged(f"{key} is no index") from error
    if named != (index.upto, _digest(data)) or index.run_id != run_id:
        raise Damaged(f"{key} is not what its name says")
    return index


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
