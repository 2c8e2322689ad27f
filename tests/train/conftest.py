"""A run's checkpoints in a folder store, a store that fails when it is told to, and nodes with real agents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent import procs
from mgpu_train.checkpoint.commitlog import CommitLog
from mgpu_train.checkpoint.lines import Commit
from mgpu_train.checkpoint.manifest import Manifest, Sidecar, checkpoint_id
from mgpu_train.checkpoint.pack import objects
from mgpu_train.checkpoint.upload import commit_when_complete, upload_part
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

    def checksum(self, key: str, size: int, progress: Progress | None = None) -> str:
        return self._pass("checksum", key, size, progress)

    def stat(self, key: str) -> Stat | None:
        return self._pass("stat", key)

    def list(self, prefix: str, after: str = "") -> Iterator[Stat]:
        return self._pass("list", prefix, after)

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
    monkeypatch.setattr("mgpu_train.checkpoint.pack.SMALL_BYTES", 100)
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
def same_bits(tmp_path: Path) -> Callable[[Path, Path], None]:
    """`same_bits(one, other)` fails unless two checkpoints of the trainer are equal bit for bit, in all they hold."""

    def check(one: Path, other: Path) -> None:
        import torch

        ones, others = (_contents(folder, tmp_path / f"{name}.pt") for name, folder in (("a", one), ("b", other)))
        assert ones.keys() == others.keys()
        assert sum(isinstance(value, torch.Tensor) for value in ones.values()) > 30
        for key, value in ones.items():
            same = torch.equal(value, others[key]) if isinstance(value, torch.Tensor) else value == others[key]
            assert same, key

    return check


# --- nodes with real agents -------------------------------------------------------------------------------------------

TIMES = {"poll_s": 0.05, "peers_s": 10, "drain_s": 30, "stop_grace_s": 20, "lease_renew_s": 0.2, "command_s": 30}
SAVING = """
import json, os, pathlib, time
def save(step, data=b"weights"):
    folder = pathlib.Path(os.environ["MGPU_CHECKPOINT_DIR"])
    aside = folder / f".tmp-{step}"
    aside.mkdir()
    (aside / f"node-{os.environ['MGPU_NODE_RANK']}.bin").write_bytes(data * 100)
    aside.rename(folder / f"step-{step}")
def metric(kind, **values):
    with open(os.environ["MGPU_METRICS_DIR"] + "/rank-0.jsonl", "a") as file:
        print(json.dumps({"kind": kind, "t": time.time(), **values}), file=file)
"""


class Node:
    """One node: a home folder, and the operator's commands as it would call them over SSH."""

    def __init__(self, home: Path, store: Path, rank: int = 0, nodes: int = 1) -> None:
        self.home, self.store, self.rank, self.nodes = home, store, rank, nodes
        self.run = home / "runs" / "r"
        (self.run / "work").mkdir(parents=True)
        (self.run / "work" / "saving.py").write_text(SAVING)
        (home / ".mgpu").mkdir()
        self.env = {**os.environ, "HOME": str(home), "AWS_SECRET_ACCESS_KEY": "of the node"}

    def program(self, text: str) -> None:
        (self.run / "work" / "prog.py").write_text(text)

    def job(self, **changes: Any) -> None:
        times = {**TIMES, **changes.pop("timeouts", {})}
        base = {
            "run_id": "r",
            "attempt": 1,
            "writer": "writer-1",
            "node_rank": self.rank,
            "nodes": self.nodes,
            "processes_per_node": 1,
            "master_addr": "127.0.0.1",
            "master_port": 29999,
            "launcher": "python",
            "command": ["prog.py"],
            "workdir": "runs/r/work",
            "checkpoint": {"to": f"file://{self.store}", "every_steps": 1, "writers": "all"},
            "lease_file": ".mgpu/lease",
            "notice_file": ".mgpu/notice.json",
            "timeouts": times,
        }
        job = {**base, **changes}
        (self.run / "job.json").write_text(json.dumps(job))
        if job["checkpoint"] and not self.rank:  # as the operator does
            self.commit_log.begin_attempt(job["attempt"], job["writer"])

    @property
    def commit_log(self) -> CommitLog:
        return CommitLog(open_store(f"file://{self.store}"), "r")

    @property
    def commits(self) -> list[int]:
        """Committed steps, newest first."""
        return [entry.step for entry in self.commit_log.checkpoints()]

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "mgpu_train", "agent", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.home, env=self.env, stdin=pipe, stdout=pipe, stderr=pipe)

    def call(self, *arguments: str, stdin: dict[str, Any] | bytes = b"", code: int = 0) -> dict[str, Any]:
        """Runs one agent command; returns its answer, or its one line of error."""
        process = self.popen(*arguments)
        out, err = process.communicate(stdin if isinstance(stdin, bytes) else json.dumps(stdin).encode(), timeout=60)
        assert process.returncode == code, (out, err)
        return json.loads(out) if code == 0 else {"error": err.decode()}

    def start(self, secrets: dict[str, Any] | None = None, code: int = 0) -> dict[str, Any]:
        return self.call("start", "--job", "runs/r/job.json", stdin=secrets or {}, code=code)

    def stop(self, *options: str) -> dict[str, Any]:
        return self.call("stop", "--run", "r", *options)

    def status(self) -> dict[str, Any]:
        return self.call("status", "--run", "r")

    def notice(self, left_s: float, action: str = "terminate") -> None:
        """Warns as a host does: whole or not at all."""
        moment = datetime.fromtimestamp(time.time() + left_s, UTC).isoformat()
        aside = self.home / ".mgpu" / "notice.new"
        aside.write_text(json.dumps({"action": action, "time": moment}))
        aside.replace(self.home / ".mgpu" / "notice.json")

    @property
    def said(self) -> dict[str, Any]:
        return json.loads((self.run / "status.json").read_text())

    @property
    def log(self) -> str:
        return (self.run / "log").read_text(errors="replace")

    @property
    def processes(self) -> list[procs.Process]:
        return procs.carrying(f"MGPU_CHECKPOINT_DIR={self.run / 'checkpoints'}")

    def until(self, condition: Callable[[], Any], deadline_s: float = 60) -> Any:
        end = time.monotonic() + deadline_s
        while not (result := condition()):
            assert time.monotonic() < end, f"it did not happen in time: {self.log}"
            time.sleep(0.03)
        return result

    def ended(self) -> dict[str, Any]:
        """The final status; the agent and everything it started has ended."""
        status = self.until(lambda: self.said if self.said["phase"] in ("done", "failed") else None)
        agent = json.loads((self.run / "agent.json").read_text())["process"]
        self.until(lambda: not procs.Process(**agent).alive)
        assert self.processes == []
        return status


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
        if (node.run / "agent.json").exists():
            procs.Process(**json.loads((node.run / "agent.json").read_text())["process"]).send(signal.SIGKILL)
        procs.kill_all(lambda node=node: node.processes, 10)


@pytest.fixture
def node(nodes: Callable[[int], list[Node]]) -> Node:
    return nodes(1)[0]
