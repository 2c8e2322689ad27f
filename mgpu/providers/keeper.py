"""The keeper of a node that is no machine of its own: an SSH server, a lease, and the end of all that ran there.

What Slurm's tasks and Kubernetes' pods have in common (`slurm/node.py`, `kubernetes/pod.py`). It runs on the node, with
the standard library of Python 3.9 and those parts of `mgpu` and `mgpu_train` that were sent with it.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mgpu_train.agent.machine import procs
from mgpu_train.system import prctl

from mgpu.providers.local import containers

MARK = "MGPU_INSTANCE"  # in the environment of everything that runs on a node
BASHS_OWN = ("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID")  # read-only where `sh` is bash
TOOLS = ("/usr/sbin", "/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh", "/usr/lib/misc")
PORTS = 5  # that are tried
START_S, KILL_S = 10.0, 10.0

SESSION = """# what each SSH session runs: the node's own home, and the environment of the job
. {folder}/environment
cd "$HOME" || exit 1
case ${{SSH_ORIGINAL_COMMAND-}} in
    '') exec "${{SHELL:-/bin/sh}}" -l ;;
    mgpu-sftp) exec {sftp} ;;
    *) exec /bin/sh -c "$SSH_ORIGINAL_COMMAND" ;;
esac
"""
SSHD = """Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
AuthenticationMethods publickey
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxSessions 100
MaxStartups 100
Subsystem sftp mgpu-sftp
ForceCommand /bin/sh {folder}/session
"""


def tool(name: str) -> str:
    """The path of a program of OpenSSH's. Raises OSError: it is not installed."""
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *TOOLS]))
    if path is None:
        raise OSError(f"{socket.gethostname()} has no {name}: OpenSSH's server has to be installed on the nodes")
    return path


def exportable(name: str) -> bool:
    """Whether any `sh` lets a script set this variable: one that does not ends the script."""
    return name.isascii() and name.isidentifier() and name not in BASHS_OWN


def write(path: Path, text: str | bytes) -> None:
    """Replaces a file at once, readable for its owner alone. Text is UTF-8."""
    new = path.with_name(path.name + ".new")
    new.touch(mode=0o600)
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    new.replace(path)


def remove(folder: Path) -> None:
    """Removes a folder, with what programs have made read-only; what is somebody else's stays."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return
    for above, names, _ in os.walk(folder):  # from above: a folder is opened before it is entered
        for name in names:
            with suppress(OSError):
                if not Path(above, name).is_symlink():
                    Path(above, name).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Terms:
    """How long a node lives, and for whom; times in seconds."""

    lease_s: float  # before anybody renews it
    hard_cap_s: float  # from its start
    ends_by: float  # UNIX; 0: nothing says so
    ssh_public_key: str


class Keeper:
    """The keeper of one node. `id` marks all that runs there; its own `folder` is made by `furnish`, and removed.
    `scripts`: where lease.sh and poweroff.sh lie."""

    left_out: tuple[str, ...] = ("MGPU_",)  # how variables begin that sessions do not get of this process's
    kept: tuple[str, ...] = ()  # which they get all the same

    def __init__(self, node: str, folder: Path, scripts: Path, terms: Terms) -> None:
        self.id, self.folder, self.scripts, self.terms = node, folder, scripts, terms
        self.home = self.folder / "home"
        self.lease = self.home / ".mgpu" / "lease"
        self.began_at = time.time()
        by_s = terms.ends_by - self.began_at if terms.ends_by else terms.hard_cap_s
        self.hard_cap_s = max(0.0, min(terms.hard_cap_s, by_s))
        self.hard_cap = int(procs.uptime_s() + self.hard_cap_s)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.port = 0
        self.ending = ""
        self.made = False  # the folder, by this keeper's node

    def wait(self, wakeup: int) -> None:
        """A second at most, or until a signal has come; what has ended is started again."""
        self.revive()
        select.select([wakeup], [], [], 1.0)
        while select.select([wakeup], [], [], 0)[0]:
            os.read(wakeup, 4096)

    def listen(self) -> int:
        """Takes SIGUSR2, the end, and SIGCHLD; what can be read when a signal has come."""
        wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "ending", "given back"))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return wakeup

    def notice(self, seconds: float) -> None:
        """Writes it where the agent looks (`mgpu_train.agent.machine.notices`)."""
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
        try:
            write(self.home / ".mgpu" / "notice.json", json.dumps({"action": "terminate", "time": at}))
        except OSError as error:
            sys.stderr.write(f"no notice could be written: {error}\n")

    def furnish(self) -> None:
        """Makes the node's folder, with its first lease, its host key and what sessions begin with."""
        self.folder.mkdir(mode=0o700)  # one that is there already is somebody else's
        self.made = True
        self.on_made()
        for folder in (self.home, self.home / ".mgpu", self.folder / "tmp"):
            folder.mkdir(mode=0o700)
        write(self.lease, f"{int(procs.uptime_s() + self.terms.lease_s)}\n")
        own = {name: value for name, value in os.environ.items() if not name.startswith(self.left_out)}
        own = {**own, "HOME": str(self.home), "TMPDIR": str(self.folder / "tmp"), MARK: self.id}
        own |= {name: os.environ[name] for name in self.kept if name in os.environ}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in own.items() if exportable(name)]
        write(self.folder / "environment", os.fsencode("".join(lines)))  # each byte as the job has it
        write(self.folder / "session", os.fsencode(SESSION.format(folder=self.folder, sftp=tool("sftp-server"))))
        write(self.folder / "authorized_keys", self.terms.ssh_public_key + "\n")
        key = ("-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.folder / "host_key"))
        if subprocess.run([tool("ssh-keygen"), *key], check=False).returncode:
            raise OSError(f"ssh-keygen made no host key on {socket.gethostname()}")

    def serve(self) -> None:
        """Starts the SSH server on a port that is free."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's server wants it
        for _ in range(PORTS):
            with socket.socket() as probe:
                probe.bind(("", 0))
                self.port = probe.getsockname()[1]
            write(self.folder / "sshd_config", os.fsencode(SSHD.format(folder=self.folder, port=self.port)))
            self.revive()
            if self.answers():
                return
        raise OSError(f"sshd does not start on {socket.gethostname()}")

    @property
    def host_key(self) -> str:
        """The public half, as it is pinned."""
        return " ".join((self.folder / "host_key.pub").read_text(encoding="utf-8").split()[:2])

    def answers(self) -> bool:
        """Whether the server greets; False: it has ended."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.children["sshd"].poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    return connection.recv(4) == b"SSH-"
            except OSError:
                time.sleep(0.02)
        return False

    def end_command(self) -> str:
        """What ends the node when its lease does, a line of sh: this keeper is asked first, and then not waited for."""
        pid, ticks = os.getpid(), procs.me().start_ticks
        return f"kill -USR2 {pid}; exec /bin/sh {self.scripts}/poweroff.sh {pid} {ticks} {self.id} 15"

    def revive(self) -> None:
        """Starts the SSH server and the lease's script where they do not run, and buries what has ended."""
        pid = os.getpid()
        lease = [str(self.lease), str(self.hard_cap), "2", "/bin/sh", "-c", self.end_command()]
        commands = {
            "sshd": [tool("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")],
            "lease": ["/bin/sh", f"{self.scripts}/lease.sh", *lease],
        }
        # sshd writes its title over its environment, mark and all: whoever looks for what is left does not see it
        befores: dict[str, Callable[[], None]] = {"sshd": lambda: prctl.die_with_parent(signal.SIGTERM, pid)}
        for name, command in commands.items():
            child = self.children.get(name)
            if child is None or child.poll() is not None:
                # not the task's own output: Slurm would wait for whoever holds it
                with (self.folder / f"{name}.log").open("ab") as log:
                    self.children[name] = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=self.marked(),
                        preexec_fn=befores.get(name),
                    )
        procs.reap(pid, 0)

    def marked(self) -> dict[str, str]:
        """The environment of what has to end with the node, wherever it goes."""
        return {**os.environ, MARK: self.id}

    def on_made(self) -> None:
        """The folder is there, and nothing in it yet."""

    def reason(self, known: str) -> str:
        """Why the node ends: its clocks, or what is known."""
        return "its lease or its hard cap has ended" if procs.uptime_s() >= self.lease_end() else known

    def clear(self) -> bool:
        """Ends all that runs on the node, and removes its folder. False: something lives on."""
        own = os.getpid()
        ended = procs.kill_all(
            lambda: list({*procs.descendants(own), *procs.carrying(f"{MARK}={self.id}")}),
            KILL_S,
            reap=lambda: procs.reap(own, 0),
        )
        if self.made:
            containers.remove(self.home.resolve())  # their processes are children of Docker's own daemon
            remove(self.folder)
        return ended

    def lease_end(self) -> int:
        """The second since boot at which the lease's script ends the node."""
        try:
            return min(self.hard_cap, int(self.lease.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return self.hard_cap
