"""Servers that fork: one for all who ask for the same, as long as any of them lives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import forks
import pytest
import ranks
from forks import Forks
from mgpu_train.agent.machine import procs
from waiting import until

PARENT = "import os; print(os.getppid())"
BEHIND = """
import os, signal, sys, time

def said(what):
    print(what, flush=True)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
parent = os.getppid()
said(f"{os.getpid()} {parent} {os.environ['OF']} {sys.argv[1]} {os.uname().nodename}")
while os.getppid() == parent:
    time.sleep(0.01)
said("orphaned")
"""
HANGS = """
import os, signal

def rank():
    print("hangs", flush=True), signal.pause()

def waits(child):
    print("hangs", flush=True), os.wait()

child = os.fork()
waits(child) if child else rank()
"""

LAST_WORDS = """
import atexit, threading

def last():
    atexit.register(print, "at its end")
    print("of a thread")

threading.Thread(target=lambda: threading.main_thread().join() or last()).start()
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers of this test's own."""
    monkeypatch.setattr(forks, "share", lambda: tmp_path)
    (tmp_path / "parent.py").write_text(PARENT)
    yield
    until(lambda: not list(tmp_path.glob(f"{'[0-9a-f]' * 16}")), why=lambda: list(tmp_path.iterdir()))


def server(of: Forks, folder: Path) -> int:
    """The process that forks."""
    return int(of.run(folder / "parent.py", (), dict(os.environ), cwd=folder, timeout=30).stdout)


def test_who_asks_for_the_same_shares_a_server_until_the_last_of_them_has_ended(tmp_path: Path):
    one, same, other = Forks("json"), Forks("json"), Forks("csv")
    first = server(one, tmp_path)
    assert server(same, tmp_path) == first != server(other, tmp_path)
    del one
    assert server(same, tmp_path) == first
    del same
    until(lambda: procs.of(first) is None or not procs.of(first).alive)
    assert server(Forks("json"), tmp_path) != first


def test_a_server_that_was_killed_is_told_and_another_one_takes_its_place(tmp_path: Path):
    before = Forks("json")
    os.kill(server(before, tmp_path), signal.SIGKILL)
    with pytest.raises((RuntimeError, ConnectionError)):
        server(before, tmp_path)
    server(Forks("json"), tmp_path)


def test_a_server_that_cannot_import_is_told_with_its_own_words(tmp_path: Path):
    with pytest.raises((RuntimeError, ConnectionError)) as told:
        server(Forks("no_such_module"), tmp_path)
    assert "No module named 'no_such_module'" in "".join(told.value.__notes__)
    next(tmp_path.glob("*.err")).with_suffix("").unlink()  # where it listened


def test_who_has_started_a_server_is_read_to_its_end_while_others_use_that(tmp_path: Path):
    (tmp_path / "starts.py").write_text(
        f"import os, sys; sys.path.insert(0, {str(Path(forks.__file__).parent)!r}); from forks import Forks, Path\n"
        "of = Forks('json')\n"
        "ran = of.run(Path('parent.py').resolve(), (), dict(os.environ), cwd=Path.cwd(), timeout=30)\n"
        "print(ran.stdout.strip() or ran.stderr, flush=True)\n"
        "print(input())"
    )
    env = {**os.environ, "MGPU_TESTS_FORKS": str(tmp_path)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "starts.py"], cwd=tmp_path, env=env, text=True, **pipes) as first:
        assert first.stdout
        started, shared = int(first.stdout.readline()), Forks("json")
        assert server(shared, tmp_path) == started
        assert first.communicate("bye\n", timeout=60) == ("bye\n", "")


def test_who_looks_in_proc_finds_what_is_forked_by_its_own_words_and_environment(tmp_path: Path):
    looks = tmp_path / "looks.py"
    looks.write_text(
        "for of in 'cmdline', 'environ': print(*map(str.rstrip, open(f'/proc/self/{of}').read().split('\\0')), sep='|')"
    )
    env = {"OF": "its_own", "LONG": "x" * 20_000}
    done = Forks("json").run(looks, ("--a", "word"), env, cwd=tmp_path, timeout=30)
    rest = "||"  # one word, whatever room is left: each costs those who look through all processes
    assert done.stdout.splitlines() == [
        f"{sys.executable}|{looks}|--a|word{rest}",
        f"OF=its_own|LONG={env['LONG']}{rest}",
    ]


def test_what_is_forked_says_what_it_has_to_say_at_its_end(tmp_path: Path):
    (tmp_path / "ends.py").write_text(LAST_WORDS)
    done = forks.Forks().run(tmp_path / "ends.py", (), dict(os.environ), cwd=tmp_path, timeout=30)
    assert done.stdout == "of a thread\nat its end\n"


def test_an_environment_that_cannot_be_shown_is_refused(tmp_path: Path):
    (tmp_path / "runs.py").write_text("print('it runs')")
    done = Forks("json").run(tmp_path / "runs.py", (), {"LONG": "x" * 100_000}, cwd=tmp_path, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert "more than there is room for" in done.stderr


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[str]]]]:
    """Starts BEHIND, with a process that stands for it, and reads its first words: its pid, its parent's and so on."""
    (tmp_path / "behind.py").write_text(BEHIND)
    of = Forks("json")
    words = of.behind(tmp_path / "behind.py")

    def start(*prefix: str) -> tuple[subprocess.Popen[str], list[str]]:
        command = [*prefix, *words, "word"]
        env = {**os.environ, "OF": "its_own"}
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
        stack.callback(process.kill)
        assert process.stdout
        return process, process.stdout.readline().split()

    with ExitStack() as stack:
        yield start


def test_a_process_that_stands_for_a_forked_one_is_told_apart_by_its_number_alone(behind):
    process, (pid, *words) = behind()
    assert int(pid) != process.pid
    assert words == [str(os.getpid()), "its_own", "word", os.uname().nodename]
    process.terminate()
    assert process.wait(30) == 7


def test_it_ends_as_the_forked_one_does(behind):
    process, (pid, *_) = behind()
    os.kill(int(pid), signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_the_forked_one_ends_with_it(behind):
    process, (pid, *_) = behind()
    process.kill()
    until(lambda: procs.of(int(pid)) is None)
    assert process.communicate()[0] == ""


def test_the_forked_one_hears_that_the_parent_of_both_has_died(behind):
    process, _ = behind("sh", "-c", '"$@" & wait', "sh")
    process.kill()
    assert process.communicate(timeout=30)[0] == "orphaned\n"


def test_the_forked_one_is_on_the_machine_of_who_stands_for_it(behind, namespaces):
    _, (*_, host) = behind("unshare", "--uts", "--mount", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    assert host == "elsewhere"


def test_ranks_that_hang_say_where_each_of_them_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hangs.py").write_text(HANGS)
    of = Forks("json")
    with monkeypatch.context() as patched:
        patched.setattr(ranks, "_FORKS", of)
        hanging = ranks.start(tmp_path / "hangs.py", (), tmp_path / "said", os.environ)
    until(lambda: hanging.said.count("hangs") == 2)
    with pytest.raises(AssertionError, match="it has run for 0 s"):
        hanging.wait(0)
    assert re.findall(r"in (waits|rank)\b", hanging.said) == ["waits", "rank"]


def test_a_run_of_many_workers_has_one_server_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("import workers\ndef pytest_xdist_setupnodes(specs): workers.fork(specs)\n")
    test = "import logging, pytest, sys\n@pytest.mark.parametrize('n', range(8))\n"
    test += "def test_it(n, worker_id):\n    assert worker_id != 'master' and 'torch' in sys.modules\n"
    test += "    assert logging.getLogger('transformers').handlers[0].stream.fileno() == 2\n"
    (tmp_path / "test_it.py").write_text(test)
    env = {**os.environ, "MGPU_TESTS_FORKS": str(tmp_path), "PYTHONPATH": str(Path(forks.__file__).parent)}
    run = [sys.executable, "-m", "pytest", "-q", "-n2", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert "8 passed" in done.stdout, done.stdout + done.stderr
