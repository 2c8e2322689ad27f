"""What the agent decides, from plain values and a clock that the test sets."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from mgpu_train.agent.attempt.decide import Act, Cause, Ended, Watched, asks_peers, look, lost, verdict
from mgpu_train.agent.status.status import Fault
from mgpu_train.config import CheckpointTarget, Job, TrainConfig
from mgpu_train.timeouts import Timeouts

TIMES = Timeouts(stop_grace_s=10)
TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: {port}, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)  # torch 2.15
TO = CheckpointTarget(to="file:///x", writers="all", every_steps=5)


def job(**changes) -> Job:
    base = {
        "run_id": "r",
        "attempt": 1,
        "writer": "w",
        "node_rank": 0,
        "nodes": 2,
        "processes_per_node": 1,
        "master_addr": "127.0.0.1",
        "master_port": 1,
        "command": ("train.py",),
        "checkpoint": TO,
    }
    return Job.model_validate({**base, **changes})


def train_job(**changes) -> Job:
    return job(command=None, train=TrainConfig(steps=20), **changes)


@pytest.mark.parametrize(
    ("seen", "act"),
    [
        (Watched(now=100), Act.WATCH),
        (Watched(now=100, hung="no sign of progress"), Act.KILL),
        (Watched(now=100, hung="no sign of progress", silent=True), Act.KILL),
        (Watched(now=5, asked=5), Act.TERMINATE),
        (Watched(now=14, asked=5), Act.TERMINATE),
        (Watched(now=15, asked=5), Act.KILL),  # stop_grace_s
        (Watched(now=5, asked=5, asked_now=True), Act.KILL),
        (Watched(now=5, fenced="attempt 2 was started"), Act.KILL),
        (Watched(now=5, resumed_step=9, saved_step=9), Act.WATCH),
        (Watched(now=5, resumed_step=9, saved_step=8), Act.KILL),  # it began anew
        (Watched(now=5, resumed_step=9), Act.WATCH),
    ],
)
def test_what_is_done_to_a_launcher(seen, act):
    assert look(seen, TIMES)[0] is act


def test_a_stop_waits_for_what_a_save_takes_and_no_longer_than_one_may():
    times = Timeouts(stop_grace_s=10, save_s=300)

    def killed_at(save_s: float) -> float:
        _, cause = look(Watched(now=5, asked=5, save_s=save_s), times)
        return next(at for at in range(5, 1000) if look(Watched(now=at, asked=5, ending=cause), times)[0] is Act.KILL)

    assert [killed_at(save_s) for save_s in (0, 3, 120, 4000)] == [15, 15, 125, 305]


def test_a_hang_is_the_programs_unless_a_node_has_fallen_silent():
    _, hung = look(Watched(now=100, hung="no sign of progress"), TIMES)
    assert (hung.fault, hung.reason) == (Fault.USER, "no sign of progress")
    _, missed = look(Watched(now=100, hung="no sign of progress", silent=True), TIMES)
    assert (missed.fault, "heard no more" in missed.reason) == (Fault.INFRASTRUCTURE, True)


def test_the_first_cause_stands_and_only_its_grace_is_cut():
    _, cause = look(Watched(now=5, asked=5), TIMES)
    later = Watched(now=6, asked=5, asked_now=True, fenced="attempt 2 was started", ending=cause)
    assert look(later, TIMES) == (Act.KILL, cause)


STOP = Cause(Fault.STOPPED, "this node was asked to stop", 1, 10)
STALL = Cause(Fault.INFRASTRUCTURE, "no progress", 1, 0)
GONE = Cause(Fault.PROVIDER, "the provider takes this machine", 1, 0)
GOOD = Ended(exit_code=0, said="done", saved_step=20, durable_step=20)


@pytest.mark.parametrize(
    ("which", "end", "fault", "words"),
    [
        (train_job(), GOOD, None, ""),
        (
            train_job(),
            replace(GOOD, durable_step=15, problem="no bucket"),
            Fault.INFRASTRUCTURE,
            "step-20, is not safe: no",
        ),
        (train_job(), replace(GOOD, saved_step=15, durable_step=15), Fault.INFRASTRUCTURE, "step 15, not 20"),
        (train_job(), replace(GOOD, saved_step=-1, durable_step=-1, resumed_step=20), None, ""),
        (train_job(checkpoint=None), Ended(exit_code=0), None, ""),
        (train_job(), replace(GOOD, cause=STOP), None, ""),  # it finished while it was asked to stop
        (train_job(), replace(GOOD, cause=STOP, said="stopped"), Fault.STOPPED, "this node was asked to stop"),
        (train_job(), replace(GOOD, said="stopped"), Fault.INFRASTRUCTURE, "not by this agent"),
        (train_job(), replace(GOOD, said="stopped", exit_code=1), Fault.INFRASTRUCTURE, "not by this agent"),
        (train_job(), replace(GOOD, exit_code=1, cause=STOP), Fault.STOPPED, "this node was asked to stop"),
        (train_job(), replace(GOOD, cause=GONE), None, ""),  # it was through before the machine went
        (train_job(), replace(GOOD, cause=GONE, durable_step=15), Fault.PROVIDER, "takes this machine; the final"),
        (train_job(), replace(GOOD, cause=GONE, said="stopped"), Fault.PROVIDER, "takes this machine"),
        (train_job(), replace(GOOD, cause=STALL), Fault.INFRASTRUCTURE, "no progress"),
        (job(), Ended(exit_code=0), Fault.USER, "left no folder `step-<n>`"),
        (job(), Ended(exit_code=0, saved_step=1, durable_step=1), None, ""),
        (job(), Ended(exit_code=0, saved_step=2, durable_step=1), Fault.INFRASTRUCTURE, "step-2, is not safe"),
        (job(), Ended(exit_code=0, saved_step=2, durable_step=1, unkept=1), Fault.INFRASTRUCTURE, "step-2, is not"),
        (job(), Ended(exit_code=0, saved_step=2, durable_step=1, unkept=2), Fault.USER, "step-2, is not safe"),
        (job(), Ended(exit_code=0, saved_step=2, resumed_step=9), Fault.USER, "load MGPU_RESUME_DIR"),
        (job(), Ended(exit_code=3, last_words="ValueError: x"), Fault.USER, "exit code 3: ValueError: x"),
        (job(), Ended(exit_code=-signal.SIGKILL), Fault.USER, "the program was ended by SIGKILL: most often"),
        (job(), Ended(exit_code=1, full=True), Fault.USER, "exit code 1; the disk is full: `disk_gib`"),
        (job(), Ended(exit_code=-signal.SIGKILL, starved=1), Fault.USER, "SIGKILL: out of memory, the kernel says"),
        (
            job(),
            Ended(exit_code=1, rank=3, rank_code=3, last_words="bye"),
            Fault.USER,
            "rank 3 ended with exit code 3: ",
        ),
        (
            job(),
            Ended(exit_code=1, rank=1, rank_code=-9, last_words="[gloo] x"),
            Fault.USER,
            "rank 1 was ended by SIGKILL",
        ),
        (job(), Ended(exit_code=1, rank=1, rank_code=-9, starved=2), Fault.USER, "out of memory"),
        (job(), Ended(exit_code=1, rank=0, rank_code=-11), Fault.USER, "rank 0 was ended by SIGSEGV"),
        (job(), Ended(exit_code=1, rank=0, rank_code=-7), Fault.USER, "SIGBUS: most often /dev/shm is full"),
        (
            job(),
            Ended(exit_code=1, rank=0, rank_code=-7, kernel=("I/O error, dev nvme1n1, sector 184 op 0x0:(READ)",)),
            Fault.INFRASTRUCTURE,
            "SIGBUS: the disk has failed",
        ),
        (
            job(),
            Ended(exit_code=1, rank=0, rank_code=-6, last_words="NCCL watchdog"),
            Fault.INFRASTRUCTURE,
            "SIGABRT: NCCL",
        ),
        (job(), Ended(exit_code=-signal.SIGSEGV), Fault.USER, "the program was ended by SIGSEGV"),
        (job(), Ended(exit_code=-99), Fault.USER, "the program was ended by signal 99"),
        (job(nodes=1), Ended(exit_code=1, last_words=TAKEN.format(port=1)), Fault.INFRASTRUCTURE, "EADDRINUSE"),
        (job(nodes=1), Ended(exit_code=1, last_words=TAKEN.format(port=8080)), Fault.USER, "EADDRINUSE"),
        (
            job(preflight_port=7),
            Ended(exit_code=1, last_words=TAKEN.format(port=7)),
            Fault.INFRASTRUCTURE,
            "EADDRINUSE",
        ),
        (job(), Ended(exit_code=1, last_words="RuntimeError: [gloo] Connection closed"), Fault.INFRASTRUCTURE, "gloo"),
        (job(nodes=1), Ended(exit_code=1, last_words="RuntimeError: [gloo] wrong shape"), Fault.USER, "gloo"),
        # a node that has no part in the checkpoints answers for its launcher alone
        (job(node_rank=1, checkpoint=TO.model_copy(update={"writers": "rank0"})), Ended(exit_code=0), None, ""),
    ],
)
def test_how_an_attempt_ends(which, end, fault, words):
    failure = verdict(which, end)
    assert (failure.fault if failure else None) is fault
    assert words in (failure.reason if failure else "")


@pytest.mark.parametrize(("code", "kills", "starved"), [(-9, 1, True), (-9, 0, False), (3, 1, False)])
def test_only_what_the_kernel_has_killed_for_want_of_memory_is_said_to_have_lacked_it(code, kills, starved):
    failure = verdict(job(), Ended(exit_code=1, rank=1, rank_code=code, starved=kills))
    assert failure is not None
    assert (failure.fault, failure.starved) == (Fault.USER, starved)


@pytest.mark.parametrize(
    ("end", "over"),
    [
        (Ended(exit_code=0), False),
        (Ended(exit_code=0, said="done"), False),
        (Ended(exit_code=0, said="done", cause=STOP), False),
        (Ended(exit_code=0, said="done", cause=GONE), False),
        (Ended(exit_code=0, said="stopped"), True),
        (Ended(exit_code=1), True),
        (Ended(exit_code=0, cause=STOP), True),
        (Ended(exit_code=0, said="done", cause=STALL), True),
    ],
)
def test_what_no_upload_can_mend_is_told_before_the_uploads(end, over):
    assert lost(end) is over


@pytest.mark.parametrize(
    ("which", "changes", "asked"),
    [
        (job, {}, True),
        (job, {"nodes": 1}, False),
        (job, {"checkpoint": None}, False),  # nothing is written down
        (train_job, {}, False),  # it says what it did, and to which step
    ],
)
def test_whose_word_is_needed_for_a_success(which, changes, asked):
    assert asks_peers(which(**changes)) is asked
