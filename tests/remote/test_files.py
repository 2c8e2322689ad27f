"""Files by SFTP: whole or not at all, and a growing log byte for byte (F39, F40)."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import paramiko
import pytest
from mgpu_train.timeouts import Timeouts
from waiting import until

from mgpu.errors import ConnectionFailed, InputError, RemoteError


@pytest.mark.parametrize("size", [0, 1, 32_768, 32_769, 5_000_000])
def test_what_was_written_is_read(node, size):
    data = random.Random(size).randbytes(size)
    node.write("file", data)
    assert node.read("file") == data


def test_write_replaces_whole_files_with_the_mode_asked_for(node, server):
    node.write("file", b"old", 0o644)
    with (server.home / "file").open("rb") as reader:
        node.write("file", b"new")
        assert reader.read() == b"old"  # another file: nobody ever sees half of each
    assert (server.home / "file").read_bytes() == b"new"
    assert stat.S_IMODE((server.home / "file").stat().st_mode) == 0o600
    assert [path.name for path in server.home.iterdir()] == ["file"]


def test_write_makes_missing_folders_for_the_user_alone(node, server):
    node.write("runs/a b/job.json", b"{}")
    node.write("runs/a b/other", b"")
    assert (server.home / "runs/a b/job.json").read_bytes() == b"{}"
    assert stat.S_IMODE((server.home / "runs/a b").stat().st_mode) == 0o700
    node.write(str(server.home / "absolute/x"), b"1")
    assert node.read("absolute/x") == b"1"


def test_absent_files(node, tmp_path):
    with pytest.raises(FileNotFoundError):
        node.read("absent")
    with pytest.raises(FileNotFoundError):
        node.fetch("absent", tmp_path / "x")
    assert node.read_from("absent", 0, 100) == b""
    assert not node.exists("absent")
    node.write("there", b"")
    assert node.exists("there")
    assert node.read("there") == b""


def test_a_refusal_of_the_node_is_not_a_lost_connection(node, server):
    (server.home / "folder").mkdir()
    with pytest.raises(RemoteError, match="could not write folder") as refused:
        node.write("folder", b"x")
    assert not isinstance(refused.value, ConnectionFailed)
    assert [path.name for path in server.home.iterdir()] == ["folder"]
    node.write("file", b"x")
    with pytest.raises(RemoteError, match="could not write file/below"):
        node.write("file/below", b"x")
    assert node.read("file") == b"x"


def test_a_file_below_a_link_to_nowhere_is_not_written(node, server):
    (server.home / "runs").symlink_to("nowhere")
    with pytest.raises(RemoteError, match=r"node 0.*could not write runs/a/job\.json"):
        node.write("runs/a/job.json", b"{}")
    node.write("other", b"1")


@pytest.mark.parametrize("path", ["", "-rf", "a\nb", "a\x00b", "\x1b[2J", "\udcff", "a\u2028b"])
def test_paths_that_are_not_plain_are_refused(node, server, path):
    for call in (node.read, node.exists, lambda p: node.write(p, b""), lambda p: node.read_from(p, 0, 1)):
        with pytest.raises(InputError):
            call(path)
    assert "sftp" not in server.seen


def test_names_with_spaces_quotes_and_letters_of_all_kinds(node):
    for name in ("two words", "'", '"', "$(id)", "数据", "a\\b", "*"):
        node.write(name, name.encode())
        assert node.read(name) == name.encode()


def test_a_small_file_costs_few_requests(node, monkeypatch):
    """Each node's status is read several times a second."""
    node.write("status", b"1" * 1500)
    client, asked = node._files._client, list[int]()
    request = client._async_request

    def counted(kind: object, number: int, *more: object) -> int:
        asked.append(number)
        return request(kind, number, *more)

    monkeypatch.setattr(client, "_async_request", counted)
    assert node.read("status") == b"1" * 1500
    assert len(asked) <= 4, "opened, measured, read, closed"


def test_a_growing_file_is_followed_byte_for_byte(node, server):
    log, expected = server.home / "log", random.Random(1).randbytes(3_000_000)
    done = threading.Event()

    def grow() -> None:
        with log.open("ab", buffering=0) as out:
            for start in range(0, len(expected), 40_000):
                out.write(expected[start : start + 40_000])
                time.sleep(0.002)
        done.set()

    threading.Thread(target=grow, daemon=True).start()
    got = bytearray()
    while not (done.is_set() and len(got) == len(expected)):
        piece = node.read_from("log", len(got), 100_000)
        assert len(piece) <= 100_000
        got += piece
        assert expected.startswith(got)
    assert node.read_from("log", len(got), 100) == b""
    assert node.read_from("log", len(got) + 50, 100) is None, "it was emptied"
    assert server.seen.count("sftp") == 1


def test_following_goes_on_where_a_cut_connection_left_it(new_server, open_node):
    """F39: received = remote, byte for byte."""
    server = new_server()
    node, expected = open_node(server), os.urandom(2_000_000)
    server.home.joinpath("log").write_bytes(expected)
    got, cuts = b"", 0
    while len(got) < len(expected):
        if len(got) > (cuts + 1) * 400_000:
            cuts += 1
            node.close()
        try:
            got += node.read_from("log", len(got), 70_000)
        except ConnectionFailed:
            node.reconnect()
    assert cuts == 4
    assert got == expected


def test_one_line_without_end_is_read_in_bounded_pieces(node, server):
    """F40: a limit is a limit, and nothing is decoded."""
    with server.home.joinpath("log").open("wb") as out:
        out.truncate(1 << 30)
        out.seek(500_000_000)
        out.write(b"\xff\xfe\x1b[31m")
    assert len(node.read_from("log", 0, 1 << 20)) == 1 << 20
    assert node.read_from("log", 500_000_000, 7) == b"\xff\xfe\x1b[31m"
    with pytest.raises(RemoteError, match="too large"):
        node.read("log")


def test_a_fetch_ends_when_its_caller_wants_it_to_and_leaves_nothing(node, server, tmp_path):
    (server.home / "model").write_bytes(b"x" * 5_000_000)

    def go_on():
        raise RemoteError("no time is left")

    with pytest.raises(RemoteError, match="no time is left"):
        node.fetch("model", tmp_path / "model", go_on)
    assert list(tmp_path.glob("*model*")) == []


def test_fetch_copies_whole_files_or_nothing(node, server, tmp_path):
    data = os.urandom(5_000_003)
    server.home.joinpath("model").write_bytes(data)
    dest = tmp_path / "out" / "model"
    dest.parent.mkdir()
    dest.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        node.fetch("absent", dest)
    assert dest.read_bytes() == b"old"
    node.fetch("model", dest)
    assert dest.read_bytes() == data
    assert [path.name for path in dest.parent.iterdir()] == ["model"]
    longest = "é" * 127 + "x"  # 255 bytes
    (server.home / longest).write_bytes(data)
    node.fetch(longest, tmp_path / longest)
    assert (tmp_path / longest).read_bytes() == data
    with pytest.raises(FileNotFoundError):
        node.fetch("model", tmp_path / "no" / "folder")
    assert node.read("model") == data  # the session is fit for use


def test_a_server_that_stops_answering_costs_the_deadline(server, open_node):
    node = open_node(server, Timeouts(command_s=0.5))  # and keep-alives of 5 s: only the deadline can end it
    node.write("x", b"1")
    server.freeze()
    with pytest.raises(ConnectionFailed) as failed:
        node.read("x")
    assert "0.5 s" in failed.value.why
    server.thaw()

    def answers() -> bool:
        with suppress(ConnectionFailed):  # the deadline is short also for a server that answers, on a busy machine
            return node.read("x") == b"1"
        return False

    until(answers)


@pytest.mark.parametrize(
    ("line", "why"),
    [("exit 127", "EOF during negotiation"), ("echo Welcome to this cluster", "Garbage packet received")],
    ids=["no program", "a login shell that greets"],
)
def test_a_server_without_sftp_is_no_lost_connection(node, monkeypatch, line, why):
    """It would be connected to again, and its machine replaced, for ever."""
    with monkeypatch.context() as patch:
        patch.setattr(paramiko.Channel, "invoke_subsystem", lambda channel, _sftp: channel.exec_command(line))
        with pytest.raises(RemoteError, match="could not read x") as refused:
            node.read("x")
        assert not isinstance(refused.value, ConnectionFailed)
        assert refused.value.why == f"Its SSH server starts no SFTP session: {why}"
        assert "Subsystem sftp" in refused.value.next_step
    node.write("x", b"1")
    assert node.read("x") == b"1"


def test_a_server_that_starts_no_sftp_for_a_moment_is_asked_again(node, monkeypatch):
    """A node that has no memory or no process left: the run would end for what is over in a second."""
    ask, asked = paramiko.Channel.invoke_subsystem, list[str]()

    def full(channel, subsystem):
        asked.append(subsystem)
        return channel.exec_command("exit 254") if len(asked) < 4 else ask(channel, subsystem)

    monkeypatch.setattr(paramiko.Channel, "invoke_subsystem", full)
    assert not node.exists("x")
    assert len(asked) == 4


def test_calls_of_several_threads_do_not_mix(node):
    for number in range(4):
        node.write(f"file-{number}", bytes([number]) * 200_000)

    def read(number: int) -> bool:
        return all(node.read(f"file-{number}") == bytes([number]) * 200_000 for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(4)))


def test_a_connection_that_is_lost_as_the_session_says_goodbye_is_a_lost_connection(node, monkeypatch):
    node.write("x", b"1")
    client = node._files._client

    def goodbye() -> None:  # what paramiko raises, depending on the moment
        raise EOFError

    def cut(*_: object) -> None:
        node.close()
        raise EOFError

    monkeypatch.setattr(client, "close", goodbye)
    monkeypatch.setattr(client, "stat", cut)
    with pytest.raises(ConnectionFailed):
        node.read_from("x", 0, 10)
