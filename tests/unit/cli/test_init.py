"""`mgpu init` beside a user's own program: the run file runs that one, and says what becomes of its work."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mgpu import paths
from mgpu.backend import location
from mgpu.cli.init import _ignore
from mgpu.errors import InputError
from mgpu.spec.load import load


@pytest.fixture
def init(mgpu, world, monkeypatch):
    """Makes a project of a folder with these files; the run file, read as `launch` reads it."""
    monkeypatch.setattr("mgpu.iac.engine.install.set_up", lambda *_: None)

    def make(**contents: str):
        folder = world.folder / "p"
        folder.mkdir()
        for name, text in contents.items():
            (folder / name.replace("_", ".")).write_text(text)
        done = mgpu("init", "p")
        assert done.code == 0, done.err
        return load(folder / "mgpu.yaml"), done.err, folder

    return make


@pytest.mark.parametrize("name", ["train_py", "main_py", "finetune_py"])
def test_the_program_that_is_there_is_run_and_its_files_come_home(init, name):
    spec, said, folder = init(**{name: "print('mine')\n"})
    program = name.replace("_", ".")
    assert spec.command == (program,)
    assert (spec.checkpoint, "*.pt" in spec.outputs) == ("none", True)
    assert f"wrote {Path('p') / 'mgpu.yaml'}, which runs {program}" in said
    assert [path.name for path in folder.glob("*.py")] == [program]
    assert (folder / program).read_text() == "print('mine')\n"


def test_a_program_that_saves_as_mgpu_expects_keeps_its_checkpoints_and_requirements_are_installed(init):
    spec, _, _ = init(train_py="import os\nos.environ['MGPU_CHECKPOINT_DIR']\n", requirements_txt="einops\n")
    assert spec.command == ("train.py",)
    assert spec.checkpoint != "none"
    assert spec.recovery.attempts > 0
    assert spec.code.requirements == "requirements.txt"


def test_a_gitignore_that_is_not_utf_8_keeps_its_bytes(tmp_path):
    path = tmp_path / ".gitignore"
    path.write_bytes("größe/\n".encode("latin-1"))
    _ignore(path)
    first, *added = path.read_bytes().splitlines()
    assert first == "größe/".encode("latin-1")
    assert b".mgpu/" in added


def test_what_comes_next_can_be_pasted_whatever_the_folder_is_called(mgpu, world, monkeypatch):
    monkeypatch.setattr("mgpu.iac.engine.install.set_up", lambda *_: None)
    assert "next: cd 'my work' && mgpu plan " in mgpu("init", "my work").err


def test_a_folder_that_cannot_be_written_into_is_told_in_three_lines(mgpu, world):
    """/proc/self takes no files, not even root's."""
    for folder in ("/proc/self", "/proc/self/new"):
        done = mgpu("init", folder)
        assert (done.code, done.err.startswith(f"error: {folder}: ")) == (2, True), done.err
        assert len(done.err.splitlines()) == 3


def test_beside_several_programs_or_none_an_example_is_written_and_run(init):
    spec, _, folder = init(a_py="", b_py="")
    assert spec.command == ("train.py", "--steps", "200")
    assert "MGPU_CHECKPOINT_DIR" in (folder / "train.py").read_text()


@pytest.mark.parametrize("name", ["setup_py", "conftest_py"])
def test_what_tools_find_by_its_name_is_nobodys_program(init, name):
    spec, _, folder = init(**{name: ""})
    assert spec.command == ("train.py", "--steps", "200")
    assert (folder / "train.py").exists()


def test_beside_what_tools_find_by_its_name_the_only_program_is_run(init):
    assert init(setup_py="", conftest_py="", finetune_py="print()")[0].command == ("finetune.py",)


def test_a_project_names_its_backend_which_was_tried_before(mgpu, world, monkeypatch):
    used = []
    monkeypatch.setattr("mgpu.iac.engine.install.set_up", lambda *_: used.append(location.current().folder))
    team = world.folder / "team"
    assert mgpu("init", "p", "--backend", team.as_uri()).code == 0
    assert used == [team]
    assert yaml.safe_load((world.folder / "p" / "Pulumi.yaml").read_text())["backend"] == {"url": team.as_uri()}
    assert (team / "mgpu" / "owner").exists()
    assert mgpu("init", "p", "--backend", team.as_uri()).code == 0, "again is the same"
    other = mgpu("init", "p", "--backend", (world.folder / "other").as_uri())
    assert (other.code, team.as_uri() in other.err) == (2, True)
    refused = mgpu("init", "q", "--backend", "https://api.pulumi.com")
    assert (refused.code, (world.folder / "q" / "Pulumi.yaml").exists()) == (2, False)
    alone = mgpu("init", "q", "--secrets-provider", "awskms://alias/x")
    assert (alone.code, "is a folder of this machine" in alone.err) == (2, True)


def test_a_run_file_elsewhere_is_of_its_own_projects_backend(mgpu, world, monkeypatch):
    monkeypatch.setattr("mgpu.iac.engine.install.set_up", lambda *_: None)
    team = world.folder / "team"
    mgpu("init", "elsewhere", "--backend", team.as_uri())

    def planned(_):
        raise InputError(f"its backend is {location.current().folder}")

    monkeypatch.setattr("mgpu.cli.common.agreement.make_plan", planned)
    assert f"its backend is {team}" in mgpu("plan", "elsewhere/mgpu.yaml").err
    assert location.current().root == paths.state_dir(), "and no other command's"
