"""The same against OpenSSH's own server, where it is installed: it answers in other orders than asyncssh does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

import pytest
from fakes import strange_shell
from mgpu_train.timeouts import Timeouts
from paramiko import Channel, ChannelException
from paramiko.packet import Packetizer
from waiting import until

from mgpu.errors import ConnectionFailed, HostKeyMismatch, RemoteError
from mgpu.remote.node import connect


@pytest.fixture
def at_sshd(sshd, open_node):
    return open_node(sshd)


def test_commands(at_sshd):
    assert (
        at_sshd.run(["printf", "%s|", "two words", "$(id)", "数据"], timeout=20).stdout.decode()
        == "two words|$(id)|数据|"
    )
    data = os.urandom(5_000_000)
    assert at_sshd.run(["cat"], stdin=data, timeout=30).stdout == data
    assert at_sshd.run(["sh", "-c", "exit 3"], timeout=20, check=False).status == 3
    assert at_sshd.run(["exec", "sh", "-c", "kill -9 $$"], timeout=20, check=False).status == -1
    with pytest.raises(ConnectionFailed):
        at_sshd.run(["sleep", "60"], timeout=0.3)


def test_files_and_sync(at_sshd, tmp_path):
    folder, dest = tmp_path / "project", tmp_path / "remote" / "work"
    folder.mkdir()
    (folder / "a").write_bytes(os.urandom(3_000_000))
    (folder / "b").symlink_to("a")
    assert at_sshd.sync(folder, str(dest), python=sys.executable).sent == 2
    assert at_sshd.sync(folder, str(dest), python=sys.executable).sent == 0
    assert (dest / "b").read_bytes() == (folder / "a").read_bytes()
    path = str(tmp_path / "remote" / "new" / "file")
    at_sshd.write(path, b"x" * 3_000_000)
    at_sshd.write(path, b"y" * 3_000_000)
    assert at_sshd.read(path) == b"y" * 3_000_000
    assert at_sshd.read_from(path, 2_999_990, 100) == b"y" * 10
    with pytest.raises(FileNotFoundError):
        at_sshd.read(str(tmp_path / "absent"))
    with pytest.raises(RemoteError, match=r"node 0.*could not write") as refused:
        at_sshd.write(str(dest), b"where a folder is")
    assert "full disk" in refused.value.why, "that is all that is known"


def test_a_server_without_sftp(at_sshd, monkeypatch):
    ask = Channel.invoke_subsystem
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "invoke_subsystem", lambda channel, _sftp: ask(channel, "none"))
        for _ in range(3):  # each asks several times, and a server allows 10 sessions: none is left behind
            with pytest.raises(RemoteError, match="could not read") as refused:
                at_sshd.read("x")
            assert not isinstance(refused.value, ConnectionFailed)
    assert not at_sshd.exists("/absent")


@pytest.mark.parametrize("login_shell", [" ".join(strange_shell.PROGRAM)], ids=["strange"])
def test_a_user_whose_login_shell_is_no_posix_shell(at_sshd, tmp_path):
    script = "for each; do\n printf '%s|' \"$each\"; done; exit 3  # wow!"
    done = at_sshd.run(["sh", "-c", script, "sh", "a\\\\b", "c!\n"], timeout=20, check=False)
    assert (done.status, done.stdout) == (3, b"a\\\\b|c!\n|"), done.stderr
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a").write_text("here")
    assert at_sshd.sync(tmp_path / "project", str(tmp_path / "work"), python=sys.executable).sent == 1
    assert (tmp_path / "work" / "a").read_text() == "here"


def test_another_host_key(sshd, new_server, keys, timeouts):
    with pytest.raises(HostKeyMismatch):
        connect(sshd.target(host_key=new_server().host_key), keys.file, timeouts)


def test_more_sessions_than_the_server_allows(at_sshd):
    held = [at_sshd._connection.open_session(20) for _ in range(10)]
    with pytest.raises(ConnectionFailed, match="node 0") as failed:
        at_sshd.run(["true"], timeout=20)
    assert "MaxSessions" in failed.value.why
    for channel in held:
        channel.close()

    def opens() -> bool:
        with suppress(ChannelException), at_sshd._connection.open_session(20):
            return True
        return False

    until(opens, 60)  # the server lets go of those that were closed when it comes to it
    assert not at_sshd.closed


def test_key_exchanges_are_begun_by_the_server_alone(sshd, open_node, monkeypatch):
    """Those that paramiko begins end a connection on which channels come and go."""
    begun = list[object]()
    monkeypatch.setattr(Packetizer, "REKEY_BYTES", 100_000)
    monkeypatch.setattr(Packetizer, "_trigger_rekey", lambda packetizer: begun.append(packetizer))
    assert open_node(sshd).run(["cat"], stdin=bytes(1_000_000), timeout=30).stdout == bytes(1_000_000)
    assert begun == []


def test_a_stopped_session_is_noticed(sshd, open_node):
    """Its kernel acknowledges; the process that serves this connection does not answer."""
    node = open_node(sshd, Timeouts(keepalive_s=0.3))
    session = int(node.run(["exec", "sh", "-c", "echo $PPID"], timeout=20).stdout)
    threading.Timer(0.3, os.kill, (session, signal.SIGSTOP)).start()
    try:
        with pytest.raises(ConnectionFailed):
            node.run(["sleep", "600"], timeout=600)
    finally:
        os.kill(session, signal.SIGCONT)
