"""What the commit log says, in short: its entries without their lists of files, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as checked

from mgpu_train.checkpoint.log.manifest import (
    MAX_FILES,
    STRICT,
    Attempt,
    AttemptEntry,
    CheckpointEntry,
    CheckpointId,
    EndEntry,
    Entry,
    Meta,
    PrunedEntry,
    Seconds,
    Seq,
    Step,
    SupervisorEntry,
    Token,
    build_checks,
    checkpoint_id,
)


@checked(frozen=True, slots=True, kw_only=True, config=STRICT)
class Commit:
    """A committed checkpoint; its manifest, which may have 100,000 files, is read by `CommitLog.manifest`.

    A run may have thousands, all of them in memory: a Document takes three times as much.
    """

    kind: Literal["checkpoint"] = "checkpoint"
    seq: Seq = Field(description="number of its entry in the log")
    attempt: Attempt
    writer: Token = Field(description="token of who committed it")
    at: Seconds
    checkpoint_id: CheckpointId
    step: Step = Field(description="optimizer steps done")
    nodes: int = Field(ge=1, description="nodes of the attempt")
    world_size: int = Field(ge=1, description="processes of all nodes")
    files: int = Field(ge=1, le=MAX_FILES, description="how many files it has")
    bytes: int = Field(ge=0, description="size of all of them together")
    meta: Meta = Field(default_factory=dict, description="node 0's")
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _consistent(self) -> Commit:
        if self.checkpoint_id != checkpoint_id(self.attempt, self.step):
            raise ValueError(f"{self.checkpoint_id} is not the id of attempt {self.attempt}, step {self.step}")
        return self


@dataclass(frozen=True)
class Unreadable:
    """A number of the log whose entry is missing or damaged."""

    seq: int
    problem: str


Readable = AttemptEntry | Commit | PrunedEntry | SupervisorEntry | EndEntry
Line = Readable | Unreadable
L = TypeVar("L", bound=Readable)


def in_short(entry: Entry) -> Readable:
    """The line of an entry."""
    return commit_of(entry) if isinstance(entry, CheckpointEntry) else entry


def commit_of(entry: CheckpointEntry) -> Commit:
    """A checkpoint's entry without its list of files."""
    build_checks(Commit)
    manifest = entry.manifest
    return Commit(
        seq=entry.seq,
        attempt=entry.attempt,
        writer=entry.writer,
        at=entry.at,
        checkpoint_id=manifest.checkpoint_id,
        step=manifest.step,
        nodes=manifest.nodes,
        world_size=manifest.world_size,
        files=len(manifest.files),
        bytes=manifest.bytes,
        meta=manifest.meta,
        manifest_sha256=entry.manifest_sha256,
    )


def standing(log: Iterable[Line]) -> list[Commit]:
    """The checkpoints of a log that were not given up, newest first; a stale attempt's commit is none."""
    found: list[Commit] = []
    pruned: set[str] = set()
    newest = 0
    for line in log:
        if isinstance(line, Commit) and line.attempt >= newest:
            found.append(line)
        elif isinstance(line, PrunedEntry):
            pruned.update(line.checkpoint_ids)
        newest = max(newest, 0 if isinstance(line, Unreadable) else line.attempt)
    return [line for line in reversed(found) if line.checkpoint_id not in pruned]


def damaged(log: Iterable[Line]) -> bool:
    """True when a line of it cannot be read."""
    return any(isinstance(line, Unreadable) for line in log)


def newest(log: Iterable[Line], kind: type[L]) -> L | None:
    """The newest line of a kind; None: there is none."""
    found: L | None = None
    for line in log:
        found = line if isinstance(line, kind) else found
    return found


def newest_attempt(log: Iterable[Line]) -> int:
    """The newest attempt that a line speaks of; 0: none."""
    return max((line.attempt for line in log if not isinstance(line, Unreadable)), default=0)


def end_of(log: Iterable[Line], attempt: int) -> EndEntry | None:
    """How an attempt ended, by its own word; None: it has said nothing."""
    return next((line for line in log if isinstance(line, EndEntry) and line.attempt == attempt), None)
