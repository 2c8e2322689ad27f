"""A way to a server of this machine that a test can cut: TCP by another port of loopback."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Relay:
    """Carries connections from `port` to `target`, but while it is cut: then all end at once, and nothing passes."""

    def __init__(self, target: int) -> None:
        self._target, self._cut = target, False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self) -> None:
        """Ends what stands and what comes."""
        with self._lock:
            self._cut = True
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Carries again."""
        self._cut = False

    def close(self) -> None:
        """Ends all of it."""
        self.cut()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self._server.accept()
                threading.Thread(target=self._carry, args=(peer,), daemon=True).start()

    def _carry(self, peer: socket.socket) -> None:
        with peer, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as other:
            with self._lock:
                if self._cut:
                    return
                self._open |= {peer, other}
            back = threading.Thread(target=_pump, args=(other, peer), daemon=True)
            back.start()
            _pump(peer, other)
            back.join()
            with self._lock:
                self._open -= {peer, other}


def _pump(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)
