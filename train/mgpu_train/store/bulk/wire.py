"""One connection to S3 at a time: TLS, proxies, requests; and what goes wrong on it, in our words."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from mgpu_train.store.bulk.message import Route

NEVER, FEW, ALWAYS = 1, 3, 1 << 30  # tries
_LONGEST_ERROR = 64 << 10  # bytes of an error's document
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "RequestTimeout", "InternalError"}
_DIGEST = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}


class Trouble(Exception):
    """A try that failed. `kind`: http, connect, tls, network, short, file, changed, cancelled or bug; see S3Errors.

    `tries` is how often a task may end so. `stale`: the connection was an old one, which the server had given up.
    """

    def __init__(self, kind: str, text: str, *, tries: int = ALWAYS, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.told: dict[str, Any] = {"kind": kind, "text": text, "status": status, "code": code}
        self.tries = tries
        self.stale = False


def refused(status: int, document: bytes) -> Trouble:
    """What an answer that is an error means."""
    found = {name: re.search(rb"<%b>([^<]{0,500})" % name.encode(), document) for name in ("Code", "Message")}
    code, message = (match[1].decode(errors="replace") if match else "" for match in found.values())
    busy = status in (408, 429) or status >= 500 or code in _BUSY
    tries = ALWAYS if busy else FEW if code in _DIGEST else NEVER
    return Trouble("http", message, tries=tries, status=status, code=code or str(status))


class Wire:
    """The connection of one worker; it is opened when it is needed, and again after any trouble."""

    def __init__(self, connect_s: float, read_s: float) -> None:
        self._connect_s, self._read_s = connect_s, read_s
        self._route: Route | None = None
        self._open: http.client.HTTPConnection | None = None
        self._contexts: dict[str | None, ssl.SSLContext] = {}

    def ask(
        self,
        route: Route,
        method: str,
        target: str,
        headers: dict[str, str],
        send: Callable[[socket.socket], None] | None = None,
    ) -> http.client.HTTPResponse:
        """Makes a request, its body written by `send`, and returns the answer's head. Raises Trouble."""
        used = self._usable(route) is not None
        with self.watched(used):
            connection = self._connection(route)
            proxied = route.proxy and route.url.startswith("http:")
            connection.putrequest(
                method, route.url + target if proxied else target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in (headers | self._to_proxy(route)).items():
                connection.putheader(name, value)
            connection.endheaders()
            try:
                if send:
                    send(connection.sock)
            except (ConnectionError, ssl.SSLError):
                return self._last_words(connection)
            return connection.getresponse()

    def reader(self, answer: http.client.HTTPResponse) -> Callable[[memoryview], int]:
        """What fills memory with an answer's body, and returns how much that was: less only at its end."""
        sock = self._open.sock if self._open else None
        if sock is None or answer.chunked or answer.length is None:
            return answer.readinto  # type: ignore[return-value]
        return _Direct(answer, sock).read

    @contextmanager
    def watched(self, used: bool = False) -> Iterator[None]:
        """Turns what a connection raises in the block into Trouble, and closes it."""
        try:
            yield
        except Trouble:
            self.close()
            raise
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise Trouble("tls", error.verify_message, tries=NEVER) from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            trouble = Trouble("network", f"{type(error).__name__}: {error}"[:200])
            trouble.stale = used and not isinstance(error, TimeoutError)
            raise trouble from error

    def close(self) -> None:
        """Ends the connection; nothing of what was under way is used."""
        if self._open:
            with suppress(OSError):
                self._open.close()
        self._open = None

    def _last_words(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        """A server that refuses a body hangs up; what it said of it may be there all the same."""
        connection.sock.settimeout(min(1.0, self._read_s))
        answer = connection.getresponse()
        if answer.status < 300:
            raise ConnectionError("the server hung up in the middle of a body")
        return answer

    def _usable(self, route: Route) -> http.client.HTTPConnection | None:
        """What is open to there. http.client would open again by itself what a server has closed, with other times."""
        return self._open if self._open is not None and self._open.sock and self._route == route else None

    def _connection(self, route: Route) -> http.client.HTTPConnection:
        if usable := self._usable(route):
            return usable
        self.close()
        made = self._made(route)
        try:
            made.connect()
        except ssl.SSLCertVerificationError:
            made.close()
            raise
        except OSError as error:
            made.close()
            raise Trouble("connect", f"{type(error).__name__}: {error}"[:200]) from error
        made.sock.settimeout(self._read_s)
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open, self._route = made, route
        return made

    def _made(self, route: Route) -> http.client.HTTPConnection:
        server = urlsplit(route.url)
        host, port = server.hostname or "", server.port
        if server.scheme == "http":
            first = urlsplit(route.proxy) if route.proxy else server
            return http.client.HTTPConnection(first.hostname or "", first.port, timeout=self._connect_s)
        context = self._context(route.ca)
        if not route.proxy:
            return http.client.HTTPSConnection(host, port, timeout=self._connect_s, context=context)
        proxy = urlsplit(route.proxy)
        made = http.client.HTTPSConnection(
            proxy.hostname or "", proxy.port or 80, timeout=self._connect_s, context=context
        )
        made.set_tunnel(host, port or 443, _authorization(proxy))
        return made

    def _to_proxy(self, route: Route) -> dict[str, str]:
        plain = route.proxy and route.url.startswith("http:")
        return _authorization(urlsplit(route.proxy or "")) if plain else {}

    def _context(self, ca: str | None) -> ssl.SSLContext:
        if ca not in self._contexts:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as boto3's: Python's defaults are stricter from 3.13 on
            try:
                context.load_verify_locations(ca) if ca else context.load_default_certs()
                self._contexts[ca] = context
            except OSError as error:
                raise Trouble("tls", f"cannot read {ca}: {error.strerror}", tries=NEVER) from error
        return self._contexts[ca]


class _Direct:
    """A body of known length, read past http.client once that has given out what came with the head."""

    def __init__(self, answer: http.client.HTTPResponse, sock: socket.socket) -> None:
        self._answer, self._left = answer, answer.length or 0
        self._held = min(self._left, len(answer.fp.peek())) if self._left else 0
        # TLS gives 16 KiB a call: its own `recv_into` would only be one more
        tls = isinstance(sock, ssl.SSLSocket)
        self._take: Callable[..., Any] = sock.read if tls else lambda count, to: sock.recv_into(to, count)

    def read(self, to: memoryview) -> int:
        """Fills `to`; returns how much came, less only at the end."""
        to, done = to[: self._left], 0
        if self._held:
            done = self._answer.readinto(to[: self._held])
            self._held -= done
        while done < len(to) and not self._held and (count := self._take(len(to) - done, to[done:])):
            done += count
        self._left -= done
        if not self._left:
            self._answer.close()  # its connection can be used again
        return done


def body_of(answer: http.client.HTTPResponse) -> bytes:
    """What is left of a small answer, so that its connection can be used again."""
    return answer.read(_LONGEST_ERROR)


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
