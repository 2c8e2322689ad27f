"""A node of provider `local` as a machine: SSH and SFTP, its lease, and every way it can end. Real processes."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import asyncssh
import paramiko
import pytest
from fakes.local import LocalWorld
from mgpu_train.agent.host.layout import LEASE
from waiting import until

from mgpu.errors import InvalidRequest, NoCapacity, Transient
from mgpu.providers.base import FleetRequest, Handle, NodePhase, NodeState, create_token
from mgpu.providers.local import bill, nodes, procs
from mgpu.providers.local import provider as module
from mgpu.providers.local.nodes import Instance
from mgpu.providers.local.provider import LocalProvider

DEADLINE_S = 60.0
SCRIPTS = Path(module.__file__).parent


@dataclass
class World(LocalWorld):
    """With the private half of the key."""

    key: paramiko.PKey

    def create(self, request: FleetRequest) -> Handle:
        offer = self.provider.offers(request.requirements).offers[0]
        return self.provider.create(request, offer, create_token("o-1", "demo", 1, offer, 0))

    def up(self, request: FleetRequest) -> tuple[Handle, tuple[NodeState, ...]]:
        handle = self.create(request)
        until(lambda: self.provider.describe(handle).ready)
        return handle, self.provider.describe(handle).nodes

    def node(self) -> tuple[Handle, NodeState]:
        handle, states = self.up(self.request())
        return handle, states[0]

    def connect(self, node: NodeState, user: str = "mgpu", key: paramiko.PKey | None = None) -> paramiko.SSHClient:
        client = paramiko.SSHClient()
        kind, data = node.host_key.split()
        pinned = paramiko.PKey.from_type_string(kind, base64.b64decode(data))
        client.get_host_keys().add(f"[{node.address}]:{node.port}", kind, pinned)
        client.connect(
            node.address, node.port, user, pkey=key or self.key, look_for_keys=False, allow_agent=False, timeout=20
        )
        return client

    def node_process(self, handle: Handle) -> procs.Process:
        node_process = self.instance(handle).node_process()
        assert node_process is not None
        return node_process.process


def fresh_key() -> tuple[paramiko.PKey, str]:
    key = asyncssh.generate_private_key("ssh-ed25519")
    private = paramiko.Ed25519Key.from_private_key(io.StringIO(key.export_private_key("openssh").decode()))
    return private, key.export_public_key().decode().strip()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    key, public = fresh_key()
    world = World(LocalProvider(root=tmp_path / "l"), public, key)
    yield world
    world.all_gone()


def run(client: paramiko.SSHClient, command: str, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
    to, out, err = client.exec_command(command, timeout=DEADLINE_S)
    with contextlib.suppress(OSError):
        to.write(stdin)
        to.channel.shutdown_write()
    output, errors = out.read(), err.read()
    return out.channel.recv_exit_status(), output, errors


def daemon(client: paramiko.SSHClient, command: str) -> procs.Process:
    """Starts what outlives its session, as the agent does."""
    _, out, _ = run(client, f"setsid {command} >/dev/null 2>&1 </dev/null & echo $!")
    process = procs.of(int(out))
    assert process is not None
    return process


# --- SSH


def test_commands_run_by_sh_in_a_clean_home(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-1")
    monkeypatch.setenv("WANDB_API_KEY", "canary-2")
    monkeypatch.setenv("PIP_INDEX_URL", "https://pypi.example")
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    handle, node = world.node()
    with world.connect(node) as client:
        _, out, _ = run(client, "env; echo PWD=$(pwd)")
        _, everything, _ = run(client, "cat /proc/$PPID/environ")
    seen = dict(line.split("=", 1) for line in out.decode().splitlines())
    home = str(world.instance(handle).home)
    assert (seen["HOME"], seen["PWD"], seen["USER"], seen["LANG"]) == (home, home, "mgpu", "C.UTF-8")
    assert seen["TMPDIR"] == str(world.instance(handle).folder / "tmp")
    assert seen["PIP_INDEX_URL"] == "https://pypi.example"
    assert seen["https_proxy"] == "http://proxy.example"
    assert b"canary" not in out
    assert b"canary" not in everything, "nor does the SSH server hold any of it"


def test_python3_is_the_nodes_interpreter_with_its_environment(world: World):
    _, node = world.node()
    with world.connect(node) as client:
        _, out, _ = run(client, "python3 -c 'import sys, pytest; print(sys.prefix)'; python -c 'print(2)'")
    assert out.decode().split() == [sys.prefix, "2"]


@pytest.mark.parametrize(
    ("command", "status", "out", "err"),
    [
        ("printf '%s|' a 'b c' '$HOME' \"d\ne\"", 0, b"a|b c|$HOME|d\ne|", b""),
        ("echo out; echo err >&2; exit 7", 7, b"out\n", b"err\n"),
        ("cat", 0, b"\x00\xff\r\n\x04", b""),
        ("exec 0<&-; sleep 0.1; echo on", 0, b"on\n", b""),
    ],
)
def test_status_output_and_input(world: World, command: str, status: int, out: bytes, err: bytes):
    _, node = world.node()
    with world.connect(node) as client:
        assert run(client, command, b"\x00\xff\r\n\x04") == (status, out, err)


def test_a_command_killed_by_a_signal_has_no_status(world: World):
    _, node = world.node()
    with world.connect(node) as client:
        assert run(client, "kill -9 $$")[0] == -1


def test_bytes_arrive_whole_however_fast_they_come_and_however_slowly_they_are_read(world: World):
    _, node = world.node()
    data = os.urandom(5_000_000)
    digest = hashlib.sha256(data).hexdigest().encode()
    with world.connect(node) as client:
        for _ in range(3):
            assert run(client, "sleep 0.05; sha256sum", data)[1].split()[0] == digest
        _, out, _ = client.exec_command("head -c 9000000 /dev/zero | tee /dev/stderr >/dev/null; echo end >&2")
        received = b""
        while chunk := out.channel.recv_stderr(65536):
            received += chunk
            time.sleep(0.0005)
        assert len(received) == 9_000_004


def test_many_sessions_at_once(world: World):
    _, node = world.node()
    wrong = []

    def one(number: int) -> None:
        if run(client, f"cat; exit {number}", b"x" * 100_000) != (number, b"x" * 100_000, b""):
            wrong.append(number)

    with world.connect(node) as client:
        threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_terminal_has_a_size_and_carries_ctrl_c(world: World):
    _, node = world.node()
    with world.connect(node) as client:
        shell = client.invoke_shell(width=90, height=30)
        shell.settimeout(DEADLINE_S)
        shell.send(b"stty size; tty; sleep 1000\n")
        seen = b""
        while b"/dev/pts" not in seen:
            seen += shell.recv(4096)
        shell.resize_pty(100, 40)
        shell.send(b"\x03")
        shell.send(b"stty size; exit 3\n")
        while chunk := shell.recv(4096):
            seen += chunk
        assert b"30 90" in seen
        assert b"40 100" in seen
        assert shell.recv_exit_status() == 3


def test_a_program_goes_on_when_its_client_is_gone_and_a_terminal_hangs_up(world: World):
    _, node = world.node()
    client = world.connect(node)
    _, out, _ = client.exec_command("echo $$; exec sleep 1000")
    kept = procs.of(int(out.readline()))
    _, terminal, _ = client.exec_command("echo $$; exec sleep 1000", get_pty=True)
    hung_up = procs.of(int(terminal.readline()))
    client.close()
    assert kept is not None
    assert hung_up is not None
    until(lambda: not hung_up.alive)
    assert kept.alive


@pytest.mark.parametrize("who", ["other key", "other user"])
def test_nobody_else_may_log_in(world: World, who: str):
    _, node = world.node()
    login = {"key": fresh_key()[0]} if who == "other key" else {"user": "root"}
    with pytest.raises(paramiko.AuthenticationException):
        world.connect(node, **login)


def test_a_node_listens_on_loopback_only(world: World):
    _, node = world.node()
    # address and port as the kernel prints them: 0100007F is 127.0.0.1
    lines = Path("/proc/net/tcp").read_text().split("\n")
    port = f"{node.port:04X}"
    listening = [line.split()[1] for line in lines[1:] if line and line.split()[3] == "0A"]
    assert f"0100007F:{port}" in listening
    assert f"00000000:{port}" not in listening


def test_a_node_is_a_jump_host_to_loopback_and_nowhere_else(world: World):
    _, states = world.up(world.request(2))
    with world.connect(states[0]) as jump:
        transport = jump.get_transport()
        assert transport is not None
        channel = transport.open_channel("direct-tcpip", (states[1].address, states[1].port), ("127.0.0.1", 0))
        assert channel.recv(4) == b"SSH-"
        with pytest.raises(paramiko.ChannelException, match="prohibited"):
            transport.open_channel("direct-tcpip", ("192.0.2.1", 22), ("127.0.0.1", 0))


# --- SFTP


def test_sftp_paths_are_relative_to_home_or_real(world: World):
    handle, node = world.node()
    home = str(world.instance(handle).home)
    with world.connect(node) as client, client.open_sftp() as sftp:
        assert sftp.normalize(".") == home
        sftp.mkdir("runs")
        sftp.putfo(io.BytesIO(b"one"), "runs/a")
        sftp.putfo(io.BytesIO(b"two"), f"{home}/runs/b")
        sftp.posix_rename("runs/a", "runs/b")
        assert sftp.listdir("runs") == ["b"]
        assert sftp.open("runs/b").read() == b"one"
        assert run(client, "cat runs/b")[1] == b"one"
        assert ".mgpu" in sftp.listdir(".")
        sftp.chmod("runs/b", 0o600)
        assert sftp.stat("runs/b").st_mode & 0o777 == 0o600  # type: ignore[operator]


def test_sftp_refuses_to_rename_onto_a_file_and_links_stay_as_they_are(world: World):
    _, node = world.node()
    with world.connect(node) as client, client.open_sftp() as sftp:
        sftp.putfo(io.BytesIO(b"one"), "a")
        sftp.putfo(io.BytesIO(b"two"), "b")
        with pytest.raises(OSError, match="exists"):
            sftp.rename("a", "b")
        sftp.symlink("../elsewhere", "link")
        assert sftp.readlink("link") == "../elsewhere"
        sftp.remove("link")


@pytest.mark.parametrize("path", ["../host_key", "/etc/passwd", "runs/../../host_key", "way-out/host_key"])
def test_sftp_does_not_leave_home(world: World, path: str):
    _, node = world.node()
    with world.connect(node) as client, client.open_sftp() as sftp:
        sftp.symlink("..", "way-out")
        with pytest.raises(PermissionError):
            sftp.open(path)
        with pytest.raises(PermissionError):
            sftp.putfo(io.BytesIO(b"x"), path)


# --- the node process and every way to end


def test_a_node_process_leaves_its_starter_entirely(world: World):
    handle, _ = world.node()
    pid = world.node_process(handle).pid
    assert os.getsid(pid) == pid
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[1]) != os.getpid()
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    files = {link for link in links if link.startswith("/") and link != "/dev/null"}
    assert files == {str(world.instance(handle).log)}


def test_everything_on_a_node_ends_with_it_and_the_folder_goes(world: World):
    handle, node = world.node()
    with world.connect(node) as client:
        processes = [
            daemon(client, "sleep 1000"),
            daemon(client, "env -i sleep 1000"),
            daemon(client, "sh -c \"trap '' TERM; while :; do sleep 1; done\""),
        ]
    world.gone(handle)
    assert [process.alive for process in processes] == [False] * 3
    assert not world.instance(handle).folder.exists()
    assert bill.read(world.root).nodes[0].cost_usd > 0


def test_a_killed_node_process_is_a_lost_node_and_its_remains_are_ended(world: World):
    handle, node = world.node()
    with world.connect(node) as client:
        left = daemon(client, "sleep 1000")
        world.node_process(handle).send(signal.SIGKILL)
        until(lambda: not world.node_process(handle).alive)
    assert left.alive
    assert len(bill.read(world.root).alive) == 1, "what is left costs money, whoever keeps it"
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert not left.alive
    assert not world.instance(handle).folder.exists()
    assert world.provider.describe(handle).nodes[0].reason == "the node process was killed"
    kinds = [line.split('"')[3] for line in (world.root / bill.FILE).read_text().splitlines()]
    assert kinds == ["start", "stop"]


@pytest.fixture
def ordinary() -> Iterator[Path]:
    """A folder of its own for a test that must not be root, for whom nothing is read-only."""
    with tempfile.TemporaryDirectory() as name:
        user = os.geteuid() or 65534
        os.chown(name, user, -1)
        before = os.geteuid()
        os.seteuid(user)
        yield Path(name)
        os.seteuid(before)


def test_a_node_is_not_gone_before_its_disk_is(ordinary: Path, monkeypatch: pytest.MonkeyPatch):
    """Go's module cache and others make their folders read-only."""
    instance = Instance(ordinary, "0123456789-0")
    instance.register(nodes.NodeSpec(0, "f", 1, "me", "key", "python", 1, 1, 0.1, "spot"))
    assert instance.claim(procs.Process(2**22 + 1, 1, "an older boot"))
    deep = instance.home / "go" / "mod" / "cache"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    for folder in (deep, deep.parent, instance.home):
        folder.chmod(0o500)
    with monkeypatch.context() as stuck:
        stuck.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert not instance.settle()
        assert not instance.stopped
    assert instance.settle()
    assert not instance.folder.exists()


def test_the_ssh_server_of_a_killed_node_process_does_not_live_on(world: World):
    handle, node = world.node()
    world.node_process(handle).send(signal.SIGKILL)

    def refused() -> bool:
        with socket.socket() as attempt:
            return attempt.connect_ex((node.address, node.port)) != 0

    until(refused)


def test_a_stopped_node_process_ends_all_the_same(world: World, monkeypatch: pytest.MonkeyPatch):
    handle, _ = world.node()
    world.node_process(handle).send(signal.SIGSTOP)
    world.gone(handle)


def test_a_node_process_that_does_not_end_in_time_is_killed(world: World, monkeypatch: pytest.MonkeyPatch):
    handle, _ = world.node()
    instance = world.instance(handle)
    monkeypatch.setattr(procs.Process, "send", lambda *_: True)
    assert not instance.terminate("destroyed", kill_after_s=0.2)
    sent = []
    monkeypatch.setattr(procs.Process, "send", lambda _, signum: sent.append(signum))
    time.sleep(0.3)
    instance.terminate("destroyed", kill_after_s=0.2)
    assert signal.SIGKILL in sent
    monkeypatch.undo()


@pytest.mark.parametrize("jump_s", [1200.0, -1200.0])
def test_a_clock_that_is_set_neither_kills_a_node_process_early_nor_spares_it(
    world: World, monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    handle, _ = world.node()
    instance, sent, now = world.instance(handle), list[int](), time.time()
    with monkeypatch.context() as patch:
        patch.setattr(procs.Process, "send", lambda _, signum: sent.append(signum))
        instance.terminate("destroyed", kill_after_s=1)
        patch.setattr(nodes.time, "time", lambda: now + jump_s)
        instance.terminate("destroyed", kill_after_s=1)
        assert signal.SIGKILL not in sent
        later_s = procs.uptime_s() + 1.1
        patch.setattr(procs, "uptime_s", lambda: later_s)
        instance.terminate("destroyed", kill_after_s=1)
        assert signal.SIGKILL in sent


def test_a_dead_ssh_server_is_started_again_on_the_same_port_and_programs_go_on(world: World):
    handle, node = world.node()
    with world.connect(node) as client:
        kept = daemon(client, "sleep 1000")
    servers = [p for p in procs.descendants(world.node_process(handle).pid) if b".sshd" in _command(p)]
    servers[0].send(signal.SIGKILL)
    until(lambda: _answers(world, node))
    assert kept.alive
    assert world.phase(handle) is NodePhase.RUNNING


def _command(process: procs.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it ended just now


def _answers(world: World, node: NodeState) -> bool:
    try:
        with world.connect(node) as client:
            return run(client, "echo up")[1] == b"up\n"
    except (OSError, EOFError, paramiko.SSHException):
        return False


def test_a_lease_that_nobody_renews_ends_the_node(world: World):
    handle = world.create(world.request(lease_s=2))
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert world.provider.describe(handle).nodes[0].reason == "its lease or its hard cap has ended"
    assert bill.read(world.root).alive == ()
    assert not world.instance(handle).folder.exists()


def test_a_lease_that_turned_into_a_pipe_ends_the_node_and_hangs_nobody(world: World):
    handle = world.create(world.request(lease_s=300, hard_cap_s=12))
    lease = world.instance(handle).home / LEASE
    until(lease.exists)
    lease.unlink()
    os.mkfifo(lease)
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert world.provider.describe(handle).nodes[0].reason == "its lease or its hard cap has ended"


def test_a_machine_that_is_started_late_ends_by_the_hard_cap_that_was_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Who made the gang was killed half-way, and the gang is completed when it is found again."""
    start = module._start
    with monkeypatch.context() as patch:
        patch.setattr(module, "_start", lambda instances: start(instances[:1]))
        handle = world.create(world.request(2, hard_cap_s=600))
    late = world.instance(handle, 1)
    asked = late.spec()
    (late.record / "spec.json").write_text(json.dumps(asdict(replace(asked, asked_at=asked.asked_at - 600))))
    assert world.create(world.request(2, hard_cap_s=600)) == handle
    until(lambda: world.provider.describe(handle).nodes[1].phase is NodePhase.TERMINATED)
    assert world.provider.describe(handle).nodes[1].reason == "its lease or its hard cap has ended"
    assert world.provider.describe(handle).nodes[0].phase is not NodePhase.TERMINATED


def test_a_renewed_lease_keeps_the_node_but_not_beyond_its_hard_cap(world: World):
    handle = world.create(world.request(lease_s=6, hard_cap_s=14))
    lease = world.instance(handle).home / LEASE
    until(lambda: lease.exists() and lease.read_text().endswith("\n"))
    first = int(lease.read_text())
    (lease.parent / "new").write_text("999999999")
    (lease.parent / "new").replace(lease)
    until(lambda: procs.uptime_s() > first + 4)
    assert world.phase(handle) is not NodePhase.TERMINATED
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)


def test_a_dead_lease_script_is_started_again(world: World):
    handle, _ = world.node()
    node_process = world.node_process(handle)

    def enforcers() -> set[procs.Process]:
        return {p for p in procs.descendants(node_process.pid) if b"lease.sh" in _command(p)}

    until(enforcers)
    killed = [process for process in enforcers() if process.send(signal.SIGKILL)]
    assert killed
    until(lambda: enforcers() - set(killed))


def test_the_lease_ends_what_a_killed_node_process_has_left_without_anybody_looking(world: World):
    handle, states = world.up(world.request(lease_s=300))
    with world.connect(states[0]) as client:
        left = daemon(client, "sleep 1000")
    world.node_process(handle).send(signal.SIGKILL)
    (world.instance(handle).home / LEASE).write_text("1")  # seconds since boot: long ago
    until(lambda: not left.alive)
    until(lambda: bill.read(world.root).alive == ())


def test_records_that_vanish_end_the_node(world: World):
    handle, _ = world.node()
    node_process = world.node_process(handle)
    record, aside = world.instance(handle).record, world.root / "aside"
    record.rename(aside)
    until(lambda: not node_process.alive)
    aside.rename(record)
    assert world.phase(handle) is NodePhase.TERMINATED


def test_a_folder_that_vanishes_ends_the_node(world: World):
    handle, _ = world.node()
    shutil.rmtree(world.instance(handle).folder)
    until(lambda: world.phase(handle) is NodePhase.TERMINATED)
    assert world.provider.describe(handle).nodes[0].reason == "its folder is gone"


# --- create, repaired


def test_a_create_that_was_killed_halfway_is_completed_by_the_next(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_start", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        world.create(world.request(2))
    (half,) = world.provider.list_owned("o-1")
    assert world.phase(half) is NodePhase.PENDING
    monkeypatch.undo()
    handle, _ = world.up(world.request(2))
    assert handle == half


def test_a_half_made_gang_that_was_destroyed_never_starts(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_start", lambda _: None)
    handle = world.create(world.request(2))
    monkeypatch.undo()
    assert world.provider.destroy(handle)
    assert world.create(world.request(2)) == handle
    assert world.phase(handle) is NodePhase.TERMINATED
    assert bill.read(world.root).nodes == ()


def test_a_node_process_that_cannot_start_is_told_with_its_last_words(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nodes, "login_environment", lambda *_: {"PATH": "/nowhere"})
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with pytest.raises(Transient, match="did not start"):
        world.create(world.request(python=str(Path(sys.prefix) / "bin" / "python")))


def test_more_nodes_than_the_machine_carries_are_refused(world: World):
    with pytest.raises(NoCapacity, match="room for"):
        world.create(world.request(1024))
    assert world.provider.list_owned("o-1") == ()


def test_there_are_no_gpus_and_no_other_regions(world: World):
    needed = world.request().requirements
    with_gpus = world.provider.offers(needed.model_copy(update={"gpus_per_node": 1}))
    assert with_gpus.offers == ()
    assert "`provider: hosts`" in with_gpus.notes[0]  # the plan tells it: where to go with the GPUs of this machine
    assert world.provider.offers(needed.model_copy(update={"regions": ("us-east-1",)})).offers == ()
    assert {offer.market for offer in world.provider.offers(needed).offers} == {"spot", "on-demand"}


def test_check_names_a_python_without_torch_and_one_that_is_missing(tmp_path: Path):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    with pytest.raises(InvalidRequest, match="torch"):
        LocalProvider({"python": str(bare)}, tmp_path).check()
    with pytest.raises(InvalidRequest, match="is not a program"):
        LocalProvider({"python": "/nowhere/python"}, tmp_path).check()


def test_a_node_nobody_knows_is_not_called_terminated(world: World):
    handle = world.create(world.request())
    with pytest.raises(InvalidRequest, match="no record"):
        world.provider.describe(handle.model_copy(update={"ids": ("0123456789-0",)}))
    with pytest.raises(InvalidRequest):
        world.provider.describe(handle.model_copy(update={"ids": ("../../etc",)}))


def test_a_node_process_needs_neither_pydantic_nor_asyncssh():
    code = "import sys, mgpu.providers.local.node_process as _\nprint({'pydantic', 'asyncssh'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_the_provider_loads_no_ssh_server():
    code = "import sys; from mgpu.providers import registry; registry.get('local'); print('asyncssh' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"


# --- lease.sh alone, on a clock of the test's own


class LeaseScript:
    """lease.sh with a made-up uptime; its power-off command writes a line."""

    def __init__(self, folder: Path, hard_cap: int = 1000) -> None:
        self.uptime, self.lease, self.off = folder / "uptime", folder / "lease", folder / "off"
        self.tools, self.polls = folder / "tools", folder / "polls"
        self.at(100)
        self.hard_cap = hard_cap
        self.process: subprocess.Popen | None = None

    def at(self, second: int) -> None:
        aside = self.uptime.with_suffix(".new")
        aside.write_text(f"{second}.25 1000.00\n")
        aside.replace(self.uptime)

    def start(self) -> None:
        # a poll of 0 seconds would be a busy loop: `sleep` is replaced by a short one
        self.tool("sleep", f"echo >>{self.polls}; exec /bin/sleep 0.02")
        power_off = ("sh", "-c", f"echo off >>{self.off}")
        command = ["sh", SCRIPTS.parent / "lease.sh", self.lease, str(self.hard_cap), "5", *power_off]
        path = f"{self.tools}:{os.environ['PATH']}"
        self.process = subprocess.Popen(command, env={"PATH": path, "MGPU_UPTIME_FILE": str(self.uptime)})

    def tool(self, name: str, does: str) -> None:
        """What the script calls by this name."""
        self.tools.mkdir(exist_ok=True)
        (self.tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (self.tools / name).chmod(0o755)

    def settled(self) -> None:
        """Returns when the script has looked at least once since this call: it sleeps after each look."""
        polled = lambda: self.polls.stat().st_size if self.polls.exists() else 0  # noqa: E731
        before = polled()
        until(lambda: polled() >= before + 2)

    @property
    def powered_off(self) -> int:
        return len(self.off.read_text().splitlines()) if self.off.exists() else 0


@pytest.fixture
def script(tmp_path: Path) -> Iterator[LeaseScript]:
    script = LeaseScript(tmp_path)
    yield script
    if script.process is not None:
        script.process.kill()
        script.process.wait()


def test_the_lease_script_powers_off_at_the_lease_and_repeats_until_it_works(script: LeaseScript):
    script.lease.write_text("200\n")
    script.start()
    script.settled()
    assert script.powered_off == 0
    script.at(199)
    script.settled()
    assert script.powered_off == 0
    script.at(200)
    until(lambda: script.powered_off >= 3)


def test_a_renewed_lease_counts_and_the_hard_cap_beats_it(script: LeaseScript):
    script.lease.write_text("200\n")
    script.start()
    script.lease.write_text("99999\n")
    script.settled()
    script.at(999)
    script.settled()
    assert script.powered_off == 0
    script.at(1000)
    until(lambda: script.powered_off)


@pytest.mark.parametrize(
    "garbage", [None, "", "soon\n", "-5\n", "0x99\n", "1e9\n", "0900\n", "9" * 40, "$(touch pwned)\n"]
)
def test_a_lease_that_cannot_be_read_leaves_the_last_good_one(script: LeaseScript, garbage: str | None):
    script.lease.write_text("300\n")
    script.start()
    script.settled()
    if garbage is None:
        script.lease.unlink()
    else:
        script.lease.write_text(garbage)
    script.settled()
    script.at(299)
    script.settled()
    assert script.powered_off == 0
    script.at(300)
    until(lambda: script.powered_off)


def test_without_any_lease_the_hard_cap_stands(script: LeaseScript):
    script.start()
    script.at(999)
    script.settled()
    assert script.powered_off == 0
    script.at(1000)
    until(lambda: script.powered_off)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_what_is_no_small_file_keeps_nobody_from_the_clock(script: LeaseScript, kind: str):
    script.lease.write_text("300\n")
    script.start()
    script.settled()
    script.lease.unlink()
    if kind == "pipe":
        os.mkfifo(script.lease)
    elif kind == "device":
        script.lease.symlink_to("/dev/zero")
    elif kind == "folder":
        script.lease.mkdir()
    else:
        with script.lease.open("w") as file:
            file.truncate(1 << 34)
    script.settled()
    assert script.powered_off == 0
    script.at(300)
    until(lambda: script.powered_off)


def test_a_pipe_that_is_put_there_while_it_looks_keeps_nobody_from_the_clock(script: LeaseScript):
    script.tool("dd", f'rm {script.lease}; mkfifo {script.lease}; exec /bin/dd "$@"')
    script.tool("timeout", 'shift; exec /usr/bin/timeout 0.1 "$@"')
    script.lease.write_text("300\n")
    script.start()
    script.settled()
    assert script.powered_off == 0
    script.at(1000)
    until(lambda: script.powered_off)


def test_what_was_born_while_the_rest_was_killed_is_killed_too(tmp_path: Path):
    environment = {"PATH": os.environ["PATH"], procs.MARK: "fedcba9876-0"}

    def born() -> subprocess.Popen:
        return subprocess.Popen(["sleep", "1000"], env=environment)

    first = born()
    script = 'sh "$0" 4194305 1 fedcba9876-0 1; sleep 1000'
    enforcer = subprocess.Popen(["sh", "-c", script, SCRIPTS.parent / "poweroff.sh"], env=environment)
    assert first.wait(DEADLINE_S) == -signal.SIGKILL
    second = born()
    try:
        assert second.wait(DEADLINE_S) == -signal.SIGKILL
        assert enforcer.wait(DEADLINE_S) == -signal.SIGKILL, "and last of all the lease script"
    finally:
        for process in (second, enforcer):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "arguments",
    [[], ["lease", "soon", "5", "true"], ["lease", "100", "x", "true"], ["lease", "100", "0", "true"]],
)
def test_the_lease_script_refuses_what_it_cannot_enforce(arguments: list[str]):
    command = ["sh", SCRIPTS.parent / "lease.sh", *arguments]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert b"usage" in done.stderr
