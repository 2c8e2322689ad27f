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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

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
_HELD = 'dir=$1; shift; "$@" </dev/null & cat >/dev/null; kill $!; rm -rf "$dir"'  # until its input ends
_LOGIN = r"[Uu]nauthorized|must be logged in|getting credentials"
_SOCKET_NAME = 80  # bytes of a folder's name that leave room for a socket's
_CHECK = "`mgpu check kubernetes` says what is missing, with the least role that has it."


class Missing(Exception):
    """There is no such object."""


class Exists(Exception):
    """An object of this name is there already, or was changed meanwhile."""


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
        done = _run(self.kubectl("config", "view", "--minify", "--output=json"))
        if done.returncode == 0:
            told = json.loads(done.stdout)
            context = (told.get("contexts") or [{}])[0].get("context", {})
            server = (told.get("clusters") or [{}])[0].get("cluster", {}).get("server", "")
            return told.get("current-context", ""), context.get("namespace") or "default", server
        if not self.context and IN_CLUSTER.exists():
            return "", IN_CLUSTER.read_text().strip(), ""
        cure = "Name one in `kubernetes: {context: ...}`; `kubectl config get-contexts` lists them."
        raise InvalidRequest("kubernetes: kubectl has no such context", done.stderr.strip(), cure)


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidRequest("kubernetes: kubectl does not run", str(error), "") from error


class _Proxy:
    """A kubectl that carries calls for this process."""

    def __init__(self, access: Access) -> None:
        access.kubectl()
        short = len(tempfile.gettempdir()) < _SOCKET_NAME
        self.folder = tempfile.mkdtemp(prefix="mgpu-kube-", dir=None if short else "/tmp")  # noqa: S108  a new one, 0700
        self.path = str(Path(self.folder) / "api")
        argv = ["/bin/sh", "-c", _HELD, "sh", self.folder, *access.kubectl("proxy", f"--unix-socket={self.path}")]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
        )
        timer = threading.Timer(_START_S, self.close)
        timer.start()
        said = list[str]()
        for line in self._process.stdout or ():  # "Starting to serve on ...", after what it warns of
            said.append(line.strip())
            if line.startswith("Starting"):
                break
        timer.cancel()
        if not (said and said[-1].startswith("Starting")):
            self.close()
            why = "\n".join(said[-8:])
            raise InvalidRequest("kubernetes: kubectl proxy does not start", why, "Try `kubectl get pods`.")
        # whoever writes to a pipe that is not read stops some day
        threading.Thread(target=self._drain, name="kubectl proxy", daemon=True).start()

    def _drain(self) -> None:
        for _ in self._process.stdout or ():
            pass

    def close(self) -> None:
        """Ends it; its folder goes."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()


_proxies: dict[Access, _Proxy] = {}
_lock = threading.Lock()


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


def renew(access: Access) -> None:
    """Has the next call start another kubectl, which reads its configuration anew."""
    with _lock:
        if proxy := _proxies.pop(access, None):
            proxy.close()


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

    def get(self, path: str, **query: str) -> Json:
        """An object, or a list. Raises Missing."""
        return json.loads(self._call("GET", path, query))

    def text(self, path: str, **query: str) -> str:
        """A log. Raises Missing."""
        return self._call("GET", path, query)

    def post(self, path: str, body: Json, *, makes: bool = False, **query: str) -> Json:
        """Makes an object. Raises Exists; with `makes`, AmbiguousCreate where nobody knows whether it did."""
        return json.loads(self._call("POST", path, query, body, lost=AmbiguousCreate if makes else Transient))

    def patch(self, path: str, body: Json) -> Json:
        """Merges this into an object. Raises Missing; Exists: it was changed meanwhile."""
        return json.loads(self._call("PATCH", path, {}, body))

    def delete(self, path: str, body: Json) -> None:
        """Asks for its end. Raises Missing; Exists: not by these preconditions."""
        self._call("DELETE", path, {}, body)

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Json | None = None,
        lost: type[ProviderError] = Transient,
    ) -> str:
        try:
            return self._asked(method, path, query, body, lost)
        except AuthError:  # kubectl reads a log-in once: there may be a newer one
            renew(self.access)
            return self._asked(method, path, query, body, lost)

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
        if answer.status < 300:
            return text
        raise refused(what, answer.status, text, answer.headers.get("Retry-After"), lost)


def refused(
    what: str, status: int, text: str, retry_after: str | None = None, lost: type[ProviderError] = Transient
) -> Exception:
    """What an answer that is no success means: 4xx is the API server's word, all else may be a lost one."""
    try:
        told = json.loads(text)
        why = str(told.get("message", text))
    except (ValueError, AttributeError):
        why = text.strip()[-1000:]
    match status:
        case 404:
            return InvalidRequest(what, why, "Create it, or name another.") if "namespaces" in why else Missing(why)
        case 409:
            return Exists(why)
        case 401:
            return AuthError(what, why, "Log in as your cluster wants it, until `kubectl get pods` works.")
        case 403 if "exceeded quota" in why:
            return QuotaExceeded(what, why, "Ask for less, or have the namespace's quota raised.")
        case 403:
            return PermissionDenied(what, why, _CHECK)
        case 429:
            seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
            return RateLimited(what, why, "Wait.", retry_after=seconds)
        case _ if 400 <= status < 500:
            return InvalidRequest(what, why, _CHECK)
        case _ if re.search(_LOGIN, why):  # kubectl's own word: it did not get as far as the API server
            return AuthError(what, why, "Log in as your cluster wants it, until `kubectl get pods` works.")
    return lost(what, why or f"status {status}", "Ask again later.")


def in_cluster() -> bool:
    """Whether this process runs in a pod that may speak to its API server."""
    return IN_CLUSTER.exists() and "KUBERNETES_SERVICE_HOST" in os.environ
