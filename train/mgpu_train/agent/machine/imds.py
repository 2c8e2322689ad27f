"""Notices from EC2's metadata service (IMDSv2), asked for beside the agent: what was answered last is read at once.

Absent (404) is an answer: there is no notice. Whatever else goes wrong is told to who reads, and asked for again.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from contextlib import suppress

ADDRESS = "169.254.169.254"
EVERY_S = 5.0  # between two looks, as AWS recommends
TIMEOUT_S = 2.0  # for one answer, from the first byte that is sent to the last that comes

_TOKEN, _TOKEN_S = "/latest/api/token", 21600
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_MAX_BYTES = 4096


class _Refused(OSError):
    """The service answered, and not with what was asked for."""


class Imds:
    """A `notices.Source`. The thread that asks lives as long as the agent, whatever the service does."""

    def __init__(self, address: str = ADDRESS, *, every_s: float = EVERY_S, timeout_s: float = TIMEOUT_S) -> None:
        """`address` is `host` or `host:port`; nothing is asked before the first `read`."""
        self._address, self._every_s, self._timeout_s = address, every_s, timeout_s
        self._token = ""
        self._action: bytes | None = None
        self._rebalance: bytes | None = None
        self._trouble = ""
        self._thread: threading.Thread | None = None

    def read(self) -> bytes | None:
        """See Source."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._live, name="imds", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the system has no thread left; the next read tries again
                self._thread = None
                raise OSError(str(error)) from error
        if self._action is None and self._trouble:
            raise OSError(self._trouble)
        return self._action

    def hint(self) -> bytes | None:
        """See Source."""
        return self._rebalance

    def _live(self) -> None:
        while True:
            self._look()
            time.sleep(self._every_s)

    def _look(self) -> None:
        try:
            self._action = self._asked(_ACTION)
            self._rebalance = self._asked(_REBALANCE)
            self._trouble = ""
        except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
            self._trouble = f"the metadata service: {error or type(error).__name__}"

    def _asked(self, path: str) -> bytes | None:
        """What stands there; None: nothing. A token that is not taken any more is replaced by a new one."""
        for token in (self._token or self._new_token(), ""):
            status, body = self._answer("GET", path, {"X-aws-ec2-metadata-token": token or self._new_token()})
            if status != http.HTTPStatus.UNAUTHORIZED:
                break
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        if status != http.HTTPStatus.OK:
            raise _Refused(f"{path} is answered with {status}")
        return body

    def _new_token(self) -> str:
        self._token = ""
        status, body = self._answer("PUT", _TOKEN, {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)})
        if status != http.HTTPStatus.OK:
            raise _Refused(f"a token is refused with {status}")
        self._token = body.decode("ascii").strip()
        return self._token

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        # not urllib: http_proxy is not for an address of this very machine
        connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        try:
            connection.connect()
            # the time-out above is for each read alone: a service that drips byte by byte is cut off by this one
            guard = threading.Timer(self._timeout_s, _cut, [connection.sock])
            guard.daemon = True
            guard.start()
            try:
                connection.request(method, path, headers={**headers, "Connection": "close"})
                answer = connection.getresponse()
                return answer.status, answer.read(_MAX_BYTES)
            finally:
                guard.cancel()
        finally:
            connection.close()


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):  # it has ended meanwhile
        sock.shutdown(socket.SHUT_RDWR)
