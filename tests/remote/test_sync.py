"""Sync: changed files only, whole or not at all, and no path that leads out of the folder on either side."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import until

from mgpu.errors import CommandFailed, ConnectionFailed, InputError
from mgpu.remote import receiver
from mgpu.remote.snapshot import Snapshot, scan
from mgpu.remote.targets import SyncReport

OWN = {receiver.MANIFEST, receiver.LOCK}


def tree(folder: Path) -> dict[str, object]:
    """What a folder holds, without what belongs to sync itself."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file() and name not in OWN:
            found[name] = path.read_bytes()
    return found


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "project"
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "train.py").write_text("print('hello')\n")
    (root / "pkg" / "__init__.py").write_bytes(b"")
    (root / "pkg" / "deep" / "two words 数据.bin").write_bytes(os.urandom(400_000))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    return root


@pytest.fixture
def dest(server) -> Path:
    return server.home / "runs/r/work"


def sync(node, folder, **options) -> SyncReport:
    return node.sync(folder, "runs/r/work", python=sys.executable, **options)


def test_a_first_sync_sends_all_and_a_second_nothing(node, folder, dest, server):
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert sync(node, folder) == SyncReport(files=4, sent=4, deleted=0, bytes_sent=total)
    assert tree(dest) == tree(folder)
    assert stat.S_IMODE((dest / "run.sh").stat().st_mode) & 0o111
    assert not stat.S_IMODE((dest / "train.py").stat().st_mode) & 0o111
    before = server.seen.count("command")
    assert sync(node, folder) == SyncReport(4, 0, 0, 0)
    assert server.seen.count("command") == before + 1


def test_an_upgrade_on_the_disk_changes_no_sync_of_a_supervisor_that_runs(node, folder, dest, monkeypatch):
    """The next version's half of it may be asked otherwise."""
    read = Path.read_text

    def upgraded(path: Path, *args: object) -> str:
        return "raise SystemExit('of another version')" if path.name == "receiver.py" else read(path, *args)

    monkeypatch.setattr(Path, "read_text", upgraded)
    assert sync(node, folder).sent == 4
    assert tree(dest) == tree(folder)


def test_only_what_changed_is_sent(node, folder, dest):
    sync(node, folder)
    untouched = (dest / "pkg/__init__.py").stat().st_mtime_ns
    (folder / "train.py").write_text("print('world')\n")  # the same length
    os.utime(folder / "pkg/__init__.py")  # touched, not changed
    (folder / "run.sh").chmod(0o644)
    (folder / "new.py").write_text("new")
    assert sync(node, folder) == SyncReport(5, 3, 0, len("print('world')\n") + len("#!/bin/sh\n") + 3)
    assert tree(dest) == tree(folder)
    assert not (dest / "run.sh").stat().st_mode & stat.S_IXUSR
    assert (dest / "pkg/__init__.py").stat().st_mtime_ns == untouched


def test_what_vanished_is_deleted_and_what_the_node_made_stays(node, folder, dest):
    sync(node, folder)
    (dest / "pkg/deep/output.txt").write_text("made on the node")
    (dest / "metrics").mkdir()
    for path in ("pkg/deep/two words 数据.bin", "pkg/__init__.py", "run.sh"):
        (folder / path).unlink()
    (folder / "pkg/deep").rmdir()
    (folder / "pkg").rmdir()
    assert sync(node, folder).deleted == 3
    assert tree(dest) == {"train.py": b"print('hello')\n", "pkg/deep/output.txt": b"made on the node"}
    assert (dest / "metrics").is_dir()


def test_empty_folders_go_with_their_last_file(node, folder, dest):
    sync(node, folder)
    (folder / "pkg/deep/two words 数据.bin").unlink()
    sync(node, folder)
    assert sorted(path.name for path in (dest / "pkg").iterdir()) == ["__init__.py"]


def test_what_was_touched_on_the_node_is_mended(node, folder, dest):
    sync(node, folder)
    (dest / "train.py").write_text("print('h4cked')")
    (dest / "run.sh").unlink()
    (dest / "pkg/__init__.py").chmod(0o777)
    assert sync(node, folder).sent == 3
    assert tree(dest) == tree(folder)


def sync_next(node, folder, **options) -> SyncReport:
    return node.sync(folder, "runs/s/work", python=sys.executable, like="runs/*/work", **options)


def test_a_new_folder_is_sent_only_what_its_neighbour_has_not(node, folder, dest):
    (folder / "link").symlink_to("train.py")
    sync(node, folder)
    (folder / "train.py").write_text("print('world')\n")
    (folder / "new.py").write_text("new")
    (folder / "pkg/__init__.py").unlink()
    (dest / "output.txt").write_text("of the first run")
    before = tree(dest)
    assert sync_next(node, folder).sent == 2
    there = dest.parents[1] / "s/work"
    assert tree(there) == tree(folder)
    assert (there / "run.sh").stat().st_mode & stat.S_IXUSR
    assert tree(dest) == before


def test_what_is_taken_away_again_leaves_what_the_node_made_and_hides_no_neighbour(node, folder, dest):
    third = dest.parents[1] / "t/work"
    sync(node, folder)
    node.sync(folder, "runs/t/work", python=sys.executable)
    made = {"pkg/output.txt": b"made on the node", "train.py": b"came with the code, and results were added"}
    for name, contents in made.items():
        (third / name).write_bytes(contents)
    assert node.sync(Snapshot(folder, {}), "runs/t/work", python=sys.executable).deleted == 3
    assert tree(third) == made
    assert sync_next(node, folder).sent == 0, "the one that was synced last has nothing any more"
    assert tree(dest) == tree(folder)


def test_what_one_run_writes_into_its_code_is_mended_for_each(node, folder, dest):
    """However much of it they share on the disk."""
    sync(node, folder)
    sync_next(node, folder)
    there = dest.parents[1] / "s/work"
    (there / "run.sh").write_text("changed by the second run")
    assert sync(node, folder).sent <= 1
    assert tree(dest) == tree(folder)
    assert sync_next(node, folder).sent == 1
    assert tree(there) == tree(folder)


def test_a_file_that_one_of_two_runs_at_once_writes_into_is_its_own(node, folder, dest):
    sync(node, folder)
    assert sync_next(node, folder, apart=True).sent == 0
    there = dest.parents[1] / "s/work"
    assert tree(there) == tree(folder)
    assert (there / "run.sh").stat().st_mode & stat.S_IXUSR
    with (there / "train.py").open("a") as file:
        file.write("of the second run")
    assert tree(dest) == tree(folder)
    assert sync_next(node, folder, apart=True).sent == 1


def test_of_several_neighbours_the_newest_is_the_one(node, folder, dest):
    sync(node, folder)
    (folder / "train.py").write_text("print('world')\n")
    assert node.sync(folder, "runs/q/work", python=sys.executable).sent == 4
    assert sync_next(node, folder).sent == 0


def test_what_was_touched_next_door_is_sent(node, folder, dest):
    sync(node, folder)
    (dest / "train.py").write_text("print('h4cked')")
    (dest / "pkg/deep/two words 数据.bin").unlink()
    assert sync_next(node, folder).sent == 2
    assert tree(dest.parents[1] / "s/work") == tree(folder)


def test_what_is_in_the_way_of_a_copy_is_not_overwritten(node, folder, dest):
    sync(node, folder)
    there = dest.parents[1] / "s/work"
    there.mkdir(parents=True)
    for name in ("notes.txt", "train.py", "run.sh"):
        (there / name).write_text("somebody's")
    (folder / "run.sh").unlink()
    assert sync_next(node, folder).sent == 1
    assert tree(there) == tree(folder) | {"notes.txt": b"somebody's", "run.sh": b"somebody's"}


def test_files_become_folders_and_folders_files(node, folder, dest):
    sync(node, folder)
    (folder / "train.py").unlink()
    (folder / "train.py").mkdir()
    (folder / "train.py" / "inner").write_text("1")
    for path in ("pkg/deep/two words 数据.bin", "pkg/__init__.py"):
        (folder / path).unlink()
    (folder / "pkg/deep").rmdir()
    (folder / "pkg").rmdir()
    (folder / "pkg").write_text("now a file")
    sync(node, folder)
    assert tree(dest) == tree(folder)


def test_links_inside_the_folder_stay_links(node, folder, dest):
    (folder / "a").symlink_to("train.py")
    (folder / "pkg" / "up").symlink_to("../run.sh")
    (folder / "tree").symlink_to("pkg/deep")
    (folder / "pkg" / "absolute").symlink_to(folder / "train.py")
    (folder / "dangling").symlink_to("not-there")
    (folder / "pkg" / "out-and-in").symlink_to("../../project/run.sh")  # on the node the folder has another name
    (folder / "round").symlink_to("round")
    assert sync(node, folder).sent == 11
    assert (dest / "pkg/out-and-in").readlink() == Path("../run.sh")
    assert (dest / "pkg/absolute").readlink() == Path("../train.py")
    assert (dest / "pkg/absolute").read_bytes() == (folder / "train.py").read_bytes()
    assert (dest / "tree").readlink() == Path("pkg/deep")
    assert (dest / "dangling").is_symlink()
    assert sync(node, folder).sent == 0
    (folder / "a").unlink()
    (folder / "a").symlink_to("run.sh")
    assert sync(node, folder) == SyncReport(11, 1, 0, 0)
    assert (dest / "a").readlink() == Path("run.sh")


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "pkg/../../outside", "pkg/up/../outside"])
def test_links_that_leave_the_folder_are_refused(folder, tmp_path, target):
    (tmp_path / "outside").write_text("secret")
    (folder / "pkg" / "up").symlink_to("..")
    (folder / "pkg" / "fine").symlink_to("../run.sh")
    (folder / "leak").symlink_to(target)
    with pytest.raises(InputError) as refused:
        scan(folder)
    assert "leak is a link that leaves the folder" in refused.value.why
    assert "1 of its files" in refused.value.what
    assert "fine" not in refused.value.why


def test_all_files_that_cannot_be_sent_are_named_at_once(folder, monkeypatch):
    (folder / "one").symlink_to("/etc")
    (folder / "two\nlines").write_text("")
    with (folder / os.fsdecode(b"not-utf8-\xff")).open("w"):
        pass
    (folder / "of root").mkdir()
    listed = os.scandir

    def scandir(path):
        if path == folder / "of root":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr("mgpu.remote.snapshot.os.scandir", scandir)
    with pytest.raises(InputError) as refused:
        scan(folder)
    assert "4 of its files" in refused.value.what
    assert "\\n" in refused.value.why
    assert "of root/ cannot be read: Permission denied" in refused.value.why
    assert ".mgpuignore" in refused.value.next_step
    (folder / ".mgpuignore").write_text("one\ntwo*\nnot-*\nof root/\n")
    assert "train.py" in scan(folder).entries


def test_what_vanishes_while_the_folder_is_read_is_not_sent(folder, monkeypatch):
    """As an editor's own files do, and folders of programs that run meanwhile."""
    names = scan(folder).entries.keys()
    (folder / ".train.py.swp").write_text("")
    (folder / "a-link").symlink_to("train.py")
    (folder / "tmp").mkdir()
    (folder / "tmp" / "x").write_text("")

    def seen(path: str) -> str:
        if path in (".train.py.swp", "a-link"):
            (folder / path).unlink()
            shutil.rmtree(folder / "tmp", ignore_errors=True)
        return path

    monkeypatch.setattr("mgpu.remote.snapshot.check_path", seen)
    assert scan(folder).entries.keys() == names


def test_what_is_excluded(folder):
    for path in (".git/config", "pkg/__pycache__/a.pyc", "b.pyc", ".venv/bin/python", ".mgpu/env", "mgpu-runs/r/log"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    (folder / ".mgpu-sync.json").write_text("")
    (folder / "data").mkdir()
    (folder / "data" / "big").write_text("")
    (folder / "data" / "keep.txt").write_text("")
    names = {"train.py", "run.sh", "pkg/__init__.py", "pkg/deep/two words 数据.bin"}
    assert scan(folder).entries.keys() == names | {"data/big", "data/keep.txt"}
    (folder / ".mgpuignore").write_text("# large\n/data/*\n!keep.txt\n*.bin\n")
    expected = {"train.py", "run.sh", "pkg/__init__.py", "data/keep.txt", ".mgpuignore"}
    assert scan(folder).entries.keys() == expected
    assert scan(folder, ["*.py"]).entries.keys() >= {".git/config", "run.sh"}
    assert "train.py" not in scan(folder, ["*.py"]).entries


def test_sockets_and_pipes_are_left_out(folder):
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        assert len(scan(folder).entries) == 4


def test_no_folder(tmp_path):
    with pytest.raises(InputError, match="no folder"):
        scan(tmp_path / "absent")


def test_a_file_that_changes_on_the_way_changes_nothing_on_the_node(node, folder, dest):
    sync(node, folder)
    (folder / "train.py").write_text("new")
    big = folder / "big"
    big.write_bytes(os.urandom(300_000))
    snapshot = scan(folder)
    before = tree(dest)
    big.write_bytes(os.urandom(300_000))
    with pytest.raises(CommandFailed) as failed:
        sync(node, snapshot)
    assert "changed while it was sent" in failed.value.why
    big.write_bytes(b"shorter")
    with pytest.raises(InputError, match="changed while it was sent"):
        sync(node, snapshot)
    big.write_bytes(os.urandom(300_001))
    with pytest.raises(InputError, match="changed while it was sent"):
        sync(node, snapshot)
    big.unlink()
    big.symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="became a link"):
        sync(node, snapshot)
    until(lambda: tree(dest) == before)  # the node clears up once it hears that the connection has ended
    big.unlink()
    sync(node, folder)
    assert tree(dest) == tree(folder)


def test_a_transfer_that_is_cut_changes_nothing(server, open_node, folder, dest):
    node = open_node(server)
    sync(node, folder)
    before = tree(dest)
    (folder / "train.py").write_text("new")
    (folder / "run.sh").unlink()
    (folder / "big").write_bytes(os.urandom(30_000_000))
    snapshot = scan(folder)
    whole = snapshot.stream(["big", "train.py"])

    def under_way() -> bool:
        return any(path.is_dir() for path in dest.glob(".mgpu-sync.*"))

    def cut(_paths):
        for number, block in enumerate(whole):
            if number == 40:
                while not under_way():
                    time.sleep(0.02)  # a receiver that has yet to begin would be seen to have cleared up
                node.close()
            yield block

    object.__setattr__(snapshot, "stream", cut)
    with pytest.raises(ConnectionFailed):
        sync(node, snapshot)
    while under_way():
        time.sleep(0.02)  # the receiver clears up when it sees the end of its input
    assert tree(dest) == before
    node.reconnect()
    sync(node, folder)
    assert tree(dest) == tree(folder)


def test_names_are_the_same_bytes_whatever_the_nodes_locale(node, folder, dest, tmp_path, require):
    locale = tmp_path / "en_US.ISO-8859-1"
    made = subprocess.run(["/bin/sh", "-c", f"localedef -i en_US -f ISO-8859-1 {locale}"], check=False)
    require("a locale that is not UTF-8", made.returncode == 0, "localedef, or what it reads, is not installed")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nLOCPATH={tmp_path} LC_ALL={locale.name} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "größe.py").write_text("")
    node.sync(folder, "runs/r/work", python=str(python))
    assert tree(dest) == tree(folder)


def test_a_python_that_is_not_there(node, folder):
    with pytest.raises(CommandFailed) as failed:
        node.sync(folder, "work", python="/no/such/python3")
    assert failed.value.status == 127
    assert "needs /no/such/python3" in failed.value.next_step


def test_dest_that_is_not_plain(node, folder):
    with pytest.raises(InputError):
        node.sync(folder, "-rf")


# The receiver alone: what a header from anywhere can do to the node, and the node's links to it.


class Said(NamedTuple):
    status: int
    out: str
    err: str


def receive(verb: str, dest: Path, more: str, sent: bytes = b"", *, cut: bool = True, wait_s: str = "0") -> Said:
    """The receiver in this process, its standard input a pipe with `sent` in it, which has an end if it is cut."""
    out, err = io.StringIO(), io.StringIO()
    reading, writing = os.pipe()
    with (
        os.fdopen(reading) as stdin,
        os.fdopen(writing, "wb") as pipe,
        contextlib.chdir("."),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", stdin)
        pipe.write(sent)
        pipe.flush()
        if cut:
            pipe.close()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return Said(receiver.main(verb, str(dest), more, wait_s), out.getvalue(), err.getvalue())


def take(dest: Path, entries: dict[str, str], send=(), body: bytes = b"") -> Said:
    header = json.dumps({"entries": entries, "send": list(send)}).encode() + b"\n"
    return receive("take", dest, "30", header + body)


def sha(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()


EMPTY = "f:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    "path", ["../x", "/tmp/x", "a/../../x", "a//b", "./a", "", ".mgpu-sync.json", ".mgpu-sync.1/x"]
)
def test_receiver_refuses_paths_that_leave_its_folder(tmp_path, path):
    dest = tmp_path / "dest"
    done = take(dest, {path: EMPTY}, [[path, 0]])
    assert done.status == receiver.REFUSED
    assert "not a path inside" in done.err
    assert tree(dest) == {}
    assert list(tmp_path.iterdir()) == [dest]


def test_receiver_never_writes_or_deletes_through_a_link(tmp_path):
    dest, outside = tmp_path / "dest", tmp_path / "outside"
    outside.mkdir()
    assert take(dest, {"sub/file": EMPTY}, [["sub/file", 0]]).status == 0
    (dest / "sub/file").rename(outside / "file")
    (dest / "sub").rmdir()
    (dest / "sub").symlink_to(outside)
    done = take(dest, {"sub/new": EMPTY}, [["sub/new", 0]])
    assert done.status == receiver.REFUSED
    assert "sub is in the way" in done.err
    assert [path.name for path in outside.iterdir()] == ["file"]


def test_receiver_replaces_a_link_and_not_what_it_points_to(tmp_path):
    dest, outside = tmp_path / "dest", tmp_path / "outside"
    dest.mkdir()
    outside.write_text("precious")
    (dest / "file").symlink_to(outside)
    assert take(dest, {"file": EMPTY}, [["file", 0]]).status == 0
    assert outside.read_text() == "precious"
    assert not (dest / "file").is_symlink()


def test_receiver_leaves_a_folder_of_the_nodes_own_alone(tmp_path):
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "output").write_text("made here")
    done = take(tmp_path, {"name": EMPTY}, [["name", 0]])
    assert done.status == receiver.REFUSED
    assert "not from sync" in done.err
    assert (tmp_path / "name" / "output").read_text() == "made here"


def test_receiver_forgets_a_broken_manifest_and_what_a_cut_transfer_left(tmp_path):
    (tmp_path / receiver.MANIFEST).write_text('{"../../x": ["f:0", null]}')
    left = tmp_path / ".mgpu-sync.abcdef"
    left.mkdir()
    (left / "0").write_text("half")
    assert take(tmp_path, {"a": EMPTY}, [["a", 0]]).status == 0
    assert {path.name for path in tmp_path.iterdir()} == OWN | {"a"}


def test_receiver_remembers_what_it_was_about_to_put_in_place(tmp_path, monkeypatch):
    """A crash between two renames: the next sync still knows every file that may be there."""
    take(tmp_path, {"old": EMPTY}, [["old", 0]])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(receiver, "mark_of", lambda _path: 1 / 0)
    aside = tmp_path / ".mgpu-sync.x"
    aside.mkdir()
    (aside / "0").write_text("")
    with pytest.raises(ZeroDivisionError):
        receiver.put_in_place(aside, {"new": EMPTY}, ["new"])
    assert (tmp_path / "new").exists()
    assert json.loads((tmp_path / receiver.MANIFEST).read_text()).keys() == {"old", "new"}
    monkeypatch.undo()
    assert take(tmp_path, {}).out == "2"
    assert [path.name for path in tmp_path.iterdir()] == [receiver.LOCK]


def test_receiver_refuses_contents_that_are_not_what_was_announced(tmp_path):
    assert take(tmp_path, {"a": EMPTY}, [["a", 3]], b"abc").status == receiver.REFUSED
    assert take(tmp_path, {"a": EMPTY}, [["a", 3]], b"ab").status == receiver.REFUSED
    assert [path.name for path in tmp_path.iterdir()] == [receiver.LOCK]


def test_receiver_takes_files_programs_and_links_and_tells_what_is_still_as_it_left_it(tmp_path):
    entries = {"pkg/a.py": f"f:{sha(b'abc')}", "run.sh": f"x:{sha(b'#!')}", "link": "l:pkg/a.py"}
    assert take(tmp_path, entries, [["pkg/a.py", 3], ["run.sh", 2], ["link", 0]], b"abc#!") == (0, "0", "")
    assert tree(tmp_path) == {"pkg/a.py": b"abc", "run.sh": b"#!", "link": "-> pkg/a.py"}
    assert (tmp_path / "run.sh").stat().st_mode & 0o111
    (tmp_path / "run.sh").chmod(0o600)
    (tmp_path / "pkg/a.py").unlink()
    assert json.loads(receive("have", tmp_path, "").out) == {"link": "l:pkg/a.py"}
    assert take(tmp_path, {}).out == "2"
    assert {path.name for path in tmp_path.iterdir()} == {receiver.LOCK, "run.sh"}, "which was touched"


def test_receiver_takes_all_away_where_the_disk_is_full(tmp_path, monkeypatch):
    """Else it would stay so: what is taken away makes room."""

    def full(*_args, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    take(tmp_path, {"pkg/a.py": f"f:{sha(b'abc')}"}, [["pkg/a.py", 3]], b"abc")
    monkeypatch.setattr(receiver.tempfile, "mkdtemp", full)
    assert take(tmp_path, {}) == (0, "1", "")
    assert [path.name for path in tmp_path.iterdir()] == [receiver.LOCK]


def test_receiver_takes_over_from_the_folder_that_was_synced_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entries = {"sub/a": f"f:{sha(b'abc')}", "b": EMPTY, "c": EMPTY, "link": "l:b"}
    take(tmp_path / "runs/old/work", entries, [["sub/a", 3], ["b", 0], ["c", 0], ["link", 0]], b"abc")
    take(tmp_path / "runs/older/work", {"a": EMPTY}, [["a", 0]])
    os.utime(tmp_path / "runs/older/work" / receiver.MANIFEST, (0, 0))
    (tmp_path / "runs/old/work/c").write_text("touched")
    (tmp_path / "runs/new/work").mkdir(parents=True)
    (tmp_path / "runs/new/work/b").write_text("in the way")
    said = receive("have", Path("runs/new/work"), "runs/*/work")
    assert json.loads(said.out) == {"sub/a": entries["sub/a"], "link": "l:b"}
    assert tree(tmp_path / "runs/new/work") == {"sub/a": b"abc", "link": "-> b", "b": b"in the way"}


def test_receiver_does_nothing_when_what_it_is_sent_is_not_what_is_missing(tmp_path):
    take(tmp_path, {"a": EMPTY}, [["a", 0]])
    for sent in ([], [["a", 0], ["b", 0]]):
        said = take(tmp_path, {"a": EMPTY, "b": EMPTY}, sent)
        assert (said.status, "has changed since it was looked at" in said.err) == (receiver.CHANGED, True)
    assert tree(tmp_path) == {"a": b""}


def test_receiver_ends_when_its_sender_is_silent(tmp_path):
    take(tmp_path, {"a": EMPTY}, [["a", 0]])
    half = json.dumps({"entries": {"b": EMPTY}, "send": [["b", 9]]}).encode() + b"\nhalf"
    said = receive("take", tmp_path, "0.01", half, cut=False)
    assert (said.status, "nothing came for 0.01 s; nothing was changed" in said.err) == (receiver.REFUSED, True)
    assert tree(tmp_path) == {"a": b""}


@pytest.mark.parametrize("freed", [True, False])
def test_receiver_waits_for_another_one_and_names_it_in_the_end(tmp_path, monkeypatch, freed):
    with (tmp_path / receiver.LOCK).open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        if freed:
            monkeypatch.setattr(receiver.time, "sleep", lambda _s: fcntl.flock(lock, fcntl.LOCK_UN))
        said = receive("have", tmp_path, "", wait_s="60" if freed else "0")
    if freed:
        assert said == (0, "{}", "")
    else:
        assert (said.status, "process 4711 of the node has not let go" in said.err) == (receiver.BUSY, True)
