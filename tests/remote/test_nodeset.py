"""All nodes at once: connected together, asked in parallel, every failure reported."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from itertools import accumulate
from pathlib import Path

import pytest

from mgpu.errors import CommandFailed, ConnectionFailed, HostKeyMismatch, InputError
from mgpu.remote.nodeset import NodeSet


@pytest.fixture
def servers(new_server):
    return [new_server(), new_server(), new_server()]


@pytest.fixture
def nodes(servers, keys, timeouts):
    targets = [server.target(rank) for rank, server in enumerate(servers)]
    with NodeSet.connect(targets, keys.file, timeouts) as opened:
        yield opened


def test_each_asks_all_at_once_and_answers_in_order(nodes, servers):
    barrier = threading.Barrier(3)

    def ask(node):
        barrier.wait(10)
        return node.run(["pwd"], timeout=20).stdout.decode().strip()

    assert nodes.each(ask) == [str(server.home) for server in servers]
    assert [node.target.rank for node in nodes.nodes] == [0, 1, 2]
    assert nodes.each(lambda node: node.target.rank) == [0, 1, 2]


def test_each_collects_every_error(nodes):
    asked = []

    def fail(node):
        asked.append(node.target.rank)
        if node.target.rank != 1:
            node.run(["sh", "-c", f"echo broken {node.target.rank} >&2; exit 4"], timeout=20)

    with pytest.raises(CommandFailed) as failed:
        nodes.each(fail)
    assert sorted(asked) == [0, 1, 2]
    assert failed.value.status == 4
    assert "node 0" in failed.value.what
    assert "broken 0" in failed.value.why
    assert "And 1 more:" in failed.value.why
    assert "node 2" in failed.value.why
    assert "broken 2" in failed.value.why


def test_each_reports_a_bug_as_itself(nodes):
    def fail(node):
        if node.target.rank == 1:
            raise ZeroDivisionError("a bug")
        raise ConnectionFailed("lost")

    with pytest.raises(ZeroDivisionError) as failed:
        nodes.each(fail)
    assert "and 2 more" in failed.value.__notes__[0]


def test_connect_waits_for_a_node_that_boots(new_server, keys, timeouts, closed_port):
    server = new_server(port=closed_port, delay_s=0.7)
    with NodeSet.connect([server.target()], keys.file, timeouts) as nodes:
        assert nodes.nodes[0].run(["echo", "up"], timeout=20).stdout == b"up\n"


def test_connect_says_which_nodes_did_not_answer(server, keys, timeouts, closed_port):
    with pytest.raises(ConnectionFailed) as failed:
        NodeSet.connect(
            [server.target(0), server.target(1, port=closed_port)],
            keys.file,
            timeouts.model_copy(update={"connect_s": 0.5}),
        )
    assert failed.value.ranks == (1,)


def test_reach_leaves_closed_who_does_not_answer(server, keys, timeouts, closed_port):
    with NodeSet.reach([server.target(0), server.target(1, port=closed_port)], keys.file, timeouts) as nodes:
        first, second = nodes.nodes
        assert (first.closed, second.closed) == (False, True)
        with pytest.raises(ConnectionFailed):
            second.reconnect()
        assert first.run(["echo", "up"], timeout=20).stdout == b"up\n"


def test_a_jump_host_is_not_logged_in_to_by_more_at_once_than_sshd_takes(server, new_server, keys, timeouts):
    jump = new_server("jump")
    with NodeSet.reach([server.target(rank, via=jump.jump()) for rank in range(24)], keys.file, timeouts) as nodes:
        assert not any(node.closed for node in nodes.nodes)
    coming = {"connection": 1, f"auth {jump.user}": -1}
    at_once = [*accumulate(coming.get(line, 0) for line in jump.seen)]
    assert max(at_once) <= 10
    assert at_once[-1] == 0


@pytest.mark.parametrize("connect", [NodeSet.connect, NodeSet.reach])
def test_no_node_is_lost_because_a_shell_lets_programs_open_few_files(server, keys, timeouts, connect):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/dev/fd").iterdir()}
    few = [number for number in range(len(taken) + 5) if number not in taken][4]
    targets = [server.target(rank) for rank in range(6)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with connect(targets, keys.file, timeouts.model_copy(update={"connect_s": 1})) as nodes:
            assert not any(node.closed for node in nodes.nodes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_reach_refuses_another_key(server, new_server, keys, timeouts):
    other = new_server()
    with pytest.raises(HostKeyMismatch):
        NodeSet.reach([server.target(0, host_key=other.host_key)], keys.file, timeouts)


def test_connect_reports_all_nodes_that_do_not_answer_and_closes_the_others(server, keys, timeouts, closed_port):
    targets = [server.target(0), server.target(1, port=closed_port), server.target(2, port=closed_port)]
    with pytest.raises(ConnectionFailed) as failed:  # else it goes on for ever
        NodeSet.connect(targets, keys.file, timeouts.model_copy(update={"connect_s": 0.5}))
    assert "node 1" in failed.value.what
    assert "node 2" in failed.value.why
    assert "node 0" not in str(failed.value)
    wait_for_threads_to_end()


def test_connect_gives_up_at_once_on_another_host_key(new_server, keys, timeouts, closed_port):
    server, other = new_server(), new_server()
    targets = [server.target(0, port=closed_port), server.target(1, host_key=other.host_key)]
    with pytest.raises(HostKeyMismatch, match="node 1") as refused:
        NodeSet.connect(targets, keys.file, timeouts.model_copy(update={"connect_s": 3600}))
    assert "node 0" in refused.value.why


def test_connect_without_a_key(server, tmp_path, timeouts):
    with pytest.raises(InputError, match="absent"):
        NodeSet.connect([server.target()], tmp_path / "absent", timeouts)


def test_sync_reads_the_folder_once_for_all(nodes, servers, tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    for number in range(50):
        (folder / f"{number}.py").write_bytes(os.urandom(1000))
    reports = nodes.sync(folder, "work", python=sys.executable)
    assert [(report.files, report.sent) for report in reports] == [(50, 50)] * 3
    for server in servers:
        assert (server.home / "work/7.py").read_bytes() == (folder / "7.py").read_bytes()
    (servers[1].home / "work/7.py").unlink()
    assert [report.sent for report in nodes.sync(folder, "work", python=sys.executable)] == [0, 1, 0]
    assert [report.sent for report in nodes.sync(folder, "more", python=sys.executable, like="work")] == [0, 0, 0]


def test_close_leaves_no_connection_and_no_thread(servers, keys, timeouts):
    nodes = NodeSet.connect([server.target() for server in servers], keys.file, timeouts)
    nodes.each(lambda node: node.write("x", b""))
    nodes.close()
    assert all(node.closed for node in nodes.nodes)
    wait_for_threads_to_end()


def wait_for_threads_to_end() -> None:
    end = time.monotonic() + 60
    while any("Transport" in type(thread).__name__ or "mgpu-node" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.02)


def test_what_paramiko_imports_for_nothing_is_not_imported_and_stays_importable():
    found = "[name for name in sys.modules if name.startswith('invoke')]"
    program = f"import sys, mgpu.remote.nodeset; assert not {found}; import invoke"
    subprocess.run([sys.executable, "-c", program], check=True)
