"""The machines behind the fake AWS are Linux machines: they boot, let in, meet, end, and leave nothing."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from pathlib import Path
from typing import Any

import pytest
from fakes.aws import world
from fakes.aws.leftovers import held, mounts_below, processes_of
from fakes.aws.metadata import FAULTS
from fakes.aws.visitor import Node, Visitor
from waiting import until

HERE = Path(__file__).parent
PYTHON = "/opt/pytorch/bin/python"
GLOO = """
import faulthandler
faulthandler.dump_traceback_later(110, exit=True)
import datetime, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2,
                        timeout=datetime.timedelta(seconds=100))
numbers = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(numbers)
dist.destroy_process_group()  # without it gloo's threads may abort the process as it ends
print(numbers.tolist())
"""


class Refused(Exception):
    """The bench did not do what it was asked."""


class Bench:
    """A world with machines, and SSH from inside it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._numbers = folder, itertools.count(4)
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "machine_bench.py"), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.visitor = Visitor(self("pid"), folder)

    def __call__(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]

    def machine(self, user_data: bytes | str | None = None, **facts: Any) -> Node:
        """Starts one, by default with user data that lets the bench's key in."""
        number = next(self._numbers)
        given = {
            "id": f"i-{number:017x}",
            "private_address": f"10.99.1.{number}",
            "public_address": f"198.51.100.{number}",
            "region": "us-west-2",
            "zone": "us-west-2b",
            "instance_type": "p4d.24xlarge",
            "account": "123456789012",
            "role": "mgpu-node",
            "market": "spot",
            "hop_limit": 2,
            **facts,
        }
        text = self.visitor.letting_in if user_data is None else user_data
        data = text.encode() if isinstance(text, str) else text
        self("start", user_data=base64.b64encode(data).decode(), **given)
        return Node(self.visitor, given)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def bench(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.close()


@pytest.fixture
def machine(bench: Bench) -> Iterator[Callable[..., Node]]:
    """Starts machines that are gone after the test."""
    made: list[Node] = []

    def start(*arguments: Any, **facts: Any) -> Node:
        made.append(bench.machine(*arguments, **facts))
        return made[-1]

    yield start
    for each in made:
        bench("end", instance_id=each.id)


def test_a_machine_boots_and_is_one_of_its_own(machine, bench):
    secret = bench.folder / "secret"
    secret.write_text("the operator's")
    node = machine()
    assert node.run("sudo", "-n", "id", "-u") == "0"
    assert node.run("hostname", "-f") == f"ip-{node.private_address.replace('.', '-')}.ec2.internal"
    assert node.run("sh", "-c", "echo $FAKE; ls /home; cat /proc/1/comm").split() == ["yes", "ubuntu", "python"]
    assert int(node.run("sh", "-c", "ps -e | wc -l")) < 20
    for hidden in (secret, HERE, Path(world.__file__)):
        assert "No such file" in node.ssh(f"sudo ls {hidden}").stderr, hidden


def test_what_is_the_hosts_stays_the_hosts(machine):
    """Root of a machine does not reach the clock, the modules, the settings, the devices or the files of its host."""
    node = machine()
    bounding = int(node.run("sudo", "grep", "CapBnd", "/proc/self/status").split()[1], 16)
    assert not [number for number in (16, 17, 25, 27, 34) if bounding >> number & 1]
    for path in ("/proc/sys/kernel/hostname", "/sys/x", "/opt/pytorch/x", f"{sys.prefix}/x"):
        assert "Read-only" in node.ssh(f"sudo tee {path} </dev/null").stderr, path
    node.run("sudo", "tee", "/etc/made-by-a-fake-machine")
    assert not Path("/etc/made-by-a-fake-machine").exists()
    size_mib = node.run("sh", "-c", "df -m --output=size /etc /tmp | sort -u").split()
    assert len(size_mib) == 2, "one disk, and its heading"
    assert int(size_mib[0]) <= 2048


def test_user_data_of_many_parts_in_the_order_of_cloud_init(machine, bench, tmp_path):
    """Boothooks and host keys come before sshd; scripts come after it, and one that fails stops nothing."""
    key = tmp_path / "host"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    config = {
        "ssh_keys": {"ed25519_private": key.read_text(), "ed25519_public": key.with_suffix(".pub").read_text()},
        "ssh_authorized_keys": [bench.visitor.public_key],
        "runcmd": ["echo runcmd $(pgrep -c -x sshd) >>/order"],
    }
    message = MIMEMultipart()
    for kind, text in (
        ("x-shellscript", "#!/bin/sh\nsleep 0.5; echo script $(pgrep -c -x sshd) >>/order\nexit 3\n"),
        ("cloud-boothook", "#cloud-boothook\n#!/bin/sh\necho hook $(pgrep -c -x sshd) >>/order\n"),
        ("cloud-config", "#cloud-config\n" + json.dumps(config)),
        ("x-shellscript", "#!/bin/sh\necho last >>/order\n"),
    ):
        message.attach(MIMEText(text, kind))
    node = machine(gzip.compress(message.as_bytes()))
    until(lambda: "cloud-init finished" in node.console)
    order = node.run("cat", "/order").splitlines()
    assert order[0] == "hook 0"
    assert [line.split()[0] for line in order] == ["hook", "runcmd", "script", "last"]
    assert int(order[2].split()[1]) >= 1
    assert node.known_hosts.read_text().split()[1:3] == key.with_suffix(".pub").read_text().split()[:2]
    assert "exit status 3" in node.console


def test_without_user_data_it_makes_host_keys_of_its_own(machine, bench):
    node = machine("")
    until(lambda: "cloud-init finished" in node.console)
    scan = ["ssh-keyscan", "-t", "ed25519", node.public_address]
    assert "ssh-ed25519" in until(lambda: bench.visitor.inside(*scan).stdout)


def test_sshd_comes_back(machine):
    node = machine()
    first = node.run("cat", "/run/sshd.pid")
    node.run("sudo", "kill", first)
    until(lambda: node.run("cat", "/run/sshd.pid") != first)


def test_each_is_known_to_the_metadata_service_by_its_address(machine):
    one, other = machine(), machine(region="eu-west-1", zone="eu-west-1a", public_address=None)
    for node in (one, other):
        document, instance, public, role, credentials, notice = (
            "".join(node.metadata(path))
            for path in (
                "dynamic/instance-identity/document",
                "meta-data/instance-id",
                "meta-data/public-ipv4",
                "meta-data/iam/security-credentials/",
                "meta-data/iam/security-credentials/mgpu-node",
                "meta-data/spot/instance-action",
            )
        )
        identity = json.loads(document)
        assert (identity["instanceId"], identity["region"]) == (node.id, node.region) == (instance, node.region)
        assert public == (node.public_address or "404")
        assert role == "mgpu-node"
        assert json.loads(credentials)["Code"] == "Success"
        assert notice == "404"


def test_notices_and_a_service_that_fails(machine, bench):
    node = machine()
    path, kind = "meta-data/spot/instance-action", "spot/instance-action"
    bench("notice", instance_id=node.id, kind=kind, body='{"action": "terminate"}')
    assert node.metadata(path) == ['{"action": "terminate"}']
    for fault, seen in zip(FAULTS, ("no answer", "500", "401", "{malformed"), strict=True):
        bench("trouble", instance_id=node.id, fault=fault)
        assert node.metadata(path) == [seen]
    bench("trouble", instance_id=node.id, fault=None)
    bench("notice", instance_id=node.id, kind=kind, body=None)
    assert node.metadata(path) == ["404"]
    with pytest.raises(Refused, match="not one of"):
        bench("notice", instance_id=node.id, kind="spot/termination-time", body="")


def test_a_boot_waits_for_a_metadata_service_that_fails(monkeypatch):
    cloudinit = runpy.run_path(str(Path(world.__file__).with_name("inside") / "cloudinit.py"))
    known = cloudinit["user_data"].__globals__
    answers = iter([OSError("500"), b"token", b"#!/bin/sh\n"])

    def ask(*_: object) -> bytes:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setitem(known, "ask", ask)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert cloudinit["user_data"]() == b"#!/bin/sh\n"


def test_two_machines_meet(machine):
    one, other = machine(), machine(public_address=None)
    listen = (
        "import socket; server = socket.create_server(('', 5000)); link, peer = server.accept(); "
        "print(peer[0], link.recv(9).decode())"
    )
    for address in (one.private_address, one.public_address):
        say = f"import socket; socket.create_connection(('{address}', 5000), 10).sendall(b'hello')"
        with ThreadPoolExecutor() as pool:
            heard = pool.submit(one.run, "python3", "-c", listen)
            until(lambda: ":1388 " in one.run("cat", "/proc/net/tcp"))  # it listens
            other.run("python3", "-c", say, address=other.private_address)
            assert heard.result() == f"{other.private_address} hello"


def test_a_public_address_comes_and_goes(machine, bench):
    node = machine(public_address=None)
    node.run("true")
    bench("address", instance_id=node.id, public_address="198.51.100.250")
    assert node.run("hostname", address="198.51.100.250")
    assert node.metadata("meta-data/public-ipv4") == ["198.51.100.250"]
    bench("address", instance_id=node.id, public_address=None)
    with pytest.raises(ConnectionError):
        node.run("true", address="198.51.100.250", seconds=0.5)


@pytest.mark.parametrize(
    "command",
    [
        "sudo systemctl poweroff -ff",
        "sudo poweroff -f",
        "sudo shutdown -P now",
        'sudo python3 -c "import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)"',  # what any program comes to
    ],
)
def test_power_off_inside_is_told_and_leaves_nothing(machine, bench, command):
    node = machine()
    namespace = bench("namespace", instance_id=node.id)
    with held(namespace):
        node.ssh(f"(sleep 0.2; {command}) >/dev/null 2>&1 &")  # its answer comes before it
        assert bench("wait_off", instance_id=node.id, seconds=15)
        assert node.id not in bench("running")
        until(lambda: not processes_of(namespace))


def test_whoever_may_not_power_off_does_not(machine, bench):
    node = machine()
    assert node.ssh("poweroff").returncode != 0
    assert node.ssh("sudo shutdown -h +60").returncode != 0
    assert node.ssh("sudo systemctl is-system-running").returncode != 0
    assert node.run("hostname")
    assert node.id not in bench("off")


def wire(bench: Bench, node: Node, seconds: float = 3) -> subprocess.Popen[str]:
    """A connection from the world to a machine's sshd, which says what it hears next: `heard ...` or `silence`."""
    program = (
        f"import socket\nlink = socket.create_connection(('{node.private_address}', 22), 10)\nlink.recv(100)\n"
        f"print('up', flush=True)\ninput()\nlink.settimeout({seconds})\nlink.sendall(b'SSH-2.0-x\\r\\n')\n"
        "try:\n    print('heard', link.recv(9))\nexcept TimeoutError:\n    print('silence')\nexcept OSError as error:\n"
        "    print('heard', error)\n"
    )
    words = [*world.prefix(bench.visitor.pid), sys.executable, "-c", program]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    return process


def test_one_that_is_taken_away_says_nothing(machine, bench):
    """No peer is told: neither that a socket was closed nor that nobody is there; and nothing of it is left."""
    node = machine(private_address="10.50.0.9", public_address=None)
    namespace = bench("namespace", instance_id=node.id)
    node.run("true")
    link = wire(bench, node)
    with held(namespace):
        bench("end", instance_id=node.id)
        assert not processes_of(namespace)
    assert link.communicate("go\n", timeout=30)[0] == "silence\n"
    connecting = f"import socket; socket.create_connection(('{node.private_address}', 22), 1)"
    assert "timed out" in bench.visitor.inside(sys.executable, "-c", connecting).stderr
    assert not (bench.folder / "machines" / node.id / "disk").exists()
    assert node.id not in bench("off")
    bench("end", instance_id=node.id)  # again: it is gone already


def test_a_cut_wire_is_silent_and_can_be_mended(machine, bench):
    node = machine()
    node.run("true")
    link = wire(bench, node)
    bench("connect", instance_id=node.id, connected=False)
    assert link.communicate("go\n", timeout=30)[0] == "silence\n"
    bench("connect", instance_id=node.id, connected=True)
    assert node.run("hostname")


def test_one_that_hangs_stays_and_does_nothing(machine, bench):
    node = machine()
    namespace = bench("namespace", instance_id=node.id)
    node.run("true")
    bench("hang", instance_id=node.id)
    with pytest.raises(ConnectionError):
        node.ssh("true", seconds=1)
    assert node.id in bench("running")
    with held(namespace):
        bench("end", instance_id=node.id)
        assert not processes_of(namespace)


def test_an_address_is_one_machines_alone(machine, bench):
    node = machine()
    with pytest.raises(Refused, match="address of another"):
        bench.machine(private_address=node.private_address)
    with pytest.raises(Refused, match="runs already"):
        bench.machine(id=node.id)
    assert node.run("hostname")


def test_gloo_between_two_machines(machine):
    nodes = [machine(), machine()]
    store = f"tcp://{nodes[0].private_address}:29500"
    with ThreadPoolExecutor() as pool:
        results = [
            pool.submit(node.run, PYTHON, "-c", GLOO, store, str(rank), seconds=120) for rank, node in enumerate(nodes)
        ]
        assert [each.result() for each in results] == ["[3.0, 3.0, 3.0]"] * 2


def test_nothing_outlives_a_server_that_was_killed(namespaces, tmp_path):
    bench = Bench(tmp_path / "bench")
    nodes = [bench.machine(), bench.machine("#!/bin/sh\nexec sleep 1000\n")]
    nodes[0].run("true")
    spaces = [bench("namespace", instance_id=node.id) for node in nodes]
    assert all(map(processes_of, spaces))
    os.kill(bench.process.pid, signal.SIGKILL)
    bench.process.wait()
    until(lambda: not any(map(processes_of, spaces)))
    until(lambda: not mounts_below(tmp_path))


def test_one_that_cannot_start_leaves_nothing(bench):
    wires = bench.visitor.inside("ip", "-br", "link").stdout
    with pytest.raises(Refused, match="RuntimeError"):
        bench.machine(id="i-misfit", private_address="10.99.1.999")
    assert "i-misfit" not in bench("running")
    until(lambda: bench.visitor.inside("ip", "-br", "link").stdout == wires)
    assert not mounts_below(bench.folder / "machines" / "i-misfit")
