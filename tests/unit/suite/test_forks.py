"""Servers that fork: one for all who ask for the same, as long as any of them lives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
import ranks
from forks import Forks
from mgpu_train.agent.machine import procs
from waiting import until

PARENT = "import os; print(os.getppid())"
HANGS = """
import os, signal

def rank():
    print("hangs", flush=True), signal.pause()

def waits(child):
    print("hangs", flush=True), os.wait()

child = os.fork()
waits(child) if child else rank()
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
    test = "import pytest, sys\n@pytest.mark.parametrize('n', range(8))\n"
    test += "def test_it(n, worker_id): assert worker_id != 'master' and 'torch' in sys.modules\n"
    (tmp_path / "test_it.py").write_text(test)
    env = {**os.environ, "MGPU_TESTS_FORKS": str(tmp_path), "PYTHONPATH": str(Path(forks.__file__).parent)}
    run = [sys.executable, "-m", "pytest", "-q", "-n2", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert "8 passed" in done.stdout, done.stdout + done.stderr
