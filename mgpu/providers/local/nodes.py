"""One instance of provider `local`: its record, which outlives it, and its folder, which goes with it.

    <root>/instances/<id>/   the provider's record
        spec.json            what was asked for
        node.json          who keeps it: claimed once and for ever, so an instance lives once (pid 0: it never will)
        endpoint.json        port and host key: the node can be reached
        stopping.json        it was asked to end: when, and why
        stopped.json         everything of it has ended: when, and why
        heartbeat            modification time: the node process's last sign of life
        control.json    what the provider does with it, on request: mgpu.providers.local.control
        node.log
    <root>/nodes/<id>/       the machine: home, tmp, bin, host_key

Standard library only: a node process is up in some hundredths of a second.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mgpu_train.agent.host.layout import LEASE

from mgpu.providers.local import bill, files, procs
from mgpu.providers.local.procs import Process

USER = "mgpu"
# what a node takes over from this machine: how to reach a network and whom to trust; nothing of the operator's own
_PASSED_ON = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "DOCKER_HOST",  # nodes have no engine but this machine's
)
_PASSED_ON_PREFIXES = ("PIP_", "UV_")
_REMAINS_S = 2.0  # for processes to vanish after SIGKILL


@dataclass(frozen=True)
class NodeSpec:
    """What was asked for: everything a node process needs to know."""

    rank: int
    fleet: str
    generation: int
    owner: str
    ssh_public_key: str
    python: str
    lease_s: float
    hard_cap_s: float
    price_usd_per_hour: float
    market: str
    asked_at: float = 0.0  # UNIX seconds: the hard cap counts from here; 0: from when its node process began


@dataclass(frozen=True)
class NodeProcess:
    """Who keeps a node since `at` (UNIX seconds)."""

    process: Process
    at: float

    @property
    def begun(self) -> bool:
        """False: the instance was ended before it began."""
        return self.process.pid != 0


@dataclass(frozen=True)
class Instance:
    """One instance by its id; holds nothing, every question is put to the files and to the system."""

    root: Path
    id: str

    @property
    def record(self) -> Path:
        """The provider's record."""
        return self.root / "instances" / self.id

    @property
    def folder(self) -> Path:
        """The machine's disk."""
        return self.root / "nodes" / self.id

    @property
    def home(self) -> Path:
        """HOME of whoever logs in."""
        return self.folder / "home"

    @property
    def host_key(self) -> Path:
        """The SSH host key, private."""
        return self.folder / "host_key"

    @property
    def log(self) -> Path:
        """What node process and SSH server print."""
        return self.record / "node.log"

    @property
    def registered(self) -> bool:
        """True once its record is there."""
        return (self.record / "spec.json").exists()

    def register(self, spec: NodeSpec) -> None:
        """Makes the record; an instance that has one keeps it."""
        if not self.registered:
            self.record.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.claim(self.record / "spec.json", asdict(spec))

    def spec(self) -> NodeSpec:
        """What was asked for."""
        data = files.load(self.record / "spec.json")
        if data is None:
            raise FileNotFoundError(f"instance {self.id} has no record under {self.root}")
        return NodeSpec(**data)

    def claim(self, process: Process) -> bool:
        """Makes `process` this instance's node process; True for one process, once, for ever."""
        return files.claim(self.record / "node.json", {"at": round(time.time(), 3), **asdict(process)})

    def node_process(self) -> NodeProcess | None:
        """Its node process, dead or alive; None: it has none yet."""
        data = files.load(self.record / "node.json")
        return NodeProcess(Process(data["pid"], data["start_ticks"], data["boot_id"]), data["at"]) if data else None

    def endpoint(self) -> tuple[int, str] | None:
        """Port and host key (OpenSSH public key line); None: it cannot be reached yet."""
        data = files.load(self.record / "endpoint.json")
        return (data["port"], data["host_key"]) if data else None

    def publish(self, port: int, host_key: str) -> None:
        """Says how it is reached."""
        files.replace(self.record / "endpoint.json", {"port": port, "host_key": host_key})

    def ask_to_end(self, reason: str) -> float:
        """Notes that it is to end; returns for how many seconds that has been known, whatever the clock was set to."""
        uptime_s = procs.uptime_s()
        files.claim(self.record / "stopping.json", {"at": time.time(), "uptime_s": uptime_s, "reason": reason})
        return uptime_s - (files.load(self.record / "stopping.json") or {}).get("uptime_s", uptime_s)

    def end_reason(self) -> str:
        """Why it ended or is ending; empty: nobody has asked it to."""
        for name in ("stopped.json", "stopping.json"):
            data = files.load(self.record / name)
            if data:
                return data["reason"]
        return ""

    @property
    def ending_at(self) -> float | None:
        """When it was first asked to end, or was found dead (UNIX seconds); None: neither."""
        data = files.load(self.record / "stopping.json") or files.load(self.record / "stopped.json")
        return data["at"] if data else None

    @property
    def made_at(self) -> float:
        """When its record was made (UNIX seconds)."""
        return (self.record / "spec.json").stat().st_mtime

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")

    @property
    def stopped(self) -> bool:
        """True once everything of it is known to have ended."""
        return (self.record / "stopped.json").exists()

    def finish(self, reason: str) -> None:
        """Its processes have all ended: the folder goes, and the bill is closed; not while something of it is left."""
        if not _remove(self.folder) or self.stopped:
            return
        node_process = self.node_process()
        if node_process is not None and node_process.begun:
            bill.write_stop(self.root, self.id, reason)
        files.claim(self.record / "stopped.json", {"at": time.time(), "reason": reason})

    def settle(self) -> bool:
        """Looks whether it has ended; the remains of one whose node process was killed are ended first. True: it is
        gone.
        """
        node_process = self.node_process()
        if node_process is None or node_process.process.alive:
            return False
        if self.stopped:
            return True
        reason = self.end_reason() or ("the node process was killed" if node_process.begun else "ended before it began")
        if node_process.begun and not procs.end(self.remains, term_s=0, kill_s=_REMAINS_S):
            return False
        self.finish(reason)
        return self.stopped

    def remains(self) -> list[Process]:
        """Processes that carry its mark."""
        return procs.marked().get(self.id, [])

    def forgo(self, reason: str) -> None:
        """It will never begin, unless it has; nothing of it is ever billed."""
        if self.claim(Process(0, 0, "")):
            self.ask_to_end(reason)
            self.settle()

    def terminate(self, reason: str, kill_after_s: float) -> bool:
        """Asks it to end, with SIGKILL once `kill_after_s` seconds have passed since it was first asked. True: gone."""
        asked_s = self.ask_to_end(reason)
        self.claim(Process(0, 0, ""))  # no node process yet: none will ever come
        node_process = self.node_process()
        if node_process is not None and node_process.begun and node_process.process.alive:
            node_process.process.send(signal.SIGKILL if asked_s > kill_after_s else signal.SIGTERM)
            node_process.process.send(signal.SIGCONT)
        return self.settle()


def _remove(folder: Path) -> bool:
    """Removes a folder, also what a program has made read-only in it; False: something is left."""
    shutil.rmtree(folder, ignore_errors=True)
    for above, names, _ in os.walk(folder):  # each before it is entered
        for path in (path for path in map(Path(above).joinpath, ("", *names)) if not path.is_symlink()):
            with suppress(OSError):
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of this machine's environment that nodes see too."""
    return {
        name: value for name, value in environment.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }


def login_environment(instance: Instance, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a session on the node."""
    return {
        **passed_on(environment),
        "PATH": f"{instance.folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(instance.home),
        "TMPDIR": str(instance.folder / "tmp"),
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        procs.MARK: instance.id,
    }


def furnish(instance: Instance, spec: NodeSpec) -> None:
    """Makes the machine's folder: home with the first lease, tmp, and `python3` on the PATH."""
    for folder in (instance.folder, instance.home / ".mgpu", instance.folder / "tmp", instance.folder / "bin"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (instance.home / LEASE).write_text(f"{int(procs.uptime_s() + spec.lease_s)}\n", encoding="utf-8")
    for name in ("python", "python3"):
        program = instance.folder / "bin" / name
        # a script, not a link: through a link Python would not find the virtual environment it belongs to
        program.write_bytes(os.fsencode(f'#!/bin/sh\nexec {shlex.quote(spec.python)} "$@"\n'))
        os.chmod(program, 0o755)  # noqa: PTH101,S103
