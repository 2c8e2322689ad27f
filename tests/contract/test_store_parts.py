"""What stores do where no server is needed to see it: errors in words, files, retries, and what a connection meets."""

from __future__ import annotations

import base64
import datetime
import errno
import itertools
import os
import socket
import ssl
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
from botocore import exceptions as boto
from botocore.httpsession import get_cert_path
from botocore.stub import Stubber
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from mgpu_train.store import (
    Denied,
    Expired,
    NoCredentials,
    NoStore,
    NotFound,
    StoreError,
    Unavailable,
    disk,
    open_store,
)
from mgpu_train.store.bulk.message import Route
from mgpu_train.store.bulk.wire import NEVER, Trouble, Wire
from mgpu_train.store.s3 import S3Store
from mgpu_train.store.s3errors import S3Errors
from mgpu_train.timeouts import Timeouts

PEM = serialization.Encoding.PEM

# --- errors


@pytest.mark.parametrize(
    ("kind", "code", "status", "expected", "words"),
    [
        ("http", "NoSuchUpload", 404, StoreError, "somebody has ended this upload"),
        ("http", "PermanentRedirect", 301, NoStore, "Check the bucket's name and AWS_REGION"),
        ("tls", "", 0, Unavailable, "the certificate of https://s3.test is not trusted"),
        ("connect", "", 0, Unavailable, "no connection to https://s3.test"),
        ("file", "", errno.EROFS, Denied, "Use a folder that can be written"),
        ("file", "", errno.EACCES, Denied, "Give this user access to the folder"),
        ("file", "", errno.EINVAL, StoreError, "told by a test"),
        ("file", "", errno.ESTALE, Unavailable, "whether the folder's file system answers"),
        ("file", "", errno.EIO, Unavailable, "try again later"),
        ("file", "", errno.EMFILE, Unavailable, "try again later"),
        (boto.CredentialRetrievalError(provider="x", error_msg="x"), "", 0, NoCredentials, "no usable credentials"),
        ("bug", "", 0, StoreError, "the process that moves the bytes failed: told by a test"),
        ("network", "", 0, Unavailable, "stopped answering (told by a test)"),
        (boto.SSLError(endpoint_url="x", error="x"), "", 0, Unavailable, "Set AWS_CA_BUNDLE"),
        (boto.UnknownServiceError(service_name="x", known_service_names=""), "", 0, StoreError, "UnknownServiceError"),
    ],
)
def test_what_went_wrong_is_told_with_what_to_do(kind, code, status, expected, words):
    errors = S3Errors("s3://bucket/runs", "https://user:secret@s3.test")
    told = {"kind": kind, "code": code, "status": status, "text": "told by a test"}
    met = kind if isinstance(kind, Exception) else errors.of_transfer("write a", told)
    with pytest.raises(StoreError) as caught, errors.translated("write a"):
        raise met
    told = str(caught.value)
    assert (type(caught.value), words in told, "secret" in told) == (expected, True, False), told
    assert told.startswith("s3://bucket/runs: cannot write a: ")


# --- a folder


def test_a_file_is_replaced_only_as_it_was_read(tmp_path):
    store = open_store(f"file://{tmp_path}/store")
    assert not store.replace("a/b", b"new", "any")
    store.put("a/b", b"old")
    version = store.read("a/b", 9).version
    assert store.replace("a/b", b"new", version)
    assert not store.replace("a/b", b"newer", version)
    assert (store.get("a/b", 9), [each.key for each in store.list("")]) == (b"new", ["a/b"])
    store.delete("a/b")
    assert (tmp_path / "store").is_dir()
    assert not (tmp_path / "store" / "a").exists()


def test_files_and_folders_that_go_meanwhile_are_no_error_of_the_list_and_one_of_a_write(tmp_path, monkeypatch):
    store = open_store(f"file://{tmp_path}/store")
    for key in ("a", "b"):
        store.put(key, b"x")
    found = store.list("")
    assert next(found).key == "a"
    (tmp_path / "store" / "b").unlink()
    assert list(found) == []
    real, faster = disk.make_folder, iter(range(9))  # so often whoever deletes the folder is faster
    monkeypatch.setattr(disk, "make_folder", lambda folder: next(faster) < 6 or real(folder))
    with pytest.raises(NotFound, match="there is no such file"):
        store.put("gone/c", b"x")
    store.put("gone/c", b"x")
    assert next(faster) == 7


# --- S3, without a server


@pytest.fixture
def s3():
    """A store, what its client is told to answer, and its pauses; a second goes by at each look at its clock."""
    slept: list[float] = []
    env = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    clock = itertools.count().__next__
    store = S3Store("s3://bucket", "bucket", "", env, Timeouts(), clock=clock, sleep=slept.append)
    stubber = Stubber(store._client)
    stubber.activate()
    yield store, stubber, slept
    stubber.assert_no_pending_responses()


def refuses(stubber: Stubber, call: str, code: str, status: int, times: int = 1) -> None:
    for _ in range(times):
        stubber.add_client_error(call, code, http_status_code=status)


def test_an_outage_is_borne_with_growing_pauses_once_the_store_has_answered(s3):
    store, stubber, slept = s3
    refuses(stubber, "delete_object", "SlowDown", 503)
    with pytest.raises(Unavailable):
        store.delete("a")
    assert slept == [], "it never answered: rather a wrong address"
    store._answered = True
    refuses(stubber, "delete_object", "SlowDown", 503, times=4)
    refuses(stubber, "delete_object", "NoSuchKey", 404)
    store.delete("a")  # absent is success
    assert [0.5 <= pause / 2**n <= 1 for n, pause in enumerate(slept, 1)] == [True] * 4


@pytest.mark.parametrize(("renewed", "calls"), [(False, 1), (True, 2)])
def test_credentials_that_expired_are_looked_for_once(s3, monkeypatch, renewed, calls):
    store, stubber, _ = s3
    monkeypatch.setattr(store, "_renew", lambda: renewed)
    refuses(stubber, "delete_object", "ExpiredToken", 400, times=calls)
    with pytest.raises(Expired):
        store.delete("a")


@pytest.mark.parametrize("size", [3, 4, None])
def test_an_upload_that_is_gone_was_completed_only_if_the_object_says_so(s3, size):
    """The answer to an earlier try was lost, or somebody has ended the upload."""
    store, stubber, _ = s3
    refuses(stubber, "complete_multipart_upload", "NoSuchUpload", 404)
    head = {"ContentLength": size, "ChecksumCRC64NVME": base64.b64encode(bytes(8)).decode(), "ETag": "x"}
    head |= {"LastModified": datetime.datetime.now(datetime.UTC)}
    stubber.add_response("head_object", head) if size else refuses(stubber, "head_object", "404", 404)
    with nullcontext() if size == 3 else pytest.raises(StoreError, match="somebody has ended this upload"):
        store._complete("a", "id", [], 3, "0" * 16)
    refuses(stubber, "abort_multipart_upload", "NoSuchUpload", 404)
    store._abort("a", "id")


@pytest.mark.parametrize("memory", [True, False])
def test_bytes_are_a_file_for_the_process_that_moves_them_and_then_gone(s3, monkeypatch, memory):
    if not memory:
        monkeypatch.delattr(os, "memfd_create")
    store, asked, data = s3[0], [], bytes(300_000)
    assert not store._bulk.learn("a")
    with pytest.raises(RuntimeError, match="no request was made before"):
        store._bulk.receive("a", 9, None, None)
    monkeypatch.setattr(store, "stat", asked.append)
    monkeypatch.setattr(store._bulk, "send", lambda _key, path, _found: asked.extend([path, path.read_bytes()]))
    store.put("a", data)
    assert asked[::2] == ["a", data], "where the bucket is it learns by a small request"
    assert not asked[1].exists()


def test_a_small_object_that_trickles_in_is_too_slow(s3):
    with pytest.raises(Unavailable, match="the server is too slow"):
        s3[0]._slowly_read("a", SimpleNamespace(read=lambda _count: b"x"), 9)


# --- a connection


@pytest.fixture
def serve():
    """`serve(answer, context)`: the port of a server that says it to each request, and the requests' heads."""
    servers = []

    def make(answer: bytes, context: ssl.SSLContext | None = None) -> tuple[int, list[bytes]]:
        server, heard = socket.create_server(("127.0.0.1", 0)), []
        servers.append(server)

        def run() -> None:
            with suppress(OSError):  # it is over, or nobody trusts it
                while True:
                    peer = server.accept()[0]
                    with context.wrap_socket(peer, server_side=True) if context else peer as peer:
                        heard.append(peer.recv(1 << 16))
                        peer.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        return server.getsockname()[1], heard

    yield make
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def trouble(route: Route, send=None) -> tuple[str, str, int]:
    with pytest.raises(Trouble) as caught:
        Wire(60, 60).ask(route, "PUT", "/key", {}, send)
    return caught.value.told["kind"], caught.value.told["text"], caught.value.tries


def of(port: int, scheme: str = "http", **more) -> Route:
    return Route(f"{scheme}://127.0.0.1:{port}", "", "us-east-1", **more)


def test_who_refuses_a_body_and_hangs_up_is_heard_out(serve):
    def broken(_sock: socket.socket) -> None:
        raise BrokenPipeError

    wire = Wire(60, 60)
    port, _ = serve(b"HTTP/1.1 403 no\r\nContent-Length: 6\r\n\r\nreason")
    answer = wire.ask(of(port), "PUT", "/key", {}, broken)
    assert (answer.status, answer.read()) == (403, b"reason")
    port, _ = serve(b"HTTP/1.1 200 yes\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert trouble(of(port), broken)[1] == "ConnectionError: the server hung up in the middle of a body"
    answer, memory = wire.ask(of(port), "GET", "/key", {}), bytearray(3)
    assert (wire.reader(answer)(memoryview(memory)), memory) == (3, b"abc")


def test_whom_it_cannot_reach_or_trust_it_says(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert trouble(of(port))[:2] == ("connect", "ConnectionRefusedError: [Errno 111] Connection refused")
    kind, text, tries = trouble(of(port, "https", ca=str(tmp_path / "none.pem")))
    assert (kind, text, tries) == ("tls", f"cannot read {tmp_path}/none.pem: No such file or directory", NEVER)
    key, name, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(1))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    own = made.sign(key, hashes.SHA256()).public_bytes(PEM) + key.private_bytes(PEM, *plain)
    (tmp_path / "own.pem").write_bytes(own)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    port, heard = serve(b"", context)
    kind, text, tries = trouble(of(port, "https", ca=get_cert_path(True)))
    assert (kind, text.startswith("self"), tries) == ("tls", True, NEVER), text
    assert heard == [], "nothing is said to whom it does not trust"


@pytest.mark.parametrize(("who", "told"), [("", b""), ("me:p%40ss@", base64.b64encode(b"me:p@ss"))])
def test_a_proxy_is_asked_with_its_own_credentials(serve, who, told):
    port, heard = serve(b"HTTP/1.1 407 who are you\r\n\r\n")
    proxy = f"http://{who}127.0.0.1:{port}"
    kind, text, _ = trouble(Route("https://s3.test", "", "r", proxy=proxy, ca=get_cert_path(True)))
    assert (kind, "Tunnel connection failed: 407" in text) == ("connect", True)
    assert Wire(60, 60).ask(Route("http://s3.test", "", "r", proxy=proxy), "GET", "/key", {}).status == 407
    assert [head.split(b" ")[:2] for head in heard] == [[b"CONNECT", b"s3.test:443"], [b"GET", b"http://s3.test/key"]]
    for head in heard:
        assert (b"Proxy-Authorization: Basic " + told in head) == bool(told)
