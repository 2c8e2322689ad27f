"""A real Slurm of two nodes on loopback, as a test starts and ends it: one controller, a slurmd a node, no root needed.

Debian's packages do (scripts/setup-slurm.sh); GPUs are links to /dev/null. Nothing of a Slurm that this machine may
have is touched: munge, ports and folders are its own.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from mgpu_train.agent.machine import ports, procs
from waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sshd")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
START_S, KILL_S = 20.0, 10.0

CONF = """ClusterName=mgpu
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=4
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=32 RealMemory=4000 Gres=gpu:h100:2
PartitionName=main Nodes=ALL Default=YES MaxTime=240 DefaultTime=5 PriorityTier=1 State=UP
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=5 PriorityTier=9 State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here; None: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"{', '.join(absent)} not installed; scripts/setup-slurm.sh installs Slurm" if absent else None


@dataclass
class Cluster:
    """A cluster that runs. `env` is what Slurm's commands need."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def options(self) -> dict[str, str]:
        """The block of a run file, flattened."""
        places = {"work_folder": str(self.folder / "work"), "node_folder": str(self.folder / "nodes")}
        return {**places, "partition": "main", "price_usd_per_hour": "0.05"}

    def run(self, *argv: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(argv, env={**os.environ, **self.env, "PATH": PATH}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Names of the jobs that have not ended."""
        return self.run("squeue", "-h", "-o", "%j").split()

    def node(self, name: str) -> None:
        """Starts the slurmd of a node."""
        self.run("slurmd", "-N", name, "-f", f"{self.folder}/slurm.conf")

    def resumed(self, name: str) -> bool:
        """Whether a node takes jobs again; one that was said to be down may have come back by itself."""
        with suppress(AssertionError):
            self.run("scontrol", "update", f"nodename={name}", "state=resume")
        return self.run("sinfo", "-h", "-n", name, "-p", "main", "-o", "%t") in ("idle", "mix", "alloc")

    def end(self, daemon: str, signum: int = signal.SIGTERM) -> None:
        """Ends a daemon: `slurmctld`, `slurmd-n1`, `munged`."""
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int((self.folder / f"{daemon}.pid").read_text()), signum)

    def idle(self) -> bool:
        """Whether all nodes can take a job, and run none."""
        return self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") == "2"

    def start(self) -> None:
        """Starts all daemons, and waits until nodes are idle."""
        for name in ("state", "spool/n1", "spool/n2", "nodes"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "nodes").chmod(0o700)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        controller, first = ports.free(1)[0], _two_in_a_row()
        text = CONF.format(
            folder=self.folder, user=getpass.getuser(), controller=controller, first=first, last=first + 1
        )
        (self.folder / "slurm.conf").write_text(text)
        devices = [(node, gpu, self.folder / f"n{node}-nvidia{gpu}") for node in (1, 2) for gpu in (0, 1)]
        for _, _, device in devices:
            device.symlink_to("/dev/null")
        lines = [f"NodeName=n{n} Name=gpu Type=h100 File={self.folder}/n{n}-nvidia[0-1]\n" for n in (1, 2)]
        (self.folder / "gres.conf").write_text("".join(lines))
        munge = {"key-file": key, "socket": self.folder / "munge.sock", "pid-file": self.folder / "munged.pid"}
        munge |= {"log-file": self.folder / "munged.log", "seed-file": self.folder / "munge.seed"}
        self.run("munged", "--force", *(f"--{name}={value}" for name, value in munge.items()))
        self.run("slurmctld", "-c", "-f", f"{self.folder}/slurm.conf")
        for name in ("n1", "n2"):
            self.node(name)
        until(self.idle, START_S, lambda: (self.folder / "slurmctld.log").read_text()[-2000:])

    @property
    def mark(self) -> str:
        """What all that belongs to it has in its environment: daemons, jobs, and what they have left."""
        return f"SLURM_CONF={self.folder / 'slurm.conf'}"

    def lifeline(self) -> subprocess.Popen[bytes]:
        """A process that ends all of it when this one has ended, by whatever signal: only this one holds the pipe."""
        code = "import sys; from mgpu_train.agent.machine import procs; sys.stdin.read(); "
        code += f"procs.kill_all(lambda: procs.carrying(sys.argv[1]), {KILL_S})"
        return subprocess.Popen([sys.executable, "-c", code, self.mark], stdin=subprocess.PIPE, start_new_session=True)

    def stop(self) -> None:
        """Cancels what runs, and ends all daemons."""
        with suppress(AssertionError):
            self.run("scancel", "-u", getpass.getuser())
            until(lambda: not self.jobs(), START_S)
        for name in ("slurmd-n1", "slurmd-n2", "slurmctld", "munged"):
            self.end(name)
        procs.kill_all(lambda: procs.carrying(self.mark), KILL_S)


def _two_in_a_row() -> int:
    while True:
        (port,) = ports.free(1)
        with suppress(OSError):
            for each in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
            return port


@pytest.fixture(scope="session")
def slurm_cluster(require, tmp_path_factory) -> Iterator[Cluster]:
    """One for the session; its nodes are shared by many gangs at a time."""
    reason = missing()
    require("slurm", reason is None, reason or "")
    folder = tmp_path_factory.mktemp("slurm")
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)  # munge wants to know who can write to the way to its socket
    cluster = Cluster(folder)
    lifeline = cluster.lifeline()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        lifeline.communicate()


@pytest.fixture
def slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, as this test's environment has it; nothing of the test stays on it."""
    for name, value in slurm_cluster.env.items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    for job in slurm_cluster.run("squeue", "-h", "-o", "%i").split():
        slurm_cluster.run("scancel", job)
    until(lambda: not slurm_cluster.jobs(), 30)
