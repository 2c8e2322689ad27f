"""One command on 64 SSH servers, cold and over connections that stand, beside asyncssh, fabric, ansible and 64 x ssh.

Cold is a whole program: it starts, imports, connects to all, runs `echo ready` on each, and ends. Over connections that
stand it is one more such command, in the program that holds them. With ansible and ssh that is another process, and one
more call of the client; `a playbook` is one more task of the same call of ansible's. All servers are OpenSSH's, on this
machine's loopback: what they take of its CPU (column `server`) is the same for everybody. Everybody may talk to all 64
at once; ansible has its pipelining, and no facts to gather. asyncssh and ssh compare host keys as ours does.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.measure import Cost, run
from bench.race import race
from bench.report import Report
from bench.tools import ROOT, peer

SERVERS, ROUNDS, START_S = 64, 3, 30.0
PEERS = {
    "asyncssh": ("asyncssh==2.24.1", "python"),
    "fabric": ("fabric==3.2.3", "python"),
    "ansible": ("ansible-core==2.19.14", "python"),
}
CLIENTS = ROOT / "bench" / "fanout_clients.py"


def main() -> None:
    """Prints both tables and what they must reach."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if not sshd or not shutil.which("ssh"):
        print("one command on many SSH servers is left out: OpenSSH is not installed")
        return
    pythons = {"ours": Path(sys.executable), "64 x ssh": Path(sys.executable)}
    pythons |= {name: python for name in PEERS if (python := peer(name, PEERS))}
    report = Report()
    with _servers(sshd) as (fleet, pid):

        def client(name: str, kind: str) -> Callable[[int], Cost]:
            return lambda _: _run(pythons[name], name, kind, fleet, pid)

        what = f"one command on {SERVERS} SSH servers"
        cold = race(report, f"{what}, cold", {name: client(name, "cold") for name in pythons}, rounds=ROUNDS)
        if "ansible" in pythons:
            pythons["a playbook"] = pythons["ansible"]
        standing = f"{what}, connections that stand"
        held = race(report, standing, {name: client(name, "held") for name in pythons}, rounds=ROUNDS)
    for name, kind, costs, least in (
        ("fabric", "cold", cold, 1),
        ("ansible", "cold", cold, 2),
        ("ansible", "connections that stand", held, 20),
    ):
        if name in costs:
            report.at_least(f"{kind}: speed over {name}'s", costs[name].wall_s / costs["ours"].wall_s, least, "x")


def _run(python: Path, name: str, kind: str, fleet: Path, pid: int) -> Cost:
    with tempfile.TemporaryDirectory(prefix="mgpu-", dir="/tmp") as scratch:  # short: sockets of ssh's lie there
        # -P: what lies beside the program is not on its path
        cost = run([str(python), "-P", str(CLIENTS), name, kind, str(fleet), scratch], os.environ, server=pid)
        for held in Path(scratch).rglob("*"):
            if held.is_socket():  # ssh's, which holds a connection
                subprocess.run(["ssh", "-O", "exit", "-S", str(held), "127.0.0.1"], check=True, capture_output=True)
    if cost.error:
        raise SystemExit(f"{name}, {kind}: {cost.error}")
    return cost


@contextmanager
def _servers(sshd: str) -> Iterator[tuple[Path, int]]:
    """A file that says where the servers listen and which keys they have; and the process that they stem from."""
    user = pwd.getpwuid(os.getuid()).pw_name
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # root's sshd wants it; the distribution's service makes it at its start
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as name:
        folder = Path(name)
        login, ports, configs = _key(folder / "id"), _free_ports(SERVERS), list[Path]()
        (folder / "authorized").write_text(f"{login}\n")
        servers = list[tuple[int, str]]()
        for port in ports:
            servers.append((port, _key(folder / f"host-{port}")))
            configs.append(folder / f"config-{port}")
            configs[-1].write_text(
                f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host-{port}\nPidFile none\nUsePAM no\n"
                f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
                f"SetEnv HOME={folder}\n"  # bash reads a ~/.bashrc even for a command, and one may take longer than ssh
            )
        known = "".join(f"[127.0.0.1]:{port} {key}\n" for port, key in servers)
        (folder / "known_hosts").write_text(known)
        fleet = {"user": user, "key": f"{folder}/id", "known_hosts": f"{folder}/known_hosts", "servers": servers}
        (folder / "fleet.json").write_text(json.dumps(fleet))
        script = f'for each do {sshd} -D -q -f "$each" & done; wait'
        parent = subprocess.Popen(["sh", "-c", script, "sh", *map(str, configs)], process_group=0)
        try:
            _wait(ports)
            yield folder / "fleet.json", parent.pid
        finally:
            os.killpg(parent.pid, 15)
            parent.wait()


def _key(path: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path.with_suffix(".pub").read_text().strip()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def _wait(ports: list[int]) -> None:
    end = time.monotonic() + START_S
    for port in ports:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > end:
                raise SystemExit(f"sshd on port {port} did not start")
            time.sleep(0.05)
