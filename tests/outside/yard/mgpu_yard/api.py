"""Yard's HTTP API. What it answers, and what it does not, becomes mgpu's errors here and nowhere else."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import urllib3

from mgpu.errors import (
    AuthError,
    BillingError,
    Conflict,
    InvalidRequest,
    NoCapacity,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Scope,
    Transient,
)
from mgpu.providers.rate_limit import RateLimit
from mgpu_yard.options import YardOptions

Instance = dict[str, Any]
_REFUSED, _NOT_FOUND, _BUSY, _BROKEN = 300, 404, 429, 500

# code -> the error, what else it rules out, and what the user can do about it
_MEANINGS: Mapping[str, tuple[type[ProviderError], Scope, str]] = {
    "unauthorized": (AuthError, "account", "Put your key into the variable that `yard.key` names."),
    "balance": (BillingError, "account", "Add credit at https://yard.example/billing."),
    "quota_exceeded": (QuotaExceeded, "account", "Ask for more at https://yard.example/limits."),
    "no_capacity": (NoCapacity, "region", ""),
    "key_reused": (Conflict, "offer", "Ask for a new generation of the fleet, or end the old one."),
}


@functools.cache
def limit(endpoint: str, key: str) -> RateLimit:
    """Of an account's requests, for all that ask in this process; others make it answer 429 all the same."""
    return RateLimit(10, burst=60)


class Api:
    """One account's way to it. Keeps nothing: any process may go on. `keys`: it knows the header Idempotency-Key."""

    def __init__(self, options: YardOptions, *, keys: bool) -> None:
        self._options, self._keys = options, keys
        self._limit = limit(options.endpoint, options.key)

    def types(self) -> list[dict[str, Any]]:
        """What is on sale."""
        return self._ask("GET", "/types")

    def make(self, asked: Mapping[str, Any], key: str) -> Instance:
        """One machine; by the same key the same one, and so a lost answer is not the end: the same call again."""
        return self._ask("POST", "/instances", asked, key)

    def labelled(self, **labels: str) -> list[Instance]:
        """All machines with these labels, page by page."""
        found, page = list[Instance](), 1
        while page:
            answer = self._ask("GET", f"/instances?{urlencode({**labels, 'page': page})}")
            found, page = found + answer["instances"], answer["next"]
        return found

    def one(self, name: str) -> Instance | None:
        """A machine; None: Yard knows none of this id."""
        return self._ask("GET", f"/instances/{name}")

    def end(self, name: str) -> Instance | None:
        """Asks a machine to end. How it is then; None: Yard knows none of this id."""
        return self._ask("DELETE", f"/instances/{name}")

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, key: str = "") -> Any:
        headers = {"Authorization": f"Bearer {os.environ.get(self._options.key, '')}"}
        headers |= {"Idempotency-Key": key} if key and self._keys else {}
        url, seconds = self._options.endpoint + path, self._options.answer_s
        self._limit.wait()
        try:  # no retries here: mgpu asks again, and knows when it must not
            answer = urllib3.request(method, url, json=body, headers=headers, timeout=seconds, retries=False)
        except urllib3.exceptions.HTTPError as error:  # it may have been done
            raise Transient(f"yard: no answer to {method} {path}", str(error)) from error
        if answer.status >= _BROKEN:
            raise Transient(f"yard: {method} {path} has failed", f"it answers {answer.status}")
        if answer.status == _BUSY:
            raise RateLimited("yard: too many requests", retry_after=float(answer.headers.get("Retry-After", 1)))
        if answer.status == _NOT_FOUND:
            return None
        if answer.status >= _REFUSED:
            raise _refusal(answer)
        return answer.json()


def _refusal(answer: urllib3.BaseHTTPResponse) -> ProviderError:
    try:
        said = answer.json()
        code, message = said["code"], said["message"]
    except (ValueError, KeyError, TypeError):  # not from Yard itself: a proxy, say
        code, message = "", f"it answers {answer.status}"
    error, scope, cure = _MEANINGS.get(code, (InvalidRequest, "provider", ""))
    return error(f"yard: {message}", "", cure, scope=scope)
