"""A connection to a port of a pod: the API's port-forward, over a WebSocket.

    python -P -m mgpu.providers.kubernetes.forward NAMESPACE POD PORT [KUBECONFIG [CONTEXT]]

As a program it is the proxy command of a user's own ssh. mgpu calls `connect` in its own process instead: no program,
and no thread, for each of many nodes. A frame's first byte is its channel: 0 is the port, 1 what went wrong there; the
first frame of each holds the port's number (Kubernetes' `v4.channel.k8s.io`).
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence

from websockets.client import ClientProtocol
from websockets.exceptions import WebSocketException
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from mgpu.errors import MgpuError
from mgpu.providers.kubernetes.cluster import Access, dial, refused

_PROTOCOL = Subprotocol("v4.channel.k8s.io")
_DATA, _TROUBLE = 0, 1
_CHUNK = 1 << 16
_STDIN, _STDOUT = 0, 1
_FRAME = 1 << 15  # of what is sent at once


def connect(arguments: Sequence[str], seconds: float) -> PodStream:
    """NAMESPACE POD PORT [KUBECONFIG [CONTEXT]]: the connection, within so many seconds. Raises OSError: none."""
    namespace, pod, port, *access = arguments
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}"
    try:
        return PodStream(dial(Access(*access), seconds), path, time.monotonic() + seconds)
    except MgpuError as error:
        raise ConnectionError(": ".join(filter(None, (error.what, error.why)))) from error


class PodStream:
    """A pod's port as a socket; one thread may read while others write."""

    def __init__(self, connection: socket.socket, path: str, deadline: float) -> None:
        """Asks for the port on a connection to the API server. Raises OSError: the pod, or its port, is not there."""
        self._socket = connection
        self._timeout: float | None = None
        self._protocol = ClientProtocol(parse_uri(f"ws://localhost{path}"), subprotocols=[_PROTOCOL], max_size=None)
        self._lock = threading.Lock()  # of the protocol, and of what it has to send
        self._unsent = bytearray()
        self._received = bytearray()
        self._greeted: set[int] = set()  # channels that have said their port
        self._ended = False
        self._trouble = ""
        try:
            self._open(deadline)
        except BaseException:
            connection.close()
            raise
        connection.setblocking(False)  # whoever waits does it by `poll`

    def _open(self, deadline: float) -> None:
        self._protocol.send_request(self._protocol.connect())
        self._socket.sendall(b"".join(self._protocol.data_to_send()))
        while _DATA not in self._greeted and not self._ended:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                self._receive()
            except TimeoutError:
                raise ConnectionError("The pod's port did not answer in time.") from None
        if self._trouble or self._ended:
            raise ConnectionError(self._trouble or "The connection to the pod was closed.")

    def recv(self, nbytes: int, /) -> bytes:
        """As a socket's."""
        while not self._received:
            if self._ended:
                if self._trouble:
                    raise ConnectionResetError(self._trouble)
                return b""
            # not by the socket's own time-out, which a writer sets, too
            if not _ready(select.POLLIN, self._socket, seconds=self._timeout):
                raise TimeoutError
            self._receive()
        data = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return data

    def send(self, data: bytes, /) -> int:
        """As a socket's: what it takes is on its way, or is first at the next call."""
        with self._lock:
            self._flush()
            taken = data[:_FRAME]
            self._protocol.send_binary(bytes([_DATA]) + taken)
            self._unsent += b"".join(self._protocol.data_to_send())
            try:
                self._flush()
            except TimeoutError:
                pass  # the frame was begun: it counts as sent
        return len(taken)

    def settimeout(self, timeout: float | None, /) -> None:
        """As a socket's."""
        self._timeout = timeout

    def close(self) -> None:
        """Ends it, and wakes who waits on it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first
        self._socket.close()

    def fileno(self) -> int:
        """For `poll`; more may have been received than is to be read from it: see `pending`."""
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether `recv` returns without a look at the socket."""
        return bool(self._received) or self._ended

    def _flush(self) -> None:
        """Sends what is not sent yet. Raises TimeoutError: not all of it in time."""
        until = None if self._timeout is None else time.monotonic() + self._timeout
        while self._unsent:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not _ready(select.POLLOUT, self._socket, seconds=left):
                raise TimeoutError
            try:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:  # there was room for less than the kernel sends at once
                continue
            del self._unsent[:sent]

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return  # another thread was faster
        with self._lock:
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
                self._ended = True
            for event in self._protocol.events_received():
                self._take(event)
            self._unsent += b"".join(self._protocol.data_to_send())  # pongs; they go with what is sent next
            if len(self._unsent) < _CHUNK:
                try:
                    self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]
                except (BlockingIOError, BrokenPipeError, ConnectionResetError, TimeoutError):
                    pass
        if self._protocol.handshake_exc is not None:
            raise ConnectionError(self._trouble or str(self._protocol.handshake_exc))

    def _take(self, event: object) -> None:
        if isinstance(event, Response) and event.status_code != 101:
            told = refused("port-forward", event.status_code, (event.body or b"").decode(errors="replace"))
            self._trouble = getattr(told, "why", "") or str(told)
            self._ended = True
        elif isinstance(event, Frame) and event.opcode is Opcode.CLOSE:
            self._ended = True
        elif isinstance(event, Frame) and event.data:
            channel, data = event.data[0], bytes(event.data[1:])
            if channel not in self._greeted:
                self._greeted.add(channel)
            elif channel == _DATA:
                self._received += data
            elif channel == _TROUBLE:
                self._trouble += data.decode(errors="replace").strip()
                self._ended = True


def _ready(event: int, *files: int | socket.socket | PodStream, seconds: float | None = None) -> list[int]:
    """Descriptors, whatever their number, on which this has happened, or an end; none: not within so many seconds."""
    poll = select.poll()
    for each in files:
        poll.register(each, event)
    return [number for number, _ in poll.poll(None if seconds is None else math.ceil(seconds * 1000))]


def main(argv: Sequence[str]) -> int:
    """Carries standard input and output until either ends; the exit code."""
    try:
        stream = connect(argv, 15.0)
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201  ssh shows it
        return 1
    while True:
        ready = [stream.fileno()] if stream.pending else _ready(select.POLLIN, _STDIN, stream)
        if stream.fileno() in ready:
            try:
                data = stream.recv(_CHUNK)
            except (OSError, WebSocketException) as error:
                print(error, file=sys.stderr)  # noqa: T201
                return 1
            if not data:
                return 0
            while data:
                data = data[os.write(_STDOUT, data) :]
        if _STDIN in ready:
            given = os.read(_STDIN, _CHUNK)
            if not given:
                stream.close()
                return 0
            while given:
                given = given[stream.send(given) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
