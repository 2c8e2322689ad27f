"""Connections: only to the pinned key, only with our key, and a peer that falls silent is noticed (F35, F36, F37)."""

from __future__ import annotations

import base64
import socket
import stat
import threading
import time

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.errors import ConnectionFailed, HostKeyMismatch, InputError
from mgpu.remote.node import connect
from mgpu.remote.targets import HostKey, Jump, Target
from mgpu.remote.wire import Wire

KEY_TYPES = ["ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"]


@pytest.mark.parametrize("kind", KEY_TYPES)
def test_a_pinned_key_of_each_type_is_accepted(new_server, open_node, kind):
    node = open_node(new_server(host_key_type=kind))
    assert node.run(["echo", "hello"], timeout=20).stdout == b"hello\n"
    assert not node.closed


@pytest.mark.parametrize(("kind", "also"), [("ssh-rsa", "ssh-ed25519"), ("ssh-ed25519", "ssh-rsa")])
def test_of_several_host_keys_the_server_proves_the_pinned_one(new_server, open_node, kind, also):
    assert open_node(new_server(host_key_type=kind, also=also)).run(["true"], timeout=20).status == 0


@pytest.mark.parametrize("other", KEY_TYPES)
def test_another_host_key_is_refused_before_any_authentication(new_server, keys, timeouts, other):
    """F37. Of the same type the key's bytes differ; of another type the server has none to show."""
    server, imposter = new_server(host_key_type=other), new_server()
    with pytest.raises(HostKeyMismatch) as refused:
        connect(imposter.target(host_key=server.host_key), keys.file, timeouts)
    assert imposter.seen == ["connection"]
    assert HostKey.parse(server.host_key).fingerprint in refused.value.why
    # the same check must be what lets the right one pass
    connect(imposter.target(), keys.file, timeouts).close()
    assert imposter.seen[1:] == ["connection", f"auth {imposter.user}"]


def test_a_reused_address_with_a_new_key_is_refused_on_reconnect(new_server, open_node):
    """F37: the machine went, and another one got its address."""
    old = new_server()
    node = open_node(old)
    old.end()
    new = new_server()
    object.__setattr__(node.target, "port", new.port)
    with pytest.raises(HostKeyMismatch):
        node.reconnect()
    assert new.seen == ["connection"]
    assert node.closed


def test_without_a_thread_for_it_there_is_no_connection_now(server, keys, timeouts, monkeypatch):
    def full(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", full)
        with pytest.raises(ConnectionFailed) as failed:
            connect(server.target(), keys.file, timeouts)
    assert "can't start new thread" in failed.value.why
    connect(server.target(), keys.file, timeouts).close()


def test_a_key_that_the_node_does_not_know_is_refused(server, tmp_path, timeouts):
    from asyncssh import generate_private_key

    stranger = tmp_path / "stranger"
    stranger.write_bytes(generate_private_key("ssh-ed25519").export_private_key())
    with pytest.raises(ConnectionFailed, match="could not be connected to") as failed:
        connect(server.target(), stranger, timeouts)
    assert "login was refused" in failed.value.why


def test_no_agent_and_no_key_of_the_user_is_asked(server, tmp_path, timeouts, keys, monkeypatch):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()
    listener.setblocking(False)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    monkeypatch.setenv("HOME", str(tmp_path))
    ssh = tmp_path / ".ssh"
    ssh.mkdir()
    (ssh / "id_ed25519").write_bytes(keys.file.read_bytes())  # would log in
    (ssh / "config").write_text(f"Host *\n    Port 1\n    IdentityFile {keys.file}\n")
    from asyncssh import generate_private_key

    stranger = tmp_path / "stranger"
    stranger.write_bytes(generate_private_key("ssh-ed25519").export_private_key())
    with pytest.raises(ConnectionFailed):
        connect(server.target(), stranger, timeouts)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


def test_key_files_that_cannot_be_used_are_the_users_mistake(tmp_path, timeouts, server):
    from asyncssh import generate_private_key

    locked = tmp_path / "locked"
    locked.write_bytes(generate_private_key("ssh-ed25519").export_private_key(passphrase="secret"))
    junk = tmp_path / "junk"
    junk.write_text("not a key")
    for path in (tmp_path / "absent", locked, junk):
        with pytest.raises(InputError, match=path.name):
            connect(server.target(), path, timeouts)
    assert server.seen == []


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "-oProxyCommand=id"},
        {"address": "a\nb"},
        {"address": ""},
        {"address": "a b"},
        {"address": "%h"},
        {"address": "gpu1..lan"},
        {"address": f"{'x' * 64}.lan"},
        {"user": "-l"},
        {"user": "a\x00b"},
        {"user": "root\n"},
        {"user": ""},
        {"port": 0},
        {"port": 65536},
        {"host_key": ""},
        {"host_key": "ssh-ed25519"},
        {"host_key": "ssh-ed25519 AAAA"},
        {"host_key": "ssh-dss " + base64.b64encode(b"\0\0\0\x07ssh-dss").decode()},
        {"host_key": "ssh-rsa " + base64.b64encode(b"\0\0\0\x0bssh-ed25519").decode()},
        {"host_key": "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh-ed25519").decode() + " a\nb"},
    ],
)
def test_targets_that_are_not_plain_are_refused(changes):
    good = {
        "address": "10.0.0.1",
        "port": 22,
        "user": "ubuntu",
        "host_key": "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh-ed25519").decode() + " comment",
    }
    assert Target(0, **good)
    assert Target(0, **{**good, "address": "fe80::1"})
    assert Jump(**good)
    with pytest.raises(InputError):
        Target(0, **{**good, **changes})
    with pytest.raises(InputError):
        Jump(**{**good, **changes})


def test_through_a_jump_host(new_server, keys, timeouts):
    jump, server = new_server("jump"), new_server("inner")
    with connect(server.target(via=jump.jump()), keys.file, timeouts) as node:
        assert node.run(["pwd"], timeout=20).stdout.decode().strip() == str(server.home)
        node.write("x", b"1" * 300_000)
        assert node.read("x") == b"1" * 300_000
    assert f"tunnel {server.port}" in jump.seen
    assert "command" not in jump.seen
    assert stat.S_IMODE((server.home / "x").stat().st_mode) == 0o600


def test_a_jump_host_that_does_not_get_there_is_named_with_its_word(server, keys, timeouts, closed_port):
    with pytest.raises(ConnectionFailed, match="node 0") as failed:
        connect(server.target(via=server.jump(), port=closed_port), keys.file, timeouts)
    assert failed.value.why.startswith("Its jump host opened no connection to it: ")


def test_behind_a_jump_host_both_keys_are_pinned(new_server, keys, timeouts):
    jump, server, other = new_server("jump"), new_server("inner"), new_server("other")
    wrong = Jump("127.0.0.1", jump.port, jump.user, other.host_key)
    with pytest.raises(HostKeyMismatch, match="jump host"):
        connect(server.target(via=wrong), keys.file, timeouts)
    assert jump.seen == ["connection"]
    assert server.seen == []
    with pytest.raises(HostKeyMismatch, match="node 0"):
        connect(server.target(via=jump.jump(), host_key=other.host_key), keys.file, timeouts)
    assert server.seen == ["connection"]


def test_nobody_listens(timeouts, keys, server):
    from_port = server.port
    server.end()
    with pytest.raises(ConnectionFailed, match="could not be connected to"):
        connect(server.target(port=from_port), keys.file, timeouts)


@pytest.mark.parametrize("banner", [b"", b"SSH-2.0-silent\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_stops_in_the_handshake_costs_its_deadline_only(server, keys, banner):
    """F36: nothing, or only a banner, and then silence."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held = []

        def accept() -> None:
            connection, _ = listener.accept()
            connection.sendall(banner)
            held.append(connection)

        threading.Thread(target=accept, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ConnectionFailed):
            connect(server.target(port=listener.getsockname()[1]), keys.file, Timeouts(ssh_banner_s=1))
        assert time.monotonic() - began < 12, "paramiko's own deadline is 15 s"
        for connection in held:
            connection.close()


def test_a_server_that_is_stopped_is_noticed_while_a_command_runs(server, open_node):
    """F35: its kernel still acknowledges; four silent intervals end the connection, and what waits on it."""
    node = open_node(server, Timeouts(keepalive_s=0.3))
    threading.Timer(0.5, server.freeze).start()
    began = time.monotonic()
    with pytest.raises(ConnectionFailed) as failed:
        node.run(["sleep", "600"], timeout=600)
    assert time.monotonic() - began > 1
    assert "keep-alives" in failed.value.why
    assert node.closed
    server.thaw()
    node.reconnect()
    assert node.run(["echo", "again"], timeout=20).stdout == b"again\n"


def test_a_server_that_is_stopped_is_noticed_by_an_idle_connection_and_by_sftp(server, open_node):
    alone = Timeouts(keepalive_s=0.3, command_s=600)  # only keep-alives can notice it
    node, other = open_node(server, alone), open_node(server, alone)
    other.write("x", b"")
    server.freeze()
    with pytest.raises(ConnectionFailed):
        other.read("x")
    end = time.monotonic() + 60
    while not node.closed:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_server_that_is_stopped_is_noticed_while_much_is_sent(server, open_node):
    """The socket's buffers are full, and who sends holds the lock that a probe would need."""
    node = open_node(server, Timeouts(keepalive_s=0.3))

    def endless():
        while True:
            yield bytes(1 << 20)

    noticed = []

    def send() -> None:
        with pytest.raises(ConnectionFailed):
            node.run(["sh", "-c", "cat >/dev/null"], stdin=endless(), timeout=600)
        noticed.append(True)

    threading.Timer(0.5, server.freeze).start()
    # each has a window of 2 MiB, more in all than the kernel takes
    threads = [threading.Thread(target=send, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(noticed) == 8


def test_a_quiet_server_is_not_taken_for_a_dead_one(server, open_node):
    node = open_node(server, Timeouts(keepalive_s=0.4))
    assert node.run(["sh", "-c", "sleep 2; echo here"], timeout=20).stdout == b"here\n"
    assert not node.closed


def test_a_server_that_is_killed_is_noticed_at_once(server, open_node):
    """A command without a status is a lost connection, never a result."""
    node = open_node(server)
    threading.Timer(0.3, server.end).start()
    with pytest.raises(ConnectionFailed):
        node.run(["sh", "-c", "echo some; sleep 600"], timeout=600, check=False)
    with pytest.raises(ConnectionFailed):
        node.run(["true"], timeout=20)
    with pytest.raises(ConnectionFailed):
        node.read("x")


def test_close_ends_what_waits(server, open_node):
    node = open_node(server)
    threading.Timer(0.3, node.close).start()
    with pytest.raises(ConnectionFailed):
        node.run(["sleep", "60"], timeout=60)
    assert node.closed
    node.close()


class _Silent:
    """A stream that nothing comes from, and that takes nothing when `full`."""

    full = False

    def recv(self, _nbytes: int) -> bytes:
        raise TimeoutError

    def send(self, data: bytes) -> int:
        if self.full:
            raise TimeoutError
        return len(data)

    def settimeout(self, _timeout: float | None) -> None: ...

    def close(self) -> None: ...


def _tick(wire: Wire, seconds: float, clock: list[float]) -> None:
    clock[0] += seconds
    with pytest.raises(TimeoutError):
        wire.recv(1)


def test_wire_asks_after_each_silent_interval_and_ends_after_four():
    clock, asked = [0.0], []
    wire = Wire(_Silent(), deadline=9, clock=lambda: clock[0])
    wire.watch(5, lambda: asked.append(clock[0]))
    for _ in range(19):
        _tick(wire, 1, clock)
    assert asked == [5, 10, 15]
    clock[0] += 1
    with pytest.raises(ConnectionAbortedError):
        wire.recv(1)
    assert "20 s" in wire.fault


def test_wire_ends_when_the_peer_takes_nothing_and_says_nothing():
    clock, stream = [0.0], _Silent()
    wire = Wire(stream, deadline=9, clock=lambda: clock[0])
    wire.watch(5, lambda: None)
    clock[0] = 100.0
    assert wire.send(b"abc") == 3
    stream.full = True
    clock[0] = 119.0
    with pytest.raises(TimeoutError):
        wire.send(b"abc")
    clock[0] = 121.0
    with pytest.raises(ConnectionAbortedError):
        wire.send(b"abc")


def test_wire_does_not_hold_the_time_against_the_peer_in_which_we_were_stopped():
    clock, asked = [0.0], []
    wire = Wire(_Silent(), deadline=9, clock=lambda: clock[0])
    wire.watch(5, lambda: asked.append(clock[0]))
    _tick(wire, 3600, clock)
    assert asked == [3600]


def test_wire_ends_a_handshake_at_its_deadline():
    clock = [0.0]
    wire = Wire(_Silent(), deadline=9, clock=lambda: clock[0])
    _tick(wire, 8, clock)
    clock[0] = 9.5
    with pytest.raises(ConnectionAbortedError):
        wire.recv(1)
    with pytest.raises(ConnectionAbortedError):
        wire.send(b"x")
