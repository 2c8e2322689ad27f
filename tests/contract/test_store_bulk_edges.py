"""What servers, proxies and paths do to large bodies that is rare: still success, or an error that says what it was."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import ssl
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from botocore.httpsession import get_cert_path
from mgpu_train.store import Unavailable
from mgpu_train.store.bulk.connections import Connection, Remote, Shared
from mgpu_train.store.bulk.engine import Engine, Failed
from mgpu_train.store.bulk.message import Keys, Route, Settings, Task
from mgpu_train.store.bulk.wire import Wire
from mgpu_train.store.bulk.worker import Worker
from mgpu_train.store.pace import Pace
from mgpu_train.timeouts import Timeouts
from waiting import until

MIB = 1 << 20
SIZE = 25 * MIB + 7  # four parts
ALWAYS_S = 60  # after which a test has hung
HERE = Route("http://127.0.0.1:9", "/bucket", "us-east-1")  # nobody answers there
NOTHING = Task(1, "GET", HERE, "/bucket/key", 0, 1, None)


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


def test_an_error_in_an_answer_that_says_200_is_none_of_success(weather, source):
    """S3 begins its answer to the end of an upload before it has done anything."""
    told = []

    def fail(call) -> None:
        if call.method == "POST" and "uploadId" in call.path and len(told) < 2:
            told.append(call.path)
            call.status, call.answer = (
                200,
                b"<Error><Code>InternalError</Code><Message>told by a test</Message></Error>",
            )

    store, _ = weather(fail)
    sent = store.put_file("f", source)
    assert len(told) == 2
    assert store.checksum("f", SIZE) == sent.crc64nvme


def test_connections_that_always_end_too_early_are_no_damage(weather, source):
    """The head promised every byte: it is the network, and nothing is wrong with what lies in the store."""

    def cut(call) -> None:
        if "Range" in call.headers:
            call.cut_at = len(call.answer) // 2

    store, _ = weather(after=cut, store_retry_s=2)
    sent = store.put_file("f", source)
    with pytest.raises(Unavailable, match="stopped answering"):
        store.checksum("f", sent.size)


def test_a_process_that_stands_still_holds_nobody_up_however_much_it_was_told(tmp_path):
    """More than a pipe holds: whoever writes to it would wait for ever, and all others with him."""
    times = Timeouts(store_stall_s=3, store_read_s=2, store_retry_s=2)
    engine = Engine(times, Pace(None), lambda _expired: Keys("a", "b"))
    ends: list[str] = []
    long = [Task(0, "GET", HERE, "/bucket/" + 800 * "x", n, 1, str(tmp_path / (3000 * "y"))) for n in range(50)]

    def transfer(tasks: list[Task]) -> None:
        try:
            engine.run(tasks)
        except Failed as failed:
            ends.append(failed.told["kind"])

    first = threading.Thread(target=transfer, args=([NOTHING],), daemon=True)
    first.start()
    pid = until(lambda: engine.pid)
    os.kill(pid, signal.SIGSTOP)
    others = [threading.Thread(target=transfer, args=(long,), daemon=True) for _ in range(8)]
    for each in others:
        each.start()
    end = time.monotonic() + ALWAYS_S
    for each in (first, *others):
        each.join(max(0.0, end - time.monotonic()))
    if hung := len(ends) < 9:
        os.kill(pid, signal.SIGKILL)
    assert not hung
    assert "slow" in ends


def test_a_bug_costs_its_task_and_not_the_worker():
    tasks = iter([NOTHING, NOTHING])
    told: list[dict] = []
    office = SimpleNamespace(
        settings=Settings(1, 1, 1, 1, 1),
        pace=Pace(None),
        keys=Keys("a", "b\n"),
        next=lambda: next(tasks),
        answer=lambda _task, **answer: told.append(answer),
        moved=lambda _count: None,
        unwanted=lambda _task, _within_s=0: False,
    )
    worker = Worker(office)
    worker._once = lambda _task: {}["nothing"]
    with pytest.raises(StopIteration):
        worker.run()
    assert [answer["error"]["kind"] for answer in told] == ["bug", "bug"]
    assert "KeyError" in told[0]["error"]["text"]


def test_a_connections_process_hears_that_its_task_is_not_wanted_and_of_no_other():
    """That an earlier one was not wanted may come after its answer."""
    here, there = Pipe()
    office = SimpleNamespace(settings=Settings(1, 1, 1, 1, 1), pace=Pace(None), keys=Keys("", ""))
    remote, late = Remote(there, office, Shared(1), 0), replace(NOTHING, id=2)
    keys = Keys("a", "b", "c")
    here.send(None)
    here.send((late, keys))
    assert (remote.next(), remote.keys) == (late, keys)
    assert not remote.unwanted(late)
    here.send(None)
    assert remote.unwanted(late)
    assert remote.unwanted(late, ALWAYS_S)
    here.close()
    with pytest.raises(EOFError):
        remote.next()


def test_a_task_that_nobody_wants_any_more_ends_in_the_pause_before_its_next_try():
    tasks, troubles, answers, wanted = SimpleQueue(), SimpleQueue(), SimpleQueue(), {NOTHING.id}
    office = SimpleNamespace(
        settings=Settings(1, connect_s=1, read_s=1, retry_s=100 * ALWAYS_S, idle_s=1),
        pace=Pace(None),
        keys=Keys("a", "b"),
        next=tasks.get,
        stumbled=troubles.put,
        wanted=lambda task: task.id in wanted,
        answer=lambda _task, **told: answers.put(told),
    )
    connection = Connection(office, Shared(1), 0)
    try:
        connection.start()
        tasks.put(NOTHING)
        assert "refused" in troubles.get(timeout=ALWAYS_S)
        connection.look()
        assert answers.empty(), "it is wanted"
        wanted.clear()
        connection.look()
        assert answers.get(timeout=10)["error"]["kind"] == "cancelled"
    finally:
        connection.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(connection.pid, os.WNOHANG)  # nobody has to do so for it


def test_what_connections_move_is_summed_across_processes():
    shared = Shared(2)
    shared.add(1, 5)
    in_another_process(lambda: shared.add(0, -2))
    assert shared.moved == 3


def test_one_process_at_a_time_writes_to_a_file():
    shared = Shared(2)
    other = next(name for name in map(str, range(1000)) if hash(name) % 16 != hash("f") % 16)

    def free(file: str) -> bool:
        return bool(select.select([shared._turns[hash(file) % 16]], [], [], 0)[0])

    with shared.turn("f"):
        assert in_another_process(lambda: free("f")) == 0
        assert in_another_process(lambda: free(other)) == 1
    assert in_another_process(lambda: free("f")) == 1


def in_another_process(work) -> int:
    """Calls it in a process that is forked from this one, and returns what it returned, as an exit code."""
    pid = os.fork()
    if not pid:
        code = 255
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_connection_that_was_closed_gets_the_same_time_as_the_first():
    """`Connection: close` after every answer: the next one opens by itself, and is no less patient with the server."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            peer, _ = server.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(b"HTTP/1.1 200 yes\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    wire, waits = Wire(connect_s=3, read_s=17), []
    route = Route(f"http://127.0.0.1:{server.getsockname()[1]}", "", "us-east-1")
    for _ in range(2):
        wire.ask(route, "GET", "/", {}, lambda sock: waits.append(sock.gettimeout())).read()
    assert waits == [17, 17]


def test_an_authority_is_as_good_as_it_is_for_boto3(monkeypatch):
    """Python's defaults refuse, from 3.13 on, authorities that botocore takes: many private ones."""

    def of_3_13(cafile=None):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cafile)
        return context

    monkeypatch.setattr(ssl, "create_default_context", of_3_13)
    context = Wire(1, 1)._context(get_cert_path(True))
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.cert_store_stats()["x509"] > 0


def test_a_proxy_without_a_scheme_is_one_of_http(weather, monkeypatch):
    store, _ = weather()
    store.stat("x")
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "user:secret@127.0.0.1:3128")
    assert store._bulk.learn("x")
    assert store._bulk._route.proxy == "http://user:secret@127.0.0.1:3128"
