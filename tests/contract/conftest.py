"""Stores to test against (a folder, moto, versitygw where it is installed) and an S3 proxy that loses and falsifies."""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from fakes import gateway
from fakes.gateway import ACCESS, START_S
from mgpu_train.store import Store, open_store
from mgpu_train.timeouts import Timeouts

from mgpu.backend import location
from mgpu.run.record import shared


@dataclass
class Site:
    """One empty store of a test's own, and a way behind its back."""

    kind: str
    store: Store
    overwrite: Callable[[str, bytes], None]  # as a disk, or somebody else, would change it
    begin_unfinished: Callable[[str], None]  # a write that nobody will end
    unfinished: Callable[[], int]


@dataclass
class Server:
    """An S3 server on loopback."""

    endpoint: str
    env: Mapping[str, str]

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name="us-east-1",
        )

    def bucket(self) -> str:
        name = f"test-{uuid.uuid4().hex[:16]}"
        self.client().create_bucket(Bucket=name)
        return name


@pytest.fixture(scope="session")
def moto(require) -> Iterator[Server]:
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        require("s3", False, f"moto is not installed: {error}")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    yield Server(endpoint, {**ACCESS, "AWS_ENDPOINT_URL": endpoint})
    server.stop()


@pytest.fixture(scope="session")
def versitygw(require, tmp_path_factory) -> Iterator[Server]:
    program = gateway.program()
    require("versitygw", program is not None, "it is not built: scripts/setup-go-tools.sh versitygw")
    with gateway.serving(str(program), tmp_path_factory.mktemp("versitygw")) as env:
        yield Server(env["AWS_ENDPOINT_URL"], dict(env))


STORES = ("file", "moto", "versitygw", "localstack")
DRAWN = pytest.mark.drawn("stores x what is asked of them", "tests/contract/conftest.py", "train/mgpu_train/store")


@pytest.fixture(params=[pytest.param(kind, marks=DRAWN) for kind in STORES])
def site(request, tmp_path) -> Site:
    if request.param == "file":
        return _folder(tmp_path / "store")
    server = request.getfixturevalue(request.param)
    return _bucket(request.param, server if isinstance(server, Server) else Server(server.endpoint, server.env))


def _folder(root: Path) -> Site:
    def overwrite(key: str, data: bytes) -> None:
        (root / key).write_bytes(data)

    def begin(key: str) -> None:
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f".aside-0123456789ab-{path.name}").write_bytes(b"half")

    def unfinished() -> int:
        return len(list(root.rglob(".aside-*")))

    return Site("file", open_store(f"file://{root}"), overwrite, begin, unfinished)


def _bucket(kind: str, server: Server) -> Site:
    bucket, client = server.bucket(), server.client()

    def overwrite(key: str, data: bytes) -> None:
        client.put_object(Bucket=bucket, Key=f"some/prefix/{key}", Body=data)

    def begin(key: str) -> None:
        client.create_multipart_upload(Bucket=bucket, Key=f"some/prefix/{key}")

    def unfinished() -> int:
        return len(client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))

    return Site(kind, open_store(f"s3://{bucket}/some/prefix", server.env), overwrite, begin, unfinished)


# --- a proxy that does to S3 what a network and a bad disk do ---------------------------------------------------------


@dataclass
class Call:
    """One request on its way through, and its answer on the way back. `body` is empty when it begins."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytes = b""
    hang_up: bool = False  # when the answer is written
    bytes_per_s: float | None = None  # that are read of the body, and written of the answer
    cut_at: int | None = None  # bytes of the body, or of the answer, after which the connection is reset
    answer_headers: list[tuple[str, str]] = field(default_factory=list)


class Lost(Exception):
    """Raised by a fault: the connection ends here."""


Fault = Callable[[Call], None]


class _Quiet(ThreadingHTTPServer):
    """Says nothing of clients that hang up: here they are meant to."""

    def handle_error(self, *_: Any) -> None:
        pass


class Proxy:
    """`begin` sees a call before its body, `before` before the server does and may answer it, `after` sees the answer.

    All may raise Lost. With `tls`, a certificate and its key, it speaks HTTPS.
    """

    def __init__(
        self,
        target: Server,
        before: Fault | None = None,
        after: Fault | None = None,
        begin: Fault | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.calls: list[str] = []
        self._connections: set[socket.socket] = set()
        proxy, netloc = self, urlsplit(target.endpoint).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                proxy._connections.add(self.connection)

            def handle_one(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.title(): value for name, value in self.headers.items()}
                call = Call(self.command, self.path, headers, b"")
                proxy.calls.append(f"{call.method} {call.path}")
                try:
                    if begin:
                        begin(call)
                    call.body = self.read(call, length)
                    if before:
                        before(call)
                    if not call.status:
                        _forward(netloc, call)
                    if after:
                        after(call)
                except Lost:
                    self.lose()
                    return
                self.send_response(call.status)
                for name, value in call.answer_headers:
                    self.send_header(name, value)
                if not call.answer_headers:
                    self.send_header("Content-Length", str(len(call.answer)))
                self.end_headers()
                self.write(call)
                self.close_connection |= call.hang_up

            def read(self, call: Call, length: int) -> bytes:
                body = b""
                while len(body) < length:
                    step = min(length, call.cut_at or length) - len(body)
                    if not step:
                        raise Lost
                    if call.bytes_per_s:
                        step = _slowly(call.bytes_per_s, step)
                    piece = self.rfile.read(step)
                    if not piece:
                        raise Lost  # by the client, which was killed
                    body += piece
                return body

            def write(self, call: Call) -> None:
                answer = memoryview(call.answer)[: call.cut_at]
                while answer:
                    step = _slowly(call.bytes_per_s, len(answer)) if call.bytes_per_s else len(answer)
                    self.wfile.write(answer[:step])
                    answer = answer[step:]
                if call.cut_at is not None:
                    self.lose()

            def lose(self) -> None:
                self.close_connection = True
                with suppress(OSError):  # a reset, and no orderly end
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def through(moto, monkeypatch) -> Iterator[Callable[..., tuple[Store, Proxy]]]:
    """A store whose every request goes through a proxy with these faults; retries wait for nothing."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _seconds: None))  # botocore's alone
    yield from _through(moto, monkeypatch)


@pytest.fixture
def weather(request, monkeypatch) -> Iterator[Callable[..., tuple[Store, Proxy]]]:
    """The same in front of a real server, where it is installed."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _seconds: None))  # botocore's alone
    server = request.getfixturevalue("versitygw" if gateway.program() else "moto")
    yield from _through(server, monkeypatch)


def _through(server: Server, monkeypatch) -> Iterator[Callable[..., tuple[Store, Proxy]]]:
    proxies = []
    bucket = server.bucket()

    def make(
        before: Fault | None = None,
        after: Fault | None = None,
        begin: Fault | None = None,
        tls: tuple[Path, Path] | None = None,
        env: Mapping[str, str] | None = None,
        max_bytes_per_s: int | None = None,
        **times: float,
    ) -> tuple[Store, Proxy]:
        proxy = Proxy(server, before, after, begin, tls)
        proxies.append(proxy)
        env = {**(server.env if env is None else env), "AWS_ENDPOINT_URL": proxy.endpoint}
        if tls:
            env["AWS_CA_BUNDLE"] = str(tls[0])
        deadlines = Timeouts(**{"store_retry_s": 10, **times})
        store = open_store(f"s3://{bucket}/x", env, timeouts=deadlines, max_bytes_per_s=max_bytes_per_s)
        monkeypatch.setattr(store, "_sleep", lambda _seconds: None)
        return store, proxy

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture(scope="session")
def lost() -> type[Exception]:
    """What a fault raises to cut the connection."""
    return Lost


def _slowly(bytes_per_s: float, most: int) -> int:
    """Waits a moment; how many bytes fit into it."""
    time.sleep(0.05)
    return min(most, max(1, int(bytes_per_s / 20)))


def _forward(netloc: str, call: Call) -> None:
    connection = http.client.HTTPConnection(netloc, timeout=START_S)
    try:
        connection.request(call.method, call.path, call.body, call.headers)
        answer = connection.getresponse()
        call.status, call.answer = answer.status, answer.read()
        call.answer_headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "server")]
    finally:
        connection.close()


@pytest.fixture
def team(versitygw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gateway.Team:
    """Machines whose backend is a bucket of versitygw."""
    return _team(versitygw, versitygw.env, tmp_path, monkeypatch)


def _team(server: Server, env: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> gateway.Team:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(location.VARIABLE, gateway.backend(env, server.bucket(), "team"))
    monkeypatch.setattr(shared, "_LOOK_S", 0.01)
    return gateway.Team(folder, monkeypatch.setenv)


class Storm:
    """What becomes of requests on their way to a bucket, by a seed, while it blows: one in six is refused (503, 409),
    or its answer is lost, before it was done or after; and one listing in three is that of a while ago."""

    def __init__(self, seed: int) -> None:
        self.blows, self._lock = False, threading.Lock()
        self._random, self._listed = random.Random(seed), dict[str, tuple[bytes, Any]]()

    def _falls(self, share: float) -> bool:
        with self._lock:
            return self.blows and self._random.random() < share

    def before(self, call: Call) -> None:
        if self._falls(1 / 18):
            raise Lost
        if self._falls(1 / 18):
            busy = call.method != "PUT" or self._falls(0.5)
            call.status, code = (503, "SlowDown") if busy else (409, "ConditionalRequestConflict")
            call.answer = f"<Error><Code>{code}</Code><Message>told by a test</Message></Error>".encode()

    def after(self, call: Call) -> None:
        if "list-type=2" in call.path and call.status == 200:
            then = self._listed.get(call.path)
            self._listed[call.path] = (call.answer, call.answer_headers)
            if then is not None and self._falls(1 / 3):
                call.answer, call.answer_headers = then
        if self._falls(1 / 18):
            raise Lost


@pytest.fixture
def storm(request: pytest.FixtureRequest) -> Storm:
    """By the test's own seed."""
    return Storm(request.param)


@pytest.fixture
def team_in_a_storm(versitygw, storm: Storm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gateway.Team]:
    """Machines whose bucket lies behind one. Nothing waits between two tries."""
    from mgpu_train import store

    def opened(*args: Any, real: Any = store.open_store, **more: Any) -> Store:
        made = real(*args, **more)
        monkeypatch.setattr(made, "_sleep", lambda _seconds: None)
        return made

    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _seconds: None))  # botocore's alone
    monkeypatch.setattr(store, "open_store", opened)
    proxy = Proxy(versitygw, storm.before, storm.after)
    try:
        yield _team(versitygw, {**versitygw.env, "AWS_ENDPOINT_URL": proxy.endpoint}, tmp_path, monkeypatch)
    finally:
        proxy.close()
