"""Under the real torchrun: its pitfalls, and runs that are killed and resumed as if nothing had happened."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from mgpu_train.agent import launcher, procs, saves
from mgpu_train.agent.layout import RunLayout
from mgpu_train.checkpoint.local import finished
from mgpu_train.config import Job

import mgpu

TEMPLATE = Path(mgpu.__file__).parent / "templates" / "train.py"
SMALL = {
    "steps": 90, "global_batch": 8, "seq_len": 32, "warmup_steps": 5, "validate_every": 25, "validate_batches": 2,
    "threads": 1, "model": {"layers": 2, "dim": 32, "heads": 2},
}  # fmt: skip


class Place:
    """One node with two ranks: torchrun as the agent starts it, without the agent."""

    def __init__(self, home: Path) -> None:
        self.layout = RunLayout("r", PurePosixPath(home))
        self.checkpoints = Path(self.layout.checkpoints)
        for folder in (self.layout.work, self.layout.checkpoints, self.layout.metrics):
            Path(folder).mkdir(parents=True)
        self.log = home / "log"

    def start(self, attempt: int = 1, changes: dict[str, str] | None = None, **job: Any) -> subprocess.Popen[bytes]:
        """Starts an attempt; `changes` are made to the environment that the agent gives."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        made = Job.model_validate({
            "run_id": "r", "attempt": attempt, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 2,
            "master_addr": "127.0.0.1", "master_port": port, **job,
        })  # fmt: skip
        Path(self.layout.attempt_job(attempt)).write_text(made.model_dump_json())
        environment = launcher.environment(made, {}, self.layout, launcher.os.environ)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                launcher.argv(made, sys.executable),
                cwd=self.layout.work,
                env={**environment, **(changes or {})},
                stdout=log,
                stderr=log,
            )

    def train(self, attempt: int, **train: Any) -> subprocess.Popen[bytes]:
        """Starts the trainer; a later attempt from the newest checkpoint of this disk, as the agent would."""
        resume = None
        if attempt > 1:
            step, newest = finished(self.checkpoints)[-1]
            shutil.rmtree(self.layout.resume, ignore_errors=True)
            shutil.copytree(newest, self.layout.resume)
            saves.clear(self.checkpoints)
            resume = {"checkpoint_id": f"a001-step-{step}", "seq": 1}
        every = train.pop("every_steps")
        target = {"to": "file:///x", "every_steps": every, "writers": "all"}
        return self.start(attempt, train={**SMALL, **train}, checkpoint=target, resume=resume)

    @property
    def processes(self) -> list[procs.Process]:
        return procs.carrying(f"MGPU_CHECKPOINT_DIR={self.layout.checkpoints}")

    def kill_when(self, attempt: int, torchrun: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
        """SIGKILL to everything of an attempt that has begun to train, at the moment that the condition holds."""
        self.until(lambda: self.lines("start", attempt))
        victims = self.processes  # to look for them then would take longer than a step
        assert len(victims) == 3
        self.until(condition, pause_s=0.001)
        for victim in victims:
            victim.send(signal.SIGKILL)
        torchrun.wait(30)
        self.until(lambda: not self.processes)

    def until(self, condition: Callable[[], object], pause_s: float = 0.02, limit_s: float = 90) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(pause_s)

    def records(self) -> list[dict[str, Any]]:
        """The first rank's metrics, each with its attempt; a line that was torn by a kill is none."""
        found, attempt = [], 0
        path = Path(self.layout.metrics) / "rank-0.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            attempt = record["attempt"] if record["kind"] == "start" else attempt
            found.append({**record, "attempt": attempt})
        return found

    def lines(self, kind: str, attempt: int) -> list[dict[str, Any]]:
        return [each for each in self.records() if (each["kind"], each["attempt"]) == (kind, attempt)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    """`place("name")` makes one; what still runs there at the end is killed."""
    made: list[Place] = []

    def make(name: str) -> Place:
        made.append(Place(tmp_path / name))
        return made[-1]

    yield make
    for each in made:
        procs.kill_all(lambda each=each: each.processes, 10)


@pytest.fixture
def text(tmp_path: Path) -> str:
    for number in range(12):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}").write_text("the quick brown fox jumps over the lazy dog " * 20)
    return str(tmp_path / "text")


def told(place: Place, attempt: int) -> dict[tuple[str, int], tuple[Any, ...]]:
    """What an attempt's metrics say of each step, less what depends on the clock."""
    names = {"step": ("loss", "grad_norm", "lr", "samples", "steps"), "validation": ("loss",)}
    found = [(kind, line, keys) for kind, keys in names.items() for line in place.lines(kind, attempt)]
    return {(kind, line["step"]): tuple(line[key] for key in keys) for kind, line, keys in found}


@pytest.mark.drawn("strategies of training")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_between_two_checkpoints_and_resumed_equals_uninterrupted_bit_for_bit(place, text, strategy, same_bits):
    """I9"""
    settings = {"strategy": strategy, "text": text, "every_steps": 30}
    whole, cut = place("whole"), place("cut")
    assert whole.train(1, **settings).wait(120) == 0, whole.log.read_text()
    first = cut.train(1, **settings)
    # a save goes on beside the steps after it
    kept = lambda: finished(cut.checkpoints)  # noqa: E731
    cut.kill_when(1, first, lambda: kept() and any(line["step"] >= 40 for line in cut.lines("step", 1)))
    lost, resumed = cut.lines("step", 1)[-1]["step"], kept()[-1][0]
    assert resumed == 30 < lost < 60
    assert cut.train(2, **settings).wait(120) == 0, cut.log.read_text()
    assert cut.lines("start", 2)[0]["resumed_step"] == 30

    wanted, before, after = told(whole, 1), told(cut, 1), told(cut, 2)
    assert {key: wanted[key] for key in before} == before
    assert {key: wanted[key] for key in after} == after
    assert [step for kind, step in after if kind == "step"] == list(range(31, 91))
    assert before.keys() | after.keys() == wanted.keys()
    same_bits(whole.checkpoints / "step-90", cut.checkpoints / "step-90")


def test_killed_in_the_middle_of_a_save_leaves_nothing_that_looks_whole_and_is_not(place, text, same_bits):
    """F23: again and again, at other moments of a save; each attempt goes on from what is whole."""
    settings = {"strategy": "fsdp", "text": text, "every_steps": 2, "steps": 40}
    whole, cut = place("whole"), place("cut")
    assert whole.train(1, **settings).wait(120) == 0, whole.log.read_text()
    halves = 0
    for attempt, moment in ((1, "__1_0.distcp"), (2, ".metadata")):
        torchrun = cut.train(attempt, **settings)

        def half(moment: str = moment) -> bool:
            return bool(finished(cut.checkpoints)) and any(cut.checkpoints.glob(f".tmp-step-*/{moment}"))

        cut.kill_when(attempt, torchrun, half)
        halves += any(cut.checkpoints.glob(".tmp-step-*"))
        for step, folder in finished(cut.checkpoints):
            other = whole.checkpoints / f"step-{step}"  # while one save is under way the next one is skipped
            same_bits(folder, other if other.is_dir() else folder)
        assert finished(cut.checkpoints)
    assert halves, "no kill was in the middle of a save"
    assert cut.train(3, **settings).wait(120) == 0, cut.log.read_text()
    same_bits(whole.checkpoints / "step-40", cut.checkpoints / "step-40")


SLOW_SAVE = """
import os, pathlib, signal, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
rank, root = os.environ["RANK"], pathlib.Path(os.environ["MGPU_CHECKPOINT_DIR"])
(root / f"ready-{rank}").touch()
while not asked:
    time.sleep(0.01)
time.sleep(3)
(root / f"saved-{rank}").touch()
"""


@pytest.mark.parametrize(("changes", "kept"), [({}, True), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}, False)])
def test_a_save_that_takes_longer_than_torchrun_would_wait_is_finished(place, changes, kept):
    """torchrun kills its ranks 30 s after SIGTERM, unless it is told another time; here that is 1 s, and the save 3."""
    node = place("node")
    (Path(node.layout.work) / "slow.py").write_text(SLOW_SAVE)
    torchrun = node.start(changes=changes, command=["slow.py"], timeouts={"stop_grace_s": 20})
    node.until(lambda: len(list(node.checkpoints.glob("ready-*"))) == 2)
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(60)
    node.until(lambda: not node.processes)
    assert len(list(node.checkpoints.glob("saved-*"))) == (2 if kept else 0)


def test_the_ranks_of_torchrun_get_all_of_the_grace(tmp_path):
    job = Job.model_validate({
        "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "h", "master_port": 1, "command": ["x.py"], "timeouts": {"stop_grace_s": 60.5},
    })  # fmt: skip
    given = launcher.environment(job, {}, RunLayout("r", PurePosixPath(tmp_path)), {})
    assert float(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 60.5
    assert "--max-restarts 0" in (words := " ".join(launcher.argv(job, "python")))
    assert "--rdzv-backend static" in words
    assert given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_example_saves_when_it_is_stopped_and_its_workers_do_not_mind(place):
    """torchrun's SIGTERM reaches the DataLoader's workers, too."""
    node = place("node")
    shutil.copy(TEMPLATE, node.layout.work)
    torchrun = node.start(command=["train.py", "--steps", "1000000", "--save-every", "1000000"])
    node.until(lambda: len(node.processes) == 5)  # torchrun, two ranks, and a worker of each
    time.sleep(1)
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(60)
    assert "is killed by signal" not in node.log.read_text()
    assert len(finished(node.checkpoints)) == 1
