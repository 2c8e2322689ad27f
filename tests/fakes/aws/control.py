"""The control API: one JSON line asks, one answers, over a unix socket in the fake's folder."""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "control"
Verbs = Mapping[str, Callable[..., Any]]


class Refused(Exception):
    """The fake did not do what was asked; the message says why."""


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The socket's name, within the 107 bytes that a unix socket's address may have."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{NAME}"
    finally:
        os.close(handle)


def ask(folder: Path, verb: str, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """Has the fake of `folder` carry out a verb; `Refused` if it will not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link, _short(folder) as name:
        link.settimeout(timeout_s)
        link.connect(name)
        link.sendall(json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
        answer = json.loads(link.makefile("rb").readline() or b'{"refused": "the fake hung up"}')
    if "refused" in answer:
        raise Refused(f"{verb}: {answer['refused']}")
    return answer["result"]


def listen(folder: Path, verbs: Verbs) -> None:
    """Answers from now on, in threads of its own."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked = json.loads(self.rfile.readline())
            self.wfile.write(json.dumps(_carry_out(verbs, asked), default=str).encode() + b"\n")

    with _short(folder) as name:
        server = socketserver.ThreadingUnixStreamServer(name, Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="control", daemon=True).start()


def _carry_out(verbs: Verbs, asked: dict[str, Any]) -> dict[str, Any]:
    if (verb := verbs.get(asked["verb"])) is None:
        return {"refused": f"no such verb; there are {', '.join(sorted(verbs))}"}
    try:
        return {"result": verb(**asked["arguments"])}
    except Exception as error:  # noqa: BLE001  the test that asked shall see it, whatever it is
        return {"refused": f"{type(error).__name__}: {error}"}
