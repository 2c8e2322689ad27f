"""Nodes to connect to: asyncssh's server always, OpenSSH's where it is installed. Loopback only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh
import pytest
from mgpu_train.agent.machine import ports
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.remote.node import Node, connect
from mgpu.remote.targets import Jump, Target

SERVER = Path(__file__).with_name("asyncssh_server.py")
START_S = 30


@dataclass
class Server:
    """One running SSH server, and how to reach it."""

    folder: Path
    process: subprocess.Popen
    port: int
    user: str
    home: Path
    host_key: str
    stopped: bool = field(default=False)

    def target(self, rank: int = 0, **changes) -> Target:
        given = {"address": "127.0.0.1", "port": self.port, "user": self.user, "host_key": self.host_key}
        return Target(rank, **{**given, **changes})

    def jump(self) -> Jump:
        return Jump("127.0.0.1", self.port, self.user, self.host_key)

    @property
    def seen(self) -> list[str]:
        path = self.folder / "seen"
        return path.read_text().splitlines() if path.exists() else []

    def freeze(self) -> None:
        """Stops the process: its kernel goes on to acknowledge what is sent."""
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    def end(self) -> None:
        if self.stopped:
            self.thaw()
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Keys:
    """The key that logs in."""

    file: Path
    public: str


def make_key(path: Path, kind: str = "ssh-ed25519") -> str:
    key = asyncssh.generate_private_key(kind)
    path.write_bytes(key.export_private_key())
    path.chmod(0o600)
    return key.export_public_key().decode().strip()


@pytest.fixture(scope="session")
def keys(tmp_path_factory) -> Keys:
    path = tmp_path_factory.mktemp("keys") / "id"
    return Keys(path, make_key(path))


@pytest.fixture
def timeouts() -> Timeouts:
    """Short enough for tests, long enough for a busy machine."""
    return Timeouts(ssh_banner_s=15, connect_s=30, command_s=30, sync_s=60, keepalive_s=5, poll_s=0.05)


@pytest.fixture
def new_server(tmp_path, keys) -> Iterator[Callable[..., Server]]:
    """Starts asyncssh servers, each with a host key, a home and a port of its own."""
    started: list[Server] = []

    def start(
        name: str = "", host_key_type: str = "ssh-ed25519", also: str = "", port: int = 0, delay_s: float = 0
    ) -> Server:
        folder = tmp_path / (name or f"node-{len(started)}")
        folder.mkdir()
        host_key = make_key(folder / "host_key", host_key_type)
        if also:
            make_key(folder / "host_key_also", also)
        (folder / "authorized_keys").write_text(keys.public + "\n")
        process = subprocess.Popen(
            [sys.executable, SERVER, folder, str(port), str(delay_s)], stderr=(folder / "stderr").open("wb")
        )
        server = Server(folder, process, port, "trainer", folder / "home", host_key)
        started.append(server)
        if not delay_s:
            server.port = int(until(lambda: (folder / "port").exists() and (folder / "port").read_text(), START_S))
        return server

    yield start
    for server in started:
        server.end()


@pytest.fixture
def server(new_server) -> Server:
    return new_server()


@pytest.fixture
def open_node(keys, timeouts) -> Iterator[Callable[..., Node]]:
    """Connects, and closes what was opened."""
    opened: list[Node] = []

    def open_one(server: Server, given: Timeouts = timeouts, **changes) -> Node:
        opened.append(connect(server.target(**changes), keys.file, given))
        return opened[-1]

    yield open_one
    for node in opened:
        node.close()


@pytest.fixture
def node(server, open_node) -> Node:
    return open_node(server)


@pytest.fixture
def closed_port() -> int:
    return free_port()


@pytest.fixture
def login_shell() -> str:
    """The program that `sshd` hands lines to; "": that of this user."""
    return ""


@pytest.fixture
def sshd(tmp_path, keys, require, login_shell) -> Iterator[Server]:
    """OpenSSH's server, run by this user for this user, with a configuration of its own."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    require("sshd", program is not None, "OpenSSH's server is not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # root's sshd wants it; the distribution's service makes it at its start
    folder = tmp_path / "sshd"
    folder.mkdir()
    host_key = make_key(folder / "host_key")
    (folder / "authorized_keys").write_text(keys.public + "\n")
    become_root = _sudo(folder / "bin") if os.geteuid() else ""
    port = free_port()
    config = folder / "config"
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\n"
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nSubsystem sftp internal-sftp\n"
        f"{become_root}" + (f'ForceCommand {login_shell} -c "$SSH_ORIGINAL_COMMAND"\n' if login_shell else "")
    )
    stderr = folder / "stderr"
    process = subprocess.Popen([str(program), "-D", "-e", "-f", config], stderr=stderr.open("wb"))
    user = pwd.getpwuid(os.getuid())
    server = Server(folder, process, port, user.pw_name, Path(user.pw_dir), host_key)
    try:
        up = until(lambda: process.poll() is not None or _answers(port), START_S)
        require("sshd", bool(up) and process.poll() is None, f"it does not start here: {stderr.read_text().strip()}")
        yield server
    finally:
        server.end()


def _sudo(folder: Path) -> str:
    """The line of sshd's configuration by which an ordinary user's sessions find a `sudo` that changes no user: the
    files of this server are that user's, and many a machine has no sudo, or one that asks for a password."""
    folder.mkdir()
    (folder / "sudo").write_text('#!/bin/sh\ntest "$1" = -n && shift && exec "$@"\n')
    (folder / "sudo").chmod(0o755)
    return f"SetEnv PATH={folder}:/usr/local/bin:/usr/bin:/bin\n"


def free_port() -> int:
    return ports.free(1)[0]


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
