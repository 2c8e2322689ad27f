"""`--resume` goes on with a run of the same project and name, and nothing stands for a run but its name."""

from __future__ import annotations

import pytest

from mgpu.cli.common import agreement
from mgpu.console import Console
from mgpu.errors import InputError
from mgpu.run.fleet.stack import project_of
from mgpu.run.lifecycle import resume
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import Record
from mgpu.spec.load import loads

FILE = """
name: it
provider: local
max_hours: 1
max_price_usd_per_hour: 1
command: [train.py]
"""


@pytest.fixture
def project(tmp_path):
    """A folder with a run file in a project; what a run of it has left."""

    def make(name: str):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "Pulumi.yaml").write_text(f"name: {name}\n")
        (folder / "mgpu.yaml").write_text(FILE)
        return folder

    return make


@pytest.fixture
def run(xdg, project):
    folder = project("mine")
    made = Record(
        run_id="it-1", name="it", project=str(folder), project_base=str(folder), run_file=str(folder / "mgpu.yaml"),
        stack="it-1", own_stack=True, fleet_name="mine-it-1", provider="local", options={}, nodes=1,
    )  # fmt: skip
    record.write(made)
    Folder("it-1").run_file.write_text(FILE)
    return made


def resumed(run_id, folder, text=FILE):
    return resume.before(run_id, folder / "mgpu.yaml", loads(text, "mgpu.yaml"))


def test_a_run_of_this_project_and_name_is_resumed(run, tmp_path):
    found = resumed("it", tmp_path / "mine")
    assert found is not None
    assert found.run_id == "it-1"
    assert resumed(None, tmp_path / "mine") is None


def test_a_run_of_another_name_is_not(run, tmp_path):
    with pytest.raises(InputError, match="its name is `it`"):
        resumed("it-1", tmp_path / "mine", FILE.replace("name: it", "name: other"))


def test_a_run_of_another_project_is_not(run, project):
    with pytest.raises(InputError, match="another project: `mine`"):
        resumed("it-1", project("theirs"))


def test_folders_without_a_program_of_their_own_are_told_apart(run, project, xdg):
    """They share mgpu's own project."""
    folders = [project("one"), project("two")]
    for folder in folders:
        (folder / "Pulumi.yaml").unlink()
    run.project, run.project_base = str(project_of(folders[0] / "mgpu.yaml")), str(folders[0])
    record.write(run)
    assert resumed("it-1", folders[0]) is not None
    with pytest.raises(InputError, match="of another folder"):
        resumed("it-1", folders[1])
    (folders[0] / "mgpu.yaml").unlink()
    folders[0].rmdir()
    assert resumed("it-1", folders[1]) is not None, "it was moved"


def test_a_project_that_was_moved_is_the_same(run, tmp_path):
    (tmp_path / "mine").rename(tmp_path / "moved")
    assert resumed("it-1", tmp_path / "moved") is not None


@pytest.mark.parametrize("empty", ["", "  "])
def test_nothing_stands_for_no_run(run, tmp_path, empty):
    with pytest.raises(InputError, match="RUN is empty"):
        record.load(empty)
    with pytest.raises(InputError, match="RUN is empty"):
        resumed(empty, tmp_path / "mine")
    assert record.load("last").run_id == "it-1"


def test_what_has_changed_in_the_run_file_is_told(run):
    now = FILE.replace("[train.py]", "[train.py, --lr, '1']") + "recovery: {attempts: 5}\nregions: here\n"
    assert resume.changes(run, loads(FILE, "f")) == []
    assert resume.changes(run, loads(now, "f")) == [
        "command: ['train.py'] -> ['train.py', '--lr', '1']",
        "recovery.attempts: 1 -> 5",
        "regions: none -> ['here']",
    ]
    with_env = loads(FILE + "env: {RATE: 1}\n", "f")
    assert resume.changes(run, with_env) == ["env.RATE: none -> 1"], "the block itself has not changed"
    Folder("it-1").run_file.write_text("of an older version: true\n")
    assert resume.changes(run, loads(now, "f")) == []


@pytest.mark.parametrize("command", [["stop", ""], ["down", ""], ["status", ""], ["attach", ""], ["logs", ""]])
def test_no_command_takes_an_empty_run_for_the_newest(run, mgpu, command):
    done = mgpu(*command)
    assert (done.code, "RUN is empty" in done.err) == (2, True)


def test_before_it_is_paid_for_a_run_without_a_checkpoint_says_that_it_may_begin_from_zero(run, capsys):
    agreement.show_changes(Console(), run, loads(FILE, "f"))
    assert "it begins from zero" in capsys.readouterr().err
    run.checkpoint_id = "a001-step-5"
    agreement.show_changes(Console(), run, loads(FILE, "f"))
    assert capsys.readouterr().err == ""


def test_down_takes_a_run_or_a_stack(run, mgpu):
    done = mgpu("down", "it-1", "--stack", "dev")
    assert (done.code, "not both" in done.err) == (2, True)
