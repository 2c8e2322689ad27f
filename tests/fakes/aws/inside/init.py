"""Process 1 of a fake machine: makes its root file system, boots it, and ends with it.

Started by machines.py in namespaces of its own. Standard input brings one line, the machine's configuration as JSON,
and then stays open as long as the server lives: its end is the machine's end, so that nothing outlives a server that
was killed. Standard output carries one line, this process's number in the host's eyes; standard error is the console.

What boots, in cloud-init's order: cloudinit.py reads the user data and prepares the host keys, then sshd starts and is
started again whenever it ends, and cloudinit.py goes on with the scripts. SIGRTMIN+4 powers off, as with systemd, and
SIGUSR2 stops everything for good.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rootfs

CRASHED = 70  # any other end of this process is a machine that was switched off
POWER_OFF = signal.SIGRTMIN + 4
HOST_KEYS_READY = signal.SIGUSR1
HANG = signal.SIGUSR2
GRACE_S = 1.0  # from SIGTERM to the end of everything
RESTART_S = 0.2

CONSOLE = "/var/log/cloud-init-output.log"
SSHD = ("/usr/sbin/sshd", "-D", "-E", "/var/log/sshd.log")


class Init:
    """The life of a machine. Signals count from the moment that it is made; `run` comes once the root stands."""

    def __init__(self, alive: int) -> None:
        self._alive = alive
        self._environment: dict[str, str] = {}
        self._sshd = 0
        self._sshd_at: float | None = None  # when it is to start (again)
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGCHLD, HOST_KEYS_READY, HANG, POWER_OFF):
            signal.signal(number, lambda *_: None)

    def run(self, python: str, environment: dict[str, str]) -> None:
        """Boots, and returns when the machine is switched off or its server is gone."""
        self._environment = environment
        self._start(python, "-B", rootfs.CLOUD_INIT)
        if os.path.exists(rootfs.DOCKERD):  # noqa: PTH110
            self._start(rootfs.DOCKERD)
        sysrq = [os.open(rootfs.SYSRQ, os.O_RDWR | os.O_CLOEXEC)] if os.path.exists(rootfs.SYSRQ) else []  # noqa: PTH110
        while True:
            due = None if self._sshd_at is None else max(0.0, self._sshd_at - time.monotonic())
            ready, _, _ = select.select([self._alive, self._wake, *sysrq], [], [], due)
            if self._alive in ready or any(b"o" in os.read(each, 16) for each in sysrq if each in ready):
                return
            signals = os.read(self._wake, 512) if self._wake in ready else b""
            if POWER_OFF in signals:
                self._shut_down()
                return
            if HANG in signals:
                self._hang()
            if HOST_KEYS_READY in signals:
                self._sshd_at = time.monotonic()
            self._reap()
            if self._sshd_at is not None and time.monotonic() >= self._sshd_at:
                self._sshd, self._sshd_at = self._start(*SSHD), None

    def _start(self, *command: str) -> int:
        default = [signal.SIGCHLD, HOST_KEYS_READY, HANG, POWER_OFF, signal.SIGPIPE]
        return os.posix_spawn(command[0], command, self._environment, setsid=True, setsigdef=default)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._sshd:
                self._sshd_at = time.monotonic() + RESTART_S

    def _hang(self) -> None:
        os.kill(-1, signal.SIGSTOP)
        while os.read(self._alive, 1):
            pass
        os._exit(0)

    def _shut_down(self) -> None:
        os.kill(-1, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            try:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.01)
            except ChildProcessError:
                return


def read_line(descriptor: int) -> bytes:
    """One line, byte by byte: nothing that follows may be swallowed by a buffer."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise EOFError("the server was gone before it said what this machine is")
        line += byte
    return line


def connect(config: dict[str, Any]) -> None:
    """Brings `eth0` up, whose other end lies in the world."""
    address, public, gateway = config["private_address"], config["public_address"], config["gateway"]
    commands = [
        "link set lo up",
        "link set eth0 up",
        *(f"addr add {own}/32 dev eth0" for own in (address, public) if own),
        f"route add {gateway}/32 dev eth0 src {address}",
        f"route add default via {gateway} src {address}",
    ]
    v6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")
    if v6.exists():
        v6.write_text("1")
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands).encode(), check=True, timeout=20)


def main() -> None:
    """A machine's whole life."""
    alive = os.dup(0)  # not inherited
    init = Init(alive)
    os.write(1, bytes(Path("/proc/self").readlink()) + b"\n")  # the host's /proc still, so the host's number
    os.dup2(2, 1)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    config = json.loads(read_line(alive))
    socket.sethostname(config["hostname"])
    connect(config)
    init.run(config["python"], rootfs.build(config))


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:  # noqa: BLE001  nobody else would ever see it
        print(f"init: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(CRASHED)
