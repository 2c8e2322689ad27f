"""A pod's port over a WebSocket, against a server that does what the API server's may do."""

from __future__ import annotations

import fcntl
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, unix_serve

from mgpu.providers.kubernetes.forward import PodStream

Served = Callable[[ServerConnection], None]
PORT = (2222).to_bytes(2, "little")


def greet(there: ServerConnection) -> None:
    for channel in (0, 1):
        there.send(bytes([channel]) + PORT)


@contextmanager
def serving(
    folder: Path, served: Served, refuse: Callable[[ServerConnection, Request], Response | None] | None = None
) -> Iterator[socket.socket]:
    """A connection to a server that calls `served` with the one that it gets."""
    path = str(folder / "api")
    protocols = ["v4.channel.k8s.io"]
    with unix_serve(served, path, subprotocols=protocols, compression=None, process_request=refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        try:
            yield connection
        finally:
            connection.close()
            server.shutdown()
            thread.join()


def opened(connection: socket.socket, seconds: float = 10) -> PodStream:
    return PodStream(connection, "/api/v1/namespaces/n/pods/p/portforward?ports=2222", time.monotonic() + seconds)


def test_bytes_arrive_as_they_were_sent_both_ways(tmp_path: Path):
    asked = list[str]()

    def echo(there: ServerConnection) -> None:
        assert there.request
        asked.append(there.request.path)
        greet(there)
        there.ping()  # an API server may ask whether somebody is there
        for frame in there:
            assert isinstance(frame, bytes)
            assert frame[0] == 0
            there.send(frame)

    data = bytes(range(256)) * 1000
    with serving(tmp_path, echo) as connection:
        stream = opened(connection)
        stream.settimeout(10)
        left, got = data, b""
        while left:
            left = left[stream.send(left) :]
        while len(got) < len(data):
            got += stream.recv(1000)
        assert got == data
        stream.settimeout(0.01)
        with pytest.raises(TimeoutError):
            stream.recv(1)
        stream.close()
    assert asked == ["/api/v1/namespaces/n/pods/p/portforward?ports=2222"]


def test_a_process_may_have_more_files_open_than_select_can_count(tmp_path: Path):
    def echo(there: ServerConnection) -> None:
        greet(there)
        for frame in there:
            there.send(frame)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with serving(tmp_path, echo) as connection:
            high = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)
            stream = opened(socket.socket(fileno=high))
            stream.settimeout(10)
            stream.send(b"there")
            assert stream.recv(99) == b"there"
            stream.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_peer_that_takes_nothing_times_a_sender_out_and_what_it_took_is_whole(tmp_path: Path):
    goes_on, got = threading.Event(), bytearray()
    total = 1 << 20

    def slow(there: ServerConnection) -> None:
        greet(there)
        goes_on.wait(30)
        while len(got) < total:
            frame = there.recv()
            assert isinstance(frame, bytes)
            got.extend(frame[1:])

    data = bytes(range(251)) * (total // 251 + 1)
    with serving(tmp_path, slow) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # no frame goes at once
        stream = opened(connection)
        stream.settimeout(0.05)
        sent, timed_out = 0, False
        while sent < total:
            try:
                sent += stream.send(data[sent:total])
            except TimeoutError:
                timed_out = True
                goes_on.set()
        assert timed_out
        stream.settimeout(10)
        stream._flush()
        end = time.monotonic() + 20
        while len(got) < total and time.monotonic() < end:
            time.sleep(0.01)
        assert bytes(got) == data[:total]


def test_what_went_wrong_at_the_port_is_told(tmp_path: Path):
    def refused(there: ServerConnection) -> None:
        greet(there)
        there.send(b"\x01failed to connect to localhost:2222: connection refused")

    with serving(tmp_path, refused) as connection, pytest.raises(ConnectionError, match="connection refused"):
        opened(connection).recv(1)  # now, or when it is opened


def test_a_connection_that_ends_reads_as_a_sockets_end(tmp_path: Path):
    def ending(there: ServerConnection) -> None:
        greet(there)
        there.recv()

    with serving(tmp_path, ending) as connection:
        stream = opened(connection)
        stream.settimeout(10)
        stream.send(b"x")
        assert stream.recv(1) == b""
        assert stream.pending


def test_a_pod_that_is_not_there_is_named(tmp_path: Path):
    def refuse(there: ServerConnection, _: Request) -> Response:
        return there.respond(HTTPStatus.NOT_FOUND, '{"kind": "Status", "message": "pods \\"p\\" not found"}')

    with serving(tmp_path, greet, refuse) as connection, pytest.raises(ConnectionError, match='pods "p" not found'):
        opened(connection)


def test_a_server_that_says_nothing_is_not_waited_for(tmp_path: Path):
    over = threading.Event()
    with serving(tmp_path, lambda _: over.wait(10) and None) as connection:
        with pytest.raises(ConnectionError, match="did not answer in time"):
            opened(connection, 0.05)
        over.set()
