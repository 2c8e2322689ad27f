"""Checkpoints on a node's own disk: a name is a promise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mgpu_train.checkpoint.local import discard, finished, publish, write_aside


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_finished_folders_count(tmp_path):
    for name in ("step-10", "step-9", "step-0", ".tmp-step-11", "step-12.tmp", "step-", "step-01", "step-x", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-13").touch()
    (tmp_path / "step-14").symlink_to(tmp_path / "step-10")
    assert finished(tmp_path) == [(step, tmp_path / f"step-{step}") for step in (0, 9, 10)]
    assert finished(tmp_path / "nowhere") == []


def test_a_folder_that_a_program_removes_meanwhile_holds_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    monkeypatch.setattr(Path, "is_dir", lambda path: path.rmdir() is None)
    assert finished(folder) == []


def test_a_folder_loses_its_name_before_its_files_go(tmp_path, monkeypatch):
    (tmp_path / "step-1").mkdir()
    seen = []
    monkeypatch.setattr("shutil.rmtree", lambda path, **_: seen.append((path.name, finished(tmp_path))))
    discard(tmp_path / "step-1")
    assert seen[-1] == (".aside-old-step-1", [])
    discard(tmp_path / "absent")


def test_a_folder_appears_whole(tmp_path):
    final = tmp_path / "new" / "step-1"
    with write_aside(final) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("x")
        assert finished(final.parent) == []
    assert (final / "sub" / "x").read_text() == "x"
    assert names(final.parent) == ["step-1"]


def test_an_error_leaves_nothing(tmp_path):
    def fill() -> None:
        with write_aside(tmp_path / "step-1") as folder:
            (folder / "x").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill()
    assert names(tmp_path) == []


def test_a_folder_of_the_same_name_is_replaced(tmp_path):
    for text in ("old", "new"):
        with write_aside(tmp_path / "step-1") as folder:
            (folder / text).touch()
    assert names(tmp_path / "step-1") == ["new"]
    assert names(tmp_path) == ["step-1"]


def test_all_of_it_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)))
    aside = tmp_path / "aside"
    (aside / "sub").mkdir(parents=True)
    (aside / "sub" / "x").write_text("x")
    publish(aside, tmp_path / "step-1")
    assert set(synced[:-1]) == {str(aside), str(aside / "sub"), str(aside / "sub" / "x")}
    assert synced[-1] == str(tmp_path)


def test_a_killed_writer_leaves_no_finished_folder(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from mgpu_train.checkpoint.local import write_aside\n"
        "with write_aside(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'x').touch(); os.fsync = lambda _fd: os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "step-1")])
    assert done.returncode == -signal.SIGKILL
    assert finished(tmp_path) == []
    assert names(tmp_path) != []
    with write_aside(tmp_path / "step-1"):
        pass
    assert names(tmp_path) == ["step-1"]
