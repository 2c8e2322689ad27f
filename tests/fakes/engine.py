"""A Docker engine and registries of the tests' own, on loopback; of the machine's own engine nothing is used.

The engine lives in a mount and a process namespace of its own, whose first process ends with its input: however the
tests end, its containers, mounts, control groups and data are gone. The fixtures are tests/conftest.py's, so that a
session has one of each.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from mgpu_train.agent.machine import ports
from waiting import until_it_serves

# guards against hanging; an end takes as long as its data take to delete, on a disk that others use, too
READY_S, END_S, COMMAND_S = 120.0, 300.0, 120.0
PROGRAMS = (
    "sh",
    "cat",
    "ls",
    "cp",
    "mkdir",
    "chmod",
    "rm",
    "sleep",
    "echo",
    "head",
    "dd",
    "true",
    "false",
    "env",
    "id",
)
USER, PASSWORD = "tester", "canary-5ecret-pa$$word"
NO_NETWORK = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

# the first process of the namespaces: when it ends, the kernel ends all others and drops their mounts
_INSIDE = 'test -z "$1" || mount -t tmpfs -o size="$1" tmpfs "$2"; shift 2; "$@" <&- & read -r _'
_AROUND = """inside=$1 folder=$2 cgroup=$3; shift 3
unshare --mount --propagation slave --pid --fork --kill-child --mount-proc sh -c "$inside" sh "$@"
find /sys/fs/cgroup -depth -type d -path "*/$cgroup*" -exec rmdir {} + 2>/dev/null
rm -rf "$folder"
"""
_SERVE = '"$1" serve "$2/config.yml" <&- & echo $! > "$2/pid"; read -r _; kill -9 $!; wait; rm -rf "$2"'


@dataclass(frozen=True)
class Engine:
    """A running engine: no bridge, so what runs or builds there says `--network host` or `none`."""

    folder: Path

    @property
    def host(self) -> str:
        """What DOCKER_HOST is for it."""
        return f"unix://{self.folder}/sock"

    @property
    def env(self) -> dict[str, str]:
        """What to lay over os.environ: this engine, and no credentials but the test's own."""
        return {"DOCKER_HOST": self.host, "DOCKER_CONFIG": str(self.folder / "config"), "PATH": _PATH}

    @property
    def data(self) -> Path:
        """Its data root; where that is a small file system, seen from inside alone."""
        return self.folder / "data"

    def docker(self, *args: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """`docker args`; `options` go to subprocess.run. Raises RuntimeError with its words when it fails."""
        options = {"env": {**os.environ, **self.env}, "timeout": COMMAND_S, **options}
        done = subprocess.run(["docker", *args], capture_output=True, text=True, **options)
        if check and done.returncode:
            raise RuntimeError(f"docker {' '.join(args)}: exit code {done.returncode}: {done.stderr}")
        return done

    def image(self, name: str, programs: Sequence[str] = PROGRAMS, folders: Sequence[str] = ()) -> str:
        """Imports an image that holds programs of this machine, their libraries and whole folders; returns its id."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", dereference=True) as tar:
            _pack(tar, programs)
            for folder in folders:
                tar.add(folder, folder.lstrip("/"))
        command = ["docker", "import", "--change", "ENV PATH=/bin", "-", name]
        env = {**os.environ, **self.env}
        done = subprocess.run(command, input=packed.getvalue(), capture_output=True, env=env, timeout=COMMAND_S)
        done.check_returncode()
        return done.stdout.decode().strip()


@dataclass(frozen=True)
class Registry:
    """A running registry: `127.0.0.1:<port>`, plain HTTP, which engines accept of loopback alone."""

    address: str
    folder: Path
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def pid(self) -> int:
        """Its process."""
        return int((self.folder / "pid").read_text())

    @property
    def log(self) -> str:
        """What it has said, a request a line."""
        return (self.folder / "log").read_text()


@pytest.fixture(scope="session")
def engine(require) -> Iterator[Engine]:
    """An engine with one image, `base:1`: a shell and what a shell needs."""
    require("docker", not missing(), missing())
    with ExitStack() as stack:
        try:
            running = stack.enter_context(running_engine())
        except RuntimeError as error:
            require("docker", False, str(error))
            raise
        running.image("base:1")
        yield running


@pytest.fixture(scope="session")
def registry(require) -> Iterator[Registry]:
    """A registry that asks nobody who they are."""
    require("docker", not missing("docker-registry"), missing("docker-registry"))
    with running_registry() as running:
        yield running


@pytest.fixture(scope="session")
def locked_registry(require) -> Iterator[Registry]:
    """A registry that wants USER and PASSWORD."""
    require("docker", not missing("docker-registry"), missing("docker-registry"))
    with running_registry(USER, PASSWORD) as running:
        yield running


def missing(*programs: str) -> str:
    """Why no engine can run here, or ""."""
    if os.geteuid():
        return "an engine of the tests' own needs root"
    wanted = programs or ("dockerd", "docker", "containerd", "runc", "unshare")
    absent = [name for name in wanted if not shutil.which(name, path=_PATH)]
    return f"not installed: {', '.join(absent)}" if absent else ""


@contextmanager
def running_engine(
    data_mib: int | None = None, *options: str, prefix: Sequence[str] = (), network: Sequence[str] = NO_NETWORK
) -> Iterator[Engine]:
    """An engine while the block runs; with `data_mib` its data root is a file system of that size, in memory.
    `prefix`: the words before a command that run it in another network.

    Raises RuntimeError when it does not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="mgpu-engine-"))
    running = Engine(folder)
    for name in ("data", "config"):
        (folder / name).mkdir()
    cgroup, size = f"{folder.name}-{os.getpid()}", f"{data_mib}m" if data_mib else ""
    dockerd = ["dockerd", *network, *_places(folder), f"--cgroup-parent={cgroup}", *options]
    with _guarded(
        [_AROUND, "sh", _INSIDE, str(folder), cgroup, size, str(folder / "data"), *dockerd], folder, prefix
    ) as process:
        _wait(process, folder, lambda: _connects(socket.AF_UNIX, str(folder / "sock")))
        yield running


@contextmanager
def running_registry(user: str = "", password: str = "", port: int | None = None) -> Iterator[Registry]:
    """A registry while the block runs. Raises RuntimeError when it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="mgpu-registry-"))
    address = f"127.0.0.1:{port or free_port()}"
    (folder / "config.yml").write_text(_registry_config(folder, address, user, password))
    program = shutil.which("docker-registry", path=_PATH) or "docker-registry"
    with _guarded([_SERVE, "sh", program, str(folder)], folder) as process:
        _wait(process, folder, lambda: _connects(socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2]))))
        yield Registry(address, folder, user, password)


def free_port() -> int:
    """A port of loopback on which nothing listens now."""
    return ports.free(1)[0]


@contextmanager
def _guarded(command: Sequence[str], folder: Path, prefix: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that does what `command` says until its input ends, and clears up then."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*prefix, "sh", "-c", *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": _PATH},
            start_new_session=True,  # Ctrl-C is pytest's
        )
    try:
        yield process
    finally:
        assert process.stdin
        process.stdin.close()
        process.wait(END_S)


def _wait(process: subprocess.Popen[bytes], folder: Path, ready: Callable[[], bool]) -> None:
    until_it_serves(process, ready, READY_S, lambda: (folder / "log").read_text()[-2000:])


def _connects(family: int, address: Any) -> bool:
    with socket.socket(family) as probe:
        return probe.connect_ex(address) == 0


def _places(folder: Path) -> list[str]:
    (folder / "daemon.json").write_text("{}")  # not the machine's own settings
    names = {"data-root": "data", "exec-root": "exec", "pidfile": "dockerd.pid", "config-file": "daemon.json"}
    return [f"--host=unix://{folder}/sock", *(f"--{option}={folder / name}" for option, name in names.items())]


def _registry_config(folder: Path, address: str, user: str, password: str) -> str:
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "info", "formatter": "json"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": address},
    }
    if user:
        hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()
        (folder / "htpasswd").write_text(f"{user}:{hashed}\n")
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    return json.dumps(config)  # YAML, too


def _pack(tar: tarfile.TarFile, programs: Sequence[str]) -> None:
    wanted = dict[str, str]()
    for program in programs:
        path = shutil.which(program, path=_PATH)
        assert path, f"no program {program}"
        wanted[f"bin/{Path(path).name}"] = path
        linked = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        wanted |= {library.lstrip("/"): library for library in re.findall(r"(/\S+) \(0x", linked)}
    for name, path in sorted(wanted.items()):
        tar.add(path, name)
    for name in ("tmp", "etc", "proc", "sys", "dev"):
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
        tar.addfile(entry)
