"""The code of a run is what it was at the first attempt, whatever is done to the folder later."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mgpu_train.agent.host.layout import RunLayout

from mgpu.errors import InputError
from mgpu.events import Note, Warned
from mgpu.remote.node import SyncReport
from mgpu.remote.snapshot import Snapshot
from mgpu.run.job.request import resolve
from mgpu.run.nodes import code_upload
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import load, save
from mgpu.run.record.session import Session
from mgpu.spec.model import RunSpec

SAVES = "MGPU_CHECKPOINT_DIR"


class Run:
    """A run of a folder, and what each attempt sends of it."""

    def __init__(self, world, tmp_path, **spec):
        self.world, self.nodes = world, world.has_nodes(2)
        self.folder = tmp_path / "mine"
        self.folder.mkdir()
        world.record("run-1")
        base = {"name": "a", "provider": "local", "max_hours": 1, "max_price_usd_per_hour": 1}
        self.request = resolve(
            RunSpec.model_validate(base | (spec or {"command": ["t.py"]})),
            "run-1",
            self.folder,
            timeouts=world.timeouts,
        )
        self.sent, self.apart = [], []
        for node in world.nodes:
            node.sync = self._sync

    def write(self, **files):
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def send(self):
        """As every attempt does, and every process that takes the run over."""
        self.sent.clear()
        session = Session(load("run-1"), self.world.events.append, self.world.timeouts)
        code_upload.send(session, self.request, self.nodes)
        return session.folder.work

    def _sync(self, snapshot, dest, *, apart, **_):
        assert dest == str(RunLayout("run-1").work)
        self.apart.append(apart)
        self.sent.append({path: snapshot.kept.get(path) for path in snapshot.entries})
        return type(self.world.nodes[0]).sync(self.world.nodes[0], snapshot, dest)


@pytest.fixture
def run(world, tmp_path):
    return Run(world, tmp_path)


def test_what_is_edited_later_is_not_sent(run):
    run.write(train="first")
    run.send()
    (run.folder / "train").write_text("edited in place")
    (run.folder / "more").write_text("added")
    run.send()
    assert run.sent == [{"train": b"first"}] * 2


@pytest.mark.parametrize("slots", [[], [1]])
def test_no_file_is_shared_with_a_run_that_shares_the_machines(run, slots):
    """What its program writes into one, the other's would read."""
    run.write(train="x")
    record = load("run-1")
    record.slots = slots
    save(record)
    run.send()
    assert run.apart == [bool(slots)] * 2


def test_links_modes_and_what_is_ignored_stay_as_they_were(run):
    run.write(tool="#!", note="x")
    (run.folder / ".mgpuignore").write_text("note\n.mgpuignore\n")
    (run.folder / "tool").chmod(0o755)
    (run.folder / "sub").mkdir()
    (run.folder / "sub" / "link").symlink_to("../tool")
    work = run.send()
    assert run.sent[0].keys() == {"tool", "sub/link"}
    assert (work / "sub" / "link").readlink().as_posix() == "../tool"
    assert stat.S_IMODE((work / "tool").stat().st_mode) == 0o500
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert not (work / "tool").samefile(run.folder / "tool")


# --- what is told of it before anything is rented ---------------------------------------------------------------------


def test_how_much_it_is_and_what_is_left_out(run):
    run.write(train=SAVES + "x" * (3 << 19), note="x")
    (run.folder / ".gitignore").write_text("/note\n/data/\n.gitignore\n*.pt\n")
    (run.folder / "data").mkdir()
    run.write(**{"data/1": "x", "data/2": "x", "a.pt": "x", "b.pt": "x"})
    (told,) = code_upload.look(run.request)
    left_out = "left out by .gitignore or .mgpuignore: .gitignore, a.pt, b.pt and 2 more"
    assert told == Note(f"code: 1 file (1.5 MiB) of {run.folder}; {left_out}")
    run.send()
    assert [sent.keys() for sent in run.sent] == [{"train"}] * 2


def test_a_large_folder_is_told_with_its_largest_files(run, monkeypatch):
    monkeypatch.setattr(code_upload, "LARGE", 5000)
    run.write(train=SAVES, a="x" * 2000, b="x" * 2999, c="x" * 30)
    assert len(code_upload.look(run.request)) == 2
    _, warned = code_upload.look(run.request)
    assert isinstance(warned, Warned)
    assert "b (2.9 KiB), a (2.0 KiB), c (30 B) and 1 more" in warned.text
    (run.folder / ".mgpuignore").write_text("b\n")
    assert len(code_upload.look(run.request)) == 1


def test_a_program_with_a_syntax_error_is_told_before_it_is_rented_for(run):
    program = run.request.workdir / run.request.spec.command[0]
    quiet = len(code_upload.look(run.request))
    program.write_text("print(1)\nif x\n")
    told = [event.text for event in code_upload.look(run.request)][1:]
    assert len(told) == quiet
    assert told[0].startswith(f"{program.name}, line 2: ")


@pytest.mark.parametrize("ignored", ["t.py", "*.py", "/t.py"])
def test_a_program_that_is_left_out_is_refused(run, ignored):
    run.write(**{"t.py": "", ".gitignore": ignored})
    with pytest.raises(InputError, match=r"t\.py would not be sent") as refused:
        code_upload.look(run.request)
    assert "!t.py" in refused.value.next_step
    (run.folder / ".mgpuignore").write_text("!t.py")
    assert code_upload.look(run.request)


def test_a_program_in_a_folder_that_is_left_out_is_refused(world, tmp_path):
    run = Run(world, tmp_path, command=["src/t.py"])
    (run.folder / "src").mkdir()
    run.write(**{"src/t.py": "", ".gitignore": "src/"})
    with pytest.raises(InputError, match=r"src/t\.py would not be sent"):
        code_upload.look(run.request)


# --- kept once --------------------------------------------------------------------------------------------------------


def another(run, run_id):
    """The code of another run of the same folder."""
    run.world.record(run_id)
    session = Session(load(run_id), run.world.events.append, run.world.timeouts)
    nodes = SimpleNamespace(sync=lambda *_args, **_kwargs: [SyncReport(1, 1, 0, 0)])
    code_upload.send(session, replace(run.request, run_id=run_id), nodes)
    return session.folder.work


def test_runs_share_what_has_the_same_contents(run):
    run.write(train="x" * 5000, other="1", empty="")
    first = run.send()
    run.write(other="2")
    second = another(run, "run-2")
    assert (first / "train").samefile(second / "train")
    assert ((first / "other").read_text(), (second / "other").read_text()) == ("1", "2")


def test_a_program_and_a_note_of_the_same_contents_keep_their_modes(run):
    run.write(a="#!", b="#!")
    (run.folder / "a").chmod(0o755)
    work = run.send()
    assert (os.access(work / "a", os.X_OK), stat.S_IMODE((work / "b").stat().st_mode)) == (True, 0o400)


def test_contents_that_are_not_whole_are_given_to_no_other_run(run):
    """A power cut has lost some of them, or somebody has edited them in the folder of a run."""
    run.write(train="x" * 5000)
    first = run.send()
    (first / "train").chmod(0o600)
    (first / "train").write_text("edited")
    second, third = another(run, "run-2"), another(run, "run-3")
    assert (second / "train").read_text() == (third / "train").read_text() == "x" * 5000
    assert (second / "train").samefile(third / "train")
    assert (first / "train").read_text() == "edited"


def test_a_disk_without_links_has_copies(run, monkeypatch):
    def refused(*_args):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refused)
    run.write(train="x")
    assert (run.send() / "train").read_text() == (another(run, "run-2") / "train").read_text() == "x"


def test_what_no_run_has_any_more_is_removed(run):
    run.write(train="x" * 5000, other="1")
    run.send()
    run.write(other="2" * 100)
    second = another(run, "run-2")
    assert code_upload.prune() == 0
    shutil.rmtree(second)
    assert code_upload.prune() == 100
    assert another(run, "run-3").joinpath("train").read_text() == "x" * 5000


def test_what_another_process_removes_meanwhile_is_not_counted(run, monkeypatch):
    """Two commands that remove runs, or one that puts contents there in place."""
    run.write(train="x")
    shutil.rmtree(run.send())
    found = Path.glob

    def removed(folder, pattern):
        for each in found(folder, pattern):
            each.unlink()
            yield each

    monkeypatch.setattr(Path, "glob", removed)
    assert code_upload.prune() == 0


def test_a_copy_that_fails_leaves_none_behind(run, monkeypatch):
    run.write(train="first")

    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr("mgpu.remote.snapshot.os.fchmod", full)
        with pytest.raises(InputError, match="cannot be kept"):
            run.send()
    assert not [path for path in Folder("run-1").root.iterdir() if "work" in path.name]
    run.send()
    assert run.sent == [{"train": b"first"}] * 2


def test_what_another_process_has_kept_meanwhile_is_the_code(run, monkeypatch):
    """One that took the run over, while this one was about to keep it."""
    run.write(train="mine")
    write_to = Snapshot.write_to

    def overtaken(snapshot, aside):
        write_to(snapshot, aside)
        kept = Folder("run-1").work
        kept.mkdir()
        (kept / "train").write_text("theirs")

    monkeypatch.setattr(Snapshot, "write_to", overtaken)
    run.send()
    assert run.sent == [{"train": b"theirs"}] * 2
    assert [path.name for path in Folder("run-1").root.iterdir() if "work" in path.name] == ["work"]


def test_without_a_command_there_is_no_code(world, tmp_path):
    run = Run(world, tmp_path, train={})
    assert not run.send().exists()
    assert run.sent == []
