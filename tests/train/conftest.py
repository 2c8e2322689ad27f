"""A run's checkpoints in a folder store, a store that fails when it is told to, and nodes with real agents."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ranks
from fakes.nodes import Node
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.log.manifest import Manifest, Sidecar, checkpoint_id
from mgpu_train.checkpoint.transfer.pack import objects
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.store import Progress, Stat, Store, open_store

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

    def get_file(self, key: str, path: Path, *, size: int, crc64nvme: str, progress: Progress | None = None) -> None:
        self._pass("get_file", key, path, size=size, crc64nvme=crc64nvme, progress=progress)

    def forget(self, key: str) -> None:
        self._pass("forget", key)

    def checksum(self, key: str, size: int, progress: Progress | None = None) -> str:
        return self._pass("checksum", key, size, progress)

    def stat(self, key: str) -> Stat | None:
        return self._pass("stat", key)

    def list(self, prefix: str, after: str = "") -> Iterator[Stat]:
        return self._pass("list", prefix, after)

    def delete(self, key: str) -> None:
        self._pass("delete", key)

    def may_delete(self, prefix: str) -> None:
        self._pass("may_delete", prefix)

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

    def commit(self, step: int, attempt: int = 1) -> Commit | None:
        return commit_when_complete(
            self.store,
            RUN,
            checkpoint_id(attempt, step),
            writers=range(self.nodes),
            nodes=self.nodes,
            writer=f"writer-{attempt}",
        )

    def save(self, step: int, attempt: int = 1) -> Commit:
        """A whole committed checkpoint."""
        for node in range(self.nodes):
            self.upload(node, step, attempt)
        entry = self.commit(step, attempt)
        assert entry is not None
        return entry

    def manifest(self, commit: Commit) -> Manifest:
        return CommitLog(self.plain, RUN).manifest(commit)

    def path(self, entry: Commit, index: int = 0) -> Path:
        """The object of the store that holds a file of a checkpoint, alone or with others."""
        manifest = self.manifest(entry)
        file = manifest.files[index]
        return self.root / next(each.key for each in objects(RUN, manifest) if file in each.files)

    def commit_path(self, seq: int) -> Path:
        return self.root / RUN / "commits" / f"{seq:08d}.json"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose first attempt has begun; of a checkpoint's files, those of more than 100 bytes are not packed."""
    monkeypatch.setattr("mgpu_train.checkpoint.transfer.pack.SMALL_BYTES", 100)
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


# --- the trainer's checkpoints ----------------------------------------------------------------------------------------


def _contents(checkpoint: Path, aside: Path) -> dict[str, Any]:
    """Everything in a checkpoint, flat: the model, both moments, the counts, the random states."""
    import torch  # seconds, which only the trainer's tests have to wait for
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint, aside)
    return dict(_flat(torch.load(aside, weights_only=False)))


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield at, value
    else:
        for key, inner in items:
            yield from _flat(inner, f"{at}/{key}")


@pytest.fixture
def same_bits(tmp_path: Path) -> Callable[..., None]:
    """`same_bits(one, other)` fails unless two checkpoints of the trainer are equal bit for bit, in all that they hold;
    `but`: not in what begins as this pattern says."""

    def check(one: Path, other: Path, but: str = "", more_than: int = 30) -> None:
        import torch

        ones, others = (
            {
                key: value
                for key, value in _contents(folder, tmp_path / f"{name}.pt").items()
                if not (but and re.match(but, key))
            }
            for name, folder in (("a", one), ("b", other))
        )
        assert ones.keys() == others.keys()
        assert sum(isinstance(value, torch.Tensor) for value in ones.values()) > more_than
        for key, value in ones.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == others[key].dtype, key
                assert torch.equal(value, others[key]), key
            else:
                assert value == others[key], key

    return check


@dataclass(frozen=True)
class Trained:
    """One training: its folder, and the lines of metrics of its ranks."""

    home: Path
    ranks: list[list[dict[str, Any]]]

    def of(self, kind: str, key: str, rank: int = 0) -> list[Any]:
        """What all lines of this kind say."""
        return [line[key] for line in self.ranks[rank] if line["kind"] == kind]

    @property
    def metrics(self) -> set[str]:
        """Names of all that a run file may expect of it."""
        of_lines = {"kind", "t", "attempt", "steps", "world_size", "resumed_step", "step"}
        names = {"validation_step"}
        for line in self.ranks[0]:
            first = {"validation": ("validation_", "first_validation_"), "start": ("",), "step": ("",)}
            names |= {f"{each}{name}" for each in first.get(line["kind"], ()) for name in line.keys() - of_lines}
        return names


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Trained]:
    """`train(name, count, resume, **settings)` trains once a name, with the module's `SMALL` settings and these, on so
    many ranks; `resume`: from step 3 of the training of this name."""
    program, out = Path(__file__).with_name("products.py"), tmp_path_factory.mktemp("trained")

    def run(name: str, count: int = 1, resume: str = "", **settings: Any) -> Trained:
        home = out / name
        if not home.exists():
            given = {**request.module.SMALL, "strategy": "ddp" if count > 1 else "single", **settings}
            said = out / f"{name}.said"
            arguments = [out, name, count, json.dumps(given), resume]
            assert ranks.start(program, arguments, said, os.environ).wait() == 0, said.read_text()
        files = sorted((home / "metrics").glob("rank-*.jsonl"))
        return Trained(home, [[json.loads(line) for line in path.read_text().splitlines()] for path in files])

    return run


# --- nodes with real agents -------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], list[Node]]]:
    """`nodes(2)` makes so many; whatever still runs on them at the end is killed."""
    made: list[Node] = []

    def make(count: int) -> list[Node]:
        made.extend(Node(tmp_path / f"home-{rank}", tmp_path / "store", rank, count) for rank in range(count))
        return made

    (tmp_path / "store").mkdir()
    yield make
    for node in made:
        node.kill()


@pytest.fixture
def node(nodes: Callable[[int], list[Node]]) -> Node:
    return nodes(1)[0]
