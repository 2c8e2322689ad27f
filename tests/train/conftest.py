"""A run's checkpoints in a folder store, and a store that fails when it is told to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.checkpoint.manifest import CheckpointEntry, Sidecar, checkpoint_id
from mgpu_train.checkpoint.upload import commit_when_complete, upload_part
from mgpu_train.store import Stat, Store, open_store

RUN = "run-1"
Hook = Callable[[str, str], None]


def _nothing(_operation: str, _key: str) -> None:
    pass


@dataclass
class FaultyStore:
    """Passes everything on; `before` and `after` see (operation, key) and may raise: undone, or done and not told."""

    inner: Store
    before: Hook = _nothing
    after: Hook = _nothing
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.inner.url

    def _pass(self, operation: str, key: str, *rest: Any, **named: Any) -> Any:
        self.calls.append((operation, key))
        self.before(operation, key)
        result = getattr(self.inner, operation)(key, *rest, **named)
        self.after(operation, key)
        return result

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._pass("put_if_absent", key, data)

    def put(self, key: str, data: bytes) -> None:
        self._pass("put", key, data)

    def put_file(self, key: str, path: Path) -> Stat:
        return self._pass("put_file", key, path)

    def get(self, key: str, limit: int) -> bytes:
        return self._pass("get", key, limit)

    def get_file(self, key: str, path: Path, *, size: int, crc64nvme: str) -> None:
        self._pass("get_file", key, path, size=size, crc64nvme=crc64nvme)

    def checksum(self, key: str, size: int) -> str:
        return self._pass("checksum", key, size)

    def stat(self, key: str) -> Stat | None:
        return self._pass("stat", key)

    def list(self, prefix: str) -> Iterator[Stat]:
        return self._pass("list", prefix)

    def delete(self, key: str) -> None:
        self._pass("delete", key)

    def sweep(self, prefix: str, dead: Callable[[str], bool]) -> int:
        return self._pass("sweep", prefix, dead)


@dataclass
class Run:
    """One run on two nodes whose checkpoints go into a folder store."""

    tmp: Path
    nodes: int = 2

    def __post_init__(self) -> None:
        self.root = self.tmp / "store"
        self.plain = open_store(f"file://{self.root}")
        self.store = FaultyStore(self.plain)
        self.run_id = RUN

    @property
    def log(self) -> CommitLog:
        return CommitLog(self.store, RUN)

    def begin(self, attempt: int) -> None:
        self.log.begin_attempt(attempt, f"writer-{attempt}")

    def folder(self, node: int, step: int, attempt: int = 1) -> Path:
        """The node's local checkpoint; made when it is not there."""
        folder = self.tmp / f"attempt-{attempt}" / f"node-{node}" / f"step-{step}"
        if not folder.exists():
            (folder / "sub").mkdir(parents=True)
            (folder / f"__{node}_0.distcp").write_bytes(os.urandom(3000))
            (folder / "sub" / f"{node}.txt").write_text(f"node {node}, step {step}")
            if node == 0:
                (folder / ".metadata").write_bytes(b"meta %d" % step)
        return folder

    def upload(self, node: int, step: int, attempt: int = 1) -> Sidecar:
        return upload_part(
            self.store,
            RUN,
            checkpoint_id(attempt, step),
            folder=self.folder(node, step, attempt),
            attempt=attempt,
            node=node,
            step=step,
            world_size=self.nodes,
            meta={"loss": 2.5, "step": step, "by": "test"},
        )

    def commit(self, step: int, attempt: int = 1) -> CheckpointEntry | None:
        return commit_when_complete(
            self.store,
            RUN,
            checkpoint_id(attempt, step),
            writers=range(self.nodes),
            nodes=self.nodes,
            writer=f"writer-{attempt}",
        )

    def save(self, step: int, attempt: int = 1) -> CheckpointEntry:
        """A whole committed checkpoint."""
        for node in range(self.nodes):
            self.upload(node, step, attempt)
        entry = self.commit(step, attempt)
        assert entry is not None
        return entry

    def path(self, entry: CheckpointEntry, index: int = 0) -> Path:
        """Where a file of a checkpoint lies in the store."""
        file, name = entry.manifest.files[index], entry.manifest.checkpoint_id
        return self.root / RUN / "checkpoints" / name / f"node-{file.node}" / file.path

    def commit_path(self, seq: int) -> Path:
        return self.root / RUN / "commits" / f"{seq:08d}.json"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose first attempt has begun."""
    made = Run(tmp_path)
    made.begin(1)
    return made


@pytest.fixture
def damage() -> dict[str, Callable[[Path], None]]:
    """What may happen to a file in the store, by name (F28)."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)

    return {
        "missing": Path.unlink,
        "flipped": flip,
        "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
        "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
        "zero-filled": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    }
