"""A machine whose interpreter lacks what the agent needs gets it once, beside what it has; with real interpreters and
pip, and wheels that the test made. No index is asked."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pip
import pytest
from mgpu_train.agent import start
from mgpu_train.agent.host import python_env
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.host.python_env import Claim, Problem

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(".mgpu/lib/0123")
CLAIM = Claim("mine", "me", "here")


def wheel(folder: Path, name: str, version: str) -> str:
    """Makes a wheel with one module, and returns its line of a requirements file."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        at: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for at, text in files.items()
    }
    files[f"{info}/RECORD"] = (
        "".join(f"{at},sha256={digest},\n" for at, digest in digests.items()) + f"{info}/RECORD,,\n"
    )
    with zipfile.ZipFile(path, "w") as archive:
        for at, text in files.items():
            archive.writestr(at, text)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@dataclass
class Machine:
    """A home with the library as it is sent, an interpreter, and wheels instead of an index."""

    home: Path
    python: Path
    wheels: Path

    @property
    def script(self) -> Path:
        return self.home / LIBRARY / "mgpu_train" / "agent" / "host" / "python_env.py"

    @property
    def requirements(self) -> Path:
        return self.script.with_name("node-requirements.txt")

    def ready(
        self, *more: str, code: int = 0, python: Path | None = None, seconds: float = 120, claim: Claim = CLAIM
    ) -> dict[str, Any]:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "PIP_NO_INDEX": "1"}
        done = subprocess.run(
            [python or self.python, "-I", self.script, "ready", str(seconds), json.dumps(claim._asdict()), *more],
            env={**environment, "PIP_FIND_LINKS": str(self.wheels)},
            cwd=self.home,
            capture_output=True,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return json.loads(done.stdout)

    def runs(self, code: str) -> str:
        program = self.home / LIBRARY / "python"
        return subprocess.run([program, "-c", code], capture_output=True, check=True, text=True).stdout.strip()

    @property
    def environments(self) -> list[Path]:
        return [path for path in (self.home / ".mgpu" / "base").glob("*") if path.is_dir()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Its interpreter is an environment of its own, with pip, a module `torch`, and too old a pydantic."""
    home, wheels = tmp_path / "home dir", tmp_path / "wheels"
    agent = home / LIBRARY / "mgpu_train" / "agent" / "host"
    agent.mkdir(parents=True)
    wheels.mkdir()
    shutil.copy(python_env.__file__, agent)
    lines = [wheel(wheels, "awscrt", "0.99"), wheel(wheels, "boto3", "1.99.1"), wheel(wheels, "pydantic", "2.99.0")]
    (agent / "node-requirements.txt").write_text("".join(lines))
    venv.EnvBuilder(symlinks=True).create(tmp_path / "image")
    (site,) = (tmp_path / "image" / "lib").glob("python*/site-packages")
    (site / "pip").symlink_to(Path(pip.__file__).parent)  # to install it takes ten seconds
    (site / "torch.py").write_text("version = 'of the image'\n")
    (site / "pydantic.py").write_text("version = '1.10'\n")
    info = site / "pydantic-1.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pydantic\nVersion: 1.10\n")
    return Machine(home, tmp_path / "image" / "bin" / "python", wheels)


def test_what_is_missing_or_too_old_is_installed_once_beside_what_is_there(machine):
    answer = machine.ready("torch")
    assert answer["installed"] is True
    assert machine.runs("import pydantic, boto3, awscrt, torch; print(pydantic.version, torch.version)") == (
        "2.99.0 of the image"
    )
    assert machine.runs("import sys; print(sys.executable)") == answer["python"]
    assert machine.ready("torch") == {**answer, "installed": False}
    assert len(machine.environments) == 1
    own = subprocess.run([machine.python, "-c", "import pydantic; print(pydantic.version)"], capture_output=True)
    assert own.stdout == b"1.10\n", "the image's own packages stay as they are"


def test_an_interpreter_that_has_all_is_taken_as_it_is(machine):
    assert machine.ready("torch", python=Path(sys.executable)) == {"python": sys.executable, "installed": False}
    assert machine.environments == []
    assert machine.runs("import sys; print(sys.executable)") == sys.executable


def test_another_list_is_another_environment(machine):
    machine.ready()
    (machine.home / LIBRARY / "python").unlink()
    machine.requirements.write_text(machine.requirements.read_text() + "# newer\n")
    assert machine.ready()["installed"] is True
    assert len(machine.environments) == 2


def test_two_at_once_install_once(machine):
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(machine.ready())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["installed"] for answer in answers) == [False, True]


def test_who_has_waited_long_enough_for_another_installation_says_so(machine):
    folder = Path(machine.ready()["python"]).parents[1]
    (folder / "installed").unlink()
    with folder.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = machine.ready(code=python_env.PROBLEM, seconds=0)
    assert answer["problem"] == "busy"
    assert str(folder.with_suffix(".lock")) in answer["why"]
    assert machine.ready()["installed"] is True


def test_an_installation_that_was_cut_off_is_begun_anew(machine):
    folder = Path(machine.ready()["python"]).parents[1]
    (folder / "installed").unlink()
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "boto3.py").unlink()
    assert machine.ready()["installed"] is True
    assert machine.runs("import boto3; print(boto3.version)") == "1.99.1"


def test_a_package_with_another_hash_is_not_installed(machine):
    text = machine.requirements.read_text()
    machine.requirements.write_text(text[:-2] + ("0" if text[-2] != "0" else "1") + "\n")
    answer = machine.ready(code=python_env.PROBLEM)
    assert answer["problem"] == "packages"
    assert "hash" in answer["why"].lower()
    assert not (machine.home / LIBRARY / "python").exists()


def test_a_package_without_a_hash_is_not_installed(machine):
    plain = (line.partition(" --hash")[0] for line in machine.requirements.read_text().splitlines())
    machine.requirements.write_text("\n".join(plain) + "\n")
    answer = machine.ready(code=python_env.PROBLEM)
    assert (answer["problem"], "hash" in answer["why"].lower()) == ("packages", True)


def test_a_package_that_cannot_be_had_is_named(machine):
    (machine.wheels / "boto3-1.99.1-py3-none-any.whl").unlink()
    answer = machine.ready(code=python_env.PROBLEM)
    assert (answer["problem"], "boto3" in answer["why"]) == ("packages", True)


def test_what_still_lacks_after_the_installation_is_a_problem(machine):
    lines = machine.requirements.read_text().splitlines(keepends=True)
    machine.requirements.write_text(lines[1] + lines[2])
    answer = machine.ready(code=python_env.PROBLEM)
    assert (answer["problem"], "still lacks awscrt" in answer["why"]) == ("packages", True)


def test_no_torch_is_a_problem_before_anything_is_installed(machine):
    (site,) = (machine.python.parents[1] / "lib").glob("python*/site-packages")
    (site / "torch.py").unlink()
    assert machine.ready("torch", code=python_env.PROBLEM)["problem"] == "torch"
    assert machine.environments == []
    assert machine.ready()["installed"] is True, "a program may bring its own"


# --- whose the node is


@contextmanager
def living(home: Path, run: str, phase: str = "training") -> Iterator[int]:
    """An agent of this run lives: it holds its lock."""
    layout = RunLayout(run, home)
    Path(layout.root).mkdir(parents=True)
    Path(layout.status).write_text(json.dumps({"phase": phase}))
    with Path(layout.lock).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def claim(home: Path, mine: Claim = CLAIM, seconds: float = 60) -> None:
    python_env.claim(home, mine, time.monotonic() + seconds)


def test_a_node_on_which_another_run_trains_is_left_as_it_is(machine):
    python = Path(sys.executable)
    machine.ready(python=python, claim=Claim("theirs", "you", "there"))
    program = machine.home / LIBRARY / "python"
    program.write_text("theirs")
    with living(machine.home, "theirs"):
        answer = machine.ready(python=python, code=python_env.PROBLEM)
    assert answer == {
        "problem": "used", "why": "Run theirs (owner you, from there) trains there.", "run": "theirs",
    }  # fmt: skip
    assert program.read_text() == "theirs"
    machine.ready(python=python)
    assert program.read_text() != "theirs", "its agent is dead"


@pytest.mark.parametrize(
    ("theirs", "mine", "free"),
    [
        ([0, 1], (2, 3), True),
        ([0, 1], (1, 2), False),
        ([0, 1], (), False),
        ([], (0, 1), False),
    ],
)
def test_runs_with_other_slots_of_a_node_have_it_at_the_same_time(tmp_path, theirs, mine, free):
    claim(tmp_path, Claim("theirs", slots=tuple(theirs)))
    end = time.monotonic() + 60
    with living(tmp_path, "theirs"):
        share = {"slots": theirs, "of": 4, "gpus": True} if theirs else None
        (tmp_path / "runs/theirs/job.json").write_text(json.dumps({"share": share}))
        if not free:
            with pytest.raises(Problem, match="Run theirs trains there"):
                claim(tmp_path, Claim("mine", slots=mine))
            with pytest.raises(Problem, match="Run theirs"), python_env.claimed(tmp_path, "mine", end, mine):
                pass
            return
        claim(tmp_path, Claim("mine", slots=mine))
        for run, slots in (("mine", mine), ("theirs", theirs)):  # whoever has claimed it last
            with python_env.claimed(tmp_path, run, end, slots):
                pass
        with pytest.raises(Problem, match="Run mine has come"), python_env.claimed(tmp_path, "theirs", end, ()):
            pass


def test_a_run_is_not_in_its_own_way(tmp_path):
    with living(tmp_path, CLAIM.run):
        claim(tmp_path)


def test_an_agent_that_ends_is_waited_for(tmp_path, monkeypatch):
    with living(tmp_path, "theirs", "done") as lock:
        later = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: fcntl.flock(lock, fcntl.LOCK_UN))
        monkeypatch.setattr(python_env, "time", later)
        claim(tmp_path)


def test_an_agent_that_trains_is_not_waited_for(tmp_path, monkeypatch):
    impatient = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it will not end"))
    monkeypatch.setattr(python_env, "time", impatient)
    with living(tmp_path, "theirs"), pytest.raises(Problem, match="trains there"):
        claim(tmp_path)


def test_an_agent_that_never_ends_is_not_waited_for_for_ever(tmp_path):
    with living(tmp_path, "theirs", "failed"), pytest.raises(Problem, match="Run theirs trains there") as caught:
        claim(tmp_path, seconds=0)
    assert caught.value.kind == "used"


def test_whoever_claimed_it_last_has_it(tmp_path):
    claim(tmp_path)
    claim(tmp_path, Claim("theirs"))
    end = time.monotonic() + 60
    with pytest.raises(Problem, match="Run theirs has come") as caught, python_env.claimed(tmp_path, CLAIM.run, end):
        pass
    assert (caught.value.kind, caught.value.run) == ("used", "theirs")
    with python_env.claimed(tmp_path, "theirs", end):
        with pytest.raises(Problem) as caught:
            claim(tmp_path, seconds=0)
        assert caught.value.kind == "busy"


@pytest.mark.parametrize("torn", ["", '{"run": "th', '{"ran": "theirs"}'])
def test_a_claim_that_a_machine_has_torn_as_it_went_down_is_nobodys(tmp_path, torn):
    claim(tmp_path)
    (tmp_path / ".mgpu/claim.json").write_text(torn)
    with python_env.claimed(tmp_path, "other", time.monotonic() + 60):
        pass
    claim(tmp_path, Claim("other"))


def test_an_agent_does_not_start_where_another_run_has_claimed_the_node(tmp_path):
    layout = RunLayout("mine", tmp_path)
    claim(tmp_path, Claim("theirs"))
    job = SimpleNamespace(run_id="mine", secrets=(), share=None, timeouts=SimpleNamespace(command_s=5))
    with pytest.raises(Problem) as caught:
        start.start(job, SimpleNamespace(env={}), layout)
    assert caught.value.run == "theirs"
    assert not Path(layout.root).exists()


def test_an_interpreter_that_is_too_old_is_a_problem(monkeypatch, capsys):
    monkeypatch.setattr(python_env, "OLDEST", (99, 0))
    assert python_env.main("ready", "10", "{}", "torch") == python_env.PROBLEM
    assert json.loads(capsys.readouterr().out)["problem"] == "old"


@pytest.mark.parametrize(
    ("version", "lacks"), [("2.11", []), ("2.11.0rc1", []), ("3", []), ("2.10.9", [1]), ("1", [1]), ("2.9", [1])]
)
def test_a_version_is_compared_as_numbers(monkeypatch, version, lacks):
    monkeypatch.setattr(python_env, "NEEDS", {"pydantic": (2, 11)})
    monkeypatch.setattr(python_env.importlib.metadata, "version", lambda _name: version)
    assert len(python_env.lacking()) == len(lacks)


def test_what_is_needed_is_what_the_package_declares():
    with (ROOT / "train" / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]
    wanted = {line.partition(">=")[0]: line.partition(">=")[2].partition(",")[0] for line in declared["dependencies"]}
    assert {name: ".".join(map(str, least)) for name, least in python_env.NEEDS.items()} == wanted
    assert declared["requires-python"] == ">=" + ".".join(map(str, python_env.OLDEST))


def test_the_list_is_that_of_the_lock():
    code = "import write_node_requirements as w; print(w.LIST); print(w.text(), end='')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scripts", capture_output=True, check=True, text=True
    )
    assert f"{python_env.LIST}\n{python_env.LIST.read_text()}" == done.stdout, "run scripts/write_node_requirements.py"
    packages = [line.split("==")[0] for line in done.stdout.splitlines() if "==" in line]
    assert set(python_env.NEEDS) <= set(packages)
    assert "torch" not in packages
