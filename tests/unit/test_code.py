"""The code of a run is what it was at the first attempt, whatever is done to the folder later."""

from __future__ import annotations

import errno
import os
import stat

import pytest
from mgpu_train.agent.layout import RunLayout

from mgpu.errors import InputError
from mgpu.events import Note
from mgpu.remote.snapshot import Snapshot
from mgpu.run import code
from mgpu.run.record import Folder, load
from mgpu.run.request import resolve
from mgpu.run.session import Session
from mgpu.spec.model import RunSpec


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
        self.sent = []
        for node in world.nodes:
            node.sync = self._sync

    def write(self, **files):
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def send(self):
        """As every attempt does, and every process that takes the run over."""
        self.sent.clear()
        session = Session(load("run-1"), self.world.events.append, self.world.timeouts)
        code.send(session, self.request, self.nodes)
        return session.folder.work

    def _sync(self, snapshot, dest, **_):
        assert dest == str(RunLayout("run-1").work)
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


def test_links_modes_and_what_is_ignored_stay_as_they_were(run):
    run.write(tool="#!", note="x")
    (run.folder / ".mgpuignore").write_text("note\n.mgpuignore\n")
    (run.folder / "tool").chmod(0o755)
    (run.folder / "sub").mkdir()
    (run.folder / "sub" / "link").symlink_to("../tool")
    work = run.send()
    assert run.sent[0].keys() == {"tool", "sub/link"}
    assert (work / "sub" / "link").readlink().as_posix() == "../tool"
    assert stat.S_IMODE((work / "tool").stat().st_mode) == 0o700
    assert stat.S_IMODE(work.stat().st_mode) == 0o700
    assert (work / "tool").stat().st_nlink == 1


def test_it_is_copied_once_and_said_how_much(run):
    run.write(train="x" * (3 << 19))
    run.send()
    run.send()
    kept = [event.text for event in run.world.of(Note) if "kept with" in event.text]
    assert kept == [f"code: 1 file (1.5 MiB) of {run.folder} kept with the run"]


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
