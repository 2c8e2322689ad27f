"""Under the real torchrun: its pitfalls."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.launchers import forked, torchrun
from mgpu_train.agent.machine import ports, procs
from mgpu_train.agent.phases import launcher_process, preflight
from mgpu_train.checkpoint.local import finished
from mgpu_train.config import Job
from mgpu_train.launchers import PROGRAM, TORCHRUN
from waiting import until

import mgpu

HANGS_S = 180  # longer than any of these takes beside whatever else
TEMPLATE = Path(mgpu.__file__).parent / "templates" / "train.py"


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
        port = ports.free(1)[0]
        made = Job.model_validate({
            "run_id": "r", "attempt": attempt, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 2,
            "master_addr": "127.0.0.1", "master_port": port, **job,
        })  # fmt: skip
        Path(self.layout.attempt_job(attempt)).write_text(made.model_dump_json())
        Path(self.layout.stacks(attempt)).mkdir()
        environment = launcher_process.environment(made, {}, self.layout, launcher_process.os.environ)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                launcher_process.argv(made, self.layout, sys.executable),
                cwd=self.layout.work,
                env={**environment, **preflight.by_launchers(made), **(changes or {})},
                stdout=log,
                stderr=log,
            )

    @property
    def processes(self) -> list[procs.Process]:
        return procs.carrying(f"MGPU_CHECKPOINT_DIR={self.layout.checkpoints}")

    def until(self, condition: Callable[[], object]) -> None:
        until(condition, 90, self.log.read_text)


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
    torchrun.wait(HANGS_S)
    node.until(lambda: not node.processes)
    assert len(list(node.checkpoints.glob("saved-*"))) == (2 if kept else 0)


def test_the_ranks_of_torchrun_get_all_of_the_grace(tmp_path):
    job = Job.model_validate({
        "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "h", "master_port": 1, "command": ["x.py"], "timeouts": {"stop_grace_s": 60.5},
    })  # fmt: skip
    given = launcher_process.environment(job, {}, RunLayout("r", PurePosixPath(tmp_path)), {})
    assert float(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 60.5
    assert "--max-restarts 0" in (
        words := " ".join(launcher_process.argv(job, RunLayout("r", PurePosixPath(tmp_path)), "python"))
    )
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
    torchrun.wait(HANGS_S)
    assert "is killed by signal" not in node.log.read_text()
    assert len(finished(node.checkpoints)) == 1


ENDS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("bye", flush=True)
    {end}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", -9, "rank 1 was ended by SIGKILL"),
    ],
    ids=["exit 3", "SIGKILL"],
)
def test_how_the_first_rank_has_ended_is_known_without_a_stack(place, end, code, words):
    """torchrun itself ends with 1 for all of them."""
    node = place("node")
    (Path(node.layout.work) / "ends.py").write_text(ENDS.format(end=end))
    assert node.start(command=["ends.py"]).wait(HANGS_S) == 1
    assert json.loads(Path(node.layout.failure(1)).read_text()) == {"rank": 1, "exit_code": code}
    log = node.log.read_text()
    assert f"torchrun: {words} (pid " in log
    assert "Traceback" not in log


def test_a_stop_is_one_line(place):
    node = place("node")
    (Path(node.layout.work) / "waits.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(60)\n")
    torchrun = node.start(command=["waits.py"])
    node.until(lambda: node.log.read_text().count("ready") == 2)
    torchrun.send_signal(signal.SIGTERM)
    assert torchrun.wait(HANGS_S) == 1
    assert node.log.read_text().splitlines() == ["ready", "ready", "torchrun: stopped by SIGTERM"]
    assert not Path(node.layout.failure(1)).exists()


WAITS = """
import os, time
print("rank has", [name for name in os.environ if "PREFLIGHT" in name], flush=True)
time.sleep(600 * int(os.environ["RANK"]))
"""


def test_torchrun_ends_when_asked_while_it_waits_for_a_peer_that_is_not_done(place):
    """It waits 300 s for the other nodes' torchruns, which may be gone: a machine that is taken has no such time. The
    two have measured their nodes before."""
    port, meeting = ports.free(2)
    pair = [place("first"), place("second")]
    runs = []
    for rank, node in enumerate(pair):
        (Path(node.layout.work) / "ends.py").write_text(WAITS)
        job = {"command": ["ends.py"], "nodes": 2, "node_rank": rank, "processes_per_node": 1, "master_port": port}
        job["preflight_port"] = meeting
        runs.append(node.start(changes={"LOGLEVEL": "INFO"}, **job))
    pair[0].until(lambda: "Waiting 300 seconds for other agents to finish" in pair[0].log.read_text())
    runs[0].send_signal(signal.SIGTERM)
    assert runs[0].wait(HANGS_S) == 1
    for node in pair:
        log = node.log.read_text()
        assert "torchrun: preflight: 2 nodes, " in log
        assert log.index("preflight: 2 nodes") < log.index("rank has []"), "and ranks hear nothing of it"
    assert "torchrun: stopped by SIGTERM" in pair[0].log.read_text()


def test_it_ends_by_a_signal_of_its_own_once_its_ranks_have(monkeypatch, capsys, tmp_path):
    ranks, heard = [["one"], []], os.pipe()
    monkeypatch.setattr(torchrun, "time", SimpleNamespace(sleep=lambda _seconds: None))
    monkeypatch.setattr(torchrun.procs, "descendants", lambda _pid: ranks.pop(0))
    monkeypatch.setattr(torchrun, "os", SimpleNamespace(read=os.read, getpid=os.getpid, _exit=sys.exit))
    os.write(heard[1], bytes([signal.SIGCHLD, signal.SIGTERM]))
    with pytest.raises(SystemExit):
        torchrun._end_after_ranks(heard[0])
    assert ranks == []
    torchrun._leave("", 1, -9)
    torchrun._leave(str(tmp_path / "none" / "failure"), 1, -9)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "torchrun: stopped by SIGTERM"
    assert second.startswith(f"torchrun: {tmp_path}/none/failure cannot be written: [Errno 2]")


TRAINS: dict[str, Any] = {
    "train": {
        "strategy": "ddp",
        "steps": 1_000_000,
        "global_batch": 4,
        "seq_len": 16,
        "model": {"layers": 1, "dim": 8, "heads": 1},
        "validate_every": 1_000_000,
        "validate_batches": 1,
    },
    "checkpoint": {"every_steps": 1_000_000, "to": "file:///x", "writers": "all"},
}


def train(
    node: Place, changes: dict[str, str] | None = None, **job: Any
) -> tuple[subprocess.Popen[bytes], list[procs.Process]]:
    """The trainer, once both of its ranks have made a step; torchrun, and they."""
    torchrun = node.start(changes=changes, **TRAINS, **job)
    metrics = Path(node.layout.metrics)
    node.until(lambda: sum('"step"' in each.read_text() for each in metrics.glob("rank-*.jsonl")) == 2)
    stacks = Path(node.layout.stacks(1))
    ranks = [procs.of(json.loads((stacks / f"rank-{rank}.json").read_text())["pid"]) for rank in range(2)]
    return torchrun, [rank for rank in ranks if rank]


def test_ranks_of_the_trainer_come_of_one_import_and_one_that_is_killed_is_known(place):
    node = place("node")
    torchrun, ranks = train(node)
    mine = procs.command_line(torchrun.pid)
    assert [procs.command_line(rank.pid) for rank in ranks] == [mine, mine], "they are forked, not started"
    ranks[1].send(signal.SIGKILL)
    assert torchrun.wait(HANGS_S) == 1
    assert "torchrun: rank 1 was ended by SIGKILL (pid " in node.log.read_text()
    node.until(lambda: not node.processes)


def test_forked_ranks_save_when_torchrun_is_asked_to_end(place):
    node = place("node")
    torchrun, _ = train(node)
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(HANGS_S)
    assert len(finished(node.checkpoints)) == 1
    node.until(lambda: not node.processes)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("node_rank", [0, 1])
def test_forked_ranks_that_never_begin_end_with_torchrun(place, node_rank, number):
    """The other node does not come: the first one waits in Python, any other in C++."""
    node = place("node")
    torchrun = node.start(nodes=2, node_rank=node_rank, **TRAINS)
    node.until(lambda: len(node.processes) == 3)
    torchrun.send_signal(number)
    torchrun.wait(HANGS_S)
    node.until(lambda: not node.processes)


NO_FORK = """
import os, threading
from mgpu_train.agent.launchers import forked
if os.environ["WHAT"] == "a driver":
    forked._DEVICES = ("/dev/zero",)
    held = open("/dev/zero")
else:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize("what", ["a driver", "a thread"])
def test_nothing_is_forked_beside_what_a_fork_would_break(place, tmp_path, what):
    node, path = place("node"), launcher_process.shipped_library()
    (tmp_path / "sitecustomize.py").write_text(NO_FORK)
    torchrun, ranks = train(node, {"WHAT": what, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), path)))})
    assert procs.command_line(torchrun.pid) not in [procs.command_line(rank.pid) for rank in ranks], "they are started"
    torchrun.send_signal(signal.SIGTERM)
    torchrun.wait(HANGS_S)


def test_ranks_whose_output_goes_elsewhere_are_started(place):
    """A launcher of one's own may add `--redirects`, which a process that runs already would not heed."""
    node = place("node")
    logs = Path(node.layout.work) / "logs"
    words = *TORCHRUN.argv[:-1], "--redirects", "3", "--log-dir", str(logs), PROGRAM
    torchrun, ranks = train(node, launcher=TORCHRUN.model_copy(update={"argv": words}).model_dump())
    assert "threads each" in next(logs.rglob("0/stderr.log")).read_text()
    assert procs.command_line(torchrun.pid) not in [procs.command_line(rank.pid) for rank in ranks]
    node.until(lambda: {each.pid for each in node.processes} == {torchrun.pid, *(rank.pid for rank in ranks)})


def test_ranks_that_a_word_in_front_binds_to_cores_are_started():
    """`--numa-binding` has torchrun put `numactl` before a rank's words."""
    usual, begun = (sys.executable, "-u", *forked.TRAINER), SimpleNamespace(_stdout=None, _stderr=None)
    assert forked.as_usual(begun, usual)
    assert not forked.as_usual(begun, ("numactl", "--physcpubind=0", *usual))


def test_what_cannot_be_imported_is_told_by_the_ranks(place, tmp_path):
    node, path = place("node"), launcher_process.shipped_library()
    (tmp_path / "pydantic.py").write_text("raise ImportError('none for this Python')")
    torchrun = node.start(changes={"PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), path)))}, **TRAINS)
    assert torchrun.wait(HANGS_S) == 1
    assert "ImportError: none for this Python" in node.log.read_text()
    assert json.loads(Path(node.layout.failure(1)).read_text())["exit_code"] == 1
