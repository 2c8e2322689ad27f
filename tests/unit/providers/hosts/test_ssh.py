"""What ssh says, as errors with a cure; how a node is reached where the user's configuration takes a detour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.hosts import make_key

from mgpu.errors import AuthError, InvalidRequest, Transient
from mgpu.providers.base import NodeState, ProxyCommand
from mgpu.providers.hosts import ssh
from mgpu.providers.hosts.options import Host
from mgpu.remote.targets import hop

GPU = Host(address="anna@gpu1:2222")


class Said(ssh.Client):
    """A client whose ssh ends as it is told."""

    def __init__(self, status: int = 0, stderr: str = "", stdout: str = "") -> None:
        super().__init__()
        self.__dict__.update(done=(status, stdout, stderr), commands=[])

    def _run(self, command: list[str], text: str, seconds: float) -> subprocess.CompletedProcess[str]:
        self.__dict__["commands"].append(command)
        return subprocess.CompletedProcess(command, *self.__dict__["done"])


@pytest.mark.parametrize(
    ("status", "stderr", "kind", "told", "cure"),
    [
        (255, "connect to host gpu1 port 22: No route", Transient, "does not answer", "whether it is up"),
        (255, "anna@gpu1: Permission denied (publickey).", AuthError, "cannot log in", "ssh-add"),
        (255, "Received disconnect: Too many authentication failures", AuthError, "cannot log in", "ssh-add"),
        (255, "No ED25519 key.\nHost key verification failed.", AuthError, "is not known", "compare its fingerprint"),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            AuthError,
            "another host key",
            "stands in between",
        ),
        (127, "bash: python3: command not found", InvalidRequest, "has no python3", "Install Python 3"),
        (1, "OSError: [Errno 28] No space left on device", InvalidRequest, "cannot do", "Look there"),
    ],
)
def test_each_way_to_fail_has_its_error_and_cure(status, stderr, kind, told, cure):
    with pytest.raises(kind) as caught:
        Said(status, stderr).ask(GPU, {"verb": "look"})
    assert caught.value.what.startswith("host anna@gpu1:2222")
    assert told in caught.value.what
    assert cure in caught.value.next_step
    assert caught.value.scope == "offer", "other hosts are not ruled out"


@pytest.mark.parametrize(
    ("status", "stdout", "kind"),
    [
        (127, "", ssh.Mute),
        (1, "This account is currently not available.\n", ssh.Mute),
        (0, "Please change your password\n", ssh.Mute),
        (1, f"Welcome!\n\n{ssh._BEGUN}\n", InvalidRequest),
        (0, f"\n{ssh._BEGUN}\n", InvalidRequest),
    ],
)
def test_a_host_that_runs_nothing_is_told_from_one_that_has_failed(status, stdout, kind):
    with pytest.raises(InvalidRequest) as caught:
        Said(status, "a word", stdout).ask(GPU, {"verb": "end"})
    assert type(caught.value) is kind


def test_what_a_login_shell_prints_is_passed_over_and_nothing_is_asked_of_a_person():
    client: Any = Said(stdout='Welcome!\n\n{"held": null}\n')
    assert client.ask(GPU, {"verb": "look"}) == {"held": None}
    (command,) = client.commands
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} <= {*command}
    assert command[-6:] == ["anna", "-p", "2222", "--", "gpu1", "'python3' -I -S -"]


def test_an_answer_that_is_none_is_told():
    with pytest.raises(InvalidRequest) as caught:
        Said(stdout="Please change your password\n").ask(GPU, {"verb": "look"})
    assert "change your password" in caught.value.why


@pytest.mark.parametrize(
    ("settings", "via"),
    [
        ({}, None),
        ({"proxyjump": "none", "proxycommand": "none"}, None),
        (
            {"proxyjump": "eve@gate:2200"},
            ["ssh", "-o", "BatchMode=yes", "-W", "10.0.0.7:22", "--", "ssh://eve@gate:2200"],
        ),
        ({"proxyjump": "a,gate"}, ["ssh", "-o", "BatchMode=yes", "-J", "a", "-W", "10.0.0.7:22", "--", "ssh://gate"]),
        (
            {"proxyjump": "me@[10.0.0.1]:2222"},
            ["ssh", "-o", "BatchMode=yes", "-W", "10.0.0.7:22", "--", "ssh://me@[10.0.0.1]:2222"],
        ),
        (
            {"hostname": "fd00::7", "proxyjump": "fd00::1"},
            ["ssh", "-o", "BatchMode=yes", "-W", "[fd00::7]:22", "--", "ssh://[fd00::1]"],
        ),
        ({"proxycommand": "nc -x %r %h %p 100%%h"}, ["sh", "-c", "exec nc -x anna 10.0.0.7 22 100%h"]),
        ({"proxycommand": "gate %n"}, ["sh", "-c", "exec gate gpu1"]),
    ],
)
def test_a_detour_of_the_users_is_taken_by_the_run_too(settings, via):
    known = {"hostname": "10.0.0.7", "port": "22", "user": "anna", **settings}
    found = ssh.Client()._via(GPU, known)
    assert found == (via and {"command": via})
    if via:
        node = NodeState.model_validate({"rank": 0, "id": "x", "phase": "running", "via": found})
        assert isinstance(node.via, ProxyCommand)
        assert hop(found)


def test_a_detour_that_ssh_alone_understands_is_refused_before_the_host_is_taken():
    known = {"hostname": "10.0.0.7", "port": "22", "user": "anna", "proxycommand": "gate %C %h %%C"}
    with pytest.raises(InvalidRequest, match="its ProxyCommand has %C\n") as caught:
        ssh.Client()._via(GPU, known)
    assert caught.value.scope == "offer"


def test_the_key_that_is_pinned_is_the_one_that_ssh_has_accepted(tmp_path: Path):
    shown, other, own = (make_key(tmp_path / name) for name in ("a", "b", "c"))
    known = tmp_path / "known"
    known.write_text(f"[gpu1]:2222 {other}\n[gpu1]:2222 {shown} its comment\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
    settings = {"hostname": "gpu1", "port": "2222", "userknownhostsfile": f"{tmp_path}/none {known}"}
    client = ssh.Client()
    assert client._host_key(settings, [], {ssh._fingerprint(shown)}) == " ".join(shown.split()[:2])
    told = [f"{own} root@gpu1\n"]  # of a host whose key a certificate vouches for
    assert client._host_key(settings, told, {ssh._fingerprint(own)}) == " ".join(own.split()[:2])
    assert client._host_key(settings, [], {ssh._fingerprint(own)}) is None


def test_without_ssh_the_cure_is_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nowhere"))
    with pytest.raises(InvalidRequest) as caught:
        ssh.Client().ask(GPU, {"verb": "look"})
    assert "Install OpenSSH" in caught.value.next_step
