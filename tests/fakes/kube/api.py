"""The API of Kubernetes, as far as the kubelet and the tests need it: five verbs, and what has changed."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

ANSWER_S = 15.0
WATCH_S = 300  # a watch ends after so long, and is begun anew


class Refused(Exception):
    """An answer that is no success. `status` is HTTP's; 409: it is another one by now, or is there already."""

    def __init__(self, status: int, words: str) -> None:
        try:
            words = json.loads(words)["message"]
        except (ValueError, KeyError, TypeError):
            pass  # it is not the API that answers so
        super().__init__(f"{status}: {words}")
        self.status = status


SILENT = (urllib3.exceptions.HTTPError, OSError)


def passing(error: Exception) -> bool:
    """Whether asking again may help: nobody answers, or the server is not all there yet."""
    return not isinstance(error, Refused) or error.status in (401, 403, 429) or error.status >= 500


@dataclass(frozen=True)
class Access:
    """A way to the API: files of a certificate that says who calls, and of the one that the server's is signed by."""

    server: str
    ca: Path
    cert: Path
    key: Path


class Api:
    """The API, as one user; threads may share it. Raises Refused, or SILENT: nobody answers."""

    def __init__(self, access: Access) -> None:
        context = ssl.create_default_context(cafile=str(access.ca))
        context.load_cert_chain(access.cert, access.key)
        self._server = access.server
        self._pool = urllib3.PoolManager(ssl_context=context, retries=False, maxsize=8)

    def get(self, path: str, **query: str) -> dict[str, Any]:
        """An object, or a list of them."""
        return self._ask("GET", path, query=query)

    def raw(self, path: str) -> bytes:
        """What is no object."""
        answer = self._pool.request("GET", self._server + path, timeout=ANSWER_S)
        if answer.status >= 300:
            raise Refused(answer.status, answer.data.decode(errors="replace"))
        return answer.data

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """The objects of a list."""
        return self.get(path, **query)["items"]

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Makes an object."""
        return self._ask("POST", path, body)

    def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces an object."""
        return self._ask("PUT", path, body)

    def patch(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Changes an object as `kubectl patch` does."""
        return self._ask("PATCH", path, body, "application/strategic-merge-patch+json")

    def delete(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """Asks for the end of an object, or of those of a list."""
        return self._ask("DELETE", path, body, query=query)

    def watch(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        """What has changed since `resourceVersion`, until the server ends it."""
        given = {"watch": "true", "timeoutSeconds": str(WATCH_S), **query}
        timeout = urllib3.Timeout(connect=ANSWER_S, read=WATCH_S)
        answer = self._pool.request("GET", self._server + path, fields=given, preload_content=False, timeout=timeout)
        try:
            if answer.status >= 300:
                raise Refused(answer.status, answer.data.decode(errors="replace"))
            for line in answer:
                yield json.loads(line)
        finally:
            answer.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        kind: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        url = self._server + path + ("?" + urlencode(query) if query else "")
        given = None if body is None else json.dumps(body).encode()
        answer = self._pool.request(method, url, body=given, headers={"Content-Type": kind}, timeout=ANSWER_S)
        if answer.status >= 300:
            raise Refused(answer.status, answer.data.decode(errors="replace"))
        return json.loads(answer.data)
