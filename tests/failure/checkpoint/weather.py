"""What the way to an S3 server does to requests: a proxy on loopback that passes them on, or does not."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fate = Literal["fine", "slowdown", "conflict", "refused", "lost", "reset", "silent", "slow"]
SLOW_BYTES_PER_S = 1000
_PIECE = 1 << 20
_LET_GO_S = 60.0  # longer than any test waits
_ANSWERS = {  # without that the server hears of it
    "slowdown": (503, "SlowDown"),
    "conflict": (409, "ConditionalRequestConflict"),
    "refused": (412, "PreconditionFailed"),
}


def always(fate: Fate) -> Callable[[str], Fate]:
    """Every request meets the same."""
    return lambda _request: fate


def writes(fate: Fate) -> Callable[[str], Fate]:
    """Every request that would change something meets the same."""
    return lambda request: fate if request.startswith(("PUT", "POST", "DELETE")) else "fine"


def sometimes(fate: Fate, share: float, seed: int) -> Callable[[str], Fate]:
    """One request in so many, drawn by a seed."""
    draw, lock = random.Random(seed), threading.Lock()

    def decide(_request: str) -> Fate:
        with lock:
            return fate if draw.random() < share else "fine"

    return decide


class Weather:
    """The proxy. `decide` is given `METHOD path` and may be replaced at any time."""

    def __init__(self, endpoint: str) -> None:
        self.decide: Callable[[str], Fate] = always("fine")
        self.met: Counter[str] = Counter()
        self.over = threading.Event()  # set: who was kept waiting is let go
        self._netloc = urlsplit(endpoint).netloc
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def clear(self) -> None:
        """From here on all is fine."""
        self.decide = always("fine")
        self.over.set()

    def close(self) -> None:
        """Ends."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, list[Any], bytes]:
        """The server's status, headers and body."""
        connection = http.client.HTTPConnection(self._netloc, timeout=_LET_GO_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "server", "date")]
            return answer.status, kept, answer.read()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Clients hang up here: that is no news."""


def _handler(weather: Weather) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def meet(self) -> None:
            request = f"{self.command} {self.path}"
            fate = weather.decide(request)
            weather.met[fate] += 1
            length = int(self.headers.get("Content-Length") or 0)
            if self.headers.get("Expect", "").lower() == "100-continue" and fate != "silent":
                self.send_response_only(100)
                self.end_headers()
            body = self._read(length // 2 if fate == "reset" else length, slow=fate == "slow")
            if fate == "silent":
                weather.over.wait(_LET_GO_S)
                return self._hang_up()
            if fate == "reset" and length:
                return self._hang_up()
            if fate in _ANSWERS:
                status, code = _ANSWERS[fate]
                data = f"<Error><Code>{code}</Code><Message>Not now.</Message></Error>".encode()
                return self._answer(status, [("Content-Length", str(len(data)))], data)
            status, headers, data = weather.pass_on(self.command, self.path, dict(self.headers), body)
            if fate == "lost":
                return self._hang_up()
            if fate == "reset":
                self._answer(status, headers, data[: len(data) // 2])
                return self._hang_up()
            return self._answer(status, headers, data, slow=fate == "slow")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = meet  # noqa: N815 - http.server's names

        def _read(self, length: int, *, slow: bool) -> bytes:
            pieces = []
            while length > 0:
                pieces.append(self.rfile.read(min(length, SLOW_BYTES_PER_S if slow else _PIECE)))
                length -= len(pieces[-1])
                if not pieces[-1] or (slow and weather.over.wait(1)):
                    break
            return b"".join(pieces) + self.rfile.read(length)

        def _answer(self, status: int, headers: list[Any], data: bytes, *, slow: bool = False) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            step = SLOW_BYTES_PER_S if slow else max(1, len(data))
            for start in range(0, len(data), step):
                if start:
                    weather.over.wait(1)
                self.wfile.write(data[start : start + step])

        def _hang_up(self) -> None:
            """A reset: what was sent and not read yet is lost."""
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
