"""I8: values that nobody but the program may see are looked for everywhere, while machines live and after that.

A canary in `secrets:` and in the exception that a program dies of, in the operator's own environment, in the store's
key, in the user part of the endpoint's URL; and the private SSH key. Looked for in every file of the user's folders,
of the machines' disks and of the engine's, in what the commands print, in the object store, and in the arguments and
environments of all processes, again and again while a run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import pytest

from mgpu import paths
from mgpu.providers.local.procs import MARK

SECRET, OWN, STORE_KEY, URL = ("canary" + name for name in ("5ecret", "unrelated", "st0rekey", "ur1"))
CANARIES = (SECRET, OWN, STORE_KEY, URL)
BUCKET = "canary-bucket"
MACHINES = "local"  # the folder that has the machines' disks
LOOK_S = 0.1
LARGEST = 32 << 20

PROGRAM = """
import os, pathlib, sys, time
assert os.environ["TOKEN"]
root = pathlib.Path(os.environ["MGPU_CHECKPOINT_DIR"])
resume = os.environ.get("MGPU_RESUME_DIR")
first = int(pathlib.Path(resume, "weights").read_text()) if resume else 0
for step in range(first + 1, 5):
    time.sleep(float(sys.argv[1]))
    print(f"step {step}", flush=True)
    aside = root / f".tmp-{step}"
    aside.mkdir(parents=True, exist_ok=True)
    (aside / "weights").write_text(str(step))
    aside.rename(root / f"step-{step}")
    if sys.argv[2:] and step == 2:
        raise RuntimeError("cannot log in with " + os.environ["TOKEN"])
"""


@pytest.fixture(scope="module")
def s3(require) -> Iterator[int]:
    """The port of an S3 server with the bucket."""
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        require("s3", False, f"moto is not installed: {error}")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    client(port).create_bucket(Bucket=BUCKET)
    yield port
    server.stop()


def client(port):
    where = f"http://127.0.0.1:{port}"
    return boto3.client(
        "s3", endpoint_url=where, aws_access_key_id="t", aws_secret_access_key="t", region_name="us-east-1"
    )


@dataclass
class Search:
    """Looks at everything of a world, all the time; each finding names the place and the canary."""

    world: object
    found: set[str] = field(default_factory=set)
    key: str = ""  # a line of the private SSH key
    on_nodes: int = 0  # processes seen there
    _known: dict[Path, tuple[int, int, int]] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[Search]:
        """Looks while the block runs, and once more at its end."""
        self._over.clear()
        thread = threading.Thread(target=self._look_on)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()
            self._look()

    def text(self, where: str, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.found |= {f"{name} in {where}" for name in self._names() if name.encode() in data}

    def _names(self) -> tuple[str, ...]:
        return (*CANARIES, self.key) if self.key else CANARIES

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        self._find_key()
        for root in (self.world.root, paths.cache_dir() / "pulumi-home"):
            for folder, _, names in os.walk(root):
                for name in names:
                    self._file(Path(folder, name))
        self._processes()

    def _find_key(self) -> None:
        for path in () if self.key else (self.world.state / "keys").glob("*/*"):
            with contextlib.suppress(OSError):
                if "PRIVATE KEY" in (text := path.read_text()):
                    if path.stat().st_mode & 0o077:
                        self.found.add(f"{path} is open to others")
                    self.key = text.splitlines()[3]

    def _file(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            stat = path.lstat()
            mark = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            fresh = self._known.get(path) != mark and stat.st_size <= LARGEST and not path.is_symlink()
            # the key's own file; and on its machine a log holds what the program itself says
            if not fresh or "keys" in path.parts or not path.is_file():
                return
            self._known[path] = mark
            data = path.read_bytes()
            if path.name == "log" and MACHINES in path.parts:
                data = b"\n".join(line for line in data.splitlines() if not of_the_program(line))
            self.text(str(path), data)

    def _processes(self) -> None:
        mark = f"{MARK}=".encode()
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if not entry.name.isdigit():
                    continue
                environment = Path(entry.path, "environ").read_bytes()
                if os.fsencode(str(self.world.root)) not in environment:
                    continue
                arguments = Path(entry.path, "cmdline").read_bytes()
                if not arguments:
                    continue  # it ended between the two reads: whose environment that was cannot be told
                self.text(f"the arguments of {arguments!r}", arguments)
                if mark not in environment:
                    continue  # the operator's own, and the engine's: their user gave it to them
                self.on_nodes += 1
                if b"train.py" in arguments:
                    environment = environment.replace(f"TOKEN={SECRET}".encode(), b"")
                self.text(f"the environment of {arguments!r}", environment)


def of_the_program(line: bytes) -> bool:
    """The line that the program itself says its secret in."""
    return b"RuntimeError: cannot log in with" in line and b"[agent]" not in line


def world_of(new_world, name, port, command, **more):
    world = new_world(
        name,
        TOKEN=SECRET,
        UNRELATED=OWN,
        AWS_ACCESS_KEY_ID="AKIATESTER",
        AWS_SECRET_ACCESS_KEY=STORE_KEY,
        AWS_REGION="us-east-1",
        AWS_ENDPOINT_URL=f"http://user:{URL}@127.0.0.1:{port}",
        MGPU_TIMEOUTS=json.dumps({"store_connect_s": 2, "store_retry_s": 2}),
    )
    (world.project / "train.py").write_text(PROGRAM)
    world.write(command=command, secrets=["TOKEN"], checkpoint={"to": f"s3://{BUCKET}/runs"}, **more)
    return world


def searched(search, *args, code=0, exact=True):
    """Runs a command and looks at all that it prints."""
    done = search.world.mgpu(*args)
    search.text(f"the output of mgpu {args}", done.stdout + done.stderr)
    assert not exact or done.returncode == code, (args, done.returncode, done.stderr)
    return done


def after(search, run_id, *commands):
    """What tells of a run when it is over."""
    for command in commands:
        searched(search, *command.split(), run_id, exact=False)


def objects(search, port):
    for page in client(port).get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for each in page.get("Contents", ()):
            answer = client(port).get_object(Bucket=BUCKET, Key=each["Key"])
            search.text(f"object {each['Key']}", answer["Body"].read() + json.dumps(answer["Metadata"]).encode())


def clean(search):
    assert search.on_nodes, "it was looked for while the run went on"
    assert search.key, "the private key was seen, so that it could be looked for"
    assert sorted(search.found) == []
    assert search.world.alive() == 0


def test_a_run_that_succeeds(new_world, s3):
    search = Search(world_of(new_world, "succeeds", s3, ["train.py", "0.3"]))
    with search.going_on():
        run = json.loads(searched(search, "launch", "--yes", "--json").stdout)
        after(search, run["run_id"], "status", "logs", "checkpoints ls", "checkpoints pull")
        objects(search, s3)
    assert run["checkpoint_step"] == 4
    clean(search)


def test_a_program_that_dies_of_an_exception_with_its_secret_in_it(new_world, s3):
    search = Search(world_of(new_world, "fails", s3, ["train.py", "0.1", "raise"]))
    with search.going_on():
        done = searched(search, "launch", "--yes", "--json", code=6)
        run = json.loads(done.stdout)
        assert f"cannot log in with {'*' * len(SECRET)}" in done.stderr, "it said so itself: how that is told on"
        assert "cannot log in with" in run["reason"]
        after(search, run["run_id"], "status --json", "attach", "down")
        objects(search, s3)
    clean(search)


def test_a_run_whose_machine_is_taken(new_world, s3):
    world = world_of(new_world, "taken", s3, ["train.py", "2"], recovery={"attempts": 3, "wait_minutes": 1})
    search = Search(world)
    with search.going_on():
        launch = world.start("mgpu", "launch", "--yes", "--json")
        try:
            world.wait(lambda: world.run().get("checkpoint_step", -1) >= 1, 60)
            searched(search, "local", "kill", "0")
            out, err = launch.communicate(timeout=600)
        finally:
            launch.kill()
        search.text("the output of launch", out + err)
        assert launch.returncode == 0, err
        run = json.loads(out)
        assert run["recoveries"] == 1
        after(search, run["run_id"], "attach --json")
        objects(search, s3)
    clean(search)


def test_a_store_that_fails_with_its_address_in_the_error(new_world, s3):
    world = world_of(new_world, "no-store", 1, ["train.py", "0.1"])
    search = Search(world)
    with search.going_on():
        searched(search, "launch", "--yes", "--json", code=2)  # it is looked at before anything is rented
    assert sorted(search.found) == []
    assert world.alive() == 0
