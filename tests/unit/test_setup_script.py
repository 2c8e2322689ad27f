"""scripts/setup.sh on machines made of fakes: what it finds, what it leaves alone, and what it says when it cannot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("sh", "dirname", "cksum", "cat", "sed", "sort", "head", "cut", "mkdir", "rm", "mv", "cp", "chmod")

# A uv that makes the environment it is asked for, out of a Python that writes down how it was called.
UV = """#!/bin/sh
echo "uv $*" >>calls
case $1 in
    --version) echo "uv {version}" ;;
    venv) mkdir -p .venv/bin; printf '#!/bin/sh\\necho "venv-python $*" >>calls\\n' >.venv/bin/python
          chmod +x .venv/bin/python ;;
    sync) exit {sync} ;;
esac
"""
# A Python that is new enough; its pip "installs" uv, or fails.
PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit 0 ;;
    "-m pip --version") exit 0 ;;
    "-m pip install"*) echo "pip $*" >>calls; mkdir -p "$5/bin"; cp uv.fake "$5/bin/uv"; exit {pip} ;;
esac
"""


class Machine:
    """A checkout and a PATH with nothing on it but a few standard tools."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.cache = folder / "checkout", folder / "bin", folder / "cache"
        for name in ("scripts/setup.sh", "scripts/uv.txt", "uv.lock", "pyproject.toml", "train/pyproject.toml"):
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.program(self.checkout / "uv.fake", UV.format(version="0.13.8", sync=0))

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def has_python(self, pip: int = 0) -> Machine:
        self.program(self.bin / "python3", PYTHON.format(pip=pip))
        return self

    def has_uv(self, version: str = "0.13.8", sync: int = 0) -> Machine:
        self.program(self.bin / "uv", UV.format(version=version, sync=sync))
        return self

    def set_up(self) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), "HOME": "/nonexistent", "XDG_CACHE_HOME": str(self.cache)}
        command = [str(self.bin / "sh"), "scripts/setup.sh"]
        return subprocess.run(command, cwd=self.checkout, env=env, capture_output=True, text=True, check=False)

    def calls(self) -> list[str]:
        """What was called since the last time this was asked."""
        log = self.checkout / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_set_up_asks_uv_nothing(machine):
    assert machine.has_python().has_uv().set_up().returncode == 0
    assert "uv sync --quiet --frozen" in machine.calls()
    again = machine.set_up()
    assert (again.returncode, again.stderr) == (0, "")
    assert machine.calls() == ["venv-python -m mgpu.iac.install --project ."]


@pytest.mark.parametrize("name", ["uv.lock", "pyproject.toml", "train/pyproject.toml"])
def test_a_changed_lock_or_project_file_is_synced_into_the_same_venv(machine, name):
    machine.has_python().has_uv().set_up()
    machine.calls()
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    assert "bringing .venv" in machine.set_up().stderr
    calls = machine.calls()
    assert "uv sync --quiet --frozen" in calls
    assert not any(call.startswith("uv venv") for call in calls)


def test_the_size_is_said_before_the_download(machine):
    assert "5.5 GB" in machine.has_python().has_uv(sync=1).set_up().stderr


@pytest.mark.parametrize("version", [None, "0.4.9"])
def test_uv_is_installed_outside_the_checkout_where_it_is_missing_or_too_old(machine, version):
    machine.has_python()
    if version:
        machine.has_uv(version)
    assert machine.set_up().returncode == 0
    calls = machine.calls()
    pip = next(call for call in calls if call.startswith("pip"))
    assert "--require-hashes" in pip
    assert list(machine.cache.glob("mgpu/uv/*/bin/uv")), "uv lies in the cache"
    (machine.checkout / ".venv" / ".mgpu-stamp").unlink()
    assert machine.set_up().returncode == 0
    assert not any(call.startswith("pip") for call in machine.calls()), "and is found there the next time"


def test_no_python_is_one_error_with_the_cure(machine):
    done = machine.set_up()
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 3
    assert "Install one" in done.stderr


def test_a_uv_that_cannot_be_installed_is_an_error_with_the_cure(machine):
    done = machine.has_python(pip=1).set_up()
    assert done.returncode != 0
    assert "Install uv by hand" in done.stderr
    assert not list(machine.cache.glob("mgpu/uv/*[0-9]/bin/uv")), "half an installation is not taken for one"


def test_packages_that_cannot_be_installed_are_an_error_and_tried_again(machine):
    done = machine.has_python().has_uv(sync=2).set_up()
    assert done.returncode != 0
    assert "could not be installed" in done.stderr
    machine.calls()
    machine.has_uv().set_up()
    assert "uv sync --quiet --frozen" in machine.calls()
