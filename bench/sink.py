"""An S3 server on loopback that throws bodies away, as cheaply as Python can: what a client costs is seen beside it.

It speaks TLS 1.3, and as much S3 as s5cmd, boto3 and mgpu's own store ask for. Every connection has a process of its
own, so that no lock of the interpreter stands between two. Of an object only its size and checksum are kept, and the
bytes where its key ends with .json; reading any other gives `pattern` again and again, which is what the bench writes.
With `--faults slowdown=0.3,lost=0.3,reset=0.05` so many of the requests are refused, not answered though done, or cut
off; `silent=1` answers none and keeps the connection, `slow=1` takes 1 KB a second.

Runs as a program of its own, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import selectors
import signal
import socket
import ssl
import struct
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote

from bench.sink_answers import Answer, Answers, Objects, Request, refusal

PERIOD = 16 << 10  # bytes after which the content of every object repeats itself
_LONGEST_LINE = 64 << 10
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}


def pattern(size: int) -> bytes:
    """The first `size` bytes of every object's content."""
    period = random.Random(7).randbytes(PERIOD)
    return (period * (size // PERIOD + 1))[:size]


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

    def dawdle(self, bytes_per_s: int) -> None:
        """Never answer, and read no more than so much; until the client has enough."""
        leaving = select.poll()
        leaving.register(self.stream, select.POLLRDHUP)
        while not leaving.poll(1000):
            if bytes_per_s:
                self.stream.recv(bytes_per_s)

    def reset(self) -> None:
        """Break the connection off, without a farewell."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.stream.detach())


class Sink:
    """Serves one connection, in a process of its own."""

    def __init__(self, answers: Answers, faults: dict[str, float]) -> None:
        self._answers = answers
        self._faults = faults
        self._random = random.Random(os.getpid())

    def serve(self, connection: Connection) -> None:
        """Answers requests until the client leaves, or a fault takes the connection."""
        while (request := connection.request()) is not None:
            fault = self._fault()
            if fault == "silent" or (fault == "slow" and "partNumber" in request.query):
                return connection.dawdle(1024 if fault == "slow" else 0)
            if fault == "reset" and request.method == "PUT":
                connection.take(min(request.body_bytes, 1 << 20) // 2, None)
                return connection.reset()
            keep = request.key.endswith(".json") or request.method == "POST"
            body = connection.body(request, keep=keep)
            if fault == "slowdown":
                connection.send(refusal(503, "SlowDown", "Please reduce your request rate."))
                continue
            answer = self._answers.to(request, body)
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
            _handle(accepted, context, Sink(Answers(Objects(args.state)), faults))
            os._exit(0)
        accepted.close()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
