"""moto behind a WSGI wrapper: every request is read once, noted, met by faults, and answered one at a time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from moto import backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wrappers import Response

from fakes.aws import faults, organization, permissions, prices
from fakes.aws.cloud import Cloud
from fakes.aws.patching import replace
from fakes.aws.protocol import Call, read, refusal, understand

Start = Callable[..., Any]
# what a token used before with other parameters is called
MISMATCH = {"ec2": "IdempotentParameterMismatch", "scheduler": "ConflictException"}


class Quiet(MotoRequestHandler):
    """Writes no line per request."""

    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  werkzeug's name
        """Says nothing."""


class Front:
    """The WSGI application."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        services = tuple(backends.list_of_moto_modules())  # moto looks at its 200 folders anew for each request
        replace(backends, "list_of_moto_modules", lambda: services)
        self.moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """One request; moto is not made for threads, so it sees one at a time."""
        call = understand(environ, read(environ))
        with self.cloud.lock:
            self.cloud.calls.append((time.time(), call))
            met = self.cloud.faults.hit(call)
        time.sleep(sum(rule.seconds for rule in met))
        early = [rule for rule in met if rule.kind == "error" and not rule.after]
        response = faults.answer(early[0], call) if early else self._once(call, environ)
        if late := [rule for rule in met if rule.after]:
            response = faults.answer(late[0], call)
        if any(rule.kind == "lose" for rule in met):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return response(environ, start)

    def _once(self, call: Call, environ: dict[str, Any]) -> Response:
        """A call with a client token is carried out once; the same again gets the same answer."""
        with self.cloud.lock:
            token = call.parameters.get("ClientToken")
            if not token or call.service not in MISMATCH or call.parameters.get("DryRun"):
                return self._carry_out(call, environ)
            key = (call.service, call.region, call.action, token)
            asked = json.dumps(call.parameters, sort_keys=True, default=str)
            before, response = self.cloud.tokens.get(key, (asked, None))
            if before != asked:
                text = "The token has been used before with other parameters."
                return refusal(call, MISMATCH[call.service], f"{text} ({call.action}, {token})")
            if response is None:
                response = self._carry_out(call, environ)
                if response.status_code == 200:
                    self.cloud.tokens[key] = (asked, response)
            return response

    def _carry_out(self, call: Call, environ: dict[str, Any]) -> Response:
        if denied := organization.refused(call, self.cloud.organization):
            return denied
        handler = prices.HANDLERS.get((call.service, call.action))
        if handler is None:
            permissions.heard(environ)
            response = Response.from_app(self.moto, environ, buffered=True)
            denies = call.service == "ec2" or (call.service != "s3" and b"<Code>AccessDenied" in response.get_data())
            if response.status_code == 403 and denies:  # moto's IAM says it in XML to every service
                denied = faults.denial(call.service, call.action)
                return refusal(call, faults.spelled("Denied", call.service), denied, 403)
            return response
        try:
            answer = handler(self.cloud, call)
        except prices.Refusal as error:
            return refusal(call, error.code, str(error))
        return Response(json.dumps(answer), content_type="application/x-amz-json-1.1")


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
