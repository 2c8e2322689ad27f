"""Uploads while training goes on: every node the same checkpoints, one at a time, the last one always."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mgpu_train.agent.uploads.uploads import Announced, CheckpointStoreError, NewerAttempt, Uploads
from mgpu_train.timeouts import Timeouts

PATIENCE_S = 5.0
TIMES = Timeouts(poll_s=0.005, peers_s=5)


class Shared:
    """What the store of one attempt holds, for all nodes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.said: Announced | None = None
        self.parts: dict[int, set[int]] = {}
        self.commits: list[int] = []
        self.pruned = 0


class FakeDepot:
    """One node's view of it; `before` runs before each upload and may fail or wait."""

    def __init__(self, shared: Shared, node: int, before: Callable[[int], object] = lambda _step: None) -> None:
        self.shared, self.node, self.before = shared, node, before
        self.tries: list[int] = []

    def announce(self, said: Announced) -> None:
        assert self.node == 0
        self.shared.said = said

    def announced(self) -> Announced | None:
        return self.shared.said

    def upload(self, step: int, folder: Path) -> None:
        self.tries.append(step)
        self.before(step)
        if not folder.is_dir():
            raise CheckpointStoreError(f"{folder.name} is gone")
        self.shared.parts.setdefault(step, set()).add(self.node)

    def commit(self, step: int) -> str | None:
        assert self.node == 0
        if len(self.shared.parts[step]) < self.shared.nodes:
            return None
        self.shared.commits.append(step)
        return f"id-{step}"

    def prune(self) -> None:
        self.shared.pruned += 1


class Node:
    """One node's uploads and its checkpoint folder."""

    def __init__(self, checkpoint_store: FakeDepot, folder: Path, **changes) -> None:
        self.checkpoint_store, self.folder = checkpoint_store, folder
        folder.mkdir()
        self.said: list[str] = []
        self.looks: list[int] = []
        given = {
            "leads": checkpoint_store.node == 0,
            "alone": checkpoint_store.shared.nodes == 1,
            "times": TIMES,
            "say": self.said.append,
        }
        self.uploads = Uploads(checkpoint_store, folder, **{**given, **changes})
        look = self.uploads.look
        self.uploads.look = lambda: self.looks.append(0) or look()

    def save(self, *steps: int) -> None:
        for step in steps:
            (self.folder / f"step-{step}").mkdir()
            (self.folder / f"step-{step}" / "model.pt").touch()

    @property
    def here(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    @property
    def status(self):
        return self.uploads.status


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    def wait(condition: Callable[[], object]) -> None:
        ticker = threading.Event()
        for _ in range(2000):
            if condition():
                return
            ticker.wait(0.005)
        pytest.fail("it did not happen within 10 s")

    return wait


def drained(*nodes: Node, patience_s: float = PATIENCE_S) -> None:
    for node in nodes:
        node.uploads.drain(patience_s)
    for node in nodes:
        assert node.uploads.ended(10)


def test_one_node_uploads_commits_and_prunes(tmp_path, until):
    node = Node(FakeDepot(Shared(1), 0), tmp_path / "n")
    node.uploads.start()
    node.save(5)
    until(lambda: node.status.committed_step == 5)
    drained(node)
    assert (node.status.saved_step, node.status.uploaded_step, node.status.committed_id) == (5, 5, "id-5")
    assert (node.status.skipped, node.status.failed, node.status.problem) == (0, 0, None)
    assert node.checkpoint_store.shared.pruned == 1
    assert node.here == ["step-5"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_disk_that_fails_once_ends_no_uploads(tmp_path, until, node):
    shared = Shared(1 + node)
    shared.said = Announced(5, final=False)
    one = Node(FakeDepot(shared, node), tmp_path / "n")
    look, fails = one.uploads.look, [OSError(5, "Input/output error")] * 2

    def failing() -> int:
        if fails:
            raise fails.pop()
        return look()

    one.uploads.look = failing
    one.uploads.start()
    until(lambda: not fails)
    one.save(5)
    until(lambda: one.status.uploaded_step == 5)
    assert "Input/output error" in str(one.status.problem)
    drained(one)


def test_the_last_checkpoint_is_uploaded_even_if_the_drain_comes_first(tmp_path):
    node = Node(FakeDepot(Shared(1), 0), tmp_path / "n")
    node.save(5)
    node.uploads.drain(PATIENCE_S)
    node.uploads.start()
    assert node.uploads.ended(10)
    assert node.checkpoint_store.shared.commits == [5]


def test_saves_that_are_overtaken_are_skipped_counted_and_deleted(tmp_path, until):
    go = threading.Event()
    checkpoint_store = FakeDepot(Shared(1), 0, lambda step: go.wait(10) if step == 1 else None)
    node = Node(checkpoint_store, tmp_path / "n")
    node.uploads.start()
    node.save(1)
    until(lambda: checkpoint_store.tries == [1])
    node.save(2, 3, 4, 5)
    node.uploads.look()
    assert node.here == ["step-1", "step-5"]  # what is under way, and the newest
    go.set()
    drained(node)
    assert checkpoint_store.shared.commits == [1, 5]
    assert node.status.skipped == 3
    assert node.here == ["step-5"]


def test_a_disk_without_room_for_one_more_is_told_once(tmp_path, until, monkeypatch):
    node = Node(FakeDepot(Shared(1), 0), tmp_path / "n")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=9))
    node.uploads.start()
    for step, size in ((1, 9), (2, 10), (3, 11)):
        (tmp_path / "aside").mkdir()
        (tmp_path / "aside" / "shard").write_bytes(b"x" * size)
        (tmp_path / "aside").rename(node.folder / f"step-{step}")
        until(lambda step=step: node.status.committed_step == step)
    drained(node)
    assert [text.partition(" has")[0] for text in node.said if "next save" in text] == ["checkpoint: step-2"]
    assert (node.status.failed, node.status.uploaded_step) == (0, 3)


def test_one_of_several_nodes_keeps_what_node_0_may_still_ask_for(tmp_path):
    node = Node(FakeDepot(Shared(2), 1), tmp_path / "n")
    node.save(1, 2, 3, 4, 5, 6)
    node.uploads.look()
    assert node.here == ["step-3", "step-4", "step-5", "step-6"]


def test_all_nodes_upload_what_node_0_chose_however_slow_one_is(tmp_path, until):
    shared = Shared(3)
    go = threading.Event()
    nodes = [Node(FakeDepot(shared, rank), tmp_path / f"n{rank}") for rank in range(3)]
    nodes[2].checkpoint_store.before = lambda step: go.wait(10) if step == 1 else None
    for node in nodes:
        node.uploads.start()
    for step in (1, 2, 3, 4):
        for node in nodes:
            node.save(step)
        until(lambda: nodes[2].checkpoint_store.tries == [1])
    go.set()
    drained(*nodes)
    assert shared.commits == [1, 4]
    assert shared.parts == {1: {0, 1, 2}, 4: {0, 1, 2}}
    assert shared.said == Announced(4, final=True)
    assert [node.status.uploaded_step for node in nodes] == [4, 4, 4]
    assert [node.status.skipped for node in nodes] == [2, 2, 2]
    assert [node.status.committed_step for node in nodes] == [4, -1, -1]


def test_a_node_may_be_behind_node_0(tmp_path, until):
    shared = Shared(2)
    first, second = (Node(FakeDepot(shared, rank), tmp_path / f"n{rank}") for rank in range(2))
    second.save(1)  # so that it looks at all at what node 0 says
    shared.said = Announced(2, final=False)
    second.uploads.start()
    until(lambda: len(second.looks) > 3)
    assert second.checkpoint_store.tries == []
    second.save(2)
    until(lambda: second.status.uploaded_step == 2)
    shared.said = Announced(3, final=True)
    second.save(4)
    drained(second)
    assert second.status.problem == "step-3 was asked for, but is not on this node's disk"
    assert first.checkpoint_store.tries == []


def test_a_failing_store_is_tried_again_and_named(tmp_path):
    left = [3]

    def fail(_step: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise CheckpointStoreError("SlowDown")

    waits: list[float] = []
    node = Node(FakeDepot(Shared(1), 0, fail), tmp_path / "n", pause=waits.append)
    node.save(7)
    node.uploads.drain(PATIENCE_S)
    node.uploads.run()
    assert node.checkpoint_store.shared.commits == [7]
    assert node.status.problem == "uploading step-7: SlowDown"
    assert node.status.failed == 0
    assert len(waits) == 3
    assert waits[0] <= 1.0
    assert 1.0 <= waits[2] <= 4.0


def test_a_failed_save_gives_way_to_a_newer_one(tmp_path, until):
    node: Node

    def fail(step: int) -> None:
        if step == 1:
            if len(node.checkpoint_store.tries) == 2:
                node.save(2)
            raise CheckpointStoreError("no such bucket")

    short = threading.Event()
    node = Node(FakeDepot(Shared(1), 0, fail), tmp_path / "n", pause=lambda _s: short.wait(0.002))
    node.save(1)
    node.uploads.start()
    until(lambda: node.status.committed_step == 2)
    drained(node)
    assert node.checkpoint_store.tries == [1, 1, 2]
    assert node.status.failed == 1


def test_parts_that_never_come_fail_the_save_and_nothing_else(tmp_path, until):
    shared = Shared(2)
    node = Node(FakeDepot(shared, 0), tmp_path / "n", times=TIMES.model_copy(update={"peers_s": 0.05}))
    node.uploads.start()
    node.save(1)
    until(lambda: node.status.problem)
    assert node.status.problem == "step-1: other nodes' parts are missing after 0.05 s"
    assert node.status.failed == 0  # with nothing newer to do it waits on
    shared.parts[2] = {1}
    node.save(2)
    until(lambda: node.status.committed_step == 2)
    drained(node)
    assert (shared.commits, node.status.failed) == ([2], 1)


@pytest.mark.parametrize("part_s", [200, 700])
def test_a_node_that_is_always_late_holds_up_commits_and_does_not_prevent_them(tmp_path, part_s):
    """A save each minute, node 0's part in 20 s, the other's in more than `peers_s`."""
    shared, now, parts = Shared(2), [0.0], []  # of the other node: when each is there
    times = TIMES.model_copy(update={"poll_s": 20, "peers_s": 120})

    def later(seconds: float) -> None:
        for _ in range(int(seconds) // 20):
            now[0] += 20
            if now[0] % 60 == 0 and now[0] <= 3600:
                node.save(int(now[0]) // 60)
            if parts and now[0] >= parts[-1][1]:
                shared.parts.setdefault(parts[-1][0], set()).add(1)
            if shared.said and (not parts or (now[0] >= parts[-1][1] and shared.said.step > parts[-1][0])):
                parts.append((shared.said.step, now[0] + part_s))
            if now[0] == 3600:
                node.uploads.drain(900)

    store = FakeDepot(shared, 0, lambda _step: later(20))
    node = Node(store, tmp_path / "n", times=times, clock=lambda: now[0], pause=later)
    node.uploads.run()
    assert shared.commits[-1] == 60, "the last one"
    during = [step for step in shared.commits if step < 60]
    assert len(during) >= 0.6 * (3600 / part_s - 2), shared.commits
    assert node.status.failed <= 4


def test_a_part_that_comes_late_counts_while_there_is_nothing_newer(tmp_path, until):
    shared = Shared(2)
    node = Node(FakeDepot(shared, 0), tmp_path / "n", times=TIMES.model_copy(update={"peers_s": 0.05}))
    node.uploads.start()
    node.save(1)
    until(lambda: node.status.problem)
    shared.parts[1].add(1)
    until(lambda: node.status.committed_step == 1)
    drained(node)
    assert (shared.commits, node.status.failed) == ([1], 0)


def test_the_drain_does_not_wait_for_an_older_save_in_place_of_the_last(tmp_path, until):
    shared = Shared(2)
    node = Node(FakeDepot(shared, 0), tmp_path / "n", times=TIMES.model_copy(update={"peers_s": 0.5}))
    node.uploads.start()
    node.save(1)
    until(lambda: node.status.uploaded_step == 1)
    shared.parts[2] = {1}  # the other node gave step 1 up
    node.save(2)
    drained(node, patience_s=3600)
    assert (shared.commits, node.status.failed) == ([2], 1)


def test_a_silent_node_0_does_not_fill_the_disks_of_the_others(tmp_path):
    node = Node(FakeDepot(Shared(2), 1), tmp_path / "n")
    node.save(*range(1, 10))
    assert node.uploads.look() == 9
    assert node.here == ["step-6", "step-7", "step-8", "step-9"]


def test_saves_of_steps_before_the_resumed_one_are_not_uploaded(tmp_path, until):
    node = Node(FakeDepot(Shared(1), 0), tmp_path / "n", resumed_step=5)
    node.uploads.start()
    node.save(4)
    until(lambda: node.status.saved_step == 4)
    node.save(5)
    until(lambda: node.status.committed_step == 5)
    drained(node)
    assert node.checkpoint_store.tries == [5]


def test_without_node_0_the_others_do_not_wait_for_ever(tmp_path):
    node = Node(FakeDepot(Shared(2), 1), tmp_path / "n")
    node.save(3)
    node.uploads.start()
    drained(node, patience_s=0.05)
    assert node.checkpoint_store.tries == []
    assert "node 0 has not asked for step-3" in (node.status.problem or "")


def test_in_haste_the_parts_of_others_are_looked_for_once_more(tmp_path, until):
    times = TIMES.model_copy(update={"poll_s": 3600, "peers_s": 3600})
    for arrived in (True, False):
        shared = Shared(2)
        node = Node(FakeDepot(shared, 0), tmp_path / f"n-{arrived}", times=times)
        node.save(1)
        node.uploads.drain(3600)
        node.uploads.start()
        until(lambda node=node: node.status.uploaded_step == 1)
        if arrived:
            shared.parts[1].add(1)
        node.uploads.hurry()
        assert node.uploads.ended(10)
        assert (shared.commits, node.status.failed) == (([1], 0) if arrived else ([], 1))


def test_in_haste_what_node_0_asked_for_is_brought_and_nothing_is_waited_for(tmp_path, until):
    times = TIMES.model_copy(update={"poll_s": 3600})
    for said in (Announced(3, final=False), None):
        shared = Shared(2)
        node = Node(FakeDepot(shared, 1), tmp_path / f"n-{said is None}", times=times)
        node.save(3)
        node.uploads.drain(3600)
        node.uploads.start()
        until(lambda node=node: node.looks)
        shared.said = said
        node.uploads.hurry()
        assert node.uploads.ended(10)
        assert node.checkpoint_store.tries == ([3] if said else [])


def test_in_haste_a_failing_store_is_tried_once_more(tmp_path, until):
    def fail(_step: int) -> None:
        raise CheckpointStoreError("SlowDown")

    node = Node(FakeDepot(Shared(1), 0, fail), tmp_path / "n")
    node.save(1)
    node.uploads.drain(3600)
    node.uploads.start()
    until(lambda: node.checkpoint_store.tries)
    tries = len(node.checkpoint_store.tries)
    node.uploads.hurry()
    assert node.uploads.ended(10)
    assert len(node.checkpoint_store.tries) <= tries + 2
    assert node.status.failed == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_more_save_takes_is_what_the_last_one_took(tmp_path, until, rank):
    now = [100.0]

    def upload(step: int) -> None:
        now[0] += step

    shared = Shared(2)
    node = Node(FakeDepot(shared, rank, upload), tmp_path / "n", clock=lambda: now[0])
    node.uploads.start()
    assert node.uploads.expect_s() is None
    for step in (7, 9):
        shared.parts[step] = {1 - rank}
        node.save(step)
        shared.said = Announced(step, final=False)
        until(lambda step=step: node.uploads.expect_s() == step)
    drained(node)


def test_what_is_in_flight_is_waited_for_first(tmp_path, until):
    now = [100.0]
    go = threading.Event()

    def upload(step: int) -> None:
        now[0] += 10
        if step == 2:
            go.wait(10)

    times = TIMES.model_copy(update={"drain_s": 20})
    node = Node(FakeDepot(Shared(1), 0, upload), tmp_path / "n", times=times, clock=lambda: now[0])
    node.uploads.start()
    assert node.uploads.drain_s() == 20
    node.save(1)
    until(lambda: node.uploads.expect_s() == 10)
    now[0] = 200.0
    node.save(2)
    until(lambda: node.checkpoint_store.tries == [1, 2])
    now[0] = 204.0  # of 10 s
    assert node.uploads.expect_s() == 16
    assert node.uploads.drain_s() == 24
    now[0] = 300.0  # longer than the last one: any moment now
    assert node.uploads.expect_s() == 10
    go.set()
    drained(node)


def test_a_fast_node_gets_as_long_for_its_last_upload_as_the_slow_ones(tmp_path):
    """Node 0 asks for the next save when the slowest node's part is there."""
    shared, now = Shared(2), [100.0]

    def later(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 100 + 1500 * len(node.checkpoint_store.tries):
            shared.said = Announced(1 + len(node.checkpoint_store.tries), final=len(node.checkpoint_store.tries) == 2)
        if len(node.checkpoint_store.tries) == 2 and not drains:
            drains.append(node.uploads.drain_s())
            node.uploads.drain(drains[0])

    drains: list[float] = []
    times = TIMES.model_copy(update={"poll_s": 10, "drain_s": 900})
    node = Node(FakeDepot(shared, 1), tmp_path / "n", times=times, clock=lambda: now[0], pause=later)
    node.save(1, 2, 3)
    node.uploads.run()
    assert node.checkpoint_store.tries == [1, 2, 3]
    assert drains[0] == pytest.approx(1.5 * 1500, rel=0.02)


def test_a_save_that_failed_says_nothing_of_the_next(tmp_path, until):
    node = Node(FakeDepot(Shared(2), 0), tmp_path / "n", times=TIMES.model_copy(update={"peers_s": 0.05}))
    node.save(1)
    node.uploads.start()
    drained(node, patience_s=0)
    assert node.status.failed == 1
    assert node.uploads.expect_s() is None


def test_a_node_that_has_nothing_left_does_not_wait_for_node_0(tmp_path):
    node = Node(FakeDepot(Shared(2), 1), tmp_path / "n")
    node.uploads.start()
    drained(node, patience_s=3600)


def test_a_newer_attempt_ends_the_uploads(tmp_path, until):
    checkpoint_store = FakeDepot(Shared(1), 0)

    def fenced(_step: int) -> str | None:
        raise NewerAttempt("attempt 2 was started")

    checkpoint_store.commit = fenced
    node = Node(checkpoint_store, tmp_path / "n")
    node.uploads.start()
    node.save(1)
    until(lambda: node.uploads.fenced)
    assert node.uploads.fenced == "attempt 2 was started"
    assert node.uploads.ended(10)
    assert node.status.committed_step == -1


def test_a_bug_in_the_uploads_is_seen(tmp_path):
    def bug(_step: int) -> None:
        raise ZeroDivisionError("oops")

    node = Node(FakeDepot(Shared(1), 0, bug), tmp_path / "n")
    node.save(1)
    node.uploads.drain(PATIENCE_S)
    node.uploads.run()
    assert node.status.problem == "the uploads ended: ZeroDivisionError: oops"
    assert node.said == ["checkpoint: the uploads ended: ZeroDivisionError: oops"]


def test_a_folder_that_is_made_before_what_it_will_hold_is_waited_for_while_the_program_runs(tmp_path, until):
    """It would be given up as a checkpoint without a file, and what is written there then be in no store."""
    node = Node(FakeDepot(Shared(1), 0), tmp_path / "n")
    inner = node.folder / "step-1" / "global_step1"
    inner.mkdir(parents=True)
    node.uploads.start()
    until(lambda: len(node.looks) > 3)
    assert node.checkpoint_store.tries == []
    (inner / "model.pt").touch()
    until(lambda: node.status.committed_step == 1)
    (node.folder / "step-2").mkdir()
    drained(node)
    assert node.checkpoint_store.tries == [1, 2], "nothing more will come: what is wrong with it is told"


def test_a_program_that_writes_under_the_final_name_is_told_once(tmp_path):
    node = Node(FakeDepot(Shared(1), 0), tmp_path / "node-0")
    for step, late_s in ((1, -1), (2, 60), (3, 60)):
        node.save(step)
        (node.folder / f"step-{step}" / "model.pt").touch()
        now = time.time() + late_s
        os.utime(node.folder / f"step-{step}" / "model.pt", (now, now))
        node.uploads._bring(step, node.folder / f"step-{step}", final=False)
    assert [line for line in node.said if "model.pt was written after" in line] == [
        "checkpoint: step-2: model.pt was written after the folder had that name. What comes so late may be missing in "
        "the store: write the folder beside, and rename it when it is whole"
    ]
