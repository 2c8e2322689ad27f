"""What Pulumi's language host is told of the installed packages: as pip would tell it, in a tenth of the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mgpu.iac import environment
from mgpu.iac.engine import packages

_ASKED = ("-m", "pip", "list", "-v", "--format", "json")


def told(*arguments: str, path: str = "") -> str:
    """What the host's Python prints."""
    settings = environment.engine_env([])
    env = {**os.environ, environment.PYTHON: settings[environment.PYTHON], "PYTHONPATH": path}
    program = [settings["PULUMI_PYTHON_CMD"], *arguments]
    return subprocess.run(program, env=env, capture_output=True, text=True, check=True).stdout


def as_the_host_reads_it(answer: str) -> dict[str, tuple[str, Path]]:
    """Version and module of each package that may have a plug-in: by its name, or by a file in its module."""
    read = {}
    for package in json.loads(answer):
        module = Path(package["location"], package["name"].replace("-", "_"))
        if package["name"].startswith("pulumi-") or (module / "pulumi-plugin.json").exists():
            read[package["name"]] = (package["version"], module)
    return read


def test_the_host_reads_from_it_what_it_would_read_from_pip(tmp_path):
    for name, module in (("pulumi_aws-7.1.0", "pulumi_aws"), ("Snow_flake-1.0+local.2", "Snow_flake")):
        (tmp_path / module).mkdir()
        (tmp_path / module / "pulumi-plugin.json").write_text("{}")
        (tmp_path / f"{name}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: {name.partition('-')[2]}\n"
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(metadata)
    ours = as_the_host_reads_it(told(*_ASKED, path=str(tmp_path)))
    pips = subprocess.run(
        [sys.executable, *_ASKED], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=True
    )
    assert ours == as_the_host_reads_it(pips.stdout.decode())
    assert {"pulumi-aws", "Snow-flake"} <= ours.keys()


def test_it_knows_each_package_that_pip_knows():
    known = {package["name"].lower() for package in json.loads(told(*_ASKED))}
    pips = json.loads(subprocess.run([sys.executable, *_ASKED], capture_output=True, check=True).stdout)
    # some names have dots, which folders keep or lose: no package of Pulumi's has any
    assert {package["name"].lower().replace("_", "-").replace(".", "-") for package in pips} == {
        name.replace(".", "-") for name in known
    }


def test_of_two_packages_with_one_name_the_first_counts(tmp_path):
    for folder, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / folder / f"pulumi_x-{version}.dist-info").mkdir(parents=True)
    found = packages.installed([str(tmp_path / "none"), str(tmp_path / "a"), str(tmp_path / "b")])
    assert list(found) == [{"name": "pulumi-x", "version": "2.0", "location": str(tmp_path / "a")}]


def test_whatever_else_the_host_runs_is_run_by_the_programs_own_python():
    assert told("-c", "import sys; print(sys.executable, sys.argv[1:])", "a b", "*").strip() == (
        f"{environment.engine_env([])[environment.PYTHON]} ['a b', '*']"
    )
    assert told("-m", "pip", "--version").startswith("pip ")


def test_where_the_script_may_not_be_run_the_host_gets_the_python_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "_PYTHON", tmp_path / "python.sh")
    env = environment.engine_env([], venv=tmp_path)
    assert env["PULUMI_PYTHON_CMD"] == env[environment.PYTHON] == str(tmp_path / "bin" / "python")
