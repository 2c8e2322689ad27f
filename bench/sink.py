"""An S3 server on loopback that throws bodies away, as cheaply as Python can: what a client costs is seen beside it.

It speaks TLS 1.3, and as much S3 as s5cmd, boto3 and mgpu's own store ask for. Every connection has a process of its
own, so that no lock of the interpreter stands between two. Of an object only its size and checksum are kept, and the
bytes where its key ends with .json; reading any other gives `pattern` again and again, which is what the bench writes.
With `--faults slowdown=0.3,lost=0.3,reset=0.05` so many of the requests are refused, unanswered or cut off.

Runs as a program of its own, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import selectors
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape

PERIOD = 16 << 10  # bytes after which the content of every object repeats itself
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_LONGEST_LINE = 64 << 10
_ETAG = re.compile(rb"<ETag>(?:&quot;|&#34;|\")?([0-9a-f]+)-")
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


def pattern(size: int) -> bytes:
    """The first `size` bytes of every object's content."""
    period = random.Random(7).randbytes(PERIOD)
    return (period * (size // PERIOD + 1))[:size]


@dataclass
class Request:
    """One request without its body, which is still to be read."""

    method: str
    key: str  # without the bucket; empty for the bucket itself
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def body_bytes(self) -> int:
        """Of the object's content; what is on the wire may be longer."""
        return int(self.headers.get("x-amz-decoded-content-length") or self.headers.get("content-length") or 0)


@dataclass
class Answer:
    """What is sent back; `content` counts bytes of the pattern from `offset` on, after `body`."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    offset: int = 0
    content: int = 0
    length: int | None = None  # where the header says more than what is sent: HEAD


class Connection:
    """A connection's bytes, in and out."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._buffer = memoryview(bytearray(256 << 10))
        self._begin = self._end = 0
        self._content = memoryview(pattern(PERIOD + (1 << 20)))

    def _more(self) -> None:
        self._begin, self._end = 0, self.stream.recv_into(self._buffer)
        if not self._end:
            raise ConnectionError("the client is gone")

    def line(self) -> bytes:
        """One line without its end."""
        found = bytearray()
        while True:
            if self._begin == self._end:
                self._more()
            piece = bytes(self._buffer[self._begin : self._end])
            cut = piece.find(b"\n")
            found += piece if cut < 0 else piece[: cut + 1]
            self._begin = self._end if cut < 0 else self._begin + cut + 1
            if cut >= 0:
                return bytes(found).rstrip(b"\r\n")
            if len(found) > _LONGEST_LINE:
                raise ConnectionError("a line without an end")

    def take(self, count: int, keep: bytearray | None) -> None:
        """Read so many bytes, and forget them unless they are to be kept."""
        while count:
            if self._begin == self._end:
                self._more()
            size = min(count, self._end - self._begin)
            if keep is not None:
                keep += self._buffer[self._begin : self._begin + size]
            self._begin += size
            count -= size

    def body(self, request: Request, *, keep: bool) -> bytes:
        """Read the whole body; empty unless it is kept."""
        kept = bytearray() if keep else None
        if request.headers.get("expect", "").lower() == "100-continue":
            self.stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" not in request.headers.get("transfer-encoding", ""):
            self.take(int(request.headers.get("content-length", 0)), kept)
            return bytes(kept or b"")
        while size := int(self.line().partition(b";")[0], 16):
            self.take(size, kept)
            self.line()
        while self.line():
            pass
        return bytes(kept or b"")

    def request(self) -> Request | None:
        """The next request; None: the client closed the connection."""
        try:
            start = self.line()
        except (ConnectionError, ssl.SSLError):
            return None
        method, target, _ = start.decode("latin-1").split(" ")
        headers = {}
        while text := self.line().decode("latin-1"):
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        path, _, query = target.partition("?")
        key = unquote(path).lstrip("/").partition("/")[2]
        fields = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        return Request(method, key, fields, headers)

    def send(self, answer: Answer, *, only: int | None = None) -> None:
        """Send an answer; `only` so many bytes of its content, as a connection that breaks would."""
        length = answer.length if answer.length is not None else len(answer.body) + answer.content
        head = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Error')}", f"Content-Length: {length}"]
        head += [f"{name}: {value}" for name, value in answer.headers.items()]
        self.stream.sendall("\r\n".join([*head, "", ""]).encode("latin-1") + answer.body)
        left = answer.content if only is None else min(only, answer.content)
        offset = answer.offset % PERIOD
        while left:
            size = min(left, 1 << 20)
            self.stream.sendall(self._content[offset : offset + size])
            offset = (offset + size) % PERIOD
            left -= size

    def reset(self) -> None:
        """Break the connection off, without a farewell."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.stream.detach())


class Objects:
    """What is known of the objects, for all processes: one small file each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, key: str, size: int, crc: str, body: bytes) -> None:
        """Note an object; `crc` is S3's Base64 of its CRC64NVME, or empty."""
        path = self._folder / quote(key, safe="")
        aside = path.with_name(f"~{os.getpid()}")
        aside.write_bytes(json.dumps({"size": size, "crc": crc}).encode() + b"\n" + body)
        aside.replace(path)

    def read(self, key: str) -> tuple[dict[str, str | int], bytes, float] | None:
        """Size and checksum, the kept bytes, and when it was written; None: no such object."""
        path = self._folder / quote(key, safe="")
        try:
            head, _, body = path.read_bytes().partition(b"\n")
            return json.loads(head), body, path.stat().st_mtime
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        """Forget an object."""
        (self._folder / quote(key, safe="")).unlink(missing_ok=True)

    def list(self, prefix: str, after: str) -> Iterator[tuple[str, int, float]]:
        """Key, size and time of all that follow `after` under a prefix."""
        names = sorted(unquote(path.name) for path in self._folder.iterdir() if not path.name.startswith("~"))
        for key in names:
            if key.startswith(prefix) and key > after and (found := self.read(key)):
                yield key, int(found[0]["size"]), found[2]


class Sink:
    """The answers."""

    def __init__(self, objects: Objects, faults: dict[str, float]) -> None:
        self._objects = objects
        self._faults = faults
        self._random = random.Random(os.getpid())

    def serve(self, connection: Connection) -> None:
        """Answers requests until the client leaves, or a fault takes the connection."""
        while (request := connection.request()) is not None:
            fault = self._fault()
            if fault == "reset" and request.method == "PUT":
                connection.take(min(request.body_bytes, 1 << 20) // 2, None)
                return connection.reset()
            keep = request.key.endswith(".json") or request.method == "POST"
            body = connection.body(request, keep=keep)
            if fault == "slowdown":
                connection.send(_error(503, "SlowDown", "Please reduce your request rate."))
                continue
            answer = self._answer(request, body)
            if fault == "lost":
                return connection.reset()
            if fault == "reset":
                connection.send(answer, only=answer.content // 2)
                return connection.reset()
            connection.send(answer)
        return None

    def _fault(self) -> str | None:
        point = self._random.random()
        for name, share in self._faults.items():
            if point < share:
                return name
            point -= share
        return None

    def _answer(self, request: Request, body: bytes) -> Answer:
        if not request.key:
            return self._bucket(request)
        if request.method == "PUT":
            return self._put(request, body)
        if request.method == "POST":
            return self._create(request) if "uploads" in request.query else self._complete(request, body)
        if request.method == "DELETE":
            if "uploadId" not in request.query:
                self._objects.delete(request.key)
            return Answer(204)
        return self._get(request)

    def _put(self, request: Request, body: bytes) -> Answer:
        size, crc = request.body_bytes, request.headers.get("x-amz-checksum-crc64nvme", "")
        answer = Answer(headers={"ETag": f'"{size:x}-{secrets.token_hex(8)}"'})  # completing adds up the parts' sizes
        if crc:
            answer.headers["x-amz-checksum-crc64nvme"] = crc
        if "partNumber" in request.query:
            return answer
        if request.headers.get("if-none-match") == "*" and self._objects.read(request.key):
            return _error(412, "PreconditionFailed", "It exists.")
        self._objects.write(request.key, size, crc, body)
        return answer

    def _create(self, request: Request) -> Answer:
        return _xml(
            "InitiateMultipartUploadResult",
            f"<Bucket>b</Bucket><Key>{escape(request.key)}</Key><UploadId>{secrets.token_hex(16)}</UploadId>",
        )

    def _complete(self, request: Request, body: bytes) -> Answer:
        size = sum(int(tag, 16) for tag in _ETAG.findall(body))
        self._objects.write(request.key, size, request.headers.get("x-amz-checksum-crc64nvme", ""), b"")
        return _xml(
            "CompleteMultipartUploadResult",
            f'<Bucket>b</Bucket><Key>{escape(request.key)}</Key><ETag>"{size:x}-done"</ETag>',
        )

    def _get(self, request: Request) -> Answer:
        found = self._objects.read(request.key)
        if found is None:
            answer = _error(404, "NoSuchKey", "There is none.")
            return Answer(404, length=0) if request.method == "HEAD" else answer
        (about, body, modified), whole = found, int(found[0]["size"])
        headers = {"ETag": f'"{whole:x}-0"', "Last-Modified": formatdate(modified, usegmt=True)}
        if about["crc"] and request.headers.get("x-amz-checksum-mode"):
            headers |= {"x-amz-checksum-crc64nvme": str(about["crc"]), "x-amz-checksum-type": "FULL_OBJECT"}
        first, last, status = 0, whole - 1, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            first, last, status = int(asked[1]), min(int(asked[2] or whole), whole - 1), 206
            headers["Content-Range"] = f"bytes {first}-{last}/{whole}"
            headers.pop("x-amz-checksum-crc64nvme", None)  # a range has none
        size = last - first + 1
        if request.method == "HEAD":
            return Answer(status, headers, length=size)
        if request.key.endswith(".json"):
            return Answer(status, headers, body[first : last + 1])
        return Answer(status, headers, offset=first, content=size)

    def _bucket(self, request: Request) -> Answer:
        if request.method == "HEAD":
            return Answer(length=0)
        if "uploads" in request.query:
            return _xml("ListMultipartUploadsResult", "<Bucket>b</Bucket><IsTruncated>false</IsTruncated>")
        prefix, after = request.query.get("prefix", ""), request.query.get("continuation-token", "")
        found = list(self._objects.list(prefix, after or request.query.get("start-after", "")))
        most = int(request.query.get("max-keys", 1000))
        page, cut = found[:most], len(found) > most
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;{size:x}-0&quot;</ETag>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(at))}</LastModified></Contents>"
            for key, size, at in page
        )
        follow = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if cut else ""
        return _xml(
            "ListBucketResult",
            f"<Name>b</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(cut).lower()}</IsTruncated>{follow}{rows}",
        )


def _xml(name: str, inner: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {_NAMESPACE}>{inner}</{name}>'
    return Answer(headers={"Content-Type": "application/xml"}, body=text.encode())


def _error(status: int, code: str, message: str) -> Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())


def _handle(accepted: socket.socket, context: ssl.SSLContext | None, sink: Sink) -> None:
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError):  # what clients that are killed, or give up, do
        sink.serve(Connection(context.wrap_socket(accepted, server_side=True) if context else accepted))


def _reap(_signal: int, _frame: object) -> None:
    with suppress(ChildProcessError):  # waited for, so that their CPU time counts as this process's
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Prints the port, and serves until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path, help="an empty folder of its own")
    parser.add_argument("--certificate", help="PEM: certificate and key; without: plain HTTP")
    parser.add_argument("--faults", default="", help="name=share,...")
    args = parser.parse_args()
    faults = {name: float(share) for name, _, share in (each.partition("=") for each in args.faults.split(",") if each)}
    context = None
    if args.certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(args.certificate)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # the connections' processes, and nobody else, end with this one
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listener.getsockname()[1], flush=True)
    signal.signal(signal.SIGCHLD, _reap)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(sys.stdin, selectors.EVENT_READ)
    while all(key.fileobj is listener for key, _ in ready.select()):
        accepted, _ = listener.accept()
        if not os.fork():
            listener.close()
            _handle(accepted, context, Sink(Objects(args.state), faults))
            os._exit(0)
        accepted.close()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
