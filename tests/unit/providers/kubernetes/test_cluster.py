"""kubectl as this process keeps it: how it is started and ended, and what its words mean."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer

import pytest
from mgpu_train.agent.machine import procs
from waiting import until

from mgpu.errors import AmbiguousCreate, AuthError, InvalidRequest, Transient
from mgpu.providers.kubernetes import cluster
from mgpu.providers.kubernetes.cluster import Access, Cluster, Exists, Missing, close_all, refused

Program = Callable[[str], None]
HELPER = "getting credentials: exec: executable aws failed with exit code 255"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Makes what `kubectl` is: a script of a shell. Its sockets are in a folder of the test's own."""
    place = Path(tempfile.mkdtemp(prefix="k-"))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(script: str) -> None:
        (tmp_path / "kubectl").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "kubectl").chmod(0o755)

    yield make
    close_all()
    until(lambda: not list(place.glob("mgpu-kube-*/*")))
    subprocess.run(["rm", "-rf", place], check=True)


def folders() -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob("mgpu-kube-*")]


# --- how it lives


@pytest.mark.timeout(60)  # which would wait for an hour
def test_a_kubectl_that_does_not_start_says_why_at_once(kubectl: Program, monkeypatch):
    monkeypatch.setattr(cluster, "_START_S", 3600.0)
    kubectl("echo 'error: no such context'; exit 1")
    with pytest.raises(InvalidRequest, match="no such context"):
        Cluster(Access()).get("/version")
    until(lambda: not folders())


def test_a_kubectl_ends_with_whoever_has_started_it_and_leaves_no_folder(kubectl: Program):
    kubectl("echo Starting to serve; exec sleep 1000")
    proxy = cluster._Proxy(Access())
    kept = procs.of(proxy._process.pid)
    assert kept is not None
    until(lambda: "sleep 1000" in procs.command_line(kept.pid))  # no shell between it and us
    assert len(folders()) == 1
    proxy.close()
    until(lambda: not kept.alive)
    until(lambda: not folders())


def test_what_was_killed_with_all_that_belongs_to_it_is_swept_by_the_next_one(kubectl: Program):
    kubectl("echo Starting to serve; exec sleep 1000")
    place, long_ago = Path(tempfile.gettempdir()), time.time() - 3600
    left, young, lives = (place / f"mgpu-kube-{name}" for name in ("left", "young", "lives"))
    for folder in (left, young, lives):
        folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as dead:
        listening.bind(str(lives / "api"))
        listening.listen()
        dead.bind(str(left / "api"))  # and nobody listens
        for folder in (left, lives):
            os.utime(folder, (long_ago, long_ago))
        proxy = cluster._Proxy(Access())
        assert not left.exists()
        assert young.exists()
        assert lives.exists()
        proxy.close()
    for folder in (young, lives):
        subprocess.run(["rm", "-rf", folder], check=True)


def test_folders_of_other_users_are_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left, long_ago = tmp_path / "mgpu-kube-left", time.time() - 3600
    left.mkdir()
    os.utime(left, (long_ago, long_ago))
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        cluster._sweep(tmp_path)
    assert left.exists()
    cluster._sweep(tmp_path)
    assert not left.exists()


# --- what it says


def test_a_create_that_the_helper_kept_from_the_api_server_has_made_nothing():
    error = refused("what", 502, json.dumps({"message": HELPER}), lost=AmbiguousCreate, said=lambda: "i/o timeout")
    assert type(error) is Transient
    assert type(refused("what", 502, "bad gateway", lost=AmbiguousCreate)) is AmbiguousCreate


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Could not connect to the endpoint URL: https://portal.sso.us-east-1.amazonaws.com", Transient),
        ("dial tcp: lookup oauth2.googleapis.com: i/o timeout", Transient),
        ("[Errno -3] Temporary failure in name resolution", Transient),
        ("ERROR: (gcloud.auth) token endpoint: context deadline exceeded", Transient),
        ("Authentication failed: the identity provider is temporarily unavailable", Transient),
        ("AADSTS90033: login.example answers 503 Service Unavailable", Transient),
        (
            "An error occurred (ThrottlingException) when calling AssumeRole: Rate exceeded, not authenticated",
            Transient,
        ),
        ("429 Too Many Requests: no credentials for now", Transient),
        ("fetching the token failed: permission denied by rate", Transient),
        ("the host was not found", Transient),
        ("The token has expired after 5000 s", AuthError),
        ("", Transient),  # nobody knows; whoever asks again is told again
        ("Error loading SSO Token: Token for me does not exist", AuthError),
        ("The SSO session associated with this profile has expired or is otherwise invalid", AuthError),
        ("Please run: gcloud auth login", AuthError),
        ("Unable to locate credentials", AuthError),
    ],
)
def test_a_helper_that_gets_nowhere_is_no_log_in_that_is_over(said: str, kind: type[Exception]):
    text = json.dumps({"message": HELPER})
    error = refused("what", 502, text, said=lambda: said)
    assert type(error) is kind
    assert said in getattr(error, "why", "")


QUOTA = 'Operation cannot be fulfilled on resourcequotas "gke-resource-quotas": the object has been modified'


@pytest.mark.parametrize(
    ("message", "reason", "made", "changed"),
    [
        (QUOTA, "Conflict", Transient, Exists),  # two jobs were made at the same time: nothing is there
        ('jobs.batch "mgpu-f0" already exists', "AlreadyExists", Exists, Exists),
    ],
)
def test_a_quota_that_was_changed_meanwhile_is_no_object_that_exists(monkeypatch, message, reason, made, changed):
    api, said = Cluster(Access()), json.dumps({"message": message, "reason": reason})

    def asked(method: str, *_: object) -> str:
        raise refused(f"kubernetes: {method}", 409, said, lost=AmbiguousCreate)

    monkeypatch.setattr(api, "_asked", asked)
    with pytest.raises(made) as caught:
        api.post("/jobs", {}, makes=True)
    assert type(caught.value) is made
    assert message in str(caught.value)
    with pytest.raises(changed):
        api.patch("/jobs/mgpu-f0", {})


def test_a_page_of_somebody_in_between_is_no_answer_of_the_cluster(monkeypatch):
    api = Cluster(Access())
    monkeypatch.setattr(api, "_asked", lambda *_: "<html>Sign in</html>")
    with pytest.raises(Transient, match="Sign in"):
        api.get("/api/v1/pods")
    with pytest.raises(AmbiguousCreate):
        api.post("/jobs", {}, makes=True)


class Answers(BaseHTTPRequestHandler):
    """An API server an hour behind, whose user's helper has failed."""

    def do_GET(self) -> None:
        self.send_response(502 if self.path == "/fails" else 200)
        body = HELPER.encode() if self.path == "/fails" else b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "here"

    def log_message(self, *_: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() - 3600, usegmt=True)


def test_what_a_helper_has_written_is_told_and_the_servers_clock_is_known(kubectl: Program, tmp_path: Path):
    kubectl('echo "Starting to serve"; echo "SSO session has expired" >&2; exec sleep 1000')
    api = Cluster(Access())
    cluster._proxies[Access()] = proxy = cluster._Proxy(Access())
    with UnixStreamServer(proxy.path, Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        until(lambda: "expired" in proxy.said())
        assert api.get("/works") == {}
        assert 3595 < api.ahead_s < 3605
        with pytest.raises(AuthError) as caught:
            api._asked("GET", "/fails", {}, None, Transient)
        assert "SSO session has expired" in caught.value.why
        server.shutdown()
        thread.join()


class Logged(BaseHTTPRequestHandler):
    """An API server that lets in whoever comes by a kubectl that was started after the log-in."""

    def do_GET(self) -> None:
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write(b"{}")

    def address_string(self) -> str:
        return "here"

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def logged_in(kubectl: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the API server answers to each kubectl that is started, in turn: the status by its number."""
    statuses, servers = [401], list[UnixStreamServer]()
    kubectl('echo "Starting to serve"; exec sleep 1000')
    start = cluster._Proxy

    def started(access: Access) -> cluster._Proxy:
        proxy = start(access)
        server = UnixStreamServer(proxy.path, Logged)
        server.status = statuses[min(len(servers), len(statuses) - 1)]  # type: ignore[attr-defined]
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        return proxy

    monkeypatch.setattr(cluster, "_Proxy", started)
    monkeypatch.setattr(cluster, "_again_at", {})
    yield statuses
    for server in servers:
        server.shutdown()
        server.server_close()


def lives(proxy: cluster._Proxy) -> bool:
    return proxy._process.poll() is None


def test_a_renewed_log_in_reaches_a_process_that_runs(logged_in: list[int]):
    logged_in[:] = [401, 200]
    first = cluster._proxies[Access()] = cluster._Proxy(Access())
    assert Cluster(Access()).get("/x") == {}
    assert cluster._proxies[Access()] is not first
    until(lambda: not lives(first))


@pytest.mark.parametrize(("status", "word"), [(404, Missing), (409, Exists)])
def test_a_renewed_log_in_holds_though_what_is_asked_for_first_is_refused(
    logged_in: list[int], status: int, word: type[Exception]
):
    logged_in[:] = [401, status]
    first = cluster._proxies[Access()] = cluster._Proxy(Access())
    for _ in range(2):
        with pytest.raises(word):
            Cluster(Access()).get("/x")
    until(lambda: not lives(first))


def test_a_server_that_is_busy_says_nothing_of_a_renewed_log_in(logged_in: list[int]):
    logged_in[:] = [401, 503, 200]
    first = cluster._proxies[Access()] = cluster._Proxy(Access())
    with pytest.raises(Transient):
        Cluster(Access()).get("/x")
    assert lives(first)
    assert Cluster(Access()).get("/x") == {}


def test_connections_to_pods_outlive_a_log_in_that_is_over(logged_in: list[int], monkeypatch: pytest.MonkeyPatch):
    """They go through the first kubectl; a connection that stands is asked for no log-in any more."""
    first = cluster._proxies[Access()] = cluster._Proxy(Access())
    again = list[cluster._Proxy]()
    with monkeypatch.context() as noted:
        start = cluster._Proxy
        noted.setattr(cluster, "_Proxy", lambda access: again.append(start(access)) or again[-1])
        for _ in range(3):
            with pytest.raises(AuthError):
                Cluster(Access()).get("/x")
    assert cluster._proxies == {Access(): first}
    (second,) = again  # not one for each call
    until(lambda: not lives(second))
    assert lives(first)


# --- how it gets there


@pytest.mark.parametrize(
    ("about", "variables", "found"),
    [
        ({"server": "https://api.test:6443"}, {}, ""),
        ({"server": "https://api.test:6443"}, {"HTTPS_PROXY": "http://me:secret@proxy.test:3128"}, "proxy.test:3128"),
        ({"server": "https://api.test:6443"}, {"https_proxy": "proxy.test:3128"}, "proxy.test:3128"),
        ({"server": "https://api.test:6443"}, {"HTTP_PROXY": "http://proxy.test:3128"}, ""),
        ({"server": "https://api.test:6443"}, {"HTTPS_PROXY": "http://proxy.test:3128", "NO_PROXY": ".test"}, ""),
        ({"server": "https://127.0.0.1:6443"}, {"HTTPS_PROXY": "http://proxy.test:3128"}, ""),
        ({"server": "https://api.test:6443", "proxy-url": "http://other.test:80"}, {}, "other.test:80"),
    ],
)
def test_the_http_proxy_is_the_one_that_kubectl_uses(kubectl: Program, monkeypatch, about, variables, found: str):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    kubectl(f"echo '{json.dumps({'clusters': [{'cluster': about}]})}'")
    assert Access().http_proxy() == found


def test_kubectl_is_not_ended_by_a_signal_for_this_process_group(kubectl: Program):
    kubectl("echo Starting to serve; exec sleep 1000")
    proxy = cluster._Proxy(Access())
    assert os.getpgid(proxy._process.pid) != os.getpgid(0), "Ctrl-C is not for it"
    os.kill(proxy._process.pid, signal.SIGKILL)  # and one that is killed leaves nothing, either
    proxy.close()
    until(lambda: not folders())
