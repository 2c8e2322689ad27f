"""One node of provider `slurm`, the task of a Slurm step: an SSH server, a lease, and the end of all that ran there.

    python3 GANG/node.py          keeps the node until it is told to end
    python3 GANG/node.py sweep    ends what is left of a node whose keeper was killed

GANG is the folder that login node and nodes share: `asked.json` says what was asked for. The node adds
`made-<rank>` (its own folder is this gang's), `node-<rank>.json` (how it is reached) and, when all of it has ended,
`ended-<rank>.json` (when, and why). It runs with the standard library of Python 3.9; `mgpu` and `mgpu_train` here are
the parts of them that lie in GANG.

    SIGUSR2            ends the node: the gang is given back
    SIGURG, SIGTERM    a notice for the agent: the time limit is near; Slurm takes the node (preemption, scancel)

Slurm sends a signal to all that runs in a step, training included: SIGURG, because programs ignore it by default.
"""

from __future__ import annotations

import getpass
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
from pathlib import Path
from typing import Any

from mgpu_train.agent.machine import procs

from mgpu.providers.local import containers

GANG = Path(__file__).resolve().parent
MARK = "MGPU_INSTANCE"  # in the environment of everything that runs on a node
STEPS_OWN = ("SLURM", "SBATCH", "SRUN", "PMI", "MGPU_")  # a program would take itself for the step's task
TOOLS = ("/usr/sbin", "/usr/lib/openssh", "/usr/libexec/openssh", "/usr/lib/ssh", "/usr/lib/misc")
PORTS = 5  # that are tried
START_S, KILL_S = 10.0, 10.0
BEFORE_KILL_S = 3.0  # a node that Slurm ends is cleared so long before its SIGKILL

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


def write(path: Path, text: str) -> None:
    """Replaces a file at once, readable for its owner alone."""
    new = path.with_name(path.name + ".new")
    new.touch(mode=0o600)
    new.write_text(text)
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


class Node:
    """The keeper of one node; `told` is what was asked for."""

    def __init__(self, told: dict[str, Any], rank: int) -> None:
        self.told, self.rank = told, rank
        self.id = f"{told['token'][:10]}-{rank}"
        self.folder = Path(told["node_folder"]).expanduser() / f"mgpu-{self.id}"
        self.home = self.folder / "home"
        self.lease = self.home / ".mgpu" / "lease"
        self.began_at = time.time()
        by_s = told["ends_by"] - self.began_at if told["ends_by"] else told["hard_cap_s"]
        self.hard_cap_s = max(0.0, min(told["hard_cap_s"], by_s))
        self.hard_cap = int(procs.uptime_s() + self.hard_cap_s)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.port = 0
        self.ending = ""
        self.made = False  # the folder, by this gang
        self.kill_wait_s = int(os.environ["MGPU_KILL_WAIT"])
        self.leaves_at = float("inf")  # monotonic; Slurm kills all of it soon after

    def run(self) -> int:
        """Keeps the node until it is told to end; the task's exit code."""
        procs.become_subreaper()
        wakeup = self.listen()
        reason, code = "the node's keeper failed", 1
        try:
            self.furnish()
            self.serve()
            while not self.ending and time.monotonic() < self.leaves_at:
                self.revive()
                select.select([wakeup], [], [], 1.0)
                while select.select([wakeup], [], [], 0)[0]:
                    os.read(wakeup, 4096)
            reason, code = self.ending or "Slurm took the node", 0
        except OSError as error:
            reason = str(error)
            sys.stderr.write(f"{reason}\n")
        finally:
            ended = self.end(reason)
        return code if ended else 1  # then `sweep` tries once more

    def listen(self) -> int:
        """Takes the signals; what can be read when one has come."""
        wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "ending", "given back"))
        signal.signal(signal.SIGURG, lambda *_: self.notice(self.told["notice_s"]))
        signal.signal(signal.SIGTERM, self.on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return wakeup

    def on_term(self, *_: object) -> None:
        """Slurm says it once more when its grace is over: the first time counts."""
        if (GANG / "given-back").exists():
            self.ending = "given back"
        elif self.leaves_at == float("inf"):
            self.leaves_at = time.monotonic() + max(0.5, self.kill_wait_s - BEFORE_KILL_S)
            self.notice(self.kill_wait_s)

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
        (GANG / f"made-{self.rank}").touch()
        for folder in (self.home, self.home / ".mgpu", self.folder / "tmp"):
            folder.mkdir(mode=0o700)
        write(self.lease, f"{int(procs.uptime_s() + self.told['lease_s'])}\n")
        own = {name: value for name, value in os.environ.items() if not name.startswith(STEPS_OWN)}
        own = {**own, "HOME": str(self.home), "TMPDIR": str(self.folder / "tmp"), MARK: self.id}
        own |= {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in own.items() if name.isidentifier()]
        write(self.folder / "environment", "".join(lines))
        write(self.folder / "session", SESSION.format(folder=self.folder, sftp=tool("sftp-server")))
        write(self.folder / "authorized_keys", self.told["ssh_public_key"] + "\n")
        key = ("-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.folder / "host_key"))
        if subprocess.run([tool("ssh-keygen"), *key], check=False).returncode:
            raise OSError(f"ssh-keygen made no host key on {socket.gethostname()}")

    def serve(self) -> None:
        """Starts the SSH server on a port that is free, and tells how the node is reached."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's server wants it
        for _ in range(PORTS):
            with socket.socket() as probe:
                probe.bind(("", 0))
                self.port = probe.getsockname()[1]
            write(self.folder / "sshd_config", SSHD.format(folder=self.folder, port=self.port))
            self.revive()
            if self.answers():
                break
        else:
            raise OSError(f"sshd does not start on {socket.gethostname()}")
        host_key = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        endpoint = {"address": address(), "port": self.port, "user": getpass.getuser(), "host_key": host_key}
        endpoint |= {"began_at": self.began_at, "hard_cap_at": self.began_at + self.hard_cap_s}
        endpoint |= {"node": os.environ.get("SLURMD_NODENAME", ""), "pid": os.getpid()}
        write(GANG / f"node-{self.rank}.json", json.dumps(endpoint))

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

    def revive(self) -> None:
        """Starts the SSH server and the lease's script where they do not run, and buries what has ended."""
        job, pid, ticks = os.environ["SLURM_JOB_ID"], os.getpid(), procs.me().start_ticks
        # all nodes of the gang, by Slurm; and where its controller does not answer, this one all the same
        end = f"timeout 20 scancel --signal=USR2 {job}; kill -USR2 {pid}; timeout 20 scancel {job}"
        end += f"; exec /bin/sh {GANG}/poweroff.sh {pid} {ticks} {self.id} 15"
        lease = [str(self.lease), str(self.hard_cap), "2", "/bin/sh", "-c", end]
        commands = {
            "sshd": [tool("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")],
            "lease": ["/bin/sh", str(GANG / "lease.sh"), *lease],
        }
        # sshd writes its title over its environment, mark and all: whoever looks for what is left does not see it
        befores: dict[str, Callable[[], None]] = {"sshd": lambda: procs.die_with_parent(signal.SIGTERM, pid)}
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

    def end(self, reason: str) -> bool:
        """Ends all that runs on the node, removes its folder, and says so. False: something lives on."""
        if procs.uptime_s() >= self.lease_end():
            reason = "its lease or its hard cap has ended"
        own = os.getpid()
        ended = procs.kill_all(
            lambda: list({*procs.descendants(own), *procs.carrying(f"{MARK}={self.id}")}),
            KILL_S,
            reap=lambda: procs.reap(own, 0),
        )
        if self.made:
            containers.remove(self.home.resolve())  # their processes are children of Docker's own daemon
            remove(self.folder)
        if ended:
            write(GANG / f"ended-{self.rank}.json", json.dumps({"at": time.time(), "why": reason}))
        return ended

    def lease_end(self) -> int:
        """The second since boot at which the lease's script ends the node."""
        try:
            return min(self.hard_cap, int(self.lease.read_text()))
        except (OSError, ValueError):
            return self.hard_cap

    def sweep(self) -> int:
        """Ends what a keeper that was killed has left; the exit code."""
        if not (GANG / f"ended-{self.rank}.json").exists():
            self.made = (GANG / f"made-{self.rank}").exists()
            self.end("its keeper was killed")
        return 0


def address() -> str:
    """This node as Slurm's own daemons reach it."""
    name = os.environ.get("SLURMD_NODENAME", "")
    asked = ["scontrol", "show", "node", "-o", name]
    try:
        said = subprocess.run(asked, stdout=subprocess.PIPE, timeout=30, check=False).stdout.decode().split()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    found = [word[len("NodeAddr=") :] for word in said if word.startswith("NodeAddr=")]
    return found[0] if found else name or socket.gethostname()


if __name__ == "__main__":
    node = Node(json.loads((GANG / "asked.json").read_text()), int(os.environ["SLURM_PROCID"]))
    sys.exit(node.sweep() if sys.argv[1:] == ["sweep"] else node.run())
