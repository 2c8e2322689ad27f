"""Locks and orphans without an engine: processes that are called `pulumi`, with the marks that an engine inherits."""

from __future__ import annotations

import gzip
import json
import os
import pwd
import resource
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from mgpu_train.agent.machine import procs
from mgpu_train.store import open_store

from mgpu.backend import location
from mgpu.backend.location import Backend
from mgpu.errors import StackError
from mgpu.events import Note, ignore
from mgpu.iac.engine import locks, operations, state_file
from mgpu.iac.engine.process import CliProcess, note
from mgpu.spec.block import MOST_HOURS

PLACE = "/backend:project/stack"
WAITS = 'exec 3<>"$0"; echo ready; while :; do read nothing <&3; done'  # a fork of it would be called `pulumi` too
SAVES = "trap 'sleep 0.1; echo saved; exit 1' INT; trap 'echo killed; exit 2' TERM; " + WAITS
DEAF = "trap '' INT TERM; " + WAITS


def value(driver: procs.Process, place: str = PLACE) -> str:
    return f"{driver.pid}:{driver.start_ticks}:{driver.boot_id}:{place}"


@pytest.fixture
def dead():
    """A process that has ended."""
    child = subprocess.Popen(["/bin/sleep", "100"])
    process = procs.of(child.pid)
    child.kill()
    child.wait()
    return process


@pytest.fixture
def start(tmp_path):
    """`start(name, script, mark)`: a process that is called `name`, with a driver's mark or without one."""
    children = []

    def call(name="pulumi", script=WAITS, mark=None):
        env = os.environ | ({operations.MARK: mark} if mark else {})
        out, fifo = (tmp_path / f"{kind}-{len(children)}" for kind in ("out", "fifo"))
        os.mkfifo(fifo)
        with out.open("wb") as file:
            child = subprocess.Popen(
                [f"/somewhere/{name}", "-c", script, fifo],
                executable="/bin/sh",
                env=env,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell cannot trap an ignored one
            )
        children.append(child)
        # asleep in `read`: a shell that is hit between its last look at its signals and `read` sleeps on, untrapped
        wait_until(lambda: b"ready" in out.read_bytes() and asleep(child.pid))
        child.out = out
        return child

    yield call
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def wait_until(condition, limit_s=10):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def make_way(xdg):
    """Clears the stack of what died, with a lock of each pid that was given; what was said."""
    prefix = state_file.lock_prefix("p", "s")
    folder = location.current().folder / prefix
    folder.mkdir(parents=True)
    said = []

    def lock(pid, **changes):
        mine = {
            "pid": pid,
            "username": pwd.getpwuid(os.getuid()).pw_name,
            "hostname": socket.gethostname(),
            "timestamp": "2026-11-21T12:00:00.1+01:00",
        }
        path = folder / f"lock-{len(list(folder.iterdir()))}.json"
        path.write_text(json.dumps(mine | changes))
        return path

    def call(save_s=5.0, **more):
        operations.end_orphans(PLACE, emit=said.append, save_s=save_s, **more)
        locks.release_dead(prefix, PLACE, "stack", said.append)

    call.lock, call.folder, call.said = lock, folder, said
    return call


# ---- locks


def test_the_lock_of_a_process_that_is_gone_is_broken_and_no_other_file_touched(make_way, dead):
    path = make_way.lock(dead.pid)
    other = make_way.folder / "note.txt"
    other.write_text("")
    make_way()
    assert not path.exists()
    assert other.exists()
    assert isinstance(make_way.said[0], Note)
    assert str(dead.pid) in make_way.said[0].text


def test_a_containers_user_without_a_name_is_who_its_environment_says(make_way, dead, monkeypatch):
    theirs, ours = make_way.lock(dead.pid, username="somebody"), make_way.lock(dead.pid, username="me")

    def nameless(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    monkeypatch.setenv("USER", "me")
    with pytest.raises(StackError, match="somebody"):
        make_way()
    theirs.unlink()
    make_way()
    assert not ours.exists()


def test_the_lock_of_a_number_that_another_program_has_now_is_broken(make_way, start):
    path = make_way.lock(start("sleep").pid)
    make_way()
    assert not path.exists()


def test_the_lock_of_a_cli_that_is_at_work_is_respected_and_named(make_way, start, dead):
    cli = start()
    paths = [make_way.lock(dead.pid), make_way.lock(cli.pid)]
    with pytest.raises(StackError) as refused:
        make_way()
    assert f"process {cli.pid} of " in refused.value.what
    assert socket.gethostname() in refused.value.what
    assert "2026-11-21T12:00" in refused.value.what
    assert refused.value.exit_code == 4
    assert refused.value.next_step
    assert [path.exists() for path in paths] == [False, True]
    assert cli.poll() is None


def test_the_lock_of_a_number_that_a_cli_of_another_stack_has_now_is_broken(make_way, start):
    other = start(mark=value(procs.me(), "/backend:project/other"))
    path = make_way.lock(other.pid)
    make_way()
    assert not path.exists()
    assert other.poll() is None


@pytest.mark.parametrize("changes", [{"hostname": "elsewhere"}, {"username": "somebody"}], ids=str)
def test_what_cannot_be_judged_from_here_is_respected(make_way, dead, changes):
    path = make_way.lock(dead.pid, **changes)
    with pytest.raises(StackError, match=next(iter(changes.values()))) as refused:
        make_way()
    assert "pulumi cancel" in refused.value.next_step
    assert path.exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"pid": 1}', '{"pid": true, "username": "a", "hostname": "b", "timestamp": "c"}', "\xff"],
)
def test_a_lock_that_nobody_can_read_is_respected(make_way, text):
    path = make_way.folder / "x.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(StackError, match="nobody knows by whom") as refused:
        make_way()
    assert str(path) in refused.value.why
    assert path.exists()


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """`bucket(pid)`: the lock of a process whose host has this one's name, on a stack in a bucket, which is a folder
    here; and `bucket.make_way`."""
    monkeypatch.setattr(Backend, "_store", lambda _, address: open_store(f"file://{tmp_path}/{address[5:]}"))
    monkeypatch.setenv(location.VARIABLE, "s3://team")
    prefix = state_file.lock_prefix("p", "s")

    def lock(pid, **changes):
        path = tmp_path / "team" / prefix / "a.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = {"pid": pid, "username": pwd.getpwuid(os.getuid()).pw_name, "hostname": socket.gethostname()}
        path.write_text(json.dumps(mine | {"timestamp": "yesterday"} | changes))
        return path

    lock.make_way = lambda *lost: locks.release_dead(prefix, PLACE, "stack", ignore, lost)
    return lock


def test_a_process_that_this_machine_has_not_started_may_be_one_of_another_machine_of_its_name(bucket, dead):
    """Containers often have equal names: what is at work in the other one is not seen here."""
    path = bucket(dead.pid)
    with pytest.raises(StackError, match="another machine's that has this one's name") as refused:
        bucket.make_way()
    assert "pulumi cancel" in refused.value.next_step
    assert path.exists()
    bucket.make_way(socket.gethostname())  # whoever was there has lost the stack
    assert not path.exists()


@pytest.mark.parametrize(
    "script",
    ["date -Ins; kill -9 $$", "date -Ins; exit 255", "date -Ins"],
    ids=["killed", "failed", "a bucket that did not take the lock's end"],
)
def test_of_one_that_this_machine_has_had_it_knows(bucket, tmp_path, script):
    cli, out, written = CliProcess(grace_s=1), tmp_path / "out", {"encoding": "utf-8"}
    with out.open("wb") as said:
        given = {"cwd": tmp_path, "env": os.environ, "out": said, "err": said, "limit_s": 10.0}
        cli.run(["/bin/sh", "-c", f"echo $$; {script}"], **given)
    pid, then = out.read_text(**written).replace(",", ".").split()
    began = datetime.fromisoformat(then)
    for other in (began - timedelta(minutes=1), began + timedelta(minutes=1)):  # by one of another machine's
        path = bucket(int(pid), timestamp=other.isoformat())
        with pytest.raises(StackError, match="another machine's"):
            bucket.make_way()
    path = bucket(int(pid), timestamp=then)
    bucket.make_way()
    assert not path.exists()
    bucket(int(pid), timestamp=then)
    with pytest.raises(StackError):  # its lock is gone by now: another's
        bucket.make_way()


def test_what_is_known_of_processes_that_have_ended_is_not_kept_for_ever(xdg, tmp_path):
    old, young = note(1), note(2)
    old.parent.mkdir(parents=True)
    for path, days in ((old, 91), (young, MOST_HOURS / 24 + 1)):  # met by the end of a run that long
        path.touch()
        os.utime(path, (time.time() - days * 86400,) * 2)
    with (tmp_path / "out").open("wb") as out:
        given = {"cwd": tmp_path, "env": os.environ, "out": out, "err": out, "limit_s": 10.0}
        CliProcess(grace_s=1).run(["/bin/true"], **given)
    assert [path.exists() for path in (old, young)] == [False, True]


def test_a_disk_that_is_full_at_its_end_takes_away_nothing_that_was_known_of_it(bucket, xdg, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        (tmp_path / "full").touch()

    script = "echo $$; date -Ins; until [ -e full ]; do sleep 0.01; done; exit 255"
    with (tmp_path / "out").open("wb") as said:
        given = {"cwd": tmp_path, "env": os.environ, "out": said, "err": said, "limit_s": 10.0, "look": full}
        try:
            CliProcess(grace_s=1).run(["/bin/sh", "-c", script], **given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    pid, then = (tmp_path / "out").read_text(encoding="utf-8").replace(",", ".").split()
    path = bucket(int(pid), timestamp=then)
    bucket.make_way()
    assert not path.exists()
    assert not list(note(1).parent.iterdir()), "no half-written file"


@pytest.mark.parametrize("changes", [{}, {"username": "somebody"}], ids=str)
def test_one_that_is_at_work_is_respected_whoever_had_the_name(bucket, start, changes):
    path = bucket(start().pid, **changes)
    with pytest.raises(StackError, match="at work"):
        bucket.make_way(socket.gethostname())
    assert path.exists()


def test_no_locks_no_words(make_way):
    make_way()
    make_way.folder.rmdir()
    make_way()
    assert make_way.said == []


# ---- orphans


def test_a_cli_whose_driver_died_is_cancelled_once_and_may_save(make_way, start, dead):
    cli = start(script=SAVES, mark=value(dead))
    path = make_way.lock(cli.pid)
    reaper(cli)
    make_way()
    assert cli.out.read_text().split() == ["ready", "saved"]
    assert not path.exists()


def test_a_cli_that_does_not_obey_is_killed_when_its_time_is_over_and_not_before(make_way, start, dead):
    cli = start(script=DEAF, mark=value(dead))
    reaper(cli)
    began = time.monotonic()
    make_way(save_s=0.5)
    assert cli.wait() == -signal.SIGKILL
    assert time.monotonic() - began >= 0.5


def test_a_stopped_orphan_is_woken_to_save(make_way, start, dead):
    cli = start(script=SAVES, mark=value(dead))
    os.kill(cli.pid, signal.SIGSTOP)
    reaper(cli)
    make_way()
    assert "saved" in cli.out.read_text()


def test_a_cli_whose_driver_lives_is_not_touched(make_way, start):
    driver = procs.of(start("mgpu").pid)
    cli, host = start(mark=value(driver)), start("pulumi-language-python", mark=value(driver))
    make_way.lock(cli.pid)
    with pytest.raises(StackError, match=f"process {cli.pid}"):
        make_way()
    assert cli.poll() is None
    assert host.poll() is None


def test_a_cli_whose_driver_lives_but_has_lost_the_stack_is_cancelled_and_may_save(make_way, start):
    driver, other = procs.of(start("mgpu").pid), procs.of(start("mgpu").pid)
    cli, host = start(script=SAVES, mark=value(driver)), start("pulumi-language-python", mark=value(driver))
    spared = start("pulumi-language-python", mark=value(other))
    path = make_way.lock(cli.pid)
    reaper(cli)
    reaper(host)
    make_way(ousted=driver)
    assert "saved" in cli.out.read_text()
    assert host.wait() == -signal.SIGTERM
    assert not path.exists()
    assert driver.alive
    assert spared.poll() is None


def test_what_a_dead_cli_left_behind_is_ended_whoever_drove_it(make_way, start, dead):
    hosts = [start("pulumi-language-python", mark=value(driver)) for driver in (dead, procs.me())]
    deaf = start("pulumi-language-python", script=DEAF, mark=value(dead))
    for child in (*hosts, deaf):
        reaper(child)
    make_way()
    assert [child.wait() for child in (*hosts, deaf)] == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL]


def test_what_belongs_to_others_is_not_touched(make_way, start, dead):
    living = procs.of(start("mgpu").pid)
    spared = [
        start(),  # of a user's own shell: no mark
        start("pulumi-language-python"),
        start("pulumi-language-python", mark=value(living)),  # its CLI has just ended, its driver will look after it
        start(mark=value(dead, "/backend:project/stack2")),
        start(mark=value(dead, "/other:project/stack")),
        start(mark="0:x:y"),
        start(mark=PLACE),
    ]
    at_work = [start(mark=value(procs.me())), start("pulumi-language-python", mark=value(procs.me()))]
    make_way()
    assert [child.poll() for child in (*spared, *at_work)] == [None] * 9
    assert make_way.said == []


def test_a_wait_for_an_orphan_can_be_given_up(start, dead):
    cli = start(script=DEAF, mark=value(dead))
    operations.end_orphans(PLACE, emit=print, save_s=1e9, given_up=lambda: True)
    assert cli.poll() is None


def test_what_this_process_has_at_work_is_abandoned_and_nothing_else(start, dead):
    mine = [start(script=DEAF, mark=value(procs.me())), start("pulumi-resource-mgpu", mark=value(procs.me()))]
    others = [start(mark=value(dead)), start(mark=value(procs.me(), "/backend:project/stack2")), start()]
    operations.abandon(PLACE)
    assert [each.wait(60) for each in mine] == [-signal.SIGKILL] * 2
    assert [each.poll() for each in others] == [None] * 3


def test_a_process_that_nothing_ends_is_named(start, dead, monkeypatch):
    host = start("pulumi-language-python", mark=value(dead))
    monkeypatch.setattr(procs.Process, "send", lambda *_: True)  # as if it hung in the kernel
    now = [0.0]
    with pytest.raises(StackError, match=str(host.pid)):
        operations.end_orphans(
            PLACE, emit=print, save_s=1, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)
        )


def reaper(child):
    """Takes leave of a child as init does of orphans, as soon as it ends."""
    threading.Thread(target=child.wait, daemon=True).start()


# ---- pending operations


@pytest.mark.parametrize("packed", [False, True])
def test_creates_that_were_cut_off_are_read_from_the_state_file(xdg, packed):
    operations_ = [{"type": kind, "resource": {"urn": kind}} for kind in ("creating", "updating", "deleting")]
    state = json.dumps({"version": 3, "checkpoint": {"latest": {"pending_operations": operations_}}}).encode()
    folder = xdg / "state/mgpu/pulumi/.pulumi/stacks/p"
    folder.mkdir(parents=True)
    (folder / f"s.json{'.gz' if packed else ''}").write_bytes(gzip.compress(state) if packed else state)
    assert state_file.pending_creates("p", "s") == ("creating",)
    assert state_file.pending_creates("p", "absent") == ()


PACKED = gzip.compress(b'{"checkpoint": {}}', mtime=0)
UNREADABLE = {
    "nothing": b"",
    "half": b"{",
    "null": b"null",
    "empty": b'{"checkpoint": {}}',
    "no latest": b'{"checkpoint": {"latest": null}}',
    "half packed": PACKED[:15],
    "packed and damaged": PACKED[:10] + b"\xff" * 9,
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
def test_a_state_that_cannot_be_read_is_left_to_the_cli(xdg, data):
    folder = xdg / "state/mgpu/pulumi/.pulumi/stacks/p"
    folder.mkdir(parents=True)
    (folder / "s.json").write_bytes(data)
    assert state_file.fleets("p", "s") == frozenset()
    assert state_file.pending_creates("p", "s") == ()


def test_attributes_that_a_killed_cli_cut_off_are_dropped_and_nothing_else(xdg):
    folder = xdg / "state/mgpu/pulumi/.pulumi/stacks/p"
    folder.mkdir(parents=True)
    whole = {"s.json": "{}", "s.json.bak.attrs": '{"md5": "x"}', "other.json.attrs": ""}
    for name, text in {**whole, "s.json.attrs": "", "s.json.gz.attrs": '{"md5": '}.items():
        (folder / name).write_text(text)
    state_file.drop_torn_attributes("p", "s")
    assert {path.name: path.read_text() for path in folder.iterdir()} == whole
