"""A host key replaced over SSH, against OpenSSH's own server; and the first contact that does it, cut off anywhere."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mgpu_train.timeouts import Timeouts

from mgpu.errors import HostKeyMismatch, RemoteError, Transient
from mgpu.iac.types.contact import Contact
from mgpu.providers import start
from mgpu.providers.base import FleetState, Handle, NodePhase, NodeState
from mgpu.remote import rekey
from mgpu.remote.node import Node, connect

HANDLE = Handle(provider="p", region="r", fleet="f", generation=1, token="t", ids=("i-0",))
T = 20


@pytest.fixture
def file(sshd) -> str:
    return str(sshd.folder / "host_key")


@pytest.fixture
def shows(sshd, keys, timeouts) -> Callable[[str], bool]:
    """Whether the server shows this key, to the first connection that it accepts from now on."""

    def look(key: str) -> bool:
        shown: list[bool] = []

        def answered() -> bool:
            try:
                connect(sshd.target(host_key=key), keys.file, timeouts).close()
                shown.append(True)
            except HostKeyMismatch:
                shown.append(False)
            return True

        assert soon(answered), "it accepts none"
        return shown[0]

    return look


def soon(condition: Callable[[], bool]) -> bool:
    """True as soon as it is; a server that reads its keys again refuses connections for a moment."""
    deadline = time.monotonic() + T
    while time.monotonic() < deadline:
        try:
            if condition():
                return True
        except RemoteError:
            pass
        time.sleep(0.05)
    return False


# ---- the two steps


def test_the_server_shows_the_new_key_and_connections_that_stand_go_on(sshd, open_node, file, shows):
    node = open_node(sshd)
    new = rekey.prepare(node, T, file)
    assert shows(sshd.host_key), "nothing shows it before it is installed"
    rekey.install(node, new, T, file)
    assert soon(lambda: shows(new))
    assert not shows(sshd.host_key), "the key that others may know is dead"
    assert node.run(["echo", "here"], timeout=T).stdout == b"here\n"
    said = (sshd.folder / "stderr").read_text()  # newer servers read their keys at their start alone
    assert "SIGHUP" in said, said


def test_the_files_are_the_new_pair_for_root_alone(sshd, open_node, file):
    node = open_node(sshd)
    new = rekey.prepare(node, T, file)
    rekey.install(node, new, T, file)
    assert Path(f"{file}.pub").read_text().strip() == new
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in sshd.folder.glob("host_key*")) == ["host_key", "host_key.pub"]


def test_prepare_again_is_the_same_key(sshd, open_node, file):
    node = open_node(sshd)
    assert rekey.prepare(node, T, file) == rekey.prepare(node, T, file) != sshd.host_key


def test_a_prepare_that_was_cut_off_leaves_no_half_key(sshd, open_node, file):
    node = open_node(sshd)
    Path(f"{file}.next").touch()  # an empty file is no key
    new = rekey.prepare(node, T, file)
    rekey.install(node, new, T, file)
    assert Path(f"{file}.pub").read_text().strip() == new


def test_install_again_is_harmless(sshd, open_node, file, shows):
    node = open_node(sshd)
    new = rekey.prepare(node, T, file)
    rekey.install(node, new, T, file)
    rekey.install(node, new, T, file)
    assert soon(lambda: shows(new))


def test_a_key_that_is_installed_and_not_yet_read_is_the_one_that_is_prepared(sshd, open_node, file, shows):
    node = open_node(sshd)
    new = rekey.prepare(node, T, file)
    Path(f"{file}.next").rename(file)  # the server was not told: the process that did this was cut off
    assert rekey.prepare(node, T, file) == new
    rekey.install(node, new, T, file)
    assert soon(lambda: shows(new))


def test_another_key_than_the_one_that_was_written_down_is_not_shown(sshd, open_node, new_server, file, shows):
    node = open_node(sshd)
    rekey.prepare(node, T, file)
    with pytest.raises(RemoteError, match="did not get a host key"):
        rekey.install(node, new_server().host_key, T, file)
    assert shows(sshd.host_key)


def test_a_node_that_cannot_do_it_says_what_it_lacks(sshd, open_node, tmp_path):
    with pytest.raises(RemoteError, match="sudo") as caught:
        rekey.prepare(open_node(sshd), T, str(tmp_path / "absent" / "key"))
    assert "ssh-keygen" in caught.value.next_step


def test_a_user_who_is_not_root_becomes_root_without_a_password(tmp_path):
    for name, text in (("id", "echo 1000"), ("sudo", f'printf "%s" "$1" > {tmp_path}/asked; shift; exec "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    argv = rekey.command("prepare", str(tmp_path / "key"), "ssh-ed25519 other")
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert (tmp_path / "asked").read_text() == "-n"
    assert done.stdout.strip() in (tmp_path / "key.pub").read_text()


def test_the_key_is_replaced_where_the_start_script_puts_it():
    assert rekey.HOST_KEY_FILE == start.HOST_KEY_FILE


# ---- first contact


class Cut(BaseException):
    """Ends the process that is at work, as far as anybody can tell."""


class Tags:
    """What a provider remembers of one machine's keys; `cut` names the call before or after which the process ends."""

    def __init__(self, key: str, cut: str = "") -> None:
        self.host_key = self.one_use_key = key
        self.calls: list[bool] = []
        self.cut = cut
        self.refuse: list[Exception] = []

    def rekeyed(self, handle: Handle, node: str, host_key: str, *, used: bool) -> None:
        self.calls.append(used)
        if self.refuse:
            raise self.refuse.pop(0)
        if self.cut == f"before {used}":
            raise Cut
        self.host_key = host_key
        if used:
            self.one_use_key = ""
        if self.cut == f"after {used}":
            raise Cut

    def state(self, sshd) -> FleetState:
        node = NodeState(
            rank=0,
            id="i-0",
            phase=NodePhase.RUNNING,
            address="127.0.0.1",
            port=sshd.port,
            user=sshd.user,
            host_key=self.host_key,
            one_use_key=self.one_use_key,
        )
        return FleetState(nodes=(node,))


@pytest.fixture
def meet(sshd, keys, file, timeouts, monkeypatch) -> Callable[..., NodeState]:
    """`meet(tags)`: a new process makes first contact, with as many passes as it needs."""
    prepare, install = rekey.prepare, rekey.install
    monkeypatch.setattr(rekey, "prepare", lambda node, t: prepare(node, t, file))
    monkeypatch.setattr(rekey, "install", lambda node, new, t: install(node, new, t, file))

    def process(tags: Tags, given: Timeouts = timeouts) -> NodeState:
        contact = Contact(tags, keys.file, given)  # type: ignore[arg-type]
        seen: list[NodeState] = []

        def passed() -> bool:
            seen[:] = contact.meet(HANDLE, tags.state(sshd)).nodes
            return not seen[0].one_use_key

        assert soon(passed)
        return seen[0]

    return process


def test_first_contact_replaces_the_key_and_writes_it_down_before_it_is_shown(sshd, meet, shows):
    tags = Tags(sshd.host_key)
    node = meet(tags)
    assert node.host_key == tags.host_key != sshd.host_key
    assert (tags.one_use_key, tags.calls[0], tags.calls[-1]) == ("", False, True)
    assert shows(node.host_key)
    assert not shows(sshd.host_key)


@pytest.mark.parametrize("cut", ["before False", "after False", "before True", "after True"])
def test_what_a_process_that_died_has_begun_is_finished_by_the_next_one(sshd, meet, shows, cut):
    tags = Tags(sshd.host_key, cut)
    with pytest.raises(Cut):
        meet(tags)
    tags.cut = ""
    node = meet(tags) if tags.one_use_key else tags.state(sshd).nodes[0]
    assert shows(node.host_key)
    assert (node.host_key, tags.one_use_key) == (tags.host_key, "")


def test_a_process_that_died_between_the_file_and_the_server_is_followed(sshd, meet, shows, file, monkeypatch):
    tags = Tags(sshd.host_key)

    def half(node: Node, new: str, t: float) -> None:
        Path(f"{file}.next").rename(file)
        raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(rekey, "install", half)
        with pytest.raises(Cut):
            meet(tags)
    written = tags.host_key
    assert meet(tags).host_key == tags.host_key == written
    assert shows(written)


def test_a_provider_that_is_busy_is_told_later(sshd, meet, keys, timeouts):
    tags = Tags(sshd.host_key)
    tags.refuse = [Transient("503")]
    contact = Contact(tags, keys.file, timeouts)  # type: ignore[arg-type]
    with pytest.raises(Transient):
        contact.meet(HANDLE, tags.state(sshd))
    assert tags.host_key == sshd.host_key
    assert meet(tags).host_key != sshd.host_key


def test_what_the_provider_still_shows_of_a_met_machine_is_not_believed(sshd, meet, keys, timeouts):
    tags = Tags(sshd.host_key)
    contact = Contact(tags, keys.file, timeouts)  # type: ignore[arg-type]
    stale = tags.state(sshd)
    assert soon(lambda: not contact.meet(HANDLE, stale).nodes[0].one_use_key)
    calls = len(tags.calls)
    assert contact.meet(HANDLE, stale).nodes[0].host_key == tags.host_key
    assert len(tags.calls) == calls, "it is met once"
