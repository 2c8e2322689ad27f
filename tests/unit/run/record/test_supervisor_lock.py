"""One supervisor at a time: a dead one holds nothing, a living one loses it by force alone, and then knows it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading

import pytest

from mgpu.run.record import supervisor_lock
from mgpu.run.record.supervisor_lock import Holder, held, hold, holder, taken_from


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_the_lock_names_its_holder_for_this_user_alone(path):
    assert holder(path) is None
    with hold(path) as token:
        found = holder(path)
        assert (found.token, found.pid, found.host) == (token, os.getpid(), socket.gethostname())
        assert found.lives
        assert str(os.getpid()) in str(found)
        assert path.stat().st_mode & 0o077 == 0
        assert held(path)
    assert not held(path)
    with hold(path) as again:
        assert again not in ("", token), "every hold has a token of its own"


def test_who_looks_makes_nothing(path):
    assert not held(path)
    assert not path.exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_holder_that_was_killed_holds_nothing(path, force):
    code = "import sys, time\nfrom pathlib import Path\nfrom mgpu.run.record.supervisor_lock import hold\n"
    code += "with hold(Path(sys.argv[1])) as token:\n    print(token, flush=True)\n    time.sleep(60)\n"
    other = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    token = other.stdout.readline().strip()
    with hold(path) as mine:
        assert mine == "", "it lives"
    assert holder(path).lives
    other.kill()
    other.wait()
    other.stdout.close()
    dead = holder(path)
    assert (dead.token, dead.lives) == (token, False)
    with hold(path, force=force) as mine:
        assert mine


def test_by_force_the_lock_changes_hands_and_the_old_holder_sees_it(path):
    with hold(path) as old:
        assert taken_from(path, old) is None
        with hold(path, force=True) as new:
            assert new not in ("", old)
            assert taken_from(path, old).token == new
            assert taken_from(path, new) is None
            with hold(path) as third:
                assert third == "", "the new one's hold is as good as any"
        assert taken_from(path, old), "it does not come back when the new one has ended"
    assert not held(path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock"]


def test_the_end_of_the_old_hold_does_not_end_the_new_one(path):
    first = hold(path)
    first.__enter__()
    with hold(path, force=True):
        first.__exit__(None, None, None)
        assert held(path)


def test_a_file_that_is_replaced_between_open_and_lock_is_not_taken_for_the_lock(path, monkeypatch):
    """Two would hold it: one the old file, one the new."""
    with hold(path):
        pass
    seizing, flock = [], fcntl.flock

    def seized_meanwhile(handle, how):
        if not seizing:
            seizing.append(None)
            seizing.append(supervisor_lock._seize(path, "the-new-one"))
        return flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", seized_meanwhile)
    with hold(path) as token:
        assert token == ""
    assert holder(path).token == "the-new-one"
    seizing[1].close()


def test_who_only_looks_turns_no_supervisor_away(path):
    with hold(path):
        pass
    with path.open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert not held(path), "another one that looks is no holder"
        threading.Timer(supervisor_lock.PAUSE_S * 1.5, lambda: fcntl.flock(look, fcntl.LOCK_UN)).start()
        with hold(path) as token:
            assert token


def test_a_full_disk_keeps_nobody_from_taking_a_run_that_nobody_holds(path, monkeypatch):
    with hold(path) as dead:
        assert dead

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(supervisor_lock.json, "dumps", full)
        with hold(path) as token:
            assert token
            assert taken_from(path, token) is None
            with pytest.raises(OSError, match="No space"), hold(path, force=True):
                pytest.fail("nobody could see that it was taken")
            assert [p.name for p in path.parent.iterdir()] == ["lock"]


def test_on_a_full_disk_the_lock_is_let_go_of_without_a_word(path):
    code = "import resource, signal, sys\nfrom pathlib import Path\nfrom mgpu.run.record.supervisor_lock import hold\n"
    code += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    code += "with hold(Path(sys.argv[1])) as token:\n    print(bool(token), flush=True)\n"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize(
    "changes", [{"start_ticks": 1}, {"boot_id": "another boot"}, {"host": "another"}, {"pid": 2**22 + 1}]
)
def test_a_pid_alone_is_nobody(path, changes):
    with hold(path):
        me = holder(path)
    assert me.lives
    assert not Holder(**{**me.__dict__, **changes}).lives


@pytest.mark.parametrize("text", ["", "{", "[]", '{"token": "x"}', "\0" * 10])
def test_what_cannot_be_read_names_nobody(path, text):
    path.write_text(text)
    assert holder(path) is None
    assert taken_from(path, "mine") is None
    with hold(path) as token:
        assert holder(path).token == token
