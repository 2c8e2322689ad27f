"""Two syncs to one folder in the same moment: both succeed, one after the other; a dead one is in nobody's way."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until

from mgpu.errors import CommandFailed
from mgpu.remote import receiver
from mgpu.remote.node import Node
from mgpu.remote.snapshot import Snapshot, scan
from mgpu.remote.targets import SyncReport
from mgpu.run.nodes import agent_client

FIRST, SECOND = "print('hello')\n", "print('other')\n"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path) -> Path:
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text(FIRST)
    (root / "pkg" / "big").write_bytes(os.urandom(3_000_000))
    return root


def sync(node: Node, folder: Path | Snapshot, dest: Path | str, like: str = "") -> SyncReport:
    return node.sync(folder, str(dest), python=sys.executable, like=like)


def contents(folder: Path) -> dict[str, bytes]:
    """What a folder holds, without what belongs to sync itself: all of that is checked by its name."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    own = {name for name in files if name.startswith(receiver.ASIDE)}
    assert own <= {receiver.MANIFEST, receiver.LOCK}
    return {name: path.read_bytes() for name, path in files.items() if name not in own}


def under_way(dest: Path) -> bool:
    """True while a transfer writes aside."""
    return any(path.is_dir() for path in dest.glob(f"{receiver.ASIDE}*"))


def at_the_lock(dest: Path) -> int:
    """How many processes have the folder's lock, or wait for it."""
    count = 0
    for fds in Path("/proc").glob("[0-9]*/fd"):
        try:
            count += any(fd.readlink() == dest / receiver.LOCK for fd in fds.iterdir())
        except OSError:  # it has ended meanwhile
            continue
    return count


def held_up(snapshot: Snapshot, ready: Callable[[], object]) -> Snapshot:
    """The same; after the header its contents wait until it is `ready`."""
    whole = Snapshot.stream

    def stream(paths):
        blocks = whole(snapshot, paths)
        yield next(blocks)
        ready()
        yield from blocks

    held = Snapshot(snapshot.folder, snapshot.entries, snapshot.kept)
    object.__setattr__(held, "stream", stream)
    return held


def second_meanwhile(
    threads: ThreadPoolExecutor, dest: Path, second: Callable[[], SyncReport], answers: list[Future]
) -> Callable[[], None]:
    """In the middle of the first transfer the second comes, and waits, or has ended if it does not wait."""

    def ready() -> None:
        until(lambda: under_way(dest))
        answers.append(threads.submit(second))
        until(lambda: at_the_lock(dest) == 2 or answers[0].done())

    return ready


def between(node: Node, monkeypatch, then: Callable[[], object]) -> list[str]:
    """Calls `then` between the node's first `have` and `take`; returns the list of all the verbs to come."""
    verbs, run = [], node.run

    def watched(argv, **options):
        verbs.append("take" if "take" in argv else "have")
        if verbs == ["have", "take"]:
            then()
        return run(argv, **options)

    monkeypatch.setattr(node, "run", watched)
    return verbs


def test_the_second_waits_for_the_first_and_sends_nothing(sshd, open_node, threads, tmp_path):
    """The library, as two runs on one fleet send it."""
    package, dest = agent_client.library()[0], tmp_path / "node/lib/mgpu_train"
    first, second, answers = open_node(sshd), open_node(sshd), []
    ready = second_meanwhile(threads, dest, lambda: sync(second, package, dest), answers)
    files = len(package.entries)
    assert sync(first, held_up(package, ready), dest).sent == files
    assert answers[0].result() == SyncReport(files, 0, 0, 0)
    assert contents(dest).keys() == package.entries.keys()
    assert sync(second, package, dest).sent == 0


def test_two_that_have_both_looked_send_once(sshd, open_node, threads, folder, tmp_path, monkeypatch):
    dest, nodes, looked = tmp_path / "dest", [open_node(sshd), open_node(sshd)], threading.Barrier(2)
    verbs = [between(node, monkeypatch, lambda: looked.wait(30)) for node in nodes]
    answers = [threads.submit(sync, node, folder, dest) for node in nodes]
    assert sorted(answer.result().sent for answer in answers) == [0, 2]
    assert sorted(verbs) == [["have", "take"], ["have", "take", "have"]]
    assert contents(dest) == contents(folder)


@pytest.mark.parametrize("like", ["", "runs/*/work"])
def test_two_of_the_same_code(server, open_node, threads, folder, like):
    """Of one run, by two supervisors; with another run's code beside it, and without."""
    first, second, answers = open_node(server), open_node(server), []
    sync(first, folder, "runs/q/work")
    (folder / "train.py").write_text(SECOND)
    dest = server.home / "runs/r/work"
    ready = second_meanwhile(threads, dest, lambda: sync(second, folder, "runs/r/work", like), answers)
    assert sync(first, held_up(scan(folder), ready), "runs/r/work", like).sent == (1 if like else 2)
    assert answers[0].result().sent == 0
    assert contents(dest) == contents(folder)
    assert contents(server.home / "runs/q/work")["train.py"] == FIRST.encode()


def test_what_another_has_changed_in_between_is_sent_after_all(server, open_node, folder, monkeypatch):
    """What was there when it was looked at, and is not any more when the rest is put in place."""
    node, other = open_node(server), open_node(server)
    sync(node, folder, "work")
    (folder / "pkg" / "new").write_text("new")
    mine = scan(folder)

    def change() -> None:
        (folder / "train.py").write_text(SECOND)
        assert sync(other, folder, "work").sent == 2
        (folder / "train.py").write_text(FIRST)

    between(node, monkeypatch, change)
    assert sync(node, mine, "work").sent == 1
    assert contents(server.home / "work") == contents(folder)


def test_a_transfer_whose_operator_is_silent_is_ended(sshd, open_node, timeouts, threads, folder, tmp_path):
    """Its connection stands, and its receiver lives: the second one's success is what sets the first one free."""
    dest, answers, over = tmp_path / "dest", [], threading.Event()
    impatient = timeouts.model_copy(update={"silence_s": 0.5})
    first, second = open_node(sshd, impatient), open_node(sshd)

    def silent() -> None:
        until(lambda: under_way(dest))
        answers.append(threads.submit(sync, second, folder, dest))
        answers[0].add_done_callback(lambda _: over.set())
        assert over.wait(60)

    with pytest.raises(CommandFailed) as failed:
        sync(first, held_up(scan(folder), silent), dest)
    assert answers[0].result().sent == 2
    assert "nothing came for 0.5 s; nothing was changed here" in failed.value.why
    assert "run the command again" in failed.value.next_step
    assert contents(dest) == contents(folder)


def test_a_receiver_that_is_killed_is_in_nobodys_way(sshd, open_node, folder, tmp_path):
    dest, first, second = tmp_path / "dest", open_node(sshd), open_node(sshd)

    def kill() -> None:
        until(lambda: under_way(dest))
        os.kill(int((dest / receiver.LOCK).read_text()), signal.SIGKILL)
        until(lambda: not at_the_lock(dest))

    with pytest.raises(CommandFailed):
        sync(first, held_up(scan(folder), kill), dest)
    assert under_way(dest), "what it wrote aside"
    assert sync(second, folder, dest).sent == 2
    assert contents(dest) == contents(folder)
    assert not under_way(dest)


def test_who_has_waited_long_enough_is_told_for_whom(server, open_node, timeouts, folder):
    node = open_node(server, timeouts.model_copy(update={"sync_s": 0}))
    dest = server.home / "work"
    dest.mkdir()
    with (dest / receiver.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711\n")
        lock.flush()
        with pytest.raises(CommandFailed) as failed:
            sync(node, folder, "work")
    assert failed.value.status == receiver.BUSY
    assert "process 4711 of the node has not let go of it within 0 s" in failed.value.why
    assert "run the command again when it is done" in failed.value.next_step
    assert contents(dest) == {}
    assert sync(open_node(server), folder, "work").sent == 2


def test_a_caller_that_has_less_time_waits_no_longer(server, open_node, folder):
    dest = server.home / "work"
    dest.mkdir()
    with (dest / receiver.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CommandFailed, match="within 0 s"):
            open_node(server).sync(folder, "work", python=sys.executable, within_s=0)


def test_who_finds_another_change_each_time_gives_up_in_time(server, open_node, timeouts, folder, monkeypatch):
    node, other = open_node(server, timeouts.model_copy(update={"sync_s": 0})), open_node(server)
    between(node, monkeypatch, lambda: sync(other, folder, "work"))
    with pytest.raises(CommandFailed) as failed:
        sync(node, folder, "work")
    assert failed.value.status == receiver.CHANGED
    assert "sends other files" in failed.value.next_step


# The receiver alone, beside a neighbour that is changed or removed in the same moment.


@pytest.fixture
def neighbour(tmp_path, monkeypatch, capsys) -> Path:
    """Another run's folder, as sync left it; a new one is the working directory."""
    other, mine = tmp_path / "other", tmp_path / "mine"
    for each in (other, mine):
        each.mkdir()
    monkeypatch.chdir(other)
    Path("a").write_text("first")
    (other / receiver.MANIFEST).write_text(f'{{"a": ["f:1", "{receiver.mark_of(Path("a"))}"]}}')
    monkeypatch.chdir(mine)
    return other


@pytest.mark.parametrize("put", [os.link, receiver.copy])
def test_a_file_that_is_replaced_while_it_is_taken_over_is_not_taken_for_the_old_one(neighbour, capsys, put):
    def replaced(there, here):
        (neighbour / "fresh").write_text("second")
        (neighbour / "fresh").replace(neighbour / "a")
        put(there, here)

    receiver.have([neighbour], replaced)
    assert capsys.readouterr().out == "{}"


@pytest.mark.parametrize("put", [os.link, receiver.copy])
def test_a_file_that_is_removed_while_it_is_taken_over_is_sent(neighbour, capsys, put):
    def removed(there, here):
        there.unlink()
        put(there, here)

    receiver.have([neighbour], removed)
    assert capsys.readouterr().out == "{}"
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("put", "free", "taken"), [(os.link, 0, True), (receiver.copy, 9, False), (receiver.copy, 11, True)]
)
def test_copies_do_not_fill_a_disk_that_another_program_writes_to(neighbour, monkeypatch, put, free, taken):
    monkeypatch.setattr(receiver.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free))
    assert (neighbour / "a").stat().st_size == 5
    receiver.have([neighbour], put)
    assert Path("a").exists() == taken


@pytest.mark.parametrize("first", [True, False])
def test_a_neighbour_that_is_removed_once_it_was_found_is_passed_over(neighbour, tmp_path, capsys, first):
    gone = tmp_path / "gone"
    receiver.have([gone, neighbour] if first else [neighbour, gone], os.link)
    assert capsys.readouterr().out == '{"a": "f:1"}'
    assert Path("a").samefile(neighbour / "a")


def test_all_neighbours_are_gone(neighbour, tmp_path, capsys):
    receiver.have([tmp_path / "gone"], os.link)
    assert capsys.readouterr().out == "{}"


def test_a_full_disk_keeps_nobody_from_looking(neighbour, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(receiver.os, "pwrite", full)
    with receiver.locked(0):
        pass
