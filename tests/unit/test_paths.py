from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mgpu import paths

FOLDERS = [
    (paths.state_dir, "XDG_STATE_HOME", ".local/state"),
    (paths.cache_dir, "XDG_CACHE_HOME", ".cache"),
    (paths.config_dir, "XDG_CONFIG_HOME", ".config"),
    (paths.data_dir, "XDG_DATA_HOME", ".local/share"),
]


@pytest.mark.parametrize(("folder", "variable", "default"), FOLDERS)
def test_the_xdg_variable_is_read_at_every_call(folder, variable, default, tmp_path, monkeypatch):
    for base in ("a", "b"):
        monkeypatch.setenv(variable, str(tmp_path / base))
        assert folder() == tmp_path / base / "mgpu"


@pytest.mark.parametrize("value", ["", "relative/folder"])
@pytest.mark.parametrize(("folder", "variable", "default"), FOLDERS)
def test_an_empty_or_relative_one_is_ignored(folder, variable, default, value, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, value)
    assert folder() == tmp_path / default / "mgpu"


def test_the_owner_is_made_once(xdg):
    first = paths.owner()
    assert re.fullmatch(r"o-[0-9a-f]{12}", first)
    assert paths.owner() == first
    assert [path.name for path in paths.state_dir().iterdir()] == ["owner"]


def test_two_users_are_two_owners(tmp_path, monkeypatch):
    owners = set()
    for user in ("a", "b"):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / user))
        owners.add(paths.owner())
    assert len(owners) == 2


def test_first_runs_at_once_agree(xdg):
    command = [sys.executable, "-c", "from mgpu import paths; print(paths.owner())"]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate(timeout=60)[0].strip() for process in several}
    assert said == {paths.owner()}


def test_importing_paths_needs_only_the_standard_library():
    code = "import sys, mgpu.paths; print(*(m for m in ('pydantic', 'yaml', 'click', 'rich') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_the_state_folder_is_the_users_alone(xdg):
    paths.owner()
    assert Path(paths.state_dir()).stat().st_mode & 0o077 == 0


def test_a_path_is_shown_from_here_and_whole_where_there_is_no_here(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert (paths.near(here / "a" / "b"), paths.near(tmp_path / "c")) == (str(Path("a", "b")), str(tmp_path / "c"))
    here.rmdir()
    assert paths.near(here / "a") == str(here / "a")
