"""An attempt that hangs leaves evidence: the stacks of its ranks, and which of them the others wait for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mgpu_train import pickles, stacks
from mgpu_train.agent.attempt import hang
from mgpu_train.agent.attempt.decide import Ended, verdict
from mgpu_train.agent.attempt.hang import Hang, Rank
from mgpu_train.agent.machine import procs
from mgpu_train.agent.phases import evidence
from mgpu_train.agent.status.tail import Progress
from mgpu_train.config import Job
from waiting import until

# what Python's faulthandler has written of two ranks, one of which was late to an all-reduce
SITE = "/home/u/env/lib/python3.11/site-packages"
WAITS = f"""\
Thread 0x00007f08caffd640 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 4181 in all_reduce
  File "/usr/lib/python3.11/threading.py", line 982 in run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f08cca7db80 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 4181 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/runs/r/work/prog.py", line 12 in main
  File "/home/u/runs/r/work/prog.py", line 13 in <module>
"""
LATE = f"""\
Current thread 0x00007fee4b079b80 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 718 in readinto
  File "{SITE}/requests/models.py", line 816 in generate
  File "/home/u/runs/r/work/data.py", line 5 in slow_batch
  File "/home/u/runs/r/work/prog.py", line 10 in main
  File "/home/u/runs/r/work/prog.py", line 13 in <module>
"""
BACKWARD = f"""\
Current thread 0x00007f08cca7db80 (most recent call first):
  File "{SITE}/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "{SITE}/torch/_tensor.py", line 630 in backward
  File "/home/u/runs/r/work/prog.py", line 14 in main
  File "/home/u/runs/r/work/prog.py", line 20 in <module>
"""


def stack(text: str) -> Rank:
    return Rank(hang.main_stack(text))


def recorded(*last: tuple[str, int, str], text: str = "") -> Rank:
    """A rank whose flight recorder has these: group, number, state."""
    entries = [
        {"process_group": (group, ""), "collective_seq_id": number, "profiling_name": "nccl:all_reduce", "state": state}
        for group, number, state in last
    ]
    return Rank(hang.main_stack(text), hang.collectives({"entries": entries}))


def test_by_their_stacks_the_one_that_is_elsewhere_is_named_with_its_own_line():
    found = hang.judge({0: stack(WAITS), 1: stack(LATE), 2: stack(WAITS)}, alone=True)
    assert found.missing == 1
    assert found.words == "ranks 0, 2 wait in all_reduce, and not rank 1: rank 1 is in data.py:5 (slow_batch)"


def test_ranks_of_ddp_wait_in_their_backward_pass():
    found = hang.judge({0: stack(BACKWARD), 1: stack(LATE)}, alone=True)
    assert found.missing == 1
    assert found.words.startswith("rank 0 waits in the backward pass, and not rank 1: rank 1 is in data.py:5")
    assert hang.judge({0: stack(WAITS), 1: stack(BACKWARD)}, alone=True).missing == 1, "that one is through with it"
    assert hang.judge({0: stack(BACKWARD)}, alone=True) == Hang("rank 0 is in prog.py:14 (main)")


def test_where_all_of_a_node_wait_the_missing_one_is_elsewhere():
    found = hang.judge({0: stack(WAITS), 1: stack(WAITS)}, alone=False)
    assert found == Hang("ranks 0, 1 wait in all_reduce", None)


def test_one_that_shows_no_stacks_is_waited_for():
    """It stands in the kernel, in a driver for example, or was stopped."""
    found = hang.judge({0: stack(WAITS), 1: Rank(silent=True)}, alone=True)
    assert found == Hang("rank 0 waits in all_reduce and rank 1 showed no stacks", 1)
    assert hang.judge({0: stack(BACKWARD), 1: Rank(silent=True)}, alone=True).missing == 1
    assert hang.judge({0: stack(LATE), 1: Rank(silent=True)}, alone=True) == Hang("rank 1 showed no stacks")


def test_one_rank_alone_is_where_it_is():
    assert hang.judge({0: stack(LATE)}, alone=True) == Hang("rank 0 is in data.py:5 (slow_batch)", None)


def test_the_flight_recorder_is_believed_before_the_stacks():
    """With NCCL a rank stands where the host meets the GPU, not in the collective."""
    ranks = {
        4: recorded(("0", 7, "completed"), ("0", 8, "started"), ("1", 2, "completed"), text=LATE),
        5: recorded(("0", 7, "completed"), ("1", 2, "completed"), text=WAITS),  # of the host's, by gloo
    }
    found = hang.judge(ranks, alone=True)
    assert found.missing == 5
    assert found.words.startswith(
        "rank 5 did not come to nccl:all_reduce, number 8, where rank 4 waits: rank 5 is in prog"
    )


def test_by_their_steps_the_one_behind_is_named_and_equals_are_not():
    assert hang.judge({0: Rank(done=(12, 3)), 1: Rank(done=(12, 2))}, alone=True).missing == 1
    assert hang.judge({0: Rank(done=(12, 3)), 1: Rank(done=(12, 3))}, alone=True) == Hang()


@pytest.mark.parametrize("dump", [None, [], {"entries": 3 * [{}]}, {"entries": [{"process_group": (), "state": 1}]}])
def test_a_dump_that_is_none_says_nothing(dump):
    assert hang.collectives(dump) == {}


def test_the_dump_of_torchs_own_recorder_is_read():
    """In a process of its own: the recorder is torch's, whatever group of ranks it records."""
    script = (
        "import os, sys, torch\nfrom torch import distributed as dist\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "dist.all_reduce(torch.ones(3)); dist.barrier()\n"
        "sys.stdout.buffer.write(torch._C._distributed_c10d._dump_fr_trace())\n"
    )
    env = {**os.environ, "RANK": "0", "TORCH_FR_BUFFER_SIZE": "100"}
    dump = subprocess.run(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, check=True, timeout=600
    ).stdout
    (last,) = hang.collectives(pickles.loads(dump)).values()
    assert (last.number, last.name) == (2, "gloo:barrier")


def test_how_far_each_rank_is_comes_from_its_own_metrics():
    progress = Progress()
    progress.take({"kind": "alive", "step": 3, "rank": 1, "done": 7})
    progress.take({"kind": "step", "step": 4, "rank": 0})
    progress.take({"kind": "alive", "step": 3, "rank": 0, "done": 1})
    assert progress.done == {1: (3, 7), 0: (4, 0)}


def test_a_collective_that_the_watchdog_ended_is_told_with_the_rank_that_did_not_come():
    job = Job.model_validate({
        "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 2, "processes_per_node": 2,
        "master_addr": "h", "master_port": 1, "command": ["x.py"],
    })  # fmt: skip
    said = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE)"
    ended = Ended(exit_code=1, rank=0, rank_code=-6, lines=(said,), last_words=said, peers_answer=True)
    plain = verdict(job, ended)
    assert plain is not None
    told = verdict(job, Ended(**{**vars(ended), "hang": "rank 1 did not come to nccl:all_reduce"}))
    assert told is not None
    assert told.reason == f"{plain.reason}; rank 1 did not come to nccl:all_reduce"


# --- who is asked -----------------------------------------------------------------------------------------------------


def ask(folder: Path, rank: int, **said: int) -> None:
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))


def test_only_who_says_so_and_has_a_handler_is_signalled(tmp_path):
    """SIGUSR2 would end anything else: a worker of torchrun's, or another process with an old number."""
    program = "import os, signal, sys, time\nif len(sys.argv) > 1: signal.signal(signal.SIGUSR2, lambda *_: None)\n"
    program += "print(flush=True)\ntime.sleep(120)"
    pipe = subprocess.PIPE
    deaf, hears = (subprocess.Popen([sys.executable, "-c", program, *more], stdout=pipe) for more in ([], ["x"]))
    try:
        for rank, process in enumerate((deaf, hears, hears)):
            assert process.stdout is not None
            if rank < 2:
                process.stdout.readline()
            known = procs.of(process.pid)
            assert known is not None
            ask(tmp_path, rank, pid=process.pid, start_ticks=known.start_ticks + (rank == 2))
        (tmp_path / "rank-3.json").write_text("{")
        assert list(evidence.listening(tmp_path)) == [1]
    finally:
        for process in (deaf, hears):
            process.kill()
            process.wait()


def test_the_trainer_shows_where_it_is_and_trains_on(tmp_path):
    job = {
        "run_id": "try", "attempt": 1, "writer": "me", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1,
        "train": {
            "steps": 100000, "global_batch": 2, "seq_len": 8, "strategy": "single",
            "model": {"layers": 1, "dim": 8, "heads": 2},
        },
    }  # fmt: skip
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "stacks").mkdir()
    given = {"MGPU_JOB": str(tmp_path / "job.json"), stacks.FOLDER: str(tmp_path / "stacks")}
    with (tmp_path / "log").open("wb") as log:
        trainer = subprocess.Popen([sys.executable, "-m", "mgpu_train.loop"], env={**os.environ, **given}, stderr=log)
    try:
        until(lambda: b"step 1/" in (tmp_path / "log").read_bytes(), 120)
        ((rank, process),) = evidence.listening(tmp_path / "stacks").items()
        assert (rank, process.pid) == (0, trainer.pid)
        process.send(stacks.SIGNAL)
        until(lambda: hang.main_stack((tmp_path / "stacks" / "rank-0.txt").read_text()), 60)
        assert "loop.py" in (tmp_path / "stacks" / "rank-0.txt").read_text()
        assert "in _beat" in (tmp_path / "stacks" / "rank-0.txt").read_text(), "a thread says that it lives"
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(120) == 0
    finally:
        trainer.kill()


# --- the agent --------------------------------------------------------------------------------------------------------

# two ranks, as torchrun would have them: one is late, and one waits for it; a third process must not be signalled
RANKS = """
import os, pickle, threading, time
from pathlib import Path
from mgpu_train import stacks
folder = Path(os.environ["MGPU_STACKS_DIR"])
def recorder(rank, number):
    pipe = folder / f"flight-{rank}.pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    def answers():
        while not os.read(fd, 1):
            time.sleep(0.05)
        entry = {"process_group": ("0", "default_pg"), "collective_seq_id": number, "state": "started"}
        (folder / f"flight-{rank}").write_bytes(pickle.dumps({"entries": [{**entry, "profiling_name": "nccl:x"}]}, 2))
    threading.Thread(target=answers, daemon=True).start()
def wait_for_data():
    time.sleep(300)
if os.fork() == 0:
    time.sleep(300)
rank = 1 if os.fork() == 0 else 0
stacks.show_on_request(rank)
if RECORDED:
    recorder(rank, 8 - rank)
print("begun", flush=True)
wait_for_data()
"""


@pytest.mark.parametrize("recorded", [False, True])
def test_a_hung_attempt_shows_its_ranks_before_it_is_ended(node, recorded):
    node.program(RANKS.replace("RECORDED", str(recorded)))
    node.job(checkpoint=None, processes_per_node=1, timeouts={"first_step_s": 30, "stall_s": 3})
    node.start()
    ended = node.ended()
    assert (ended["phase"], ended["fault"]) == ("failed", "user")
    assert ended["reason"].startswith("no sign of progress for 3 s (training: timeouts.training_minutes)")
    for rank in (0, 1):
        assert f"rank {rank}: File " in node.log
        assert "in wait_for_data" in node.log
    if recorded:
        assert "rank 1 did not come to nccl:x, number 8, where rank 0 waits: rank 1 is in prog.py" in ended["reason"]
        assert ended["missing_rank"] == 1
        assert "rank 0, group 0: nccl:x, number 8, is started" in node.log


def test_an_attempt_without_ranks_that_listen_is_ended_all_the_same(node):
    node.program("import time\nprint('begun', flush=True)\ntime.sleep(300)")
    node.job(checkpoint=None, timeouts={"first_step_s": 30, "stall_s": 1})
    node.start()
    ended = node.ended()
    assert ended["reason"] == "no sign of progress for 1 s (training: timeouts.training_minutes)"
    assert (ended["hang"], ended["missing_rank"]) == ("", None)


class Ranks:
    """One that answers when the clock has run so long; what the agent does while it waits takes no time."""

    def __init__(self, folder: Path, answers_at: float) -> None:
        self.folder, self.answers_at, self.now = folder, answers_at, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.answers_at and not (self.folder / "rank-0.txt").stat().st_size:
            (self.folder / "rank-0.txt").write_text(LATE)


@pytest.mark.parametrize(
    ("answers_at", "waited", "words"), [(1, 2, "rank 0 is in data.py:5"), (60, 5.2, "rank 0 showed no stacks")]
)
def test_an_answer_is_waited_for_and_no_longer_than_five_seconds(tmp_path, monkeypatch, answers_at, waited, words):
    from types import SimpleNamespace

    folder = tmp_path / "stacks"
    folder.mkdir()
    (folder / "rank-0.txt").touch()
    ranks = Ranks(folder, answers_at)
    asked = SimpleNamespace(send=lambda _: True)
    monkeypatch.setattr(evidence, "listening", lambda _: {0: asked})
    attempt = SimpleNamespace(
        job=SimpleNamespace(attempt=1, nodes=1), layout=SimpleNamespace(stacks=lambda _: folder), say=lambda _: None
    )
    found = evidence.collect(attempt, {}, lambda: ranks.now, ranks.sleep)
    assert found.words.startswith(words)
    assert ranks.now < waited
