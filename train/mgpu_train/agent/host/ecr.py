"""A login of ECR for the machine's own role: no token of the operator's, with which one could push, comes here.

Standard library only, Python 3.8 or newer: `container.py` stands on it.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import urllib.error
import urllib.request
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mgpu_train.agent.host.docker_cli import Login
from mgpu_train.agent.host.python_env import Problem, ProblemKind

IMDS = "http://169.254.169.254"
_ANSWER_S = 10.0
_MAX_BYTES = 1 << 20
_TARGET = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"


class Keys(NamedTuple):
    """A session of the machine's role."""

    id: str
    secret: str
    token: str


def login(registry: str, region: str, endpoint: str = "", imds: str = IMDS) -> Login:
    """Who pulls from an ECR registry. `endpoint`: of ECR's API (default: AWS's own).

    Raises:
        Problem: the machine has no role, or it may not ask for a login.
    """
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    url = (endpoint or f"https://api.ecr.{region}.{suffix}").rstrip("/") + "/"
    try:
        now = datetime.datetime.now(datetime.timezone.utc)  # noqa: UP017 - for Python 3.8
        request = signed(url, b"{}", region, _role(imds), now)
        answer = json.loads(_ask(request))
        user, _, password = (
            base64.b64decode(answer["authorizationData"][0]["authorizationToken"]).decode().partition(":")
        )
    except urllib.error.HTTPError as error:
        said = error.read(500).decode("utf-8", "replace").strip()
        raise Problem(
            ProblemKind.DENIED, f"the machine's role gets no login for {registry}: {error.code} {said}"
        ) from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise Problem(ProblemKind.PULL, f"no login for {registry}: {error}") from error
    return Login(registry, user, password)


def signed(url: str, body: bytes, region: str, keys: Keys, now: datetime.datetime) -> urllib.request.Request:
    """A request of ECR's API, signed by AWS's signature version 4 (its documentation: "Create a signed AWS API
    request")."""
    at = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "host": urlsplit(url).netloc,
        "x-amz-date": at,
        "x-amz-security-token": keys.token,
        "x-amz-target": _TARGET,
    }
    names = ";".join(sorted(headers))
    lines = [f"{name}:{headers[name]}" for name in sorted(headers)]
    digest = hashlib.sha256(body).hexdigest()
    canonical = "\n".join(["POST", urlsplit(url).path, "", *lines, "", names, digest])
    scope = f"{at[:8]}/{region}/ecr/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", at, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    by = f"AWS4-HMAC-SHA256 Credential={keys.id}/{scope}, SignedHeaders={names}, Signature={signature}"
    return urllib.request.Request(url, body, {**headers, "authorization": by}, method="POST")  # noqa: S310


def _role(imds: str) -> Keys:
    """A session of the machine's role, by the metadata service's version 2."""
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _ask(urllib.request.Request(f"{imds}/latest/api/token", method="PUT", headers=ttl))  # noqa: S310
    about = {"X-aws-ec2-metadata-token": token.decode()}
    at = f"{imds}/latest/meta-data/iam/security-credentials/"
    role = _ask(urllib.request.Request(at, headers=about)).decode().split()[0]  # noqa: S310
    said: dict[str, Any] = json.loads(_ask(urllib.request.Request(at + role, headers=about)))  # noqa: S310
    return Keys(said["AccessKeyId"], said["SecretAccessKey"], said["Token"])


def _ask(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
        return bytes(answer.read(_MAX_BYTES))
