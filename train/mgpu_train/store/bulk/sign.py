"""AWS signature version 4 of one request: the few lines of it that S3 needs."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from urllib.parse import quote

from mgpu_train.store.bulk.message import Keys

UNSIGNED = "UNSIGNED-PAYLOAD"
NOTHING = hashlib.sha256(b"").hexdigest()


def query_string(query: tuple[tuple[str, str], ...]) -> str:
    """The parameters as they are sent, and signed."""
    return "&".join(sorted(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query))


def signed(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    payload: str,
    keys: Keys,
    region: str,
    now: float | None = None,
) -> dict[str, str]:
    """`headers`, of which `host` must be one, with those that sign them. `payload`: SHA-256 of the body, or UNSIGNED.

    `path` and `query` are percent-encoded; `now` in UNIX seconds.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    named = {**headers, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if keys.token:
        named["x-amz-security-token"] = keys.token
    names = ";".join(sorted(named))
    lines = "".join(f"{name}:{named[name].strip()}\n" for name in sorted(named))
    request = "\n".join((method, path, query, lines, names, payload))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    told = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, told.encode(), "sha256").hex()
    named["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope},SignedHeaders={names},Signature={signature}"
    )
    return named
