"""One registry's HTTP API, version 2: who we are, once it asks; again after what passes; a deadline on all of it."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import Any

from mgpu import __version__
from mgpu.errors import ImageError
from mgpu.image.registry import failures
from mgpu.image.registry.auth import Auth, Login
from mgpu.image.registry.reference import HUB, Reference

_HUB_API = "registry-1.docker.io"
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_S = 4.0  # between two requests
_GOOD = (200, 201, 202, 204, 404)
_BIGGEST = 8 << 20  # bytes of an answer; a manifest has 4 MiB at most
_FIELD = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class RetryPolicy:
    """How long a registry is asked: seconds for all of it, for one request, and before the first repetition; and for
    one that refuses connections, so that nobody listens there: it may be starting."""

    total_s: float = 30.0
    request_s: float = 10.0
    pause_s: float = 0.5
    refused_s: float = 4.0
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Answer:
    """Status, headers and body of what a registry says; 404 is an answer, other refusals are errors."""

    status: int
    headers: Message
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class _Request:
    method: str
    url: str
    accept: str = "*/*"
    authorization: str = field(default="", repr=False)
    body: bytes | None = field(default=None, repr=False)


class Api:
    """A repository's registry as `auth` is known there. Not for several threads at once."""

    def __init__(
        self, reference: Reference, auth: Auth, retry: RetryPolicy | None = None, ca_file: Path | None = None
    ) -> None:
        """`ca_file` is trusted besides the system's certificates. Nothing is asked yet.

        Raises:
            ImageError: the file holds no certificates.
        """
        self._reference, self._auth, self._retry = reference, auth, retry or RetryPolicy()
        host = _HUB_API if reference.registry == HUB else reference.registry
        self._base = f"{'http' if reference.local else 'https'}://{host}/v2/{reference.name}/"
        self._authorization, self._known = "", False
        handler = urllib.request.HTTPSHandler(context=_trust(ca_file))
        self._opener = urllib.request.build_opener(handler, _Proxies())

    def ask(self, method: str, path: str, accept: tuple[str, ...] = (), *, made_by_push: bool = False) -> Answer:
        """The answer to a request for `path`, below the repository.

        `made_by_push`: it may be that nobody has pushed to the repository. A registry that makes one for the first who
        does (Docker Hub) says 401 until then, also to a good login, as of one that is another's: this is a 404 then.

        Raises:
            ImageError: a refusal, or no answer in time.
        """
        end = self._retry.now() + self._retry.total_s
        request = _Request(method, self._base + path, ", ".join(accept) or "*/*", self._authorization)
        answer = self._patiently(request, end)
        if answer.status == 401:
            login = self._auth()
            self._known = login is not None
            self._authorization = self._introduce(answer, login, end)
            answer = self._patiently(replace(request, authorization=self._authorization), end)
            if answer.status == 401 and self._known and self._authorization.startswith("Bearer "):
                if made_by_push:
                    return replace(answer, status=404)
                raise failures.not_shown(self._reference, answer.body)  # a login that is wrong gets no token
        if answer.status not in _GOOD:
            raise self._refused(answer)
        return answer

    def _patiently(self, request: _Request, end: float) -> Answer:
        """Any answer; asks again after those that pass, while there is time."""
        pause, begin = self._retry.pause_s, self._retry.now()
        while True:
            wait = pause * random.uniform(0.5, 1.5)
            try:
                answer = self._once(request, end - self._retry.now())
                if answer.status not in _PASSING:
                    return answer
                wait = max(wait, _retry_after(answer.headers))
                error = self._refused(answer)
            except (OSError, HTTPException) as broken:
                error = failures.unreachable(self._reference, broken)
                reason = getattr(broken, "reason", None)
                if _stays(reason):
                    raise error from broken
                if isinstance(reason, ConnectionRefusedError):
                    end = min(end, begin + self._retry.refused_s)
            if self._retry.now() + wait >= end:
                raise error
            self._retry.sleep(wait)
            pause = min(pause * 2, _LONGEST_S)

    def _once(self, request: _Request, left_s: float) -> Answer:
        headers = {"User-Agent": f"mgpu/{__version__}", "Accept": request.accept}
        asked = urllib.request.Request(  # noqa: S310  plain HTTP is for loopback alone
            request.url, request.body, headers, method=request.method
        )
        if request.authorization:
            asked.add_unredirected_header("Authorization", request.authorization)  # a storage service is told nothing
        try:
            with self._opener.open(asked, timeout=max(min(self._retry.request_s, left_s), 0.1)) as answer:
                return Answer(answer.status, answer.headers, answer.read(_BIGGEST))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read(_BIGGEST))

    def _introduce(self, refusal: Answer, login: Login | None, end: float) -> str:
        """The Authorization header that a registry asks for; it may give one to who has no login, too."""
        challenges = refusal.headers.get_all("WWW-Authenticate") or []
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                return f"Bearer {self._token(dict(_FIELD.findall(rest)), login, end)}"
            if scheme.lower() == "basic" and login is not None:
                return login.basic()
        raise self._refused(refusal)

    def _token(self, challenge: dict[str, str], login: Login | None, end: float) -> str:
        answer = self._patiently(self._token_request(challenge, login), end)
        if answer.status != 200:
            raise self._refused(answer)
        try:
            said = json.loads(answer.body)
            return said.get("token") or said["access_token"]
        except (ValueError, KeyError, AttributeError) as error:
            raise failures.nonsense(self._reference, "a token that is none") from error

    def _token_request(self, challenge: dict[str, str], login: Login | None) -> _Request:
        realm = challenge.get("realm", "")
        where = urllib.parse.urlsplit(realm)
        if where.scheme != "https" and not (where.scheme == "http" and Reference(where.netloc, "").local):
            raise failures.nonsense(self._reference, f"to ask for a token at {realm!r}, without TLS")
        wanted = {"scope": challenge.get("scope") or f"repository:{self._reference.name}:pull"}
        if "service" in challenge:
            wanted["service"] = challenge["service"]
        if login is not None and login.identity_token:
            form = {"grant_type": "refresh_token", "client_id": "mgpu", "refresh_token": login.identity_token, **wanted}
            return _Request("POST", realm, body=urllib.parse.urlencode(form).encode())
        query = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(wanted)}"
        return _Request("GET", query, authorization=login.basic() if login else "")

    def _refused(self, answer: Answer) -> ImageError:
        return failures.refused(self._reference, answer.status, answer.body, known=self._known)


class _Proxies(urllib.request.ProxyHandler):
    """Those of the environment, for what is not this machine."""

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:  # noqa: A002  named by its base
        return None if Reference(req.host, "").local else super().proxy_open(req, proxy, type)


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    try:
        changed = ca_file.stat().st_mtime_ns if ca_file else 0
        return _context(ca_file, changed, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    except (OSError, ssl.SSLError) as error:
        cure = "image.ca_file is a PEM file."
        raise ImageError(f"{ca_file} holds no certificates", str(error), cure) from error


@functools.lru_cache(maxsize=8)
def _context(ca_file: Path | None, _changed: int, *_machine: str | None) -> ssl.SSLContext:
    """To read a machine's certificates takes 40 ms of CPU, and one publishing asks for several."""
    context = ssl.create_default_context()
    if ca_file is not None:
        context.load_verify_locations(ca_file)
    return context


def _stays(reason: object) -> bool:
    """Whether asking again is in vain: a name that nobody has, a certificate that nobody vouches for."""
    unknown = isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME
    return unknown or isinstance(reason, ssl.SSLCertVerificationError)


def _retry_after(headers: Message) -> float:
    """Seconds; 0 where it does not say, or says a date."""
    said = headers.get("Retry-After", "")
    return float(said) if said.isdigit() else 0.0
