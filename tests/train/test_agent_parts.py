"""The agent's small parts: lease, log, metrics, local checkpoints, processes, command lines."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from mgpu_train.__main__ import main
from mgpu_train.agent import start
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.host import python_env
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import identity, kernel_log, network, ports, procs
from mgpu_train.agent.machine.lease import Lease
from mgpu_train.agent.machine.network import route_to
from mgpu_train.agent.phases import data, launcher_process, requirements, resume
from mgpu_train.agent.status.log import Log, LogTimes, clean, hide, last_words, tail
from mgpu_train.agent.status.report import StatusReport
from mgpu_train.agent.status.report import read as read_status
from mgpu_train.agent.status.status import Fault, Phase
from mgpu_train.agent.status.tail import MetricsTail, Progress
from mgpu_train.agent.uploads import saves
from mgpu_train.checkpoint.formats.shards import Piece, Shards
from mgpu_train.checkpoint.local import finished
from mgpu_train.config import DataItem, Job, Resume, Secrets, TrainConfig
from mgpu_train.errors import Refused
from mgpu_train.launchers import Launcher
from mgpu_train.store import Unavailable, disk, open_store
from mgpu_train.store.base import ASIDE
from mgpu_train.system import prctl
from mgpu_train.timeouts import Timeouts
from waiting import until

RUN = "run-1"  # of the fixture `run`


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- lease ---------------------------------------------------------------------------------------------------------


def test_a_lease_is_a_whole_second_since_boot_and_renewed_at_most_every_so_often(tmp_path):
    now = [1000.7]
    lease = Lease(tmp_path / "lease", lease_s=900, renew_s=20, uptime=lambda: now[0])
    assert lease.renew()
    assert (tmp_path / "lease").read_text() == "1900\n"
    now[0] += 19
    assert not lease.renew()
    now[0] += 1
    assert lease.renew()
    assert (tmp_path / "lease").read_text() == "1920\n"
    assert names(tmp_path) == ["lease"]


def test_a_lease_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with pytest.raises(OSError, match="no-such"):
        Lease(tmp_path / "no-such" / "lease", lease_s=1, renew_s=1).renew()


def test_without_a_file_there_is_no_lease():
    assert not Lease(None, lease_s=1, renew_s=1).renew()


# --- log -----------------------------------------------------------------------------------------------------------


def test_the_agents_lines_are_marked_whole_and_counted(tmp_path):
    log = Log(tmp_path / "log")
    os.write(log.fd, b"no newline")
    log.say("one\r\n\x1b]52;c;AAAA\x07two\x1b[31m three\u202e")
    data = (tmp_path / "log").read_bytes()
    assert data == b"no newline\n[agent] one two three\n"
    assert log.own == len(data) - len(b"no newline")


def test_a_line_that_a_program_writes_in_pieces_stays_whole(tmp_path):
    pieces = [b"canary", b" ", b"work\n"]
    log = Log(tmp_path / "log", sleep=lambda s: os.write(log.fd, pieces.pop(0)))
    os.write(log.fd, b"token ")
    log.say("attempt 1: training")
    assert (tmp_path / "log").read_bytes() == b"token canary work\n[agent] attempt 1: training\n"


def test_a_line_that_is_never_ended_does_not_hold_the_agents_up(tmp_path):
    slept: list[float] = []
    log = Log(tmp_path / "log", sleep=slept.append)
    os.write(log.fd, b"\r 40%")  # a bar
    log.say("attempt 1: stopping")
    log.say("attempt 1: stopped")
    assert (tmp_path / "log").read_bytes() == b"\r 40%\n[agent] attempt 1: stopping\n[agent] attempt 1: stopped\n"
    assert 0 < sum(slept) <= 0.05


def test_the_log_has_a_mark_for_each_second_in_which_it_grew(tmp_path):
    log, now = Log(tmp_path / "log"), [100.0]
    os.write(log.fd, b"of an earlier attempt\n")  # 22 bytes
    times = LogTimes(log, tmp_path / "log.times", clock=lambda: now[0])
    told = lambda: (tmp_path / "log.times").read_text().splitlines()  # noqa: E731
    times.mark()
    assert told() == [], "nothing has come"
    for at, text in ((101.0, b"a\n"), (101.5, b"b\n"), (102.25, b""), (103.0, b"")):
        now[0] = at
        os.write(log.fd, text)
        times.mark()
    assert told() == ["24 101.0", "26 102.2"]
    os.write(log.fd, b"c\n")
    now[0] = 103.1
    times.mark(at_once=True)
    now[0] = 50.0  # set back
    os.write(log.fd, b"d\n")
    times.mark()
    assert told()[2:] == ["28 103.1", "30 50.0"]


def test_a_long_line_is_cut():
    assert clean("x" * 50, 10) == "xxxxxxx..."


def test_secrets_are_hidden_longest_first():
    assert hide("a=hunter22 b=hunter2 c=abc", ["hunter2", "hunter22", "abc"]) == "a=*** b=*** c=abc"


CHILD_FAILED = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
KILLED = "Signal 9 (SIGKILL) received by PID 7"
TORCHRUN = "E1124 10:57:46.053000 2134 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 7)"
PEER = "RuntimeError: [/gloo/pair.cc] Connection closed by peer"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("starting\nsome last line\n\n", "some last line"),
        ("Traceback (most recent call last):\n  File\nValueError: bad shape\n[agent] x\n", "ValueError: bad shape"),
        (f"[rank1]: KeyError: 'a'\n{CHILD_FAILED}: \n====\n", "[rank1]: KeyError: 'a'"),
        (f"ValueError: first\n{PEER}\n", "ValueError: first"),
        (f"{PEER}\n", PEER),
        (f"{CHILD_FAILED}: \n=====\n  traceback : {KILLED}\n=====\n", KILLED),
        (f"{PEER}\n  traceback : {KILLED}\n", KILLED),
        (f"{PEER}\n  traceback : Signal 15 (SIGTERM) received by PID 7\n", PEER),
        (f"ValueError: x\n  traceback : {KILLED}\n", "ValueError: x"),
        ("so far so good\n=====\n", "so far so good"),
        (f"loss is nan{TORCHRUN}\ntorchrun: rank 0 ended with exit code 7 (pid 8)\n", "loss is nan"),
        (f"{TORCHRUN}\nloss is nantorchrun: rank 0 ended with exit code 7 (pid 8)\n", "loss is nan"),
    ],
)
def test_last_words(tmp_path, text, words):
    log = Log(tmp_path / "log")
    os.write(log.fd, b"OldError: of another attempt\n")
    begin = log.size
    os.write(log.fd, text.encode())
    assert last_words(tail(log, begin)) == words


def test_last_words_are_found_in_a_log_that_was_emptied_meanwhile(tmp_path):
    log = Log(tmp_path / "log")
    os.write(log.fd, b"OldError: of another attempt, which was longer\n")
    begin = log.size
    os.truncate(log.path, 0)
    os.write(log.fd, b"step 1\nValueError: bad shape\n")
    assert last_words(tail(log, begin)) == "ValueError: bad shape"


def test_last_words_of_a_gigantic_line_of_garbage_are_short(tmp_path):
    log = Log(tmp_path / "log")
    os.write(log.fd, b"\xff\x1b[2J" * 100_000)
    words = last_words(tail(log, 0))
    assert 0 < len(words) <= 300
    assert "\x1b" not in words


# --- metrics -------------------------------------------------------------------------------------------------------


def line(**values) -> bytes:
    return json.dumps(values).encode() + b"\n"


def test_a_torn_line_is_kept_until_it_is_whole_and_older_attempts_are_not_read(tmp_path):
    file = tmp_path / "rank-0.jsonl"
    file.write_bytes(line(kind="step", step=7))
    tail = MetricsTail(tmp_path)
    assert list(tail.poll()) == []
    whole = line(kind="step", step=8)
    with file.open("ab") as out:
        out.write(whole[:9])
    assert list(tail.poll()) == []
    with file.open("ab") as out:
        out.write(whole[9:] + b"nonsense\n[1]\n")
    assert list(tail.poll()) == [{"kind": "step", "step": 8, "rank": 0}]
    assert list(tail.poll()) == []


def test_a_program_that_begins_its_metrics_anew_is_read_from_there(tmp_path):
    """`open(path, "w")` in each attempt: what it writes was passed over until it was as much as before."""
    file = tmp_path / "rank-0.jsonl"
    file.write_bytes(line(kind="step", step=7) * 9)
    tail = MetricsTail(tmp_path)
    file.write_bytes(line(kind="step", step=1) + b'{"kind": "st')
    assert [each["step"] for each in tail.poll()] == [1]
    file.write_bytes(line(kind="step", step=2))
    assert [each["step"] for each in tail.poll()] == [2], "the rest of a line is none of the new file's"


def test_an_endless_line_takes_bounded_memory_and_does_not_hide_what_follows(tmp_path):
    tail = MetricsTail(tmp_path)
    (tmp_path / "rank-0.jsonl").write_bytes(b"[" * (5 << 20) + b"\n" + line(kind="step", step=1))
    found = list(tail.poll())
    assert found == [{"kind": "step", "step": 1, "rank": 0}]
    assert all(len(torn) <= 1 << 16 for torn in tail._torn.values())


def test_progress_is_a_new_step_only():
    progress = Progress()
    assert progress.take({"kind": "step", "step": 3, "steps": 9, "loss": 2.5, "tokens_per_s": 10})
    assert not progress.take({"kind": "step", "step": 3, "loss": 2.0})
    assert not progress.take({"kind": "step", "step": 2, "loss": 9.0})
    assert not progress.take({"kind": "step", "step": "4"})
    assert not progress.take({"kind": "validation", "step": 3, "loss": 4.0})
    assert not progress.take({"kind": "validation", "step": 3, "loss": 3.0})
    assert progress.take({"kind": "step", "step": 4, "loss": float("nan")})
    assert not progress.take({"kind": "end", "reason": "done"})
    assert progress.ended == "done"
    assert progress.fields == {
        "step": 4,
        "steps": 9,
        "metrics": {
            "loss": 2.0,
            "tokens_per_s": 10.0,
            "validation_loss": 3.0,
            "validation_step": 3.0,
        },
        "first_metrics": {"validation_loss": 4.0},
    }


def test_a_rank_that_lives_has_made_progress_only_where_it_has_done_more():
    progress = Progress()

    def signs(kind: str, rank: int = 0, **said) -> bool:
        before = progress.signs
        progress.take({"kind": kind, "rank": rank, **said})
        return progress.signs > before

    building = {"phase": "building", "step": 0, "done": 1}
    assert signs("phase", phase="building")
    assert signs("alive", **building)
    assert not signs("alive", **building)
    assert signs("alive", rank=1, **building), "another rank"
    assert signs("alive", **{**building, "phase": "training", "done": 2})
    assert progress.stage == "training", "the line that says when a phase begins may be lost on a full disk"
    assert not signs("alive", rank=1, **building)
    assert progress.stage == "training", "a rank that stands still does not say where the attempt is"
    assert not signs("alive", **{**building, "step": 0, "done": 0})
    assert signs("alive", phase="training", step=1, done=0)
    assert signs("alive", step=1), "of a program that does not count its work"
    assert signs("step", step=1)


@pytest.mark.parametrize("said", [{}, {"starved": True}, {"damaged": "a001-step-1"}], ids=str)
def test_a_status_of_another_version_can_be_read(layout, said):
    """An agent is as new as who launched it; whoever attaches later may be older, or newer."""
    told, path = StatusReport(job(), layout), Path(layout.status)
    told.enter(Phase.FAILED, **said)
    whole = json.loads(path.read_text())
    later = {name: whole[name] for name in ("starved", "damaged") if name in whole}
    assert later == said, "an operator of before has no such key, and refuses what it does not know"
    path.write_text(json.dumps({**whole, "of_tomorrow": 1}))
    assert read_status(path) == told.status


def test_metrics_of_odd_types_leave_a_status_that_can_be_read():
    progress = Progress()
    progress.take({"kind": "validation", "step": "three", "loss": 4.0})
    progress.take({"kind": "step", "step": 1, "loss": 10**400})
    progress.take({"kind": "start", "world_size": 2, "unigram_entropy": 3.5, "ok": True, "a b": 1, "nested": {"x": 1}})
    values = {"validation_loss": 4.0, "unigram_entropy": 3.5}
    assert progress.fields == {"step": 1, "metrics": values, "first_metrics": {"validation_loss": 4.0}}


@pytest.mark.parametrize("data", [b"", b"no json\n", b"[1]\n", b'{"kind": "start", "x": "y"}\n', b"\xff\xfe\n", b"{"])
def test_whatever_a_program_writes_as_metrics_it_is_no_crash(tmp_path, data):
    tail, progress = MetricsTail(tmp_path), Progress()
    (tmp_path / "rank-0.jsonl").write_bytes(data)
    for each in tail.poll():
        progress.take(each)
    assert progress.fields == {"step": -1}


def test_a_program_has_metrics_under_its_own_names_and_not_without_end():
    progress = Progress()
    progress.take({"kind": "step", "step": 1, "acc/top-1": 0.5, **{f"m{n}": n for n in range(1000)}})
    progress.take({"kind": "step", "step": 2, "acc/top-1": 0.75, "one more": 1})
    assert (len(progress.fields["metrics"]), progress.fields["metrics"]["acc/top-1"]) == (256, 0.75)


def test_every_rank_tells_of_a_save_and_it_counts_once():
    saves = (progress := Progress()).saves
    assert (saves.fields, saves.lasted) == ({}, [])
    for rank_s in (0.5, 4.0, 3.0):  # a save stands when the slowest has written
        progress.take({"kind": "checkpoint", "step": 5, "stall_s": 0.1, "save_s": rank_s})
    for kind in ("save_skipped", "save_failed", "save_failed", "save_skipped"):
        progress.take({"kind": kind, "step": 10, "reason": "No space left on device"})
    progress.take({"kind": "save_failed", "step": 15, "reason": "Read-only file system"})
    assert saves.lasted == [4.0]
    assert saves.fields == {
        "stall_s": 0.1,
        "save_s": 3.0,
        "save_failed": 2,
        "save_skipped": 1,
        "save_problem": "step-15 was not saved: Read-only file system",
    }


@pytest.mark.parametrize("kind", [["checkpoint"], {}, None, "checkpoint", "save_failed", "save_skipped"], ids=repr)
def test_what_is_odd_about_a_save_says_nothing_of_it(kind):
    progress = Progress()
    for step in ("5", None, True, 5.0):
        progress.take({"kind": kind, "step": step, "stall_s": 1.0, "save_s": 1.0})
    progress.take({"kind": "checkpoint", "step": 5, "stall_s": "long", "save_s": -1})
    assert (progress.saves.fields, progress.saves.lasted) == ({}, [])


# --- local checkpoints ---------------------------------------------------------------------------------------------


def test_what_may_go():
    assert saves.superfluous([1, 2, 3, 4, 5], uploading=2) == [1, 3]
    assert saves.superfluous([1, 2], uploading=None) == []


def test_tidying_keeps_the_newest_and_what_is_under_way_and_clearing_leaves_nothing(tmp_path):
    for step in range(1, 6):
        (tmp_path / f"step-{step}" / "deep").mkdir(parents=True)
    (tmp_path / ".tmp-step-6").mkdir()
    assert saves.tidy(tmp_path, 1) == [1, 2, 3, 4, 5]
    assert names(tmp_path) == [".tmp-step-6", "step-1", "step-4", "step-5"]
    saves.clear(tmp_path)
    assert names(tmp_path) == []


def test_whoever_is_killed_while_clearing_leaves_no_checkpoint_that_looks_whole(tmp_path, monkeypatch):
    """Found by a random kill: `step-1` without some of its files."""
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "a").touch()

    def killed(path):
        if not path.name.startswith("."):
            (path / "a").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, **_kwargs: killed(path) if path.exists() else None)
        with pytest.raises(KeyboardInterrupt):
            saves.clear(tmp_path)
    assert [step for step, path in finished(tmp_path) if not (path / "a").exists()] == []
    saves.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- processes -----------------------------------------------------------------------------------------------------


def test_a_process_is_known_by_more_than_its_pid():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        known = procs.of(child.pid)
        assert known is not None
        stranger = procs.Process(known.pid, known.start_ticks + 1, known.boot_id)
        assert not stranger.alive
        assert not stranger.send(signal.SIGKILL)
        assert known.alive
        assert known.send(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert not known.alive
    assert not known.send(signal.SIGKILL)


def test_a_tree_is_found_across_sessions_and_killed_to_the_last():
    # child -> grandchild in a session of its own, as torchrun starts its ranks
    code = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
    child = subprocess.Popen([sys.executable, "-c", f"import subprocess, sys, time; {code}; time.sleep(60)"])
    try:
        end = time.monotonic() + 20
        while len(found := procs.descendants(child.pid)) < 1 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(found) == 1
        assert procs.kill_all(lambda: procs.descendants(child.pid), 10)
        assert not found[0].alive
    finally:
        child.kill()
        child.wait()


def test_what_another_user_runs_is_left_and_keeps_nobody_waiting(monkeypatch):
    """`sudo ... &` below an agent that is not root."""
    child = subprocess.Popen(["sleep", "60"])
    refused, send = procs.of(child.pid), signal.pidfd_send_signal
    ours = subprocess.Popen(["sleep", "60"])

    def signals(fd: int, number: int) -> None:
        if f"Pid:\t{child.pid}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        send(fd, number)

    monkeypatch.setattr(signal, "pidfd_send_signal", signals)
    try:
        below = [refused, procs.of(ours.pid)]
        assert not procs.kill_all(lambda: [each for each in below if each.alive], 3600)
        assert refused.alive
        assert ours.wait() == -signal.SIGKILL
    finally:
        for each in (child, ours):
            each.kill()
            each.wait()


AN_AGENT = """
import subprocess, sys
from mgpu_train.agent.phases import launcher_process as launcher
body = "import time; time.sleep(60)"
named = [sys.executable, "-c", f"# mgpu_train.store.bulk.child\\n{body}"]
ours, theirs = subprocess.Popen(named), subprocess.Popen(named, start_new_session=True)
other = subprocess.Popen([sys.executable, "-c", body])
gone = launcher.kill_below(20)
print(gone, ours.poll(), theirs.poll() is None, other.poll() is None)
ours.kill()
"""


def test_of_what_runs_below_the_agent_only_the_stores_own_process_is_spared():
    # in a process of its own: it kills all that is below it
    done = subprocess.run([sys.executable, "-c", AN_AGENT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True", "None", "False", "False"], "what a launcher starts has another session"


AN_AGENT_AND_ITS_LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
from mgpu_train.agent.machine import procs
from mgpu_train.agent.phases.launcher_process import Launch, LauncherProcess
from mgpu_train.system.prctl import become_subreaper

def until(what):
    end = time.monotonic() + 30
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()

def process(name):
    return procs.of(int(Path(name).read_text()))

become_subreaper()
subprocess.run(["sh", "-c", "sleep 600 & echo $! > mount"], check=True)  # what `setup` leaves running
own = subprocess.Popen(["false"])
script = "(sleep 0 & echo $! > orphan); sleep 600 & setsid sleep 600 & exec sleep 600"
launcher = LauncherProcess(Launch(["sh", "-c", script], {**os.environ}, Path.cwd()), 2)
"""


@pytest.mark.parametrize(
    ("rest", "printed"),
    [
        ("print(until(lambda: len(launcher.left) == 3), launcher.kill(20), launcher.poll(), launcher.left,"
         " process('mount').alive)", "True True -9 [] True"),
        ("until(lambda: Path('orphan').exists() and Path('orphan').read_text())\n"
         "print(until(lambda: launcher.poll() is None and process('orphan') is None), own.wait())",
         "True 1"),
    ],
    ids=["what-setup-has-started-outlives-the-launcher", "what-is-orphaned-and-has-ended-takes-no-place"],
)  # fmt: skip
def test_of_what_is_below_an_agent_its_launcher_has_its_own(tmp_path, rest, printed):
    """In a process of its own: it adopts what a launcher has orphaned."""
    program = f"{AN_AGENT_AND_ITS_LAUNCHER}try:\n    " + rest.replace("\n", "\n    ")
    program += "\nfinally:\n    procs.kill_all(lambda: procs.descendants(os.getpid()), 20)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == printed


def test_processes_are_found_by_their_environment():
    environment = {**os.environ, "MGPU_TEST_MARK": f"x{os.getpid()}"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment)
    try:
        end = time.monotonic() + 20
        while not (found := procs.carrying(f"MGPU_TEST_MARK=x{os.getpid()}")) and time.monotonic() < end:
            time.sleep(0.02)
        assert [process.pid for process in found] == [child.pid]
        assert procs.carrying("MGPU_TEST_MARK=x") == []
    finally:
        child.kill()
        child.wait()


def test_of_a_process_that_is_gone_nothing_is_said_and_nothing_signalled(tmp_path, monkeypatch):
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ends = property(lambda _process: child.wait() == 0)  # between the look and the signal
    with monkeypatch.context() as patched:
        patched.setattr(procs.Process, "alive", ends)
        assert not procs.Process(child.pid, 1, "boot").send(signal.SIGKILL)
    assert (procs.catches(child.pid, signal.SIGTERM), procs.command_line(child.pid)) == (False, "")
    assert not procs.kill_all(lambda: [SimpleNamespace(send=lambda _number: None)], -1), "it does not die"
    with pytest.raises(OSError, match="prctl"):
        prctl._prctl(-1, 0)
    monkeypatch.setattr(procs, "_PROC", tmp_path)
    assert procs.out_of_memory_kills() == 0
    with pytest.raises(OSError, match="there is no /proc to read"):
        procs.me()


@pytest.mark.parametrize(
    ("group", "events", "killed"),
    [
        ("4:memory:/x\n0::/user.slice/s.scope", "oom 9\noom_kill 2\noom_group_kill 0", 2),
        ("0::/user.slice/s.scope", None, 7),  # no such file: the whole machine's
        ("4:memory:/user.slice/s.scope", "oom_kill 2", 7),  # cgroups v1 count none of those below
    ],
)
def test_the_kernels_kills_are_this_containers_where_it_counts_them(tmp_path, monkeypatch, group, events, killed):
    monkeypatch.setattr(procs, "_PROC", tmp_path)
    monkeypatch.setattr(procs, "_CGROUPS", tmp_path / "groups")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"{group}\n")
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 7\n")
    (tmp_path / "groups" / "user.slice" / "s.scope").mkdir(parents=True)
    if events is not None:
        (tmp_path / "groups" / "user.slice" / "s.scope" / "memory.events").write_text(events)
    assert procs.out_of_memory_kills() == killed


def test_a_launcher_may_open_as_many_files_as_the_machine_allows_and_no_absurd_number(tmp_path, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    launch = launcher_process.Launch([sys.executable, "-c", program], dict(os.environ), tmp_path)

    def said() -> list[int]:
        log = Log(tmp_path / "log")
        process = launcher_process.LauncherProcess(launch, log.fd)
        until(lambda: process.poll() is not None, 60)
        return [int(each) for each in log.path.read_text().splitlines()[-1].split()]

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1] - 1), before[1]))
    try:
        assert said() == [min(before[1], procs.MOST_FILES), before[1]]
        monkeypatch.setattr(procs, "MOST_FILES", 1500)
        assert said() == [1500, before[1]]
        monkeypatch.setattr(procs, "MOST_FILES", 500)
        assert said() == [1024, before[1]], "it is never lowered"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("its_own", ["10000 65535", "nonsense"])
def test_where_no_port_is_out_of_the_kernels_range_the_kernel_chooses(tmp_path, monkeypatch, its_own):
    (tmp_path / "range").write_text(its_own)
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    found = ports.free(16)
    assert len(set(found)) == 16
    assert min(found) > 0


def test_the_kernels_log_goes_on_after_what_was_overwritten_and_is_asked_of_dmesg_else(tmp_path, monkeypatch):
    says = [OSError(errno.EPIPE, "overwritten"), b"6,1,3000000,-;new", b"", OSError(errno.EIO, "broken")]

    def read(_descriptor, _count):
        answer = says.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(kernel_log, "os", SimpleNamespace(**{**vars(os), "read": read}))
    (tmp_path / "sudo").write_text("#!/bin/sh\necho '[    1.5] old'; echo odd; echo '[   12.5] of dmesg'\n")
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_log.since(2.0, tmp_path / "sudo") == ["new"]
    assert kernel_log.since(2.0, tmp_path / "sudo") == ["of dmesg"]


# --- start ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def layout(tmp_path, monkeypatch) -> RunLayout:
    """Of a run on this node; the working directory is the node's home."""
    monkeypatch.chdir(tmp_path)
    made = RunLayout("r", PurePosixPath(tmp_path))
    Path(made.root).mkdir(parents=True)
    return made


def started(layout: RunLayout, attempt: int = 3, seconds: float = 0.01, **changes) -> dict | str:
    """What `agent start` answers, or why it refuses."""
    try:
        made = job(attempt=attempt, timeouts={"command_s": seconds}, **changes)
        return start.start(made, Secrets(), layout)
    except Refused as refused:
        return str(refused)


def test_an_attempt_is_started_once_and_never_beside_another(layout, monkeypatch):
    me = {"pid": os.getpid(), "already": True}
    held = f"another `agent start` has held {layout.lock} for 0.01 s"
    with Path(layout.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for torn in (None, '{"attempt": 3, "process": {"pid": "1", "start_ticks": 1, "boot_id": ""}}'):
            if torn:
                Path(layout.agent).write_text(torn)
            assert (started(layout), identity.read(layout)) == (held, None)
        identity.write(layout, 3)
        report = StatusReport(job(attempt=3), layout)
        report.enter(Phase.TRAINING)
        assert started(layout, seconds=60) == me
        still = f"the agent of attempt 3 (pid {os.getpid()}) still runs: stop it before attempt 4 starts"
        assert started(layout, 4, seconds=60) == still
        report.enter(Phase.DONE)
        assert started(layout, 4) == held, "it ends by itself, and is waited for"
    report.enter(Phase.TRAINING)
    assert started(layout, 2) == "attempt 2 is over: attempt 3 was started on this node"
    assert started(layout) == me
    assert json.loads(Path(layout.status).read_text())["reason"] == "the agent died in phase training"
    assert started(layout) == me
    assert started(layout, secrets=["TOKEN"]).startswith("no value came for the secrets TOKEN")
    with Path(".mgpu/claim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "somebody else has held" in started(layout)
    child = subprocess.Popen(["/bin/sleep", "60"])
    monkeypatch.setattr(start, "os", SimpleNamespace(**{**vars(os), "fork": lambda: child.pid}))
    assert started(layout, 4).startswith("the agent did not come up within 0.01 s, or failed at once: see ")
    assert child.wait() == -signal.SIGKILL, "nobody else has its number"


def test_start_tells_mistakes_from_a_node_that_another_run_has(layout, monkeypatch, capsys):
    def asked(text: str, stdin: bytes = b"{}") -> tuple[int, str]:
        Path("runs/r/job.json").write_text(text)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        return main(["agent", "start", "--job", "runs/r/job.json"]), capsys.readouterr().err

    whole = job().model_dump_json(by_alias=True)
    code, told = asked(whole.replace('"attempt":3', '"attempt":"a secret"'))
    assert (code, "runs/r/job.json: attempt: " in told, "secret" in told) == (2, True, False)
    code, told = asked(whole, bytes((1 << 20) + 1))
    assert (code, "more than 1048576 bytes of secrets on standard input" in told) == (2, True)
    python_env.claim(Path.cwd(), python_env.Claim("theirs", "you"), time.monotonic() + 60)
    code, told = asked(whole)
    assert (code, json.loads(told)["problem"], json.loads(told)["run"]) == (python_env.PROBLEM, "used", "theirs")


# --- command line and environment ----------------------------------------------------------------------------------


HERE = RunLayout("r", PurePosixPath("/h"))


def job(**changes) -> Job:
    base = {
        "run_id": "r",
        "attempt": 3,
        "writer": "w",
        "node_rank": 1,
        "nodes": 2,
        "processes_per_node": 4,
        "master_addr": "10.0.0.1",
        "master_port": 29501,
        "command": ("train.py", "--name", "$(id) `x`;"),
    }
    return Job.model_validate({**base, **changes})


def test_torchruns_command_line_is_static_and_never_restarts():
    argv = launcher_process.argv(job(), HERE, "/py")
    assert argv[:3] == ["/py", "-m", "mgpu_train.agent.launchers.torchrun"]
    assert argv[-3:] == ["train.py", "--name", "$(id) `x`;"]
    pairs = dict(zip(argv[3:-3:2], argv[4:-3:2], strict=True))
    assert pairs == {
        "--nnodes": "2",
        "--node-rank": "1",
        "--nproc-per-node": "4",
        "--master-addr": "10.0.0.1",
        "--master-port": "29501",
        "--rdzv-backend": "static",
        "--rdzv-id": "r-3",
        "--rdzv-conf": "timeout=1800",
        "--max-restarts": "0",
    }


def test_plain_python_and_the_bundled_trainer():
    assert launcher_process.argv(job(launcher="python"), HERE, "/py") == ["/py", "train.py", "--name", "$(id) `x`;"]
    assert launcher_process.argv(job(command=None, train=TrainConfig()), HERE, "/py")[-2:] == ["-m", "mgpu_train.loop"]


def test_the_launchers_environment():
    layout = RunLayout("r", PurePosixPath("/home/u"))
    node = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "no", "MGPU_RESUME_DIR": "of whoever started the agent"}
    made = launcher_process.environment(
        job(env={"A": "job", "B": "job", "PYTHONPATH": "/mine"}), {"B": "secret"}, layout, node
    )
    assert (made["PATH"], made["A"], made["B"]) == ("/bin", "job", "secret")
    assert made["MGPU_JOB"] == "/home/u/runs/r/job-3.json"
    assert made["MGPU_CHECKPOINT_DIR"] == "/home/u/runs/r/checkpoints"
    assert (made["MGPU_ATTEMPT"], made["MGPU_NODE_RANK"], made["MGPU_NODES"]) == ("3", "1", "2")
    assert int(made["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > job().timeouts.stop_grace_s
    assert made["PYTHONPATH"].split(":")[-1] == "/mine"
    assert not {"AWS_SECRET_ACCESS_KEY", "MGPU_RESUME_DIR", "RANK"} & set(made)


def test_a_program_is_told_how_often_the_run_file_wants_a_checkpoint():
    target = {"to": "file:///s", "writers": "rank0", "every_steps": 50, "every_minutes": 2.5}
    made = launcher_process.environment(job(checkpoint=target), {}, HERE, {})
    assert (made["MGPU_CHECKPOINT_EVERY_STEPS"], made["MGPU_CHECKPOINT_EVERY_MINUTES"]) == ("50", "2.5")
    without = launcher_process.environment(job(checkpoint=None), {}, HERE, {})
    assert not [name for name in without if "EVERY" in name]


def test_a_run_that_shares_a_node_sees_its_own_gpus_and_counts_its_own_cores():
    share = {"slots": (2, 3), "of": 4, "gpus": True}
    made = launcher_process.environment(job(share=share), {}, HERE, {"CUDA_VISIBLE_DEVICES": "0"})
    assert (made["CUDA_VISIBLE_DEVICES"], made["CUDA_DEVICE_ORDER"]) == ("2,3", "PCI_BUS_ID")
    for other in (None, {**share, "gpus": False}):
        assert "CUDA_VISIBLE_DEVICES" not in launcher_process.environment(job(share=other), {}, HERE, {})


@pytest.mark.parametrize(
    ("cores_of_it", "slots", "of", "mine"),
    [
        (8, (0,), 4, {0, 1}),
        (8, (2, 3), 4, {4, 5, 6, 7}),
        (7, (0, 1), 2, {0, 1, 2, 3, 4, 5, 6}),
        (2, (0,), 4, {0}),
        (2, (3,), 4, {1}),
        (1, (7,), 8, {0}),
    ],
)
def test_the_cores_that_go_with_a_share(monkeypatch, cores_of_it, slots, of, mine):
    monkeypatch.setattr(procs.os, "sched_getaffinity", lambda _: set(range(cores_of_it)))
    assert procs.cores(slots, of) == mine


def test_plain_python_gets_the_variables_of_its_one_process():
    made = launcher_process.environment(job(launcher="python"), {}, HERE, {})
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [made[name] for name in names] == ["1", "2", "0", "1", "10.0.0.1", "29501"]


def test_a_launcher_of_somebody_elses_is_filled_in_on_the_node():
    theirs = {
        "argv": ["{python}", "-m", "theirs", "--hosts={nodes}x{processes_per_node}", "--", "{program}"],
        "environment": {"THEIRS": "{world_size}@{master_addr}:{master_port}"},
    }
    told = job(launcher=theirs)
    words = ["/py", "-m", "theirs", "--hosts=2x4", "--", "train.py", "--name", "$(id) `x`;"]
    assert launcher_process.argv(told, HERE, "/py") == words
    assert launcher_process.environment(told, {}, HERE, {})["THEIRS"] == "8@10.0.0.1:29501"
    assert Job.model_validate_json(told.model_dump_json()) == told


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"argv": ["{python}", "x.py"]}, "has to hold {program}"),
        ({"argv": ["{python}", "{program}", "--n={ranks}"]}, "{ranks} means nothing here"),
        ({"argv": ["{program}"], "environment": {"A": "{python}"}}, "{python} means nothing here"),
        ({"argv": ["--run={program}", "{program}"]}, "{program} means nothing here"),
    ],
)
def test_a_launcher_that_no_node_could_fill_in_is_refused(wrong, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Launcher.model_validate(wrong)


def test_the_ranks_import_the_library_that_was_shipped():
    import mgpu_train

    assert Path(launcher_process.shipped_library()) == Path(mgpu_train.__file__).parents[1]


# --- requirements --------------------------------------------------------------------------------------------------

TEXT = "# comment\nnumpy>=1  # why\nno_such.pkg==9 \\\n  --hash=sha256:00\nother[x] @ https://h/x.whl\n"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("ERROR: No matching distribution for no-such-pkg==9\n", "`no_such.pkg==9` cannot be installed: No match"),
        ("x\nERROR: Failed building other\nERROR: y\n", "`other[x] @ https://h/x.whl` cannot be installed: Fail"),
        ("ERROR: something else\n", "req.txt cannot be installed: something else"),
        ("killed", "req.txt cannot be installed: see the log"),
    ],
)
def test_the_requirement_at_fault_is_named(output, words):
    assert words in requirements.blame("req.txt", TEXT, output)


def test_environments_are_shared_only_where_that_is_safe():
    assert requirements.key(TEXT, "run-1") == requirements.key(TEXT, "run-2")
    assert requirements.key(TEXT, "run-1") != requirements.key(TEXT + "x", "run-1")
    for local in ("-r more.txt", "-e .", "./wheel.whl", "x @ file:///y"):
        assert requirements.key(local, "run-1") != requirements.key(local, "run-2"), local


# --- the network ------------------------------------------------------------------------------------------------------


JOB = {
    "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "processes_per_node": 1, "master_port": 1,
    "command": ["x.py"],
}  # fmt: skip


LAYOUT = RunLayout("r", PurePosixPath("/home"))


def told(node=None, *, nodes=2, address="10.99.0.7", **job) -> dict[str, str]:
    """The launcher's environment on a node of several."""
    made = Job.model_validate(JOB | {"nodes": nodes, "master_addr": address, **job})
    return launcher_process.environment(made, {}, LAYOUT, node or {})


def test_between_nodes_of_one_machine_no_interface_is_named():
    assert route_to("127.0.0.1") is None
    assert route_to("::1") is None
    assert route_to("no such host.invalid") is None


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with more interfaces than one, which speaks to its peers from 10.99.0.4 or fd00::4."""
    addresses = {
        "lo": "127.0.0.1", "docker0": "172.17.0.1", "br-9f": "10.99.0.4", "tailscale0": "100.64.0.1",
        "ens5": "10.99.0.4",
    }  # fmt: skip
    monkeypatch.setattr(network.socket, "if_nameindex", lambda: list(enumerate(addresses)))
    monkeypatch.setattr(network, "_address_of", lambda _probe, name: addresses[name])
    (tmp_path / "if_inet6").write_text(
        f"{'0' * 31}1 01 80 10 80       lo\nfd00{'0' * 27}4 03 40 00 80     ens5\nfe80{'0' * 27}4 03 40 20 80 docker0\n"
    )
    monkeypatch.setattr(network, "_IF_INET6", tmp_path / "if_inet6")

    class Probe(socket.socket):
        def connect(self, _address):
            pass

        def getsockname(self):
            return ("10.99.0.4", 1) if self.family == socket.AF_INET else ("fd00::4", 1, 0, 0)

    monkeypatch.setattr(network.socket, "socket", Probe)


@pytest.mark.usefixtures("cards")
def test_the_interface_is_the_one_whose_address_speaks_to_node_0():
    env = told()
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["NCCL_SOCKET_FAMILY"]) == (
        "ens5",
        "=ens5",
        "AF_INET",
    )
    six = told(address="fd00::7")
    assert (six["NCCL_SOCKET_IFNAME"], six["NCCL_SOCKET_FAMILY"]) == ("=ens5", "AF_INET6")
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & told(nodes=1).keys()


@pytest.mark.usefixtures("cards")
def test_what_somebody_has_set_for_nccl_wins_and_is_said():
    env = told({"GLOO_SOCKET_IFNAME": "eth1"}, env={"NCCL_SOCKET_IFNAME": "eth", "NCCL_DEBUG": "INFO"})
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["NCCL_DEBUG"]) == ("eth1", "eth", "INFO")
    job = Job.model_validate(
        JOB | {"nodes": 2, "master_addr": "10.99.0.7", "env": {"NCCL_SOCKET_IFNAME": "eth", "NCCL_DEBUG": "INFO"}}
    )
    assert sorted(launcher_process.overruled(job, LAYOUT, env)) == [
        "GLOO_SOCKET_IFNAME=eth1, as the environment of this machine has it, instead of ens5",
        "NCCL_DEBUG=INFO, as `env` has it, instead of WARN",
        "NCCL_SOCKET_IFNAME=eth, as `env` has it, instead of =ens5",
    ]
    assert launcher_process.overruled(job, LAYOUT, told()) == []


def test_what_nccl_has_to_say_and_what_it_recorded_stays_with_the_run():
    env = told(nodes=1)
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["TORCH_FR_DUMP_TEMP_FILE"].startswith("/home/runs/r/")


def test_where_efa_was_rented_nccl_takes_it_or_nothing(tmp_path):
    for card, driver in (("mlx5_0", "mlx5_core"), ("rdmap16s27", "efa")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "sys" / card / "device").mkdir(parents=True)
        (tmp_path / "sys" / card / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert network.settings(2, 8, "127.0.0.1", tmp_path / "sys") == {"NCCL_NET": "AWS Libfabric"}
    assert network.settings(1, 8, "127.0.0.1", tmp_path / "sys") == {}, "alone it has no peers"
    assert network.settings(2, 0, "127.0.0.1", tmp_path / "sys") == {}, "without GPUs there is no NCCL"
    (tmp_path / "sys" / "rdmap16s27" / "device" / "driver").unlink()
    assert network.settings(2, 8, "127.0.0.1", tmp_path / "sys") == {}


@pytest.mark.parametrize(
    ("vendor", "device", "told"),
    [
        ("0x1d0f", "0xefa2", {"NCCL_NET": "AWS Libfabric"}),
        ("0x1d0f", "0xec20", {}),  # ENA, which every machine has
        ("0x15b3", "0xefa2", {}),
    ],
)
def test_an_efa_card_that_the_machine_image_has_no_driver_for_is_not_passed_over_in_silence(
    tmp_path, vendor, device, told
):
    (tmp_path / "sys").mkdir()
    card = tmp_path / "pci" / "0000:10:1b.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text(f"{vendor}\n")
    (card / "device").write_text(f"{device}\n")
    assert network.settings(2, 8, "127.0.0.1", tmp_path / "sys", tmp_path / "pci") == told


@pytest.mark.parametrize(
    ("link", "state", "told"),
    [
        ("InfiniBand", "4: ACTIVE", {"NCCL_NET": "IB"}),
        ("InfiniBand", "1: DOWN", {}),
        ("Ethernet", "4: ACTIVE", {}),  # a virtual machine's ordinary card may be one of these
    ],
)
def test_where_infiniband_is_up_nccl_takes_it_or_nothing(tmp_path, link, state, told):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{link}\n")
    (port / "state").write_text(f"{state}\n")
    assert network.settings(2, 8, "127.0.0.1", tmp_path) == told


def test_nccl_finds_the_machines_plugin_for_efa_where_the_image_has_none(tmp_path):
    own, machine = tmp_path / "own", tmp_path / "machine"
    plugin = machine / "ofi-nccl" / "lib" / "x86_64-linux-gnu" / "libnccl-net-aws-ofi.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    (machine / "efa" / "lib").mkdir(parents=True)

    def told(given, found=None):
        return dict(network.efa_plugin(given, (own, machine), lambda name: found))

    libraries = f"{plugin.parent}:{machine / 'efa' / 'lib'}"
    assert told({}) == {"NCCL_NET_PLUGIN": str(plugin), "LD_LIBRARY_PATH": libraries}
    assert told({"LD_LIBRARY_PATH": "/usr/local/nvidia/lib"})["LD_LIBRARY_PATH"] == f"/usr/local/nvidia/lib:{libraries}"
    assert told({}, found="libnccl-net.so") == {}, "the loader has one"
    assert told({"NCCL_NET_PLUGIN": "ofi"}) == {}, "somebody has said which"
    assert told({"LD_LIBRARY_PATH": str(plugin.parent)}) == {}, "the loader finds it"
    (own / "aws-ofi-nccl" / "lib").mkdir(parents=True)
    (own / "aws-ofi-nccl" / "lib" / "libnccl-net.so").touch()
    assert told({})["NCCL_NET_PLUGIN"] == str(own / "aws-ofi-nccl" / "lib" / "libnccl-net.so"), "the image's own"
    assert dict(network.efa_plugin({}, (tmp_path / "none",), lambda name: None)) == {}


def test_the_kernel_says_which_address_an_interface_has():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        assert network._address_of(probe, "lo") == "127.0.0.1"
        assert network._address_of(probe, "none-such") is None


# --- the store -----------------------------------------------------------------------------------------------------


def attempt_of(tmp_path: Path, **changes) -> SimpleNamespace:
    """What resuming and fetching data need of an attempt."""
    secrets, checkpoints = SimpleNamespace(store={}), tmp_path / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    return SimpleNamespace(
        job=job(**changes),
        secrets=secrets,
        times=Timeouts(),
        checkpoints=checkpoints,
        work=tmp_path,
        say=lambda _text: None,
    )


def test_a_resume_keeps_to_the_bound_on_bytes_per_second(tmp_path, monkeypatch):
    bounds = []

    def opened(_url, _env, *, timeouts, max_bytes_per_s=None):
        bounds.append(max_bytes_per_s)
        raise Unavailable("away")

    monkeypatch.setattr(resume, "open_store", opened)
    target = {"to": "s3://bucket/runs", "writers": "all", "max_upload_mib_per_s": 2.5}
    with pytest.raises(AttemptFailed, match="resume: away"):
        resume.resume(attempt_of(tmp_path, checkpoint=target), Resume(checkpoint_id="a001-step-1", seq=1))
    assert bounds == [5 << 19]


@pytest.mark.parametrize(("how", "found"), [("flipped", "a001-step-10"), ("missing", None)])
def test_a_node_says_which_checkpoint_is_damaged(run, damage, tmp_path, how, found):
    """What is not there is not damaged: the operator has just seen it, so this node sees another folder."""
    commit = run.save(10)
    damage[how](run.path(commit, 1))
    attempt = attempt_of(tmp_path, run_id=RUN, checkpoint={"to": f"file://{run.root}", "writers": "all"})
    attempt.layout = SimpleNamespace(resume=tmp_path / "resume")
    with pytest.raises(AttemptFailed, match="resume: ") as failed:
        resume.resume(attempt, Resume(checkpoint_id=commit.checkpoint_id, seq=commit.seq))
    assert (failed.value.fault, failed.value.damaged) == (Fault.INFRASTRUCTURE, found)


def of_second_node(**changes) -> Job:
    given = {"run_id": RUN, "attempt": 2, "command": None, "train": {"strategy": "fsdp"}, "processes_per_node": 1}
    return job(**{**given, "checkpoint": {"to": "file:///x", "writers": "all"}, **changes})


def test_an_entry_of_the_log_that_was_misread_once_is_no_damage(run, tmp_path, monkeypatch):
    commit = run.save(10)
    entry = run.commit_path(commit.seq)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-9])
    run.store.before = lambda operation, _key: entry.write_bytes(whole) if operation == "forget" else None
    monkeypatch.setattr(resume, "open_store", lambda *_args, **_named: run.store)
    attempt = attempt_of(tmp_path, run_id=RUN, checkpoint={"to": f"file://{run.root}", "writers": "all"})
    attempt.layout = SimpleNamespace(resume=tmp_path / "resume")
    assert resume.resume(attempt, Resume(checkpoint_id=commit.checkpoint_id, seq=commit.seq)) == 10
    entry.write_bytes(whole[:-9])
    run.store.before = lambda *_: None
    with pytest.raises(AttemptFailed) as failed:
        resume.resume(attempt, Resume(checkpoint_id=commit.checkpoint_id, seq=commit.seq))
    assert failed.value.damaged == commit.checkpoint_id


def test_a_node_resumes_from_what_its_ranks_read_and_says_so(run, tmp_path, monkeypatch):
    """What is here already is linked, of other attempts and other ranks as well."""
    commit, said = run.save(10), []
    seen = Shards(Path(), {}, {"of all": Piece("__1_0.distcp", 0, 1)})
    monkeypatch.setattr(resume, "read_metadata", lambda folder: (folder / ".metadata").read_bytes() and seen)
    attempt = attempt_of(tmp_path)
    attempt.job = of_second_node(checkpoint={"to": f"file://{run.root}", "writers": "all"})
    attempt.checkpoints, attempt.say = run.folder(0, 10).parent, said.append
    attempt.layout = SimpleNamespace(resume=tmp_path / "resume")
    assert resume.resume(attempt, Resume(checkpoint_id=commit.checkpoint_id, seq=commit.seq)) == 10
    assert names(tmp_path / "resume") == [".metadata", "__1_0.distcp", "sub"]
    assert (tmp_path / "resume" / ".metadata").samefile(run.folder(0, 10) / ".metadata")
    assert "4 files, 0 MiB, 2 of them from this disk; 1 other no rank of this node reads" in said[0]


def test_what_is_of_no_use_any_more_makes_room_for_what_a_node_resumes_from(run, tmp_path, monkeypatch):
    """A third attempt had the one before's on its disk, and all that was saved since, beside what it fetched."""
    commit, home, said = run.save(10), tmp_path / "checkpoints", []
    for folder in (tmp_path / "resume", home / "step-5", home / ".tmp-step-15"):
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"old")
    attempt = attempt_of(tmp_path, run_id=RUN, checkpoint={"to": f"file://{run.root}", "writers": "all"})
    attempt.layout, attempt.say = SimpleNamespace(resume=tmp_path / "resume"), said.append

    def usage(_folder: Path) -> SimpleNamespace:
        used = [*home.iterdir(), *tmp_path.glob("resume")]
        return SimpleNamespace(free=0 if used else 1 << 30)

    monkeypatch.setattr("mgpu_train.checkpoint.transfer.fetch.shutil.disk_usage", usage)
    assert resume.resume(attempt, Resume(checkpoint_id=commit.checkpoint_id, seq=commit.seq)) == 10
    assert not (tmp_path / "resume" / "weights").exists()
    assert (names(home), len(said)) == ([], 2)
    assert said[0].startswith("resume: the disk has no room beside what an earlier attempt went on from")


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ("train.py",), "train": None},
        {"train": {"strategy": "ddp"}},
        {"train": {"strategy": "single"}},
        {"train": {"strategy": "mine.strategies:Rows"}},
        {"train": {"strategy": "fsdp", "tensor_parallel": 2}},
        {"launcher": {"argv": ("mpirun", "{program}")}},
        {"launcher": "bash"},
        {"nodes": 1, "node_rank": 0},
    ],
    ids=str,
)
def test_where_it_is_not_known_what_ranks_read_a_node_fetches_everything(run, changes):
    manifest = run.manifest(run.save(10))
    assert resume.choice(of_second_node(launcher="python"), manifest)
    assert resume.choice(of_second_node(), manifest)
    assert resume.choice(of_second_node(**changes), manifest) is None


def test_metadata_that_say_nothing_of_the_files_that_there_are_choose_none(run, tmp_path, monkeypatch):
    choose = resume.choice(of_second_node(), run.manifest(run.save(10)))
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    assert choose(tmp_path) is None
    monkeypatch.setattr(resume, "read_metadata", lambda _: Shards(Path(), {}, {"step": Piece("other", 0, 1)}))
    assert choose(tmp_path) is None


def test_data_has_its_name_only_when_it_is_on_disk(tmp_path, monkeypatch):
    """A later attempt takes a file of the right size for whole: after a crash of the machine it might hold zeros."""
    open_store(f"file://{tmp_path / 'there'}").put("a/b", b"hello")
    flushed, real = [], os.fsync

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.parent == tmp_path / "in" / "a" and path.is_file():
            flushed.append((tmp_path / "in" / "a" / "b").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    data.fetch_data(attempt_of(tmp_path), DataItem.model_validate({"from": f"file://{tmp_path / 'there'}", "to": "in"}))
    assert flushed == [False]
    assert names(tmp_path / "in" / "a") == ["b"]


# --- data that is kept ------------------------------------------------------------------------------------------------


@pytest.fixture
def fetch(tmp_path, monkeypatch):
    """`fetch("a")` fetches the data again, from the store in `a`; what was read of the store is in `fetch.read`."""
    read, real = list[str](), disk.flush

    def flush(path: Path) -> None:
        read.append(path.name.rpartition("-")[2])
        real(path)

    def again(source: str = "there") -> list[str]:
        read.clear()
        said = {"from": f"file://{tmp_path / source}", "to": "in"}
        data.fetch_data(attempt_of(tmp_path), DataItem.model_validate(said))
        return sorted(read)

    monkeypatch.setattr(disk, "flush", flush)
    return again


def test_data_that_was_written_anew_is_fetched_anew_also_at_the_same_size(tmp_path, fetch):
    store = open_store(f"file://{tmp_path / 'there'}")
    store.put("a/b", b"hello")
    store.put("a/c", b"world")
    assert (fetch(), fetch()) == (["b", "c"], [])
    store.put("a/b", b"HELLO")
    assert (fetch(), fetch()) == (["b"], [])
    assert (tmp_path / "in" / "a" / "b").read_bytes() == b"HELLO"


def test_a_folder_tells_apart_what_it_has_of_two_addresses(tmp_path, fetch):
    for source, text in (("one", b"hello"), ("two", b"HELLO")):
        open_store(f"file://{tmp_path / source}").put("a", text)
        assert (fetch(source), fetch(source)) == (["a"], [])
        assert (tmp_path / "in" / "a").read_bytes() == text


@pytest.mark.parametrize("left", [None, b"", b'["file://', b"\xff\n[]\n[1]\n{}\n7\n"])
def test_data_of_which_nothing_is_written_down_is_kept_by_its_size(tmp_path, fetch, left):
    """It is the user's own, of an older version of mgpu, or the last file before a kill."""
    open_store(f"file://{tmp_path / 'there'}").put("b", b"hello")
    assert fetch() == ["b"]
    told = tmp_path / "in" / data.FETCHED
    told.unlink() if left is None else told.write_bytes(left)
    assert fetch() == []
    (tmp_path / "in" / "b").write_bytes(b"longer than it")
    assert (fetch(), fetch()) == (["b"], [])
    assert (tmp_path / "in" / "b").read_bytes() == b"hello"


def test_a_disk_without_room_for_the_data_is_told_before_anything_is_fetched(tmp_path, fetch, monkeypatch):
    store = open_store(f"file://{tmp_path / 'there'}")
    store.put("a", b"hello")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=5))
    assert fetch() == ["a"]
    store.put("b", b"hello!")
    with pytest.raises(AttemptFailed, match=r"data: 0\.0 GiB are to be fetched from .* free: .*`disk_gib`") as failed:
        fetch()
    assert (failed.value.fault, names(tmp_path / "in")) == (Fault.USER, [data.FETCHED, "a"])


def test_what_an_interrupted_attempt_had_begun_to_fetch_takes_no_room(tmp_path, fetch):
    open_store(f"file://{tmp_path / 'there'}").put("b/c", b"hello")
    (tmp_path / "in" / "b").mkdir(parents=True)
    own, before = data._own(attempt_of(tmp_path)), time.time() - Timeouts().prepare_s - 60
    for name in (
        f"{ASIDE}{own}012345-c",
        f"{ASIDE}0123-{ASIDE}{own}012345-c",
        f"{ASIDE}old",
        f"{ASIDE}of-another",
        "mine",
    ):
        (tmp_path / "in" / "b" / name).write_bytes(b"hel")
    for name in (f"{ASIDE}old", "mine"):
        os.utime(tmp_path / "in" / "b" / name, (before, before))
    assert fetch() == ["c"]
    assert names(tmp_path / "in" / "b") == [f"{ASIDE}of-another", "c", "mine"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("there", ["hello", "HELLO", "longer", None])
def test_a_late_fetcher_leaves_alone_what_others_read_by_now(tmp_path, monkeypatch, links, there):
    """On NFS a file that is replaced is gone for who has it open: ESTALE. One of an older version is replaced."""
    open_store(f"file://{tmp_path / 'there'}").put("b", b"hello")
    target, real = tmp_path / "in" / "b", disk.flush
    before = list[int]()

    def flush(path: Path) -> None:
        if path.parent == target.parent and there:
            target.write_text(there)  # another node was quicker
            before.append(target.stat().st_ino)
        real(path)

    def no_link(*_given, **_named):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(disk, "flush", flush)
    if not links:
        monkeypatch.setattr(data.os, "link", no_link)
    item = DataItem.model_validate({"from": f"file://{tmp_path / 'there'}", "to": str(target.parent)})
    data.fetch_data(attempt_of(tmp_path), item)
    assert target.read_bytes() == b"hello"
    assert ([target.stat().st_ino] == before) == (there == "hello")
    assert names(target.parent) == [data.FETCHED, "b"]


def test_two_nodes_fetch_into_one_folder_at_once(tmp_path, monkeypatch):
    """Each has its file whole before either gives it its name."""
    open_store(f"file://{tmp_path / 'there'}").put("a/b", b"hello")
    both, real = threading.Barrier(2), disk.flush

    def flush(path: Path) -> None:
        both.wait(10)
        real(path)

    monkeypatch.setattr(disk, "flush", flush)
    item = DataItem.model_validate({"from": f"file://{tmp_path / 'there'}", "to": str(tmp_path / "shared")})

    def node(rank: int) -> None:
        data.fetch_data(attempt_of(tmp_path, nodes=2, node_rank=rank), item)

    with ThreadPoolExecutor() as pool:
        list(pool.map(node, range(2)))
    assert names(tmp_path / "shared" / "a") == ["b"]
    assert (tmp_path / "shared" / "a" / "b").read_bytes() == b"hello"
