"""moto behind a WSGI wrapper that reads every request once, notes it, and answers one at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from fakes.aws.cloud import Cloud
from fakes.aws.protocol import read, understand

Start = Callable[..., Any]


class Quiet(MotoRequestHandler):
    """Writes no line per request."""

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  werkzeug's name
        """Says nothing."""


class Front:
    """The WSGI application."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """One request; moto is not made for threads, so it sees one at a time."""
        call = understand(environ, read(environ))
        with self.cloud.lock:
            self.cloud.calls.append((time.time(), call))
            response = Response.from_app(self.moto, environ, buffered=True)
        return response(environ, start)


def bound(host: str, port: int = 0) -> socket.socket:
    """A listening socket, in the network namespace of the caller."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(512)
    return listener


def serve(front: Front, listener: socket.socket) -> None:
    """Answers from now on, in threads of its own."""
    host, port = listener.getsockname()
    server = make_server(host, port, front, threaded=True, request_handler=Quiet, fd=listener.fileno())
    server.daemon_threads = True  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, name=f"http {host}", daemon=True).start()
