"""A login of ECR for the machine's own role: asked for as AWS's own SDK would, and nothing of it is shown."""

from __future__ import annotations

import base64
import datetime
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from mgpu_train.agent.host import ecr
from mgpu_train.agent.host.python_env import Problem

REGISTRY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
KEYS = ecr.Keys("ASIAROLE", "secret", "token")


class Aws(BaseHTTPRequestHandler):
    """Metadata service and ECR in one."""

    asked: list[tuple[str, dict[str, str], bytes]]
    has_role = True
    denies = False

    def do_PUT(self) -> None:
        self._say(200, b"imds-token")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != "imds-token":
            self._say(401, b"")
        elif not self.has_role:
            self._say(404, b"")
        elif self.path.endswith("/security-credentials/"):
            self._say(200, b"mgpu-node")
        else:
            self._say(
                200, json.dumps({"AccessKeyId": KEYS.id, "SecretAccessKey": KEYS.secret, "Token": KEYS.token}).encode()
            )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
        token = base64.b64encode(b"AWS:pass:word").decode()
        answer = {"authorizationData": [{"authorizationToken": token}]}
        self._say(*(403, b"AccessDeniedException") if self.denies else (200, json.dumps(answer).encode()))

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def aws() -> Iterator[tuple[type[Aws], str]]:
    made = type("Here", (Aws,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_machines_role_gets_a_login(aws):
    seen, at = aws
    found = ecr.login(REGISTRY, "eu-west-1", endpoint=at, imds=at)
    assert found == (REGISTRY, "AWS", "pass:word")
    ((path, headers, body),) = seen.asked
    assert (path, headers["x-amz-security-token"], body) == ("/", KEYS.token, b"{}")
    assert headers["x-amz-target"].endswith(".GetAuthorizationToken")


def test_requests_are_signed_as_awss_own_sdk_signs_them(monkeypatch):
    now = datetime.datetime(2026, 11, 24, 12, 0, 0, tzinfo=datetime.UTC)
    ours = ecr.signed("https://api.ecr.eu-west-1.amazonaws.com/", b"{}", "eu-west-1", KEYS, now)
    sent = {name.lower(): value for name, value in ours.header_items()}
    signature = sent.pop("authorization")
    theirs = AWSRequest("POST", ours.full_url, data=b"{}", headers={k: v for k, v in sent.items() if k in (
        "content-type", "x-amz-target")})  # fmt: skip
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda *_, **__: now.replace(tzinfo=None))
    SigV4Auth(Credentials(*KEYS), "ecr", "eu-west-1").add_auth(theirs)
    assert signature == theirs.headers["Authorization"]


@pytest.mark.parametrize(("what", "kind"), [({"has_role": False}, "denied"), ({"denies": True}, "denied")])
def test_a_machine_that_may_not_is_told_so(aws, what, kind):
    seen, at = aws
    for name, value in what.items():
        setattr(seen, name, value)
    with pytest.raises(Problem) as caught:
        ecr.login(REGISTRY, "eu-west-1", endpoint=at, imds=at)
    assert caught.value.kind == kind
    assert KEYS.secret not in str(caught.value)


def test_a_service_that_is_away_may_come_back():
    with pytest.raises(Problem) as caught:
        ecr.login(REGISTRY, "eu-west-1", endpoint="http://127.0.0.1:1", imds="http://127.0.0.1:1")
    assert caught.value.kind == "pull"
