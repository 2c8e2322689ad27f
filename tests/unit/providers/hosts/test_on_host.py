"""What runs on a host, called here: the file of keys is changed with care, and nothing that others have written is
believed or waited for."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from mgpu.providers.hosts import on_host

RECORD = {"name": "aaaaaaaaaa-0", "hard_cap_at": 1_800_000_000}
KEY = "ssh-ed25519 AAAA its comment"


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """This user's, with a base of the host's own beside it."""
    base = tmp_path / "var-tmp"
    base.mkdir()
    mine = base / f"mgpu-hosts-{os.getuid()}"
    places = {"BASE": base, "LOCK": base / "mgpu-hosts.lock", "MINE": mine, "HOLDER": mine / "holder.json"}
    for name, path in {**places, "ENDED": mine / "ended"}.items():
        monkeypatch.setattr(on_host, name, path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_a_key_is_added_below_the_users_and_taken_out_alone(home: Path):
    keys, mine = home / ".ssh" / "authorized_keys", "ssh-rsa BBBB me mgpu-hosts:mine\nssh-rsa CCCC"  # no line's end
    keys.parent.mkdir()
    (home / "elsewhere").write_text(mine)
    (home / "elsewhere").chmod(0o640)
    keys.symlink_to(home / "elsewhere")
    on_host._let_in(RECORD, KEY, "aaaaaaaaaa")
    on_host._let_in({**RECORD, "name": "aaaaaaaaaa-1"}, KEY, "aaaaaaaaaa")
    added = keys.read_text().removeprefix(mine + "\n").splitlines()
    assert [line.rpartition(" ssh-ed25519 ")[2] for line in added] == [
        f"AAAA mgpu-hosts:aaaaaaaaaa-{n}" for n in (0, 1)
    ]
    assert all(line.startswith("restrict,pty,port-forwarding,expiry-time=") for line in added)
    on_host._let_out("aaaaaaaaaa-0")
    assert keys.read_text() == f"{mine}\n{added[1]}\n"
    on_host._let_out("aaaaaaaaaa-1")
    assert keys.read_text() == mine + "\n"
    assert keys.is_symlink()
    assert (home / "elsewhere").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in keys.parent.iterdir()] == ["authorized_keys"], "no lock and no half-written file"


def test_a_user_without_keys_gets_a_file_that_sshd_accepts(home: Path):
    on_host._let_in(RECORD, KEY, "aaaaaaaaaa")
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o700
    assert (home / ".ssh" / "authorized_keys").stat().st_mode & 0o777 == 0o600


def test_a_lock_on_the_keys_whose_owner_has_died_is_broken_after_a_while(home: Path):
    lock = home / ".ssh" / ".mgpu-hosts.lock"
    lock.mkdir(parents=True)
    os.utime(lock, (1, 1))
    on_host._let_in(RECORD, KEY, "aaaaaaaaaa")
    assert "mgpu-hosts:aaaaaaaaaa-0" in (home / ".ssh" / "authorized_keys").read_text()
    assert not lock.exists()


@pytest.mark.parametrize("written", ["pipe", "[1]", '{"watch": ["../1", 2], "boot": "x"}', "{", ""])
def test_what_another_user_has_written_neither_holds_nor_breaks_a_host(home: Path, written):
    theirs = on_host.BASE / "mgpu-hosts-12345"
    theirs.mkdir()
    if written == "pipe":
        os.mkfifo(theirs / "holder.json")
    else:
        (theirs / "holder.json").write_text(written)
    asked = {"verb": "look", "names": []}
    assert on_host.main(asked)["busy"] is None, "the lock says it, and nothing else"
    lock = os.open(on_host.LOCK, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert on_host.main(asked)["busy"] == {}, "somebody has it, and does not say who"
    finally:
        os.close(lock)


def test_a_folder_of_this_users_name_that_somebody_else_has_made_is_refused(home: Path):
    on_host.MINE.symlink_to(home)
    with pytest.raises(OSError, match="not this user's own folder"):
        on_host.main({"verb": "look", "names": []})


def test_containers_of_the_run_go_with_it_and_no_other(home: Path, monkeypatch):
    docker = home / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$*" >> {home}/called\n[ "$1" = ps ] && echo c1 c2\nexit 0\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    on_host._remove_containers(Path("/scratch/x/home"))
    assert (home / "called").read_text().splitlines() == [
        "ps --all --quiet --filter=label=dev.mgpu.home=/scratch/x/home",
        "rm --force --volumes c1 c2",
    ]


def test_a_note_of_an_ended_run_goes_after_a_month(home: Path, monkeypatch):
    on_host.ENDED.mkdir(parents=True)
    for name, age_days in (("old-0", 31), ("new-0", 29)):
        path = on_host.ENDED / f"{name}.json"
        path.write_text("{}")
        then = on_host.time.time() - age_days * 86400
        os.utime(path, (then, then))
    folder = home / "run"
    (folder / "home").mkdir(parents=True)
    monkeypatch.setenv("PATH", "/nowhere")
    on_host._write(on_host.HOLDER, {**RECORD, "folder": str(folder), "watch": None, "boot": on_host._boot()})
    assert on_host._end("aaaaaaaaaa-0", "given back")
    assert {path.stem for path in on_host.ENDED.iterdir()} == {"new-0", "aaaaaaaaaa-0"}
    assert json.loads((on_host.ENDED / "aaaaaaaaaa-0.json").read_text())["ended"] == "given back"
    assert not folder.exists()
