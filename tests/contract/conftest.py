"""Stores to test against (a folder, moto, versitygw where it is installed) and an S3 proxy that loses and falsifies."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from mgpu_train.store import Store, open_store
from mgpu_train.timeouts import Timeouts

ACCESS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "canary-5ecret-key", "AWS_REGION": "us-east-1"}
START_S = 30


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
    program = os.environ.get("MGPU_VERSITYGW") or shutil.which("versitygw")
    require("versitygw", program is not None, "no program versitygw on PATH")
    folder = tmp_path_factory.mktemp("versitygw")
    port = _free_port()
    env = {
        "PATH": os.environ["PATH"],
        "ROOT_ACCESS_KEY": ACCESS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": ACCESS["AWS_SECRET_ACCESS_KEY"],
    }
    process = subprocess.Popen(
        [str(program), "--port", f"127.0.0.1:{port}", "posix", str(folder)],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        endpoint = f"http://127.0.0.1:{port}"
        yield Server(endpoint, {**ACCESS, "AWS_ENDPOINT_URL": endpoint})
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["file", "moto", "versitygw"])
def site(request, tmp_path) -> Site:
    if request.param == "file":
        return _folder(tmp_path / "store")
    return _bucket(request.param, request.getfixturevalue(request.param))


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
    """One request on its way through, and its answer on the way back."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytes = b""
    hang_up: bool = False  # when the answer is written
    answer_headers: list[tuple[str, str]] = field(default_factory=list)


class Lost(Exception):
    """Raised by a fault: the connection ends here."""


Fault = Callable[[Call], None]


class _Quiet(ThreadingHTTPServer):
    """Says nothing of clients that hang up: here they are meant to."""

    def handle_error(self, *_: Any) -> None:
        pass


class Proxy:
    """`before` sees a call before the server does and may answer it, `after` sees the answer; both may raise Lost."""

    def __init__(self, target: Server, before: Fault | None = None, after: Fault | None = None) -> None:
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
                call = Call(self.command, self.path, headers, self.rfile.read(length))
                proxy.calls.append(f"{call.method} {call.path}")
                try:
                    if before:
                        before(call)
                    if not call.status:
                        _forward(netloc, call)
                    if after:
                        after(call)
                except Lost:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(call.status)
                for name, value in call.answer_headers:
                    self.send_header(name, value)
                if not call.answer_headers:
                    self.send_header("Content-Length", str(len(call.answer)))
                self.end_headers()
                self.wfile.write(call.answer)
                self.close_connection |= call.hang_up

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815 - http.server's names

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def through(moto, monkeypatch) -> Iterator[Callable[..., tuple[Store, Proxy]]]:
    """A store whose every request goes through a proxy with these faults; retries wait for nothing."""
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _seconds: None)
    proxies = []
    bucket = moto.bucket()

    def make(before: Fault | None = None, after: Fault | None = None, **times: float) -> tuple[Store, Proxy]:
        proxy = Proxy(moto, before, after)
        proxies.append(proxy)
        env = {**moto.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        store = open_store(f"s3://{bucket}/x", env, timeouts=Timeouts(**{"store_retry_s": 10, **times}))
        monkeypatch.setattr(store, "_sleep", lambda _seconds: None)
        return store, proxy

    yield make
    for proxy in proxies:
        proxy.close()


@pytest.fixture(scope="session")
def lost() -> type[Exception]:
    """What a fault raises to cut the connection."""
    return Lost


def _forward(netloc: str, call: Call) -> None:
    connection = http.client.HTTPConnection(netloc, timeout=START_S)
    try:
        connection.request(call.method, call.path, call.body, call.headers)
        answer = connection.getresponse()
        call.status, call.answer = answer.status, answer.read()
        call.answer_headers = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "server")]
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"versitygw did not start: exit code {process.poll()}")
