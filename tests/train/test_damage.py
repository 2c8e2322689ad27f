"""The damage table (F28, F29, F52) on real files: whatever happens to a checkpoint at rest, in a folder or on an S3
server, in an object of its own or in a pack, it is noticed before anything of it is parsed, it is told, the bad one is
left as it is, and what was saved before is used.
"""

from __future__ import annotations

import json
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from fakes import gateway
from mgpu_train.checkpoint.log import keys
from mgpu_train.checkpoint.log.commit_log import CommitLog
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.log.manifest import checkpoint_id
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.transfer.fetch import fetch
from mgpu_train.checkpoint.transfer.upload import commit_when_complete, upload_part
from mgpu_train.checkpoint.transfer.verify import verify
from mgpu_train.store import Damaged, NotFound, Store, StoreError, open_store

BUCKET = "damaged"
OWN = 3000  # bytes of a file that is an object of its own here
BULK = (9 << 20) + 7  # ... of one that also travels in parts


@dataclass
class Shelf:
    """A store of a test's own, and its objects as a disk, or somebody else, may change them."""

    kind: str
    store: Store
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], None]


@pytest.fixture(scope="module")
def servers(require, tmp_path_factory) -> Iterator[Callable[[str], Shelf]]:
    """A bucket on a server of this kind, which is started when the first test asks for it."""
    started: dict[str, Shelf] = {}
    with ExitStack() as stack:

        def shelf(kind: str) -> Shelf:
            if kind not in started:
                started[kind] = _moto(stack, require) if kind == "moto" else _gateway(stack, require, tmp_path_factory)
            return started[kind]

        yield shelf


def _moto(stack, require) -> Shelf:
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        require("s3", False, f"moto is not installed: {error}")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    stack.callback(server.stop)
    host, port = server.get_host_and_port()
    env = {**gateway.ACCESS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    client = _bucket(env)

    def read(key: str) -> bytes:
        return client.get_object(Bucket=BUCKET, Key=f"runs/{key}")["Body"].read()

    def write(key: str, data: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=f"runs/{key}", Body=data)

    return Shelf("moto", open_store(f"s3://{BUCKET}/runs", env), read, write)


def _gateway(stack, require, tmp_path_factory) -> Shelf:
    program = gateway.program()
    require("versitygw", program is not None, "versitygw is not built: scripts/setup-go-tools.sh versitygw")
    folder = tmp_path_factory.mktemp("versitygw")
    env = stack.enter_context(gateway.serving(str(program), folder))
    _bucket(env)
    return _on_disk("versitygw", open_store(f"s3://{BUCKET}/runs", env), folder / BUCKET / "runs")


def _bucket(env: Mapping[str, str]) -> Any:
    client = boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region_name=env["AWS_REGION"],
    )
    client.create_bucket(Bucket=BUCKET)
    return client


DRAWN = pytest.mark.drawn("stores x damage", "train/mgpu_train/checkpoint", "train/mgpu_train/store")


@pytest.fixture(params=[pytest.param(kind, marks=DRAWN) for kind in ("file", "moto", "versitygw")])
def shelf(request, servers, tmp_path) -> Shelf:
    if request.param == "file":
        return _on_disk("file", open_store(f"file://{tmp_path}/store"), tmp_path / "store")
    return servers(request.param)


def _on_disk(kind: str, store: Store, root: Path) -> Shelf:
    """Written in place: what a server notes beside a file, its checksum too, stays as it was."""

    def write(key: str, data: bytes) -> None:
        with (root / key).open("r+b") as file:
            file.truncate(len(data))
            file.write(data)

    return Shelf(kind, store, read=lambda key: (root / key).read_bytes(), write=write)


@dataclass
class Case:
    """A run of two nodes on a shelf; of 100 bytes on, a file is an object, and a pack holds at most 150 bytes."""

    shelf: Shelf
    tmp: Path
    run: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:16]}")

    def __post_init__(self) -> None:
        self.store = self.shelf.store
        self.log.begin_attempt(1, "w")

    @property
    def log(self) -> CommitLog:
        return CommitLog(self.store, self.run)

    def key(self, name: str, step: int = 20) -> str:
        return keys.checkpoint(self.run, checkpoint_id(1, step)) + name

    def upload(self, step: int, *, large: int = OWN, nodes: int = 2) -> None:
        for node in range(nodes):
            folder = self.tmp / f"node-{node}" / f"step-{step}"
            (folder / "sub").mkdir(parents=True)
            for name, size in {f"__{node}_0.distcp": large, ".metadata": 90 * (node == 0), f"sub/{node}": 80}.items():
                if size:
                    (folder / name).write_bytes(os.urandom(size))
            name = checkpoint_id(1, step)
            upload_part(
                self.store,
                self.run,
                name,
                folder=folder,
                attempt=1,
                node=node,
                step=step,
                world_size=nodes,
                meta={"n": 1},
            )

    def commit(self, step: int, *, nodes: int = 2) -> Commit:
        name = checkpoint_id(1, step)
        made = commit_when_complete(self.store, self.run, name, writers=range(nodes), nodes=nodes, writer="w")
        assert made is not None
        return made

    def save(self, step: int, **how: int) -> Commit:
        self.upload(step, **how)
        return self.commit(step)

    def saved(self, step: int) -> dict[str, bytes]:
        return {name: data for node in (0, 1) for name, data in content(self.tmp / f"node-{node}/step-{step}").items()}

    def problems(self, commit: Commit, *, deep: bool) -> tuple[str, ...]:
        return verify(self.store, self.run, self.log.manifest(commit), deep=deep)

    def newest(self, *, deep: bool = True) -> tuple[Commit | None, list[str]]:
        said: list[str] = []
        return newest_verified(self.store, self.run, deep=deep, report=said.append), said

    def fetch(self, commit: Commit) -> dict[str, bytes]:
        fetch(self.store, self.run, self.log.manifest(commit), self.tmp / "resume", durable=False)
        return content(self.tmp / "resume")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def case(shelf, tmp_path, monkeypatch) -> Case:
    monkeypatch.setattr("mgpu_train.checkpoint.transfer.pack.SMALL_BYTES", 100)
    monkeypatch.setattr("mgpu_train.checkpoint.transfer.pack.MAX_PACK_BYTES", 150)
    return Case(shelf, tmp_path)


OBJECTS = {"shard": "node-0/__0_0.distcp", "metadata": "node-0.pack-0", "pack": "node-1.pack-0"}


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x10]) + data[len(data) // 2 + 1 :]


def hole(data: bytes) -> bytes:
    return data[:10] + bytes(len(data) - 20) + data[-10:]


SAME_SIZE = {"flipped": flipped, "hole": hole}
OTHER_SIZE = {"truncated": lambda data: data[:-1], "longer": lambda data: data + b"\0"}
DAMAGE = SAME_SIZE | OTHER_SIZE


# --- objects of a checkpoint ------------------------------------------------------------------------------------------


def is_noticed(case: Case, bad: Commit, good: Commit, name: str) -> None:
    """By reading, before anything has its name: only this one, told by its key; what was saved before is used."""
    (problem,) = case.problems(bad, deep=True)
    assert case.key(name) in problem
    with pytest.raises((Damaged, NotFound)):
        case.fetch(bad)
    assert not (case.tmp / "resume").exists()
    found, said = case.newest()
    assert found == good
    assert len(said) == 1
    assert "a001-step-20 does not verify" in said[0]
    assert case.fetch(good) == case.saved(10)


@pytest.mark.parametrize("what", OBJECTS)
@pytest.mark.parametrize("how", DAMAGE)
def test_bytes_at_rest_that_changed(case, how, what):
    good, bad = case.save(10), case.save(20)
    name = OBJECTS[what]
    damaged = DAMAGE[how](case.shelf.read(case.key(name)))
    case.shelf.write(case.key(name), damaged)
    assert bool(case.problems(bad, deep=False)) == (how in OTHER_SIZE), "sizes are compared without reading"
    is_noticed(case, bad, good, name)
    assert case.shelf.read(case.key(name)) == damaged, "the bad one is left as it is"


@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_that_is_missing(case, what):
    good, bad = case.save(10), case.save(20)
    name = OBJECTS[what]
    case.store.delete(case.key(name))
    (problem,) = case.problems(bad, deep=False)
    assert case.key(name) in problem
    assert "missing" in problem
    is_noticed(case, bad, good, name)


@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_of_another_save_under_this_manifest(case, what):
    """Whole, of the right size, and written through the store: only its checksum says that it is another one."""
    good, bad = case.save(10), case.save(20)
    name = OBJECTS[what]
    case.store.put(case.key(name), case.shelf.read(case.key(name, step=10)))
    assert bool(case.problems(bad, deep=False)) == (case.shelf.kind != "file"), "an S3 server keeps a checksum"
    is_noticed(case, bad, good, name)


def test_packs_that_changed_places(case):
    good, bad = case.save(10), case.save(20)
    first, second = case.key("node-0.pack-1"), case.key("node-1.pack-0")
    data = [case.shelf.read(first), case.shelf.read(second)]
    assert len(data[0]) == len(data[1]) == 80
    case.shelf.write(first, data[1])
    case.shelf.write(second, data[0])
    problems = case.problems(bad, deep=True)
    assert [first in problems[0], second in problems[1]] == [True, True]
    assert len(problems) == 2
    with pytest.raises(Damaged):
        case.fetch(bad)
    assert case.newest()[0] == good


@pytest.mark.parametrize("how", SAME_SIZE)
def test_a_large_object_that_is_read_in_parts(case, how):
    """No range of an object carries a checksum of its own: it is ours that notices."""
    good = case.save(10)
    bad = case.save(20, large=BULK)
    name = OBJECTS["shard"]
    case.shelf.write(case.key(name), SAME_SIZE[how](case.shelf.read(case.key(name))))
    is_noticed(case, bad, good, name)


def test_the_newest_three_are_damaged_and_the_fourth_is_used(case):
    """F29"""
    good, *bad = (case.save(step) for step in (10, 20, 30, 40))
    case.shelf.write(case.key("node-0.pack-0", 20), flipped(case.shelf.read(case.key("node-0.pack-0", 20))))
    case.store.delete(case.key("node-1/__1_0.distcp", 30))
    case.shelf.write(case.key("node-0/__0_0.distcp", 40), b"")
    found, said = case.newest()
    assert found == good
    assert [line.split(" ")[0] for line in said] == [commit.checkpoint_id for commit in reversed(bad)]


def test_a_payload_in_a_file_is_not_run(case):
    """Whoever can write into the store writes a pickle that would start a program; nobody parses what differs."""
    good, bad = case.save(10), case.save(20)
    started = case.tmp / "started"

    class Payload:
        def __reduce__(self):
            return Path.touch, (started,)

    for name in OBJECTS.values():
        data = pickle.dumps(Payload())
        case.shelf.write(case.key(name), data.ljust(len(case.shelf.read(case.key(name))), b"\0"))
    with pytest.raises(Damaged):
        case.fetch(bad)
    assert case.fetch(case.newest()[0]) == case.saved(10)
    assert case.newest()[0] == good
    assert not started.exists()


# --- sidecars, manifests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flipped", "hole", "truncated"])
def test_a_sidecar_that_changed_is_not_committed(case, how):
    good = case.save(10)
    case.upload(20)
    sidecar = case.key("node-1.json")
    case.shelf.write(sidecar, DAMAGE[how](case.shelf.read(sidecar)))
    with pytest.raises(StoreError):
        case.commit(20)
    assert case.newest() == (good, [])


def test_a_sidecar_of_the_other_node_is_not_committed(case):
    case.save(10)
    case.upload(20)
    case.store.put(case.key("node-1.json"), case.shelf.read(case.key("node-0.json")))
    with pytest.raises(Damaged, match="of another part"):
        case.commit(20)


@pytest.mark.parametrize("how", ["flipped", "hole", "truncated"])
def test_a_manifest_that_changed_is_told_and_the_one_before_is_used(case, how):
    good, bad = case.save(10), case.save(20)
    entry = keys.commit(case.run, bad.seq)
    damaged = DAMAGE[how](case.shelf.read(entry))
    case.shelf.write(entry, damaged)
    with pytest.raises((Damaged, NotFound)):
        case.log.manifest(bad)
    found, said = case.newest()
    assert found == good
    assert len(said) == 1
    assert f"{bad.seq}" in said[0].split(";")[0]
    assert case.shelf.read(entry) == damaged


def test_a_manifest_of_another_run_is_refused(case):
    """F52: word for word a good one, with checksums that fit."""
    good, bad = case.save(10), case.save(20)
    stolen = json.loads(case.shelf.read(keys.commit(case.run, bad.seq)))
    other = case.log.manifest(bad).model_copy(update={"run_id": "another-run"})
    stolen |= {"manifest": json.loads(other.model_dump_json()), "manifest_sha256": other.sha256()}
    case.store.put(keys.commit(case.run, bad.seq), json.dumps(stolen).encode())
    with pytest.raises(Damaged):
        case.log.manifest(bad)
    assert case.newest()[0] == good
    with pytest.raises(Damaged, match=f"of run another-run, not of {case.run}"):
        fetch(case.store, case.run, other, case.tmp / "resume")
    assert verify(case.store, case.run, other, deep=True) == (f"the manifest is of run another-run, not of {case.run}",)


def test_a_manifest_of_the_old_format_is_refused_with_what_to_do(case):
    """F52"""
    good, bad = case.save(10), case.save(20)
    old = json.loads(case.shelf.read(keys.commit(case.run, bad.seq)))
    old["manifest"]["version"] = 1
    case.store.put(keys.commit(case.run, bad.seq), json.dumps(old).encode())
    found, said = case.newest()
    assert found == good
    assert "format 1, and this mgpu reads format 2 alone. Use the older mgpu that wrote it" in said[0]


def test_files_of_another_world_size_are_no_part_of_a_checkpoint(case):
    """F52: what eight ranks left in the store, on this disk and in the resume folder itself, under the same names."""
    good = case.save(10)
    for name in ("node-0/__7_0.distcp", "node-0.pack-9", "node-7.json"):
        case.store.put(case.key(name, 10), b"stale")
    for folder in (case.tmp / "node-0/step-10", case.tmp / "resume"):
        folder.mkdir(exist_ok=True)
        (folder / "__7_0.distcp").write_bytes(b"stale")
    (case.tmp / "resume" / "__0_0.distcp").write_bytes(bytes(OWN))
    manifest = case.log.manifest(good)
    fetch(case.store, case.run, manifest, case.tmp / "resume", local=[case.tmp / "node-0/step-10"])
    assert content(case.tmp / "resume") == {k: v for k, v in case.saved(10).items() if k != "__7_0.distcp"}
    assert case.newest() == (good, [])


def test_parts_of_two_world_sizes_make_no_checkpoint(case):
    case.upload(20, nodes=1)
    folder = case.tmp / "node-1"
    folder.mkdir()
    (folder / "x").write_bytes(b"x")
    name = checkpoint_id(1, 20)
    upload_part(case.store, case.run, name, folder=folder, attempt=1, node=1, step=20, world_size=8, meta={})
    with pytest.raises(Damaged, match="not of one checkpoint"):
        case.commit(20)
    assert case.log.checkpoints() == []
