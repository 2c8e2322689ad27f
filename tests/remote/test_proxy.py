"""Connections that a program carries: all that others can do, and no process of theirs is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.errors import ConnectionFailed, HostKeyMismatch, InputError
from mgpu.remote.node import connect
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.proxy import ProxyStream
from mgpu.remote.targets import ProxyCommand, Target, hop

RELAY = str(Path(__file__).with_name("relay.py"))
NOWHERE = "192.0.2.1"
ENDLESS = "trap '' TERM; while :; do read -r _ || sleep 0.05; done"  # for which the end of input is none


@pytest.fixture
def carried(server, tmp_path):
    """A node of that server, which has no address, and the file with its relay's process id."""

    def target(**changes) -> Target:
        via = ProxyCommand(("{python}", RELAY, str(tmp_path / "pid"), str(server.port)))
        return server.target(address=NOWHERE, via=via, **changes)

    return target


@pytest.fixture
def relay(tmp_path):
    return lambda: int((tmp_path / "pid").read_text())


def status(pid: int | str) -> list[str]:
    """Its state and its parent; none: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    return bool(status(pid)) and status(pid)[0] != "Z"


def children() -> set[str]:
    """Of this process, the dead that nobody has asked for included."""
    return {each.name for each in Path("/proc").glob("[0-9]*") if status(each.name)[1:] == [str(os.getpid())]}


def test_commands_and_files_go_through_it_and_it_ends_with_the_connection(carried, relay, server, keys, timeouts):
    folder = server.folder / "code"
    folder.mkdir()
    (folder / "main.py").write_bytes(os.urandom(300_000))
    with NodeSet.connect([carried()], keys.file, timeouts) as nodes:
        (node,) = nodes.nodes
        assert node.run(["pwd"], timeout=20).stdout.decode().strip() == str(server.home)
        nodes.sync(folder, "code", python=sys.executable)
        assert node.read("code/main.py") == (folder / "main.py").read_bytes()
        assert alive(relay())
    assert not Path(f"/proc/{relay()}").exists(), "not even as a zombie"


def test_one_that_is_killed_is_a_lost_connection_and_the_next_one_starts_another(carried, relay, keys, timeouts):
    with connect(carried(), keys.file, timeouts) as node:
        first = relay()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ConnectionFailed):
            node.run(["sleep", "60"], timeout=60)
        node.reconnect()
        assert node.run(["echo", "again"], timeout=20).stdout == b"again\n"
        assert relay() != first


def test_another_host_key_is_refused_whatever_carries_it(carried, relay, new_server, keys, timeouts):
    with pytest.raises(HostKeyMismatch, match="node 0"):
        connect(carried(host_key=new_server().host_key), keys.file, timeouts)
    assert not alive(relay())


def test_it_ends_with_this_process_however_that_ends(carried, relay, keys, tmp_path):
    target = carried()
    program = f"""
import time
from pathlib import Path, PosixPath
from mgpu.remote.node import connect
from mgpu.remote.targets import *
from mgpu_train.timeouts import Timeouts
node = connect({target!r}, {keys.file!r}, Timeouts())
Path({str(tmp_path / "up")!r}).touch()
time.sleep(60)
"""
    operator = subprocess.Popen([sys.executable, "-c", program])
    try:
        until((tmp_path / "up").exists, 30)
        assert alive(relay())
    finally:
        operator.kill()
        operator.wait()
    until(lambda: not alive(relay()), 10)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["sh", "-c", "echo no such machine >&2; exit 3"], "has ended. no such machine"),
        (["sh", "-c", "echo Cannot perform start session; exit 0"], "Cannot perform start session"),
        (["sh", "-c", "echo SSH is far; cat"], "No answer in time. SSH is far"),
        (["sh", "-c", ENDLESS], "No answer in time."),
        (["/no/such/program"], "No such file"),
        (["yes"], "No SSH server answers."),
    ],
)
def test_one_that_does_not_get_there_says_why_and_is_gone(argv, why, server, keys):
    began, before = time.monotonic(), children()
    with pytest.raises(ConnectionFailed, match="could not be connected to") as failed:
        connect(server.target(via=ProxyCommand(tuple(argv))), keys.file, Timeouts(ssh_banner_s=0.3))
    assert why in failed.value.why
    assert time.monotonic() - began < 10
    assert children() == before


def test_two_threads_may_close_it(monkeypatch):
    """The one that reads does so at the end of the input, and whoever closes the connection."""
    stream = ProxyStream(["sh", "-c", f"echo SSH-2.0-x; {ENDLESS}"], 10)
    wait = stream._process.wait

    def too_long(timeout: float | None = None) -> int:
        monkeypatch.undo()
        os.killpg(stream._process.pid, signal.SIGKILL)  # the other one is a moment faster
        wait()
        raise subprocess.TimeoutExpired("sh", timeout or 0)

    monkeypatch.setattr(stream._process, "wait", too_long)
    stream.close()
    stream.close()


def test_the_greeting_may_come_in_pieces_and_nothing_of_it_is_lost():
    stream = ProxyStream(["sh", "-c", "printf '\\nSession\\nSS'; sleep 0.1; printf 'H-2.0-x\\r\\nrest'; cat"], 10)
    try:
        got = b""
        while len(got) < 15:
            got += stream.recv(4)
        assert got == b"SSH-2.0-x\r\nrest"
    finally:
        stream.close()


def test_a_login_node_is_come_to_by_no_more_at_once_than_sshd_takes(monkeypatch):
    under_way, most = set[ProxyStream](), list[int]()
    start, greeting = ProxyStream._start, ProxyStream._greeting

    def started(stream: ProxyStream, argv: list[str]) -> None:
        under_way.add(stream)
        most.append(len(under_way))
        start(stream, argv)

    def greeted(stream: ProxyStream, deadline: float) -> bytes:
        try:
            return greeting(stream, deadline)
        finally:
            under_way.remove(stream)

    monkeypatch.setattr(ProxyStream, "_start", started)
    monkeypatch.setattr(ProxyStream, "_greeting", greeted)
    with ThreadPoolExecutor(24) as pool:
        for stream in pool.map(lambda _: ProxyStream(["sh", "-c", "echo SSH-2.0-x; exec cat"], 30), range(24)):
            stream.close()
    assert len(most) == 24
    assert max(most) <= 10


def test_a_module_makes_the_connection_in_this_process(server, keys, monkeypatch):
    module = types.ModuleType("carrier")
    asked = list[tuple[tuple[str, ...], float]]()

    def carry(arguments: tuple[str, ...], seconds: float) -> socket.socket:
        asked.append((arguments, seconds))
        return socket.create_connection(("127.0.0.1", int(arguments[0])))

    module.connect = carry
    monkeypatch.setitem(sys.modules, "carrier", module)
    before, port = children(), str(server.port)
    via = hop({"command": ["{python}", "-P", "-m", "carrier", port, "x"], "in_process": True})
    with connect(server.target(address=NOWHERE, via=via), keys.file, Timeouts(ssh_banner_s=5)) as node:
        assert node.run(["echo", "there"], timeout=30).stdout == b"there\n"
    assert asked == [((port, "x"), 5)]
    assert children() == before
    assert via.argv == [sys.executable, "-P", "-m", "carrier", port, "x"], "what a user's own ssh starts"
    monkeypatch.setitem(sys.modules, "carrier", None)
    with pytest.raises(ConnectionFailed) as failed:
        connect(server.target(address=NOWHERE, via=via), keys.file, Timeouts(ssh_banner_s=5))
    assert "carrier makes no connections here" in failed.value.why


@pytest.mark.parametrize("command", [("ssh", "-W"), ("{python}", "-P", "-m"), ("{python}", "-P", "-m", "a; b")])
def test_what_is_no_module_makes_no_connection_in_this_process(command):
    with pytest.raises(InputError, match="not a module that carries connections"):
        ProxyCommand(command, in_process=True)


@pytest.mark.parametrize("command", [(), ("",), ("ssh", "a\nProxyJump b"), ("ssh", "\0")])
def test_commands_that_are_no_lines_are_refused(command):
    with pytest.raises(InputError):
        ProxyCommand(command)


def test_plain_data_says_how_a_node_is_reached(server):
    jump = server.jump()
    assert hop(None) is None
    assert hop(vars(jump)) == jump
    assert hop({"command": ["ssh", "-W"]}) == ProxyCommand(("ssh", "-W"))
    assert ProxyCommand(("{python}", "{python}x")).argv == [sys.executable, "{python}x"]
