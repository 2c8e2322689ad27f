"""Two nodes with real agents, and parts that are lost, damaged, or written by somebody who should have stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.nodes import Node
from mgpu_train.agent.machine import procs
from mgpu_train.checkpoint.log.lines import Commit
from mgpu_train.checkpoint.newest import newest_verified
from mgpu_train.checkpoint.retention import plan_prune
from mgpu_train.config import Retention

WAIT = """
import os, pathlib, time
from saving import save
def wait(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.02)
"""
RESUMES = (
    WAIT
    + """
resumed = pathlib.Path(os.environ["MGPU_RESUME_DIR"])
assert sorted(path.name for path in resumed.iterdir()) == ["node-0.bin", "node-1.bin"]
save(LAST)
"""
)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes and a folder for a store."""
    nodes = [Node(tmp_path / f"home-{rank}", tmp_path / "store", rank, 2) for rank in range(2)]
    yield nodes
    for node in nodes:
        node.kill()


def start(
    nodes: list[Node], program: str, attempt: int = 1, resume: Commit | None = None, patience_s: float = 60
) -> None:
    """`patience_s`: how long node 0 waits for the other's part, which begins later."""
    chosen = resume and {"checkpoint_id": resume.checkpoint_id, "seq": resume.seq}
    for node in nodes:
        node.program(program)
        to = {"to": node.url, "every_steps": 1, "writers": "all", "keep_last": 9}
        node.job(
            attempt=attempt,
            writer=f"writer-{attempt}",
            resume=chosen,
            checkpoint=to,
            timeouts={"peers_s": patience_s, "drain_s": patience_s},
        )
    for node in nodes:
        node.start()


def committed(node: Node, step: int) -> None:
    node.until(lambda: node.said["checkpoint"]["committed_step"] == step)


def newest(node: Node, told: list[str] | None = None) -> Commit | None:
    return newest_verified(node.opened, "r", report=(told if told is not None else []).append)


def ended(nodes: list[Node]) -> list[str]:
    return [node.ended()["phase"] for node in nodes]


def save_five(pair: list[Node]) -> list[Commit]:
    """Five committed checkpoints, newest first."""
    start(pair, WAIT + "for step in range(1, 6):\n    save(step)\n    wait(str(step))\n")
    for step in range(1, 6):
        committed(pair[0], step)
        for node in pair:
            (node.run / "work" / str(step)).touch()
    assert ended(pair) == ["done", "done"]
    return pair[0].commit_log.checkpoints()


def objects(node: Node, commit: Commit, rank: int) -> Path:
    """The pack of a node's part."""
    return node.store / "r" / "checkpoints" / commit.checkpoint_id / f"node-{rank}.pack-0"


def test_a_part_that_is_lost_makes_no_checkpoint_and_the_next_attempt_goes_on_from_the_one_before(pair):
    """F26: the node of one part dies between its save and its upload."""
    start(pair, WAIT + "wait('1')\nsave(1)\nwait('2')\nsave(2)\nwait('3')\n", patience_s=6)
    for node in pair:  # both are at work
        (node.run / "work" / "1").touch()
    committed(pair[0], 1)
    pair[1].kill()
    (pair[0].run / "work" / "2").touch()
    pair[0].until(lambda: "step-2: other nodes' parts are missing" in (pair[0].said["checkpoint"]["problem"] or ""))
    (pair[0].run / "work" / "3").touch()
    status = pair[0].ended()
    assert (status["phase"], status["fault"]) == ("failed", "infrastructure")
    assert pair[0].commits == [1]
    start(pair, RESUMES.replace("LAST", "3"), attempt=2, resume=newest(pair[0]))
    assert ended(pair) == ["done", "done"]
    assert pair[0].commits == [3, 1]


def test_of_what_is_damaged_the_newest_whole_one_is_used_aloud_and_never_deleted(pair):
    """F28, F29, F52: the three newest are gone, cut short, and of a format that nobody reads any more."""
    five = save_five(pair)
    objects(pair[0], five[0], 1).unlink()
    cut = objects(pair[0], five[1], 0)
    cut.write_bytes(cut.read_bytes()[:-1])
    entry = pair[0].store / "r" / "commits" / f"{five[2].seq:08d}.json"
    said = json.loads(entry.read_text())
    entry.write_text(json.dumps({**said, "manifest": {**said["manifest"], "version": 1}}))
    told: list[str] = []
    good = newest(pair[0], told)
    assert good is not None
    assert (good.step, len(told)) == (2, 3)
    assert "node-1" in told[0]
    assert "bytes" in told[1]
    assert "format 1" in told[2]
    plan = plan_prune(pair[0].opened, "r", Retention(keep_last=1))
    assert good.checkpoint_id in plan.keep
    assert set(plan.damaged) == {five[0].checkpoint_id, five[1].checkpoint_id}
    start(pair, RESUMES.replace("LAST", "6"), attempt=2, resume=good)
    assert ended(pair) == ["done", "done"]
    assert pair[0].commits[0] == 6


def test_a_flipped_byte_starts_no_launcher_on_any_node(pair):
    """F28: sizes are right, so the supervisor may choose it; nothing of it is read before it was checked."""
    newest_one, before, *_ = save_five(pair)
    pack = objects(pair[0], newest_one, 1)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    for node in pair:  # a copy of its own would do
        for folder in (node.run / "checkpoints").iterdir():
            folder.rename(folder.with_name(f"not-{folder.name}"))
    start(pair, "raise SystemExit('started')", attempt=2, resume=newest_one)
    for node in pair:
        status = node.ended()
        assert (status["phase"], status["fault"]) == ("failed", "infrastructure")
        assert status["reason"].startswith("resume: ")
        assert "launching" not in status["phase_seconds"]
    assert pack.read_bytes() == data, "what is damaged is left in place"
    start(pair, RESUMES.replace("LAST", "6"), attempt=3, resume=before)
    assert ended(pair) == ["done", "done"]


def test_who_was_stopped_and_wakes_up_in_a_newer_attempt_commits_nothing(pair, tmp_path):
    """F31: the old agents stand still, and with them the uploads; the new ones commit."""
    start(pair, WAIT + "wait('1')\nsave(1)\nwait('2')\nsave(2)\nsave(9)\nwait('never')\n", patience_s=6)
    for node in pair:
        (node.run / "work" / "1").touch()
    committed(pair[0], 1)
    old = [procs.Process(**json.loads((node.run / "agent.json").read_text())["process"]) for node in pair]
    for agent in old:
        agent.send(signal.SIGSTOP)
    for node in pair:
        (node.run / "work" / "2").touch()
    heirs = [Node(tmp_path / f"heir-{rank}", tmp_path / "store", rank, 2) for rank in range(2)]
    try:
        start(heirs, RESUMES.replace("LAST", "3"), attempt=2, resume=newest(pair[0]))
        assert ended(heirs) == ["done", "done"]
        for agent in old:
            agent.send(signal.SIGCONT)
        status = pair[0].ended()
    finally:
        for node in heirs:
            node.kill()
    assert status["phase"] == "failed"
    assert "attempt 2" in status["reason"]
    assert pair[0].commits == [3, 1]
    found = newest(pair[0])
    assert found is not None
    assert found.checkpoint_id == "a002-step-3"
