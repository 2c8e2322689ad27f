"""Starts the launcher in a session of its own, and ends it with all that it started."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mgpu_train
from mgpu_train import stacks
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import network, procs
from mgpu_train.config import Job
from mgpu_train.health import hardware
from mgpu_train.launchers import TORCHRUN
from mgpu_train.system import prctl

FLIGHT = "flight-"  # and the rank: what torch's flight recorder leaves
_STORES_PROCESS = b"mgpu_train.store.bulk.child"  # what its command line names


@dataclass(frozen=True)
class Launch:
    """One start: nothing in `argv` is ever read by a shell, nothing in it is secret."""

    argv: list[str]
    environment: dict[str, str]
    folder: Path
    orphaned: signal.Signals = signal.SIGKILL  # what it gets when its agent dies


def argv(job: Job, layout: RunLayout, python: str) -> list[str]:
    """The launcher's command line; `python` is the interpreter that has the user's requirements."""
    ours = "mgpu_train.loop" if job.trials is None else "mgpu_train.trials"
    program = ("-m", ours) if job.train is not None else job.command or ()
    return job.launcher.command(program, {**_values(job, layout), "python": python})


def torchrun(job: Job, layout: RunLayout, python: str, program: tuple[str, ...], port: int) -> list[str]:
    """The command line that starts a program of ours on every process of this node, whatever the run's launcher is."""
    return TORCHRUN.command(program, {**_values(job, layout), "python": python, "master_port": port})


def with_python(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """The environment of a shell in which `python`, `pip` and what else was installed beside them are the program's."""
    path = os.pathsep.join(filter(None, (str(Path(python).parent), environment.get("PATH", ""))))
    return {**environment, "PATH": path}


def _values(job: Job, layout: RunLayout) -> dict[str, object]:
    """What the launcher's words mean on this node: those of `mgpu_train.launchers.WORDS`, but the interpreter."""
    workers = _workers(job)
    local_ranks = {f"node-{rank}": list(range(job.processes_per_node)) for rank in range(job.nodes)}
    return {
        "nodes": job.nodes,
        "node_rank": job.node_rank,
        "processes_per_node": job.processes_per_node,
        "world_size": job.nodes * job.processes_per_node,
        "master_addr": job.master_addr,
        "master_port": job.master_port,
        "coordinator": workers[0],
        "workers": json.dumps(workers),
        "world_info": base64.urlsafe_b64encode(json.dumps(local_ranks).encode()).decode(),
        "rendezvous_s": math.ceil(job.timeouts.rendezvous_s),
        "run_id": job.run_id,
        "attempt": job.attempt,
        "failure_file": layout.failure(job.attempt),
    }


def _workers(job: Job) -> list[str]:
    """Where a process of each node may listen. Nodes on one machine, as those of provider local, share its ports."""
    addresses = job.addresses or (job.master_addr,) * job.nodes
    before = [addresses[:rank].count(address) for rank, address in enumerate(addresses)]
    ports = [job.master_port + count for count in before]
    hosts = [f"[{address}]" if ":" in address else address for address in addresses]
    return [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]


def base_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The node's environment less everything that opens the store."""
    return {name: value for name, value in environment.items() if not name.startswith("AWS_")}


def _how_often(job: Job) -> dict[str, str]:
    """How often the run file wants a checkpoint: only the program knows when it can save."""
    wanted = job.checkpoint
    every = {
        "MGPU_CHECKPOINT_EVERY_STEPS": wanted.every_steps if wanted else None,
        "MGPU_CHECKPOINT_EVERY_MINUTES": wanted.every_minutes if wanted else None,
    }
    return {name: f"{value:.15g}" for name, value in every.items() if value is not None}  # a million is no 1e+06


def collectives(job: Job, layout: RunLayout) -> dict[str, str]:
    """What NCCL, gloo and torch's flight recorder are told, unless somebody has set it."""
    return {
        "NCCL_DEBUG": "WARN",
        "TORCH_FR_DUMP_TEMP_FILE": str(layout.stacks(job.attempt) / FLIGHT),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(layout.stacks(job.attempt) / FLIGHT),
        **network.settings(job.nodes, job.gpus, job.master_addr),
    }


def overruled(job: Job, layout: RunLayout, environment: Mapping[str, str]) -> list[str]:
    """Which of these somebody has set otherwise, in words: the run file's `env`, or the machine."""
    ours = collectives(job, layout)
    return [
        f"{name}={environment[name]}, as {'`env`' if name in job.env else 'the environment of this machine'} has it, "
        f"instead of {value}"
        for name, value in ours.items()
        if environment[name] != value
    ]


def environment(job: Job, secrets: Mapping[str, str], layout: RunLayout, node: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: the node's, the job's, the secrets, and what the program may rely on."""
    given = {**base_environment(node), **job.env, **secrets}
    given.setdefault("OMP_NUM_THREADS", str(max(1, hardware.cores() // job.processes_per_node)))
    given |= {
        "MGPU_JOB": str(layout.attempt_job(job.attempt)),
        "MGPU_RUN_ID": job.run_id,
        "MGPU_ATTEMPT": str(job.attempt),
        "MGPU_NODE_RANK": str(job.node_rank),
        "MGPU_NODES": str(job.nodes),
        "MGPU_CHECKPOINT_DIR": str(layout.checkpoints),
        "MGPU_METRICS_DIR": str(layout.metrics),
        "MGPU_SAVE_REQUEST": str(layout.save_request(job.attempt)),
        stacks.FOLDER: str(layout.stacks(job.attempt)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # the agent's own grace is to end first: torchrun's 30 s would cut off a save
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(job.timeouts.grace_s(math.inf)) + 10),
    }
    if job.share is not None and job.share.gpus:  # numbered as nvidia-smi does, the same for all runs of the node
        numbers = ",".join(map(str, job.share.slots))
        given |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}
    given = {**collectives(job, layout), **given}
    if given.get("NCCL_NET") == network.EFA:
        given |= network.efa_plugin(given)
    given |= _how_often(job)
    given.pop("MGPU_RESUME_DIR", None)
    if job.resume is not None:
        given["MGPU_RESUME_DIR"] = str(layout.resume)
    given |= job.launcher.variables(_values(job, layout))
    paths = [shipped_library(), given.get("PYTHONPATH", "")]
    given["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return given


def shipped_library() -> str:
    """The folder that holds this very package, for the ranks to import the same one; "" where it is installed.

    A site-packages folder on PYTHONPATH would come before the user's own requirements.
    """
    folder = str(Path(mgpu_train.__file__).resolve().parents[1])
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return "" if folder in installed else folder


class LauncherProcess:
    """A launcher that was started. Make it on the main thread: the launcher dies with the thread that made it."""

    def __init__(self, launch: Launch, log_fd: int) -> None:
        """Output goes to `log_fd` without a pipe: it is kept as it is, and outlives the agent.

        Raises:
            OSError: it could not be started.
        """
        agent = os.getpid()
        self._before = below()
        self._process = subprocess.Popen(
            launch.argv,
            cwd=launch.folder,
            env=launch.environment,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
            preexec_fn=lambda: _prepare(launch, agent),  # no other thread runs yet
        )

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or -signal; None while it runs. What it has orphaned, and has ended, makes room for others."""
        procs.reap_adopted(self._process.pid)
        return self._process.poll()

    @property
    def left(self) -> list[procs.Process]:
        """What it has started, and lives. What `setup` had started before, a mount or a server, is the program's to use
        until the attempt ends."""
        spared = {*self._before, *(each for one in self._before for each in procs.descendants(one.pid))}
        return [each for each in below() if each not in spared]

    @property
    def foreign(self) -> bool:
        """True while it runs as another user, as one does that was started by `sudo`: no signal reaches it."""
        try:
            self._process.send_signal(0)
        except PermissionError:
            return True
        return False

    def terminate(self) -> None:
        """Asks it to save and exit, unless it is `foreign`."""
        if not self.foreign:
            self._process.terminate()

    def kill(self, deadline_s: float) -> bool:
        """Kills the launcher and all that it has started; False: something is left."""
        gone = procs.kill_all(lambda: self.left, deadline_s)
        self.poll()
        return gone


def _prepare(launch: Launch, agent: int) -> None:
    """In the launcher's process, before it is what it will be."""
    procs.open_many_files()
    prctl.die_with_parent(launch.orphaned, agent)


def kill_below(deadline_s: float) -> bool:
    """Kills every process below this one but the store's; False: something is left.

    Without the store's process the uploads that are under way would have to begin again. It ends with this one.
    """
    gone = procs.kill_all(below, deadline_s)
    procs.reap(os.getpid(), 0)
    return gone


def below() -> list[procs.Process]:
    """Every process below this one but the store's."""
    return [each for each in procs.descendants(os.getpid()) if not _moves_bytes(each.pid)]


def _moves_bytes(pid: int) -> bool:
    """True for the store's process. The launcher has a session of its own: nothing below it can be in this one."""
    try:
        here = os.getsid(pid) == os.getsid(0)
        return here and _STORES_PROCESS in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def leftovers(layout: RunLayout) -> list[procs.Process]:
    """What a killed agent left of an older attempt on this node: it carries this node's checkpoint folder."""
    return procs.carrying(f"MGPU_CHECKPOINT_DIR={layout.checkpoints}")


def python() -> str:
    """The interpreter that runs this agent."""
    return sys.executable
