"""Hosts that are there already: OpenSSH servers on loopback addresses, each in namespaces of its own, so that it can
lose its power. Processes, /var/tmp and the boot's id are a host's own, as a machine's; homes, unless they are shared.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
from mgpu_train.agent.machine import ports
from waiting import until

from mgpu.providers.hosts.provider import HostsProvider

MINE = f"mgpu-hosts-{os.getuid()}"
_BOOT = """
mount --bind "$1/var-tmp" /var/tmp
mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id
exec /usr/sbin/sshd -D -e -f "$1/config"
"""


def make_key(path: Path) -> str:
    """A private key; its public half."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    path.write_bytes(key.export_private_key())
    path.chmod(0o600)
    return key.export_public_key().decode().strip()


@dataclass
class Machine:
    """One host, by the name that the ssh configuration has of it."""

    name: str
    folder: Path
    address: str
    port: int
    home: Path
    host_key: str = ""
    process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen([*namespaces, "sh", "-ec", _BOOT, "boot", str(self.folder)], stderr=log)

    def lose_power(self) -> None:
        """Everything on it ends at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def mine(self) -> Path:
        return self.folder / "var-tmp" / MINE

    @property
    def held(self) -> dict[str, Any]:
        try:
            return json.loads((self.mine / "holder.json").read_text())
        except FileNotFoundError:
            return {}

    @property
    def id(self) -> str:
        held = self.held
        return f"{self.name}/{held['name']}.{held['hard_cap_at']}" if held else ""

    @property
    def keys(self) -> str:
        return (self.home / ".ssh" / "authorized_keys").read_text()


@dataclass
class Rack:
    """The hosts, and what a user has who may log in to them."""

    folder: Path
    machines: list[Machine] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def options(self, *names: str, **more: str) -> dict[str, str]:
        """Flattened, with these hosts, or all."""
        addresses = ",".join(names or [machine.name for machine in self.machines])
        return {"addresses": addresses, "ssh_config": str(self.config), "python": sys.executable, **more}

    def provider(self, *names: str, **more: str) -> HostsProvider:
        return HostsProvider(self.options(*names, **more))

    def machine(self, name: str) -> Machine:
        return next(machine for machine in self.machines if machine.name == name.partition("/")[0])

    def run(self, name: str, command: str) -> str:
        """As the user does, by hand."""
        done = subprocess.run(
            ["ssh", "-F", str(self.config), name, command], capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    def kill_watch(self, name: str) -> None:
        machine = self.machine(name)
        self.run(machine.name, f"kill -9 {machine.held['watch'][0]}")

    def add(self, home: Path | None = None) -> Machine:
        number = len(self.machines)
        folder = self.folder / f"host-{number}"
        (folder / "var-tmp").mkdir(parents=True)
        (folder / "var-tmp").chmod(0o1777)
        machine = Machine(f"host-{number}", folder, f"127.0.0.{number + 2}", ports.free(1)[0], home or folder / "home")
        machine.host_key = make_key(folder / "host_key")
        ssh = machine.home / ".ssh"
        if not ssh.exists():
            ssh.mkdir(parents=True, mode=0o700)
            (ssh / "authorized_keys").write_text((self.folder / "id.pub").read_text())
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        (folder / "config").write_text(
            f"ListenAddress {machine.address}\nPort {machine.port}\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {ssh}/authorized_keys\nSetEnv HOME={machine.home} PATH={path}\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
            "Subsystem sftp internal-sftp\n"
        )
        with (self.folder / "known_hosts").open("a") as known:
            known.write(f"[{machine.address}]:{machine.port} {machine.host_key}\n")
        with self.config.open("a") as config:
            config.write(f"Host {machine.name}\n HostName {machine.address}\n Port {machine.port}\n")
        self.machines.append(machine)
        return machine

    def serve(self) -> None:
        """Boots what has no power, and waits until it answers."""
        for machine in [machine for machine in self.machines if machine.process is None]:
            machine.boot()
            until(lambda machine=machine: _answers(machine), 30, (machine.folder / "log").read_text)

    def reset(self) -> None:
        """As new: nothing is held, and no token was used."""
        for machine in self.machines:
            if machine.held or machine.process is None:
                machine.lose_power()
            for folder in (machine.folder / "var-tmp").iterdir():
                shutil.rmtree(folder)
            shutil.rmtree(machine.home / ".mgpu", ignore_errors=True)
            (machine.home / ".ssh" / "authorized_keys").write_text((self.folder / "id.pub").read_text())
        self.serve()


@contextmanager
def rack(folder: Path, count: int) -> Iterator[Rack]:
    """So many hosts, up."""
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "id.pub").write_text(make_key(folder / "id") + "\n")
    made = Rack(folder)
    made.config.write_text(
        f"IdentityFile {folder}/id\nIdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile {folder}/known_hosts\n"
        "GlobalKnownHostsFile /dev/null\n"
        "KexAlgorithms curve25519-sha256\n"  # what keys are agreed on by otherwise takes 70 ms of CPU on each side
    )
    try:
        for _ in range(count):
            made.add()
        made.serve()
        yield made
    finally:
        for machine in made.machines:
            machine.lose_power()


def _answers(machine: Machine) -> bool:
    try:
        with socket.create_connection((machine.address, machine.port), 1) as connection:
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False
