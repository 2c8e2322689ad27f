"""Fresh credentials of the store for a living agent: over a socket in the run's folder, so that no disk has them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mgpu_train.config import Secrets

_PEER_S = 10.0  # for one peer to say all
_PAUSE_S = 1.0  # after a peer that could not be let in
_MAX_BYTES = 1 << 16


def listen(path: Path, take: Callable[[dict[str, str]], None]) -> None:
    """Hands `take` what comes, in a thread of its own, as long as the agent lives. Raises OSError."""
    path.unlink(missing_ok=True)  # of an earlier attempt's agent
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(_address(path))
    path.chmod(0o600)
    server.listen(4)
    threading.Thread(target=_serve, args=(server, take), name="renewal", daemon=True).start()


def hand_over(path: Path, secrets: Secrets) -> bool:
    """Gives the living agent these, of which it takes the store's part; False: nobody has taken it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(_PEER_S)
            peer.connect(_address(path))
            peer.sendall(secrets.model_dump_json().encode())
            peer.shutdown(socket.SHUT_WR)
            return peer.recv(1) == b"1"
    except OSError:
        return False


def _serve(server: socket.socket, take: Callable[[dict[str, str]], None]) -> None:
    while True:
        try:
            peer, _ = server.accept()
        except OSError:  # no file is left to open: the next credentials are as good
            time.sleep(_PAUSE_S)
            continue
        with peer, suppress(OSError, ValueError):  # who says nonsense, or nothing, gets no answer
            peer.settimeout(_PEER_S)
            take(dict(Secrets.model_validate_json(_all(peer)).store))
            peer.sendall(b"1")


def _all(peer: socket.socket) -> bytes:
    said = b""
    while (piece := peer.recv(4096)) and len(said) <= _MAX_BYTES:
        said += piece
    return said


def _address(path: Path) -> str:
    return os.path.relpath(path)  # both sides work in the node's home, and an address is of 107 bytes at most
