"""Environments on a node, the agent's own and that of the user's requirements: real ones, but for what pip does."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mgpu_train.agent.attempt.decide import AttemptFailed
from mgpu_train.agent.host import python_env
from mgpu_train.agent.host.python_env import Problem
from mgpu_train.agent.phases import requirements
from mgpu_train.agent.status.log import Log
from mgpu_train.agent.status.status import Fault

# notes how it was called; then does what the file `does` says
PIP = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    print(json.dumps([sys.argv[1:], os.getcwd(), "PYTHONPATH" in os.environ]), file=calls)
site = next(pathlib.Path(sys.prefix, "lib").glob("python*/site-packages"))
exec((here / "does").read_text())
"""
HAS_ALL = f"""
for name in {list(python_env.NEEDS)}:
    (site / f'{{name}}-99.dist-info').mkdir()
    (site / f'{{name}}-99.dist-info/METADATA').write_text('Version: 99.0')
"""


@pytest.fixture
def pip(tmp_path, monkeypatch) -> SimpleNamespace:
    """An interpreter that has this pip and too old a pydantic alone; `does` says what pip does, `calls()` how often."""
    site = tmp_path / "site-packages"
    (site / "pydantic-1.10.dist-info").mkdir(parents=True)
    (site / "pydantic-1.10.dist-info" / "METADATA").write_text("Name: pydantic\nVersion: 1.10\n")
    (site / "pip.py").write_text(PIP)
    (site / "does").touch()
    own = [path for path in sys.path if Path(path).name not in ("site-packages", "dist-packages")]
    monkeypatch.setattr(sys, "path", [*own, str(site)])
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    calls = lambda: [json.loads(line) for line in (site / "calls").read_text().splitlines()]  # noqa: E731
    return SimpleNamespace(does=(site / "does").write_text, calls=calls)


@pytest.fixture
def find(tmp_path, capsys):
    """What `python_env.py find` prints, with an environment in the folder `base`."""

    def call(base: Path = tmp_path / "base", *more: str) -> dict:
        status, answer = python_env.main("find", "60", str(base), *more), json.loads(capsys.readouterr().out)
        assert status == (python_env.PROBLEM if "problem" in answer else 0)
        return answer

    return call


def test_what_the_interpreter_lacks_is_installed_once_with_hashes_and_nothing_else(pip, find, capsys):
    assert python_env.main("lacks") == 0
    assert json.loads(capsys.readouterr().out) == ["awscrt", "boto3", "pydantic (has 1.10)"]
    pip.does(HAS_ALL)
    answer = find()
    assert answer["installed"] is True
    assert find() == {**answer, "installed": False}
    ((words, _, inherits),) = pip.calls()
    assert {"--require-hashes", "--no-deps", "--only-binary", str(python_env.LIST)} <= set(words)
    assert not inherits, "the caller's PYTHONPATH would decide what is there"


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("", "still lacks awscrt, boto3, pydantic (has 1.10)"),
        ("print(*range(9), sep='\\n'); sys.exit(1)", "3\n4\n5\n6\n7\n8"),
    ],
)
def test_pip_that_fails_or_installs_too_little_is_a_problem_and_is_asked_again(pip, find, does, why):
    pip.does(does)
    for calls in (1, 2):
        answer = find()
        assert (answer["problem"], answer["why"].endswith(why)) == ("packages", True), answer
        assert len(pip.calls()) == calls


def test_a_machine_that_cannot_have_the_environment_says_why(pip, find, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    answer = find(tmp_path / "file" / "base")
    assert (answer["problem"], "Not a directory" in answer["why"]) == ("packages", True)
    with pytest.raises(Problem, match=r"makes no environment with pip: .*Not a directory") as caught:
        python_env.make(tmp_path / "file" / "base")
    assert caught.value.kind == "pip"
    with monkeypatch.context() as patched:
        patched.setattr(python_env.importlib.util, "find_spec", lambda _name: None)
        assert find(tmp_path / "base", "torch")["problem"] == "torch"

    def late(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(python_env.subprocess, "run", late)
    assert find() == {"problem": "packages", "why": "pip did not end in time"}


def test_whoever_waits_for_a_lock_has_it_when_the_other_lets_go(tmp_path, monkeypatch):
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        later = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        monkeypatch.setattr(python_env, "time", later)
        with python_env.locked(tmp_path / "lock", time.monotonic() + 60), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_agent_whose_status_is_torn_is_taken_to_train(tmp_path, monkeypatch):
    monkeypatch.setattr(python_env, "time", SimpleNamespace(monotonic=time.monotonic))  # it is not waited for
    folder = tmp_path / "runs" / "theirs"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"phase": ')
    with (folder / "agent.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Problem, match="trains there"):
            python_env.claim(tmp_path, python_env.Claim("mine"), time.monotonic() + 60)
    assert not python_env._held(folder / "gone.lock"), "an agent whose folder goes meanwhile is none"


# --- the user's requirements


@pytest.fixture
def install(pip, tmp_path):
    """Installs requirements; the log is `tmp_path / "log"`."""
    file, log = tmp_path / "work" / "needs.txt", Log(tmp_path / "log")
    file.parent.mkdir()

    def call(text: bytes = b"einops==0.8\n") -> Path:
        file.write_bytes(text)
        return requirements.install(file, tmp_path / "env", scope="r", environment={"PYTHONPATH": "/x"}, log=log)

    return call


def test_requirements_are_installed_once_beside_what_the_agent_sees(pip, install, tmp_path):
    python = install()
    sees = subprocess.run([python, "-c", "import pip; print(pip.here)"], env={}, capture_output=True, check=False)
    assert (sees.stdout.decode().strip(), install()) == (str(tmp_path / "site-packages"), python), "torch is there once"
    (words, where, inherits), *_ = pip.calls()
    assert (words[-2:], where, inherits) == (["-r", "needs.txt"], str(tmp_path / "work"), False)
    told = "[agent] needs.txt: installing\n[agent] needs.txt: already installed\n"
    assert (tmp_path / "log").read_text() == told


@pytest.mark.parametrize(
    ("output", "fault", "reason"),
    [
        ("ERROR: No matching distribution found for einops==0.8", Fault.USER, "needs.txt: `einops==0.8` cannot be"),
        ("ERROR: [Errno 28] No space left on device", Fault.INFRASTRUCTURE, "needs.txt cannot be installed: "),
    ],
)
def test_what_pip_says_of_a_failure_is_told_and_tried_again(pip, install, tmp_path, output, fault, reason):
    pip.does(f"sys.exit({output!r})")
    for _ in range(2):
        with pytest.raises(AttemptFailed) as caught:
            install()
        assert (caught.value.fault, caught.value.reason.startswith(reason)) == (fault, True), caught.value.reason
    assert (tmp_path / "log").read_text().count(f"[agent] pip: {output}\n") == 2


def test_a_disk_without_room_for_an_environment_is_no_fault_of_the_user(install, monkeypatch):
    monkeypatch.setattr(requirements.venv.EnvBuilder, "create", lambda *_: Path("/none/bin").mkdir())
    with pytest.raises(AttemptFailed, match="no environment for the requirements: ") as caught:
        install()
    assert caught.value.fault is Fault.INFRASTRUCTURE
    with pytest.raises(AttemptFailed, match=r"needs\.txt cannot be read") as caught:
        install(b"\xff")
    assert caught.value.fault is Fault.USER
