"""The API server, by way of one `kubectl proxy` per process. Foreign errors are translated here.

kubectl alone knows how a user gets in: contexts, certificates, plug-ins of EKS, GKE and OIDC, proxies. It listens on a
socket in a folder that only this user can enter, for as long as this process lives; so a call costs no program, and
sixty-four connections to pods cost one.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

from mgpu.errors import (
    AmbiguousCreate,
    AuthError,
    InvalidRequest,
    PermissionDenied,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Transient,
)

Json = dict[str, Any]
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CALL_S, _START_S = 60.0, 30.0
_RENEW_S = 10.0  # between two log-ins that are read anew, and refused
# kubectl until the input ends. The shell becomes it: no other process gets its number before its parent has let it go
_HELD = """dir=$1; shift; exec 3<&0
{ cat <&3; kill $$; rm -rf "$dir"; } >/dev/null 2>&1 &
exec "$@" </dev/null 3<&-"""
_LOGIN = r"[Uu]nauthorized|must be logged in"
_HELPER = "getting credentials"  # kubectl's own words: the program that logs in has failed
_NO_NETWORK = (
    r"connect(ion)? (to|timed|refused|reset|aborted)|timed? ?out|name resolution|no such host|getaddrinfo|unreachable"
    r"|EOF|TLS handshake|max retries|temporar|deadline exceeded|unavailable|\b50[0234]\b|throttl|too many requests"
)
_NO_LOGIN = r"log(ged)?[ -]?(in|on)|sso|expired|authenticat|invalid_grant|executable \S+ not found|no such|credential"
_NO_WORD = (AuthError, Transient, AmbiguousCreate)  # after which nobody knows whether a log-in is good
_PREFIX = "mgpu-kube-"
_SOCKET_NAME = 80  # bytes of a folder's name that leave room for a socket's
_SAID = 8  # lines of kubectl's that are kept
_LOG_IN = "Log in as your cluster wants it, until `kubectl get pods` works."
_CHECK = "`mgpu check kubernetes` says what is missing, with the least role that has it."


class Missing(Transient):
    """There is no such object. Where one cannot be missing (a list, what is made) no API server answers, but somebody
    who stands in between: nothing is known."""

    by_api = True
    """Whether it is surely the API server's word, which gives a reason with it for every kind of object it knows."""


class Exists(Transient):
    """An object of this name is there already, or was changed meanwhile."""


class Changed(Exists):
    """An object was changed meanwhile: the one that was asked for, or a quota that a new one counts against."""


@dataclass(frozen=True)
class Access:
    """Which cluster, as whom; empty: as kubectl finds it."""

    kubeconfig: str = ""
    context: str = ""

    def kubectl(self, *arguments: str) -> list[str]:
        """kubectl's arguments. Raises InvalidRequest: it is not installed."""
        program = shutil.which("kubectl")
        if program is None:
            cure = "Install kubectl, and let it reach the cluster: https://kubernetes.io/docs/tasks/tools/"
            raise InvalidRequest("kubernetes: there is no kubectl on PATH", "", cure)
        named = {"kubeconfig": self.kubeconfig, "context": self.context}
        return [program, *(f"--{name}={value}" for name, value in named.items() if value), *arguments]

    def place(self) -> tuple[str, str, str]:
        """The names of context and namespace that kubectl would use, and the API server's address: many a cluster's
        context is called `default`. Raises InvalidRequest."""
        done = self._view()
        if done.returncode == 0:
            told = json.loads(done.stdout)
            context = (told.get("contexts") or [{}])[0].get("context", {})
            server = _server(told).get("server", "")
            return told.get("current-context", ""), context.get("namespace") or "default", server
        if not self.context and IN_CLUSTER.exists():
            return "", IN_CLUSTER.read_text(encoding="utf-8").strip(), ""
        cure = "Name one in `kubernetes: {context: ...}`; `kubectl config get-contexts` lists them."
        raise InvalidRequest("kubernetes: kubectl has no such context", done.stderr.strip(), cure)

    def http_proxy(self) -> str:
        """Host and port of the HTTP proxy that kubectl's calls go through, as Go's client finds it; empty: none."""
        done = self._view()
        cluster = _server(json.loads(done.stdout)) if done.returncode == 0 else {}
        server, given = urlsplit(cluster.get("server", "")), cluster.get("proxy-url", "")
        if not given and not re.match(r"localhost|127\.|::1", server.hostname or "localhost"):
            given = "" if proxy_bypass(server.netloc) else getproxies().get(server.scheme, "")
        return urlsplit(given if "://" in given else f"//{given}").netloc.rpartition("@")[2]

    def _view(self) -> subprocess.CompletedProcess[str]:
        return _run(self.kubectl("config", "view", "--minify", "--output=json"))


def _server(told: Json) -> Json:
    return (told.get("clusters") or [{}])[0].get("cluster", {})


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=_CALL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidRequest("kubernetes: kubectl does not run", str(error), "") from error


class _Proxy:
    """A kubectl that carries calls for this process."""

    def __init__(self, access: Access) -> None:
        access.kubectl()
        place = tempfile.gettempdir()
        place = place if len(place) < _SOCKET_NAME else "/tmp"  # noqa: S108  a new one, 0700
        _sweep(Path(place))
        self.folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        self.path = str(Path(self.folder) / "api")
        argv = ["/bin/sh", "-c", _HELD, "sh", self.folder, *access.kubectl("proxy", f"--unix-socket={self.path}")]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is not for it
        )
        timer = threading.Timer(_START_S, self.close)
        timer.start()
        self._said = deque[str](maxlen=_SAID)
        for line in self._process.stdout or ():  # "Starting to serve on ...", after what it warns of
            self._said.append(line.strip())
            if line.startswith("Starting"):
                break
        timer.cancel()
        if not (self._said and self._said[-1].startswith("Starting")):
            self.close()
            raise InvalidRequest("kubernetes: kubectl proxy does not start", self.said(), "Try `kubectl get pods`.")
        self._said.clear()
        # whoever writes to a pipe that is not read stops some day
        threading.Thread(target=self._drain, name="kubectl proxy", daemon=True).start()

    def _drain(self) -> None:
        for line in self._process.stdout or ():
            self._said.append(line.strip())

    def said(self) -> str:
        """Its last lines, and those of the program that logs it in."""
        return "\n".join(tuple(self._said))

    def close(self) -> None:
        """Ends it; its folder goes."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()


def _sweep(place: Path) -> None:
    """Takes away the folders of kubectls that were killed with all that belongs to them."""
    for left in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            about = left.lstat()
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _START_S and not _answers(left / "api"):
                shutil.rmtree(left)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


_proxies: dict[Access, _Proxy] = {}
_lock = threading.Lock()
_renewing = threading.Lock()  # one at a time, and not while `_lock` is held
_again_at: dict[Access, float] = {}  # monotonic; no log-in is read anew before


@atexit.register
def close_all() -> None:
    """Ends every kubectl of this process; the next call starts another one."""
    with _lock:
        for proxy in _proxies.values():
            proxy.close()
        _proxies.clear()


def dial(access: Access, seconds: float) -> socket.socket:
    """A connection on which HTTP is spoken to the API server. Raises OSError, InvalidRequest."""
    for again in (True, False):
        with _lock:
            proxy = _proxies.get(access)
            if proxy is None:
                proxy = _proxies[access] = _Proxy(access)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(seconds)
        try:
            connection.connect(proxy.path)
        except OSError:
            connection.close()
            with _lock:
                if _proxies.get(access) is proxy:  # it has ended
                    proxy.close()
                    del _proxies[access]
            if not again:
                raise
        else:
            return connection
    raise AssertionError


def _renewed(access: Access, refused: _Proxy | None, ask: Callable[[], str], error: AuthError) -> str:
    """What is answered to a kubectl that has read the log-in anew, after one that was `refused`. It takes that one's
    place when it is let in: until then the connections to pods stand, which outlive the log-in that made them."""
    with _renewing:
        with _lock:
            is_new = refused is None or _proxies.get(access) is not refused
            if not is_new and time.monotonic() < _again_at.get(access, 0.0):
                raise error
            if not is_new:
                del _proxies[access]
        if refused is None or is_new:
            return ask()
        over: _Proxy | None = refused
        try:
            return ask()
        except BaseException as failure:
            with _lock:
                new = _proxies.get(access)
                # any other word is the API server's, to one whom it has let in
                heard = isinstance(failure, Missing | Exists) or not isinstance(failure, _NO_WORD)
                if new is None or not heard or not isinstance(failure, Exception):
                    over, _proxies[access] = new, refused
                if isinstance(failure, AuthError):
                    _again_at[access] = time.monotonic() + _RENEW_S
            raise
        finally:
            if over is not None:
                over.close()


def said(access: Access) -> str:
    """The last lines of the kubectl that carries the calls."""
    with _lock:
        proxy = _proxies.get(access)
    return proxy.said() if proxy else ""


class _Connection(http.client.HTTPConnection):
    def __init__(self, access: Access) -> None:
        super().__init__("localhost", timeout=_CALL_S)
        self._access = access

    def connect(self) -> None:
        self.sock = dial(self._access, _CALL_S)


class Cluster:
    """Calls of the API. All raise ProviderError; `what` is what messages say was not possible."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.ahead_s = 0.0
        """Seconds that this machine's clock is ahead of the API server's, by its last answer."""

    def get(self, path: str, **query: str) -> Json:
        """An object, or a list. Raises Missing."""
        return self._object("GET", path, query)

    def text(self, path: str, **query: str) -> str:
        """A log. Raises Missing."""
        return self._call("GET", path, query)

    def post(self, path: str, body: Json, *, makes: bool = False, **query: str) -> Json:
        """Makes an object. Raises Exists; with `makes`, AmbiguousCreate where nobody knows whether it did."""
        try:
            return self._object("POST", path, query, body, lost=AmbiguousCreate if makes else Transient)
        except Changed as error:  # many are made at a time, and nothing has come of this one
            raise Transient(error.what, error.why, error.next_step) from error

    def patch(self, path: str, body: Json) -> Json:
        """Merges this into an object. Raises Missing; Exists: it was changed meanwhile."""
        return self._object("PATCH", path, {}, body)

    def delete(self, path: str, body: Json) -> None:
        """Asks for its end. Raises Missing; Exists: not by these preconditions."""
        self._call("DELETE", path, {}, body)

    def _object(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None = None,
        lost: type[ProviderError] = Transient,
    ) -> Json:
        text = self._call(method, path, query, body, lost)
        try:
            return json.loads(text)
        except ValueError as error:  # a page of somebody who stands in between
            why = f"what answers is no API server: {text[:200]}"
            raise lost(f"kubernetes: {method} {path}", why, "Is it the cluster that kubectl speaks to?") from error

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None = None,
        lost: type[ProviderError] = Transient,
    ) -> str:
        ask = partial(self._asked, method, path, query, body, lost)
        used = _proxies.get(self.access)
        try:
            return ask()
        except AuthError as error:  # kubectl reads a log-in once: there may be a newer one
            return _renewed(self.access, used, ask, error)

    def _asked(
        self, method: str, path: str, query: Mapping[str, str], body: Json | None, lost: type[ProviderError]
    ) -> str:
        what = f"kubernetes: {method} {path}"
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body).encode()
        connection = _Connection(self.access)
        try:
            connection.request(method, f"{path}?{urlencode(query)}" if query else path, data, {"Content-Type": kind})
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise lost(what, str(error) or type(error).__name__, "Ask again later.") from error
        finally:
            connection.close()
        with suppress(TypeError, ValueError):  # it says no date, or none that is one
            self.ahead_s = time.time() - parsedate_to_datetime(answer.headers["Date"]).timestamp()
        if answer.status < 300:
            return text
        raise refused(what, answer.status, text, answer.headers.get("Retry-After"), lost, lambda: said(self.access))


def refused(
    what: str,
    status: int,
    text: str,
    retry_after: str | None = None,
    lost: type[ProviderError] = Transient,
    said: Callable[[], str] = str,
) -> ProviderError:
    """What an answer that is no success means: 4xx is the API server's word, all else may be a lost one. `said`: what
    kubectl wrote before it."""
    try:
        told = json.loads(text)
        why, reason = str(told.get("message", text)), told.get("reason")
    except (ValueError, AttributeError):
        why, reason = text.strip()[-1000:], None
    match status:
        case 404:
            if 'namespaces "' in why:
                return InvalidRequest(what, why, "Create it, or name another.")
            missing = Missing(what, why, "Is it a Kubernetes API server that kubectl speaks to?")
            missing.by_api = reason == "NotFound"
            return missing
        case 409:
            return (Changed if reason == "Conflict" else Exists)(what, why, "Ask again later.")
        case 401:
            return AuthError(what, why, _LOG_IN)
        case 403 if "exceeded quota" in why:
            return QuotaExceeded(what, why, "Ask for less, or have the namespace's quota raised.")
        case 403:
            return PermissionDenied(what, why, _CHECK)
        case 429:
            seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
            return RateLimited(what, why, "Wait.", retry_after=seconds)
        case _ if 400 <= status < 500:
            return InvalidRequest(what, why, _CHECK)
        case _ if _HELPER in why:  # it did not get as far as the API server
            why = "\n".join(filter(None, (why, said())))
            words = why.replace(_HELPER, "")
            if re.search(_NO_LOGIN, words, re.IGNORECASE) and not re.search(_NO_NETWORK, words, re.IGNORECASE):
                return AuthError(what, why, _LOG_IN)
            return Transient(what, why, "Ask again later.")  # nothing was sent
        case _ if re.search(_LOGIN, why):
            return AuthError(what, why, _LOG_IN)
    return lost(what, why or f"status {status}", "Ask again later.")


def in_cluster() -> bool:
    """Whether this process runs in a pod that may speak to its API server."""
    return IN_CLUSTER.exists() and "KUBERNETES_SERVICE_HOST" in os.environ
