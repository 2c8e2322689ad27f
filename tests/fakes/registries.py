"""Registries that answer as a test says, and a wire to a real one that is counted and can be cut."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Said:
    """One answer."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def authorization(self) -> str:
        return self.headers.get("authorization", "")


Script = Callable[[Asked], Said]


@dataclass
class Scripted:
    """A server on loopback that does what `script` says, and remembers what it was asked."""

    address: str
    script: Script
    asked: list[Asked] = field(default_factory=list)


@contextmanager
def scripted(script: Script, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Scripted]:
    """One, while the block runs."""
    served = Scripted("", script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            chunked = headers.pop("transfer-encoding", "") == "chunked"
            body = _chunks(self.rfile) if chunked else self.rfile.read(int(headers.get("content-length", 0)))
            asked = Asked(self.command, self.path, headers, body)
            served.asked.append(asked)
            said = served.script(asked)
            self.send_response(said.status)
            for name, value in {"Content-Length": str(len(said.body)), **said.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815  the names are http.server's

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    served.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _chunks(stream: IO[bytes]) -> bytes:
    whole = b""
    while size := int(stream.readline(), 16):
        whole += stream.read(size)
        stream.readline()
    stream.readline()
    return whole


def forwarded(to: str, asked: Asked) -> Said:
    """What the registry at `to` says to a request, which was made under another address."""
    connection = http.client.HTTPConnection(to)
    try:
        connection.request(asked.method, asked.path, asked.body, dict(asked.headers))  # with the Host that was asked
        answer = connection.getresponse()
        headers = {name: value for name, value in answer.getheaders() if name.lower() != "transfer-encoding"}
        return Said(answer.status, headers, answer.read())
    finally:
        connection.close()


def certificate(host: str = "127.0.0.1") -> tuple[bytes, bytes]:
    """A certificate for an address or a name, signed by itself, and its key: PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    numeric = host.replace(".", "").isdigit()
    who = x509.IPAddress(ipaddress.ip_address(host)) if numeric else x509.DNSName(host)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - day).not_valid_after(now + day)
    builder = builder.add_extension(x509.SubjectAlternativeName([who]), critical=False)
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), private


@dataclass
class Wire:
    """A way to a registry: bytes that went there, and after how many of them it breaks, for good."""

    address: str
    sent: int = 0
    cut_after: int | None = None

    @property
    def broken(self) -> bool:
        return self.cut_after is not None and self.sent >= self.cut_after


@contextmanager
def wire(to: str, cut_after: int | None = None) -> Iterator[Wire]:
    """A port of loopback that leads to the registry at `to`, while the block runs."""
    listener = socket.create_server(("127.0.0.1", 0))
    line = Wire(f"127.0.0.1:{listener.getsockname()[1]}", cut_after=cut_after)
    threading.Thread(target=_accept, args=(listener, to, line), daemon=True).start()
    try:
        yield line
    finally:
        listener.close()


def _accept(listener: socket.socket, to: str, line: Wire) -> None:
    host, _, port = to.rpartition(":")
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        if line.broken:
            near.close()
            continue
        far = socket.create_connection((host, int(port)))
        threading.Thread(target=_carry, args=(near, far, line), daemon=True).start()
        threading.Thread(target=_carry, args=(far, near, None), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket, line: Wire | None) -> None:
    try:
        while block := source.recv(65536):
            if line is not None:
                line.sent += len(block)
                if line.broken:
                    break
            sink.sendall(block)
    except OSError:
        pass
    for each in (source, sink):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
