"""What runs on a host, called here: the file of keys is changed with care, and nothing that others have written is
believed or waited for."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest

from mgpu.providers.hosts import on_host

KEY = "ssh-ed25519 AAAA its comment"
# no name that a test beside this one has: `_end` looks at all processes
RECORD = {"name": "0a0a0a0a0a-0", "hard_cap_at": 1_800_000_000, "link": on_host._link(KEY)}


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
    keys = home / ".ssh" / "authorized_keys"
    mine = "ssh-rsa BBBB J\xfcrgen mgpu-hosts:mine\nssh-rsa CCCC"  # no line's end, and no UTF-8
    keys.parent.mkdir()
    (home / "elsewhere").write_text(mine, "latin-1")
    (home / "elsewhere").chmod(0o640)
    keys.symlink_to(home / "elsewhere")
    on_host._let_in(RECORD, KEY)
    on_host._let_in({**RECORD, "name": "0a0a0a0a0a-1"}, KEY)
    added = keys.read_text("latin-1").removeprefix(mine + "\n").splitlines()
    assert [line.rpartition(" ssh-ed25519 ")[2] for line in added] == [
        f"AAAA mgpu-hosts:0a0a0a0a0a-{n}" for n in (0, 1)
    ]
    assert all(line.startswith("restrict,pty,port-forwarding,expiry-time=") for line in added)
    on_host._let_out("0a0a0a0a0a-0")
    assert keys.read_text("latin-1") == f"{mine}\n{added[1]}\n"
    on_host._let_out("0a0a0a0a0a-1")
    assert keys.read_text("latin-1") == mine + "\n"
    assert keys.is_symlink()
    assert (home / "elsewhere").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in keys.parent.iterdir()] == ["authorized_keys"], "no lock and no half-written file"


def test_a_user_without_keys_gets_a_file_that_sshd_accepts(home: Path):
    on_host._let_in(RECORD, KEY)
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o700
    assert (home / ".ssh" / "authorized_keys").stat().st_mode & 0o777 == 0o600


def test_a_lock_on_the_keys_whose_owner_has_died_is_broken_after_a_while(home: Path):
    lock = home / ".ssh" / ".mgpu-hosts.lock"
    lock.mkdir(parents=True)
    os.utime(lock, (1, 1))
    on_host._let_in(RECORD, KEY)
    assert "mgpu-hosts:0a0a0a0a0a-0" in (home / ".ssh" / "authorized_keys").read_text()
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
    docker.write_text(f'#!/bin/sh\necho "$*" >> {home}/called\n[ "$1" = ps ] && echo c1 c2\nexit $(cat {home}/code)\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    run = home / "run" / "home"
    (run / ".mgpu").mkdir(parents=True)
    assert on_host._without_containers(run), "none was begun, and nobody is asked"
    assert not (home / "called").exists()
    (run / ".mgpu" / "container.lock").touch()
    (home / "code").write_text("1")
    assert not on_host._without_containers(run), "they may still be there"
    (home / "called").unlink()
    (home / "code").write_text("0")
    assert on_host._without_containers(run)
    assert (home / "called").read_text().splitlines() == [
        f"ps --all --quiet --filter=label=dev.mgpu.home={run}",
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
    assert on_host._end("0a0a0a0a0a-0", "given back")
    assert {path.stem for path in on_host.ENDED.iterdir()} == {"new-0", "0a0a0a0a0a-0"}
    assert json.loads((on_host.ENDED / "0a0a0a0a0a-0.json").read_text())["ended"] == "given back"
    assert not folder.exists()


def test_what_a_program_has_made_unreadable_goes_too(home: Path):
    deep = home / "run" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (home / "run" / "link").symlink_to(home)
    for path, mode in ((deep, 0o000), (deep.parent, 0o300), (deep.parents[1], 0o500)):
        path.chmod(mode)
    mode = home.stat().st_mode
    assert on_host._removed(home / "run")
    assert home.stat().st_mode == mode, "a link is not followed"


def test_files_that_cannot_be_removed_are_told_and_hold_no_host(home: Path, monkeypatch):
    """A home that is read-only, or a folder that a container has made as root."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    folder = home / "run"
    (folder / "home").mkdir(parents=True)
    on_host.MINE.mkdir()
    on_host._write(on_host.HOLDER, {**RECORD, "folder": str(folder), "watch": None, "boot": on_host._boot()})
    monkeypatch.setattr(on_host.shutil, "rmtree", lambda *_, **__: None)
    monkeypatch.setattr(on_host, "_replace", refused)
    (home / ".ssh").mkdir()
    (home / ".ssh" / "authorized_keys").write_text(f"ssh-rsa AAAA mgpu-hosts:{RECORD['name']}\n")
    assert on_host._end("0a0a0a0a0a-0", "given back")
    assert not on_host.HOLDER.exists()
    told = json.loads((on_host.ENDED / "0a0a0a0a0a-0.json").read_text())["ended"]
    assert told.startswith(f"given back; not removed: {folder}, the run's line in authorized_keys (")


def test_a_full_disk_keeps_nothing_alive_and_the_token_is_used_up(home: Path, monkeypatch):
    def full(path: Path, _: str, **__: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    name = "0a0a0a0a0b-0"
    on_host.MINE.mkdir()
    record = {**RECORD, "name": name, "folder": str(home / "run"), "watch": None, "boot": on_host._boot()}
    on_host._write(on_host.HOLDER, record)
    orphan = ["/bin/sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $!"]  # `_end` spares what is below this process
    trains = int(subprocess.run(orphan, env={on_host.MARK: name}, capture_output=True, check=True).stdout)
    assert on_host._process(trains)
    monkeypatch.setattr(Path, "write_text", full)
    assert on_host._end(name, "given back")
    assert on_host._process(trains) is None
    answer = on_host.main({"verb": "look", "names": [name]})
    assert answer["held"] is None
    assert [(each["name"], each["ended"]) for each in answer["ended"]] == [(name, on_host._FULL)]
    assert {path.name for path in on_host.MINE.iterdir()} == {"ended", "mutex"}, "no half-written file"


@pytest.mark.parametrize("linked", [True, False])
def test_a_host_that_was_taken_just_before_it_lost_its_power_can_be_taken_again(home: Path, linked: bool):
    """The file that says who holds it is there, and empty; what there is of the run goes."""
    folder, name = home / "0a0a0a0a0c-0", "0a0a0a0a0c-0"
    (folder / "home").mkdir(parents=True)
    on_host.MINE.mkdir()
    on_host.HOLDER.touch()
    if linked:
        (on_host.MINE / RECORD["link"]).symlink_to(folder)
        on_host._let_in({**RECORD, "name": name}, KEY)
    answer = on_host.main({"verb": "look", "names": [name]})
    assert (answer["held"], answer["busy"], answer["ended"]) == (None, None, [])
    assert [path.name for path in on_host.MINE.iterdir()] == ["mutex"]
    if linked:
        assert not folder.exists()
        assert (home / ".ssh" / "authorized_keys").read_text() == ""


def test_a_host_that_lost_its_power_is_not_free_while_a_container_of_that_run_is_left(home: Path, monkeypatch):
    """As while Docker does not answer; the next request, and the provider's view of all owners, go on from there."""
    folder = home / "0a0a0a0a0d-0"
    (folder / "home").mkdir(parents=True)
    on_host.MINE.mkdir()
    on_host.HOLDER.touch()
    (on_host.MINE / RECORD["link"]).symlink_to(folder)
    docker = iter((False, False, True))
    monkeypatch.setattr(on_host, "_without_containers", lambda _: next(docker))
    taken = {"verb": "take", "names": [], "record": {"name": "0b0b0b0b0b-0"}, "folder": str(home)}
    for _ in range(2):
        answer = on_host.main(taken)
        assert answer["held"] is None, "nobody knows whose it was"
        assert folder.exists()
        assert not (home / "0b0b0b0b0b-0").exists(), "not taken"
    on_host.main({"verb": "look", "names": []})
    assert not folder.exists()
    assert [path.name for path in on_host.MINE.iterdir()] == ["mutex"]


def test_a_run_whose_file_cannot_be_read_is_left_alone_while_its_watch_lives(home: Path):
    on_host.MINE.mkdir()
    on_host.HOLDER.touch()
    lock = on_host._locked()
    try:
        answer = on_host.main({"verb": "look", "names": []})
    finally:
        os.close(lock)
    assert (answer["held"], answer["busy"]) == (None, {})
    assert on_host.HOLDER.exists()


def test_a_lock_on_the_keys_that_somebody_has_all_the_time_is_not_waited_for_without_end(home: Path, monkeypatch):
    (home / ".ssh" / ".mgpu-hosts.lock").mkdir(parents=True)
    monkeypatch.setattr(on_host.time, "monotonic", iter((0.0, 41.0)).__next__)
    with pytest.raises(FileExistsError):
        on_host._let_in(RECORD, KEY)


def test_a_take_that_was_given_up_takes_nothing(home: Path):
    asked = {"record": {"name": "0a0a0a0a0a-0"}, "since": on_host.time.time() - 61}
    assert on_host._take(asked) == {}
    assert not on_host.HOLDER.exists()
