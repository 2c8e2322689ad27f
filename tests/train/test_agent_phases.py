"""What an agent's phases refuse, say and leave out, in this process: the launcher, the store and the clock are away."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import shutil
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from mgpu_train.agent.attempt.attempt import Attempt, StopRequests
from mgpu_train.agent.attempt.decide import AttemptFailed, Ended
from mgpu_train.agent.attempt.hang import Hang
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import procs
from mgpu_train.agent.phases import evidence, folders, launcher_process, life, outputs, peers, preflight, watch
from mgpu_train.agent.phases.launcher_process import FLIGHT, Launch
from mgpu_train.agent.phases.prepare import prepare
from mgpu_train.agent.status.status import Fault
from mgpu_train.agent.uploads import checkpoint_store
from mgpu_train.agent.uploads.checkpoint_store import AttemptStore, Said
from mgpu_train.agent.uploads.uploads import CheckpointStoreError
from mgpu_train.checkpoint.transfer.part import Unkeepable
from mgpu_train.config import Job, Secrets
from mgpu_train.health.gpus import Demand, Seen
from mgpu_train.store import Changed, Denied, Expired, open_store

TIMES = {"poll_s": 0.001, "stop_grace_s": 0, "preflight_s": 9, "heartbeat_s": 5}


@pytest.fixture
def attempt(tmp_path):
    """`attempt(**changes of its job)`; its home is `tmp_path`, and its code was sent."""

    def make(**changes) -> Attempt:
        base = {
            "run_id": "r", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
            "master_addr": "127.0.0.1", "master_port": 29999, "launcher": "python", "command": ["prog.py"],
            "workdir": "runs/r/work", "timeouts": TIMES,
        }  # fmt: skip
        layout = RunLayout("r", PurePosixPath(tmp_path))
        Path(layout.work).mkdir(parents=True, exist_ok=True)
        secrets = Secrets(env={"TOKEN": "canary"})
        return Attempt(Job.model_validate({**base, **changes}), secrets, layout, StopRequests())

    return make


def said(attempt: Attempt) -> str:
    return Path(attempt.layout.log).read_text()


def why(call) -> tuple[Fault, bool, str]:
    with pytest.raises(AttemptFailed) as caught:
        call()
    return caught.value.fault, caught.value.suspect, caught.value.reason


# --- before the launcher


def test_a_node_that_cannot_have_the_runs_folders_says_why(attempt, tmp_path, monkeypatch):
    made = attempt()
    made.work.rmdir()
    assert why(lambda: folders.make_folders(made))[2].endswith("runs/r/work: it was not sent")
    made.work.mkdir()
    folders.make_folders(made)
    assert json.loads((tmp_path / "runs/r/job-1.json").read_text())["run_id"] == "r"
    (tmp_path / "runs/r/metrics").rmdir()
    (tmp_path / "runs/r/metrics").touch()
    assert "the run's folder cannot be written: " in why(lambda: folders.make_folders(made))[2]
    made.checkpoints.rmdir()
    made.checkpoints.touch()
    assert "checkpoints cannot be emptied: " in why(lambda: folders.clear_local(made))[2]
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _path: SimpleNamespace(free=3 << 20))
    fault, _, reason = why(lambda: folders.check_room(made))
    assert (fault, "only 3 MiB are free" in reason) == (Fault.INFRASTRUCTURE, True)


@pytest.mark.parametrize(("resume", "stays"), [(None, []), ({"checkpoint_id": "a001-step-20", "seq": 3}, ["step-20"])])
def test_a_disk_that_an_older_attempt_filled_has_room_for_the_next(attempt, monkeypatch, resume, stays):
    """All that it left is deleted in any case, so it is before anything is asked of the disk."""
    made = attempt(attempt=2, resume=resume)
    for name in ("step-10", "step-20", "half"):
        (made.checkpoints / name).mkdir(parents=True)

    def disk(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=0 if len([*folder.iterdir()]) > 1 else 1 << 30)

    monkeypatch.setattr(folders.shutil, "disk_usage", disk)
    assert prepare(made, {}) == launcher_process.python()
    assert [path.name for path in made.checkpoints.iterdir()] == stays


def test_what_somebody_else_removes_meanwhile_hides_nothing_that_is_still_to_go(attempt, monkeypatch):
    """A process of the program that is on its way out. What would be left looks like a checkpoint of this attempt."""
    made = attempt()
    for name in ("step-10", "step-20", "half"):
        (made.checkpoints / name / "deep").mkdir(parents=True)
        (made.checkpoints / name / "deep" / "part").touch()
    (made.checkpoints / "note").touch()

    def beaten(real):
        def remove(path, **how):
            real(path, **how)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

        return remove

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, beaten(getattr(os, name)))
        folders.clear_local(made)
    assert [*made.checkpoints.iterdir()] == []
    made.checkpoints.rmdir()
    folders.clear_local(made)  # nobody was here before


def test_what_an_older_attempt_left_and_cannot_be_killed_ends_this_one(attempt, monkeypatch):
    monkeypatch.setattr(life.procs, "kill_all", lambda *_given: False)
    monkeypatch.setattr(life.launcher_process, "kill_below", lambda _seconds: False)
    made = attempt()
    life.live(made)
    status = json.loads(Path(made.layout.status).read_text())
    assert (status["fault"], status["reason"]) == (
        "infrastructure",
        "processes of an older attempt could not be killed",
    )
    assert "some processes of this attempt could not be killed" in said(made)


def test_a_network_that_is_not_as_mgpu_would_have_it_is_told(attempt):
    made = attempt(env={"NCCL_DEBUG": "INFO", "NCCL_NET": "IB"})
    life._tell_network(made, life.launcher_process.environment(made.job, {}, made.layout, {}))
    assert "network: NCCL_DEBUG=INFO, as `env` has it, instead of WARN" in said(made)
    assert "network: InfiniBand, or nothing (NCCL_NET=IB)" in said(made)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"NCCL_SOCKET_IFNAME": "=ens5", "GLOO_SOCKET_IFNAME": "ens5"}, "network: nodes speak TCP through ens5"),
        ({"NCCL_SOCKET_IFNAME": "=ens5", "NCCL_NET": "IB"}, "network: ranks meet through ens5"),
        ({}, ""),  # nodes that are one machine
    ],
)
def test_the_interface_between_the_nodes_is_named(attempt, monkeypatch, given, told):
    monkeypatch.setattr(life.launcher_process, "overruled", lambda *_given: [])
    made = attempt(nodes=2, gpus=1)
    life._tell_network(made, given)
    assert (told in said(made)) if told else "network:" not in said(made)


FIGURES = {
    "rank": 0,
    "tflops": 700.0,
    "inside": {"right": True, "gb_per_s": 350},
    "between": {"right": True, "gb_per_s": None},
}
WRONG = {**FIGURES, "inside": {"right": False, "gb_per_s": 350}}


@pytest.mark.parametrize(
    ("code", "ranks", "printed", "told", "suspect"),
    [
        (0, [FIGURES], "", "1 ranks, 700 TFLOPS each at least, a sum inside a node 350 GB/s, over all", None),
        (0, [WRONG], "", "preflight: node 0 (", "a sum over its own GPUs is wrong on rank 0"),
        (0, ["odd"], "", "preflight: what was measured makes no sense", None),
        (1, None, "[rank0]: MachineError: node 0 (h) has 7 of 8 GPUs", "", "has 7 of 8 GPUs"),
        (1, None, "ValueError: odd", "exit code 1, and says nothing of this machine: ValueError: odd", None),
    ],
)  # fmt: skip
def test_what_was_measured_names_a_machine_or_ends_nothing(attempt, monkeypatch, code, ranks, printed, told, suspect):
    made, ended = attempt(gpus=1, preflight_port=1), []
    process = SimpleNamespace(poll=lambda: code, kill=ended.append)
    monkeypatch.setattr(preflight, "_has_torch", lambda *_given: True)
    monkeypatch.setattr(preflight, "LauncherProcess", lambda _launch, _fd: process)
    measuring = preflight.Measuring(made, {}, "/py")
    os.write(made.log.fd, f"{printed}\n".encode())
    if ranks:
        Path(made.layout.preflight(1)).write_text(json.dumps({"part": "between", "ranks": ranks}))
    if suspect:
        fault, machine, reason = why(measuring.over)
        assert (fault, machine, suspect in reason) == (Fault.INFRASTRUCTURE, True, True)
        assert reason.startswith("preflight: node 0")
    else:
        assert measuring.over() is True
        assert told in said(made)
    assert ended, "no rank of it stays beside the program"


STATE = "00000000:B7:00.0, 0, {}\n"
ILL = "".join(
    f"GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu})\n" + "".join(f"\t Link {link}: 26.562 GB/s\n" for link in range(links))
    for gpu, links in enumerate((18, 17, 18))
)


@pytest.mark.parametrize(
    ("gpus", "mode", "odd"),
    [(1, "Disabled", None), (1, "Enabled", "is in MIG mode"), (3, "Disabled", "GPU 1 (NVIDIA H200) has 17 active")],
)
def test_the_driver_is_asked_of_mig_and_of_links_where_there_are_several_gpus(attempt, monkeypatch, gpus, mode, odd):
    asked = []

    def answers(command, _seconds):
        asked.append(command[1])
        return ILL if command[1] == "nvlink" else STATE.format(mode) if "query-gpu" in command[1] else ""

    monkeypatch.setattr(preflight.facts, "output", answers)
    monkeypatch.setattr(preflight.kernel_log, "since", lambda _s: [])
    made = attempt(gpus=gpus, processes_per_node=gpus)
    if odd is None:
        preflight.ask(made)
    else:
        fault, suspect, reason = why(lambda: preflight.ask(made))
        assert (fault, suspect, odd in reason) == (Fault.INFRASTRUCTURE, True, True)
    assert ("nvlink" in asked) == (gpus > 1)


@pytest.mark.parametrize(("mode", "told"), [("Enabled", True), ("Disabled", False), (None, False)])
def test_a_node_that_shows_too_few_gpus_says_where_mig_is_why(monkeypatch, mode, told):
    def answers(_command, _seconds):
        if mode is None:
            raise preflight.facts.NoAnswer("there is no program nvidia-smi")
        return STATE.format(mode)

    monkeypatch.setattr(preflight.facts, "output", answers)
    lack = life._lack(Demand(8, "node 0", 0, lambda: Seen(1)))
    assert lack is not None
    assert lack.words.startswith("node 0 has 1 of 8 GPUs")
    assert ("in MIG mode" in lack.words) is told
    assert life._lack(Demand(1, "node 0", 0, lambda: Seen(1))) is None


def test_a_wrong_sum_between_the_nodes_ends_the_attempt_and_blames_no_machine(attempt, monkeypatch):
    made = attempt(gpus=1, preflight_port=1)
    monkeypatch.setattr(preflight, "_has_torch", lambda *_given: True)
    ends = SimpleNamespace(poll=lambda: 0, kill=lambda _s: True)
    monkeypatch.setattr(preflight, "LauncherProcess", lambda _launch, _fd: ends)
    measuring = preflight.Measuring(made, {}, "/py")
    Path(made.layout.preflight(1)).write_text(json.dumps({"ranks": [{**FIGURES, "between": {"right": False}}]}))
    fault, suspect, reason = why(measuring.over)
    assert (fault, suspect) == (Fault.INFRASTRUCTURE, False)
    assert "a sum over all nodes is wrong on rank 0" in reason


def test_what_cannot_be_begun_measures_nothing(attempt, monkeypatch):
    made = attempt(gpus=1, preflight_port=1)
    assert preflight.Measuring(made, {}, "/none/python").over()
    assert "nothing is measured, without PyTorch" in said(made)
    monkeypatch.setattr(preflight, "_has_torch", lambda *_given: True)
    assert preflight.Measuring(made, {}, "/none/python").over()
    assert "preflight: [Errno 2]" in said(made)


# --- while it runs, and when it has ended


def test_a_launcher_that_is_none_is_the_users(attempt):
    fault, _, reason = why(lambda: watch.Watch(attempt(), None).run(Launch(["/none/python"], {}, Path("/"))))
    assert (fault, reason.startswith("the launcher cannot be started: [Errno 2]")) == (Fault.USER, True)


@pytest.mark.parametrize(
    ("free", "files", "left", "full"),
    [(1 << 8, 100, 1, False), ((1 << 8) - 1, 100, 1, True), (1 << 20, 100, 0, True), (1 << 20, 0, 0, False)],
)
def test_a_disk_that_took_no_last_words_is_named(attempt, monkeypatch, free, files, left, full):
    """On some file systems the number of files has no bound."""
    found = SimpleNamespace(f_bavail=free, f_frsize=4096, f_files=files, f_favail=left)
    monkeypatch.setattr(folders.os, "statvfs", lambda _folder: found)
    seen = watch.Watch(attempt(), None)
    ended = seen.run(Launch(["sh", "-c", "exit 3"], dict(os.environ), Path("/")))
    assert (ended.exit_code, ended.full) == (3, full)
    assert ("; the disk is full: `disk_gib`" in seen._why_hung()) is full


@pytest.fixture
def clock(monkeypatch):
    """The watch's own; it begins at 0."""
    now = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    return now


def test_a_failed_save_is_told_once_without_secrets_and_so_is_silence_of_unheard_nodes(attempt, tmp_path, clock):
    made = attempt(nodes=2, timeouts={**TIMES, "first_step_s": 10, "stall_s": 10})
    folders.make_folders(made)
    seen = watch.Watch(made, life._uploads(made, SimpleNamespace(writers="all"), -1))
    line = {"kind": "save_failed", "step": 3, "reason": "no room for canary"}
    (tmp_path / "runs/r/metrics/rank-0.jsonl").write_text(json.dumps(line) + "\n")
    for clock[0] in (10, 20, 30, 40, 50):
        seen._pass()
    assert made.report.status.checkpoint.save_problem == "step-3 was not saved: no room for ***"
    assert said(made).count("checkpoint: step-3 was not saved: no room for ***") == 1
    assert said(made).count("but some nodes were never heard here, and may be at work") == 1


def test_an_operator_in_haste_learns_where_the_ranks_of_what_may_hang_were(attempt, monkeypatch, clock):
    made, killed = attempt(timeouts={**TIMES, "first_step_s": 100}), []
    monkeypatch.setattr(evidence, "collect", lambda *_given: Hang("rank 0 waits in all_reduce", 1))
    seen = watch.Watch(made, None)
    made.stop.ask(now=True)
    for clock[0], hang in ((40, None), (60, "rank 0 waits in all_reduce")):
        seen._act(SimpleNamespace(kill=killed.append, foreign=False), along=False)
        assert made.report.status.hang == hang, "it may hang once half of its time is over"
    assert len(killed) == 2


@pytest.mark.parametrize("in_time", [True, False])
def test_a_launcher_that_runs_as_root_by_sudo_is_told_of_and_not_waited_for(attempt, monkeypatch, in_time):
    """No signal reaches it: that once failed the agent, with its uploads, or had it try for ever. It ends in its grace,
    or not."""

    def refuse(*_given: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    made = attempt(timeouts={**TIMES, "stop_grace_s": 600 if in_time else 0.001})
    made.stop.ask()
    if in_time:
        monkeypatch.setattr(launcher_process.LauncherProcess, "terminate", lambda _launcher: os.kill(started[0], 9))
    monkeypatch.setattr(launcher_process.subprocess.Popen, "send_signal", refuse)
    monkeypatch.setattr(launcher_process.procs.signal, "pidfd_send_signal", refuse)
    alive = lambda: [each for pid in started if (each := procs.of(pid)) and each.alive]  # noqa: E731
    monkeypatch.setattr(launcher_process, "below", alive)
    started: list[int] = []
    launch = launcher_process.subprocess.Popen.__init__

    def remember(self, *given, **more) -> None:
        launch(self, *given, **more)
        started.append(self.pid)

    monkeypatch.setattr(launcher_process.subprocess.Popen, "__init__", remember)
    try:
        run = partial(watch.Watch(made, None).run, Launch(["sleep", "600"], {}, made.work))
        if in_time:
            run()
            assert "cannot be asked to save and exit: start it without sudo" in said(made)
        else:
            fault, _, reason = why(run)
            assert fault == Fault.STOPPED
            assert "this node was asked to stop; the launcher runs as another user" in reason
    finally:
        for pid in started:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, 9)
                os.waitpid(pid, 0)


def test_a_rank_that_runs_as_root_by_sudo_is_passed_over_where_the_others_are_asked(attempt, monkeypatch):
    def send(_signum: int) -> bool:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    made = attempt()
    folders.make_folders(made)
    monkeypatch.setattr(evidence, "listening", lambda _folder: {0: SimpleNamespace(send=send)})
    assert evidence.collect(made, {0: (3, 0)}).missing is None


def test_a_peers_stop_has_the_cause_that_this_node_knows(attempt):
    made, ended = attempt(), Ended(exit_code=1, said="stopped")
    assert life._explained(made, ended) == ended
    made._goes(Fault.PROVIDER, "the provider takes this machine", "terminate", 60)
    assert life._explained(made, ended).cause.fault is Fault.PROVIDER
    made.stop.ask()
    assert life._explained(made, ended).cause.fault is Fault.STOPPED


def test_an_operator_in_haste_does_not_wait_for_outputs(attempt, monkeypatch):
    made, given_up = attempt(outputs=["*.pt"]), threading.Event()
    monkeypatch.setattr(life.outputs, "keep", lambda _attempt, kept: kept.cancelled.wait(60) and given_up.set())
    made.stop.ask(now=True)
    life._keep_outputs(made, fenced=False)
    assert "outputs: 0 files, 0 bytes; there was no time for more" in said(made)
    assert given_up.wait(60)


def test_a_stale_attempt_that_ends_last_replaces_nothing_in_the_store(attempt, tmp_path):
    """Its machine was cut off and lives on. Where it knows that it is stale it stores nothing."""
    given = {"outputs": ["*.txt"], "checkpoint": {"to": f"file://{tmp_path}/store", "writers": "all"}}
    store = open_store(given["checkpoint"]["to"])
    for number, fenced in ((2, False), (1, False), (3, True)):
        made = attempt(attempt=number, **given)
        (made.work / "result.txt").write_text(f"of attempt {number}")
        life._keep_outputs(made, fenced=fenced)
        listed = json.loads(Path(made.layout.outputs_list).read_text())
        assert [each["path"] for each in listed["files"]] == ["result.txt"], "here it is kept in any case"
    kept = {stat.key: store.get(stat.key, 99).decode() for stat in store.list("")}
    assert kept == {
        "r/outputs/a001/0/result.txt": "of attempt 1",
        "r/outputs/a002/0/result.txt": "of attempt 2",
    }


def test_an_attempt_ends_as_its_worst_node_and_silence_is_no_success(attempt):
    made = attempt(nodes=3, timeouts={**TIMES, "drain_s": 60})
    failure = AttemptFailed(Fault.USER, "node 2: exit code 1")
    answers = {1: [CheckpointStoreError("away"), None, Said(None)], 2: [Said(failure)]}

    def ended(rank):
        answer = answers[rank].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert life._of_peers(made, SimpleNamespace(ended=ended)) is failure
    made.stop.ask(now=True)
    answers[1] = [None]
    assert life._of_peers(made, SimpleNamespace(ended=ended)).reason == "node 1 has not said how it ended"


def test_what_a_peer_and_a_program_have_left_is_read_with_care(attempt, tmp_path, monkeypatch):
    target = {"to": f"file://{tmp_path}/store", "writers": "all"}
    made = attempt(nodes=2, checkpoint=target)
    kept, there = AttemptStore(made, made.job.checkpoint), open_store(target["to"])
    assert kept.ended(1) is None
    there.put("r/attempts/1/ended-1.json", b'{"fault": null}')
    assert kept.ended(1).failure is None
    there.put("r/attempts/1/ended-1.json", b'{"fault": "user", "reason": "exit code 1"}')
    assert kept.ended(1).failure.reason == "node 1: exit code 1"
    there.put("r/attempts/1/ended-1.json", b'{"fault": "odd"}')
    with pytest.raises(CheckpointStoreError, match=r"ended-1\.json does not say how node 1 ended"):
        kept.ended(1)
    for text, told in ((b'{"loss": 2}', ""), (b"[" * 2000, "says nothing"), (b" " * (1 << 21), "longer than 1 MiB")):
        (tmp_path / "meta.json").write_bytes(text)
        assert kept._meta(3, tmp_path / "meta.json") == ({} if told else {"loss": 2})
        assert told in said(made)
    plan = SimpleNamespace(damaged={"a001-step-3": "a part is missing"})
    monkeypatch.setattr(checkpoint_store, "plan_prune", lambda *_given, **_named: plan)
    monkeypatch.setattr(checkpoint_store, "prune", lambda *_given, **_named: None)
    kept.prune()
    kept.prune()
    assert said(made).count("a001-step-3 is damaged in the store: a part is missing") == 1


@pytest.mark.parametrize(
    ("error", "passing", "unkeepable"),
    [(Changed, True, False), (Denied, False, False), (Expired, True, False), (Unkeepable, False, True)],
)
def test_what_fails_is_tried_again_where_that_may_help(attempt, tmp_path, monkeypatch, error, passing, unkeepable):
    def upload(*_given, **_named):
        raise error("x")

    monkeypatch.setattr(checkpoint_store, "upload_part", upload)
    made = attempt(checkpoint={"to": f"file://{tmp_path}/store", "writers": "all"})
    with pytest.raises(CheckpointStoreError) as caught:
        AttemptStore(made, made.job.checkpoint).upload(3, tmp_path)
    assert (caught.value.passing, caught.value.unkeepable) == (passing, unkeepable)


def test_an_output_that_cannot_be_linked_is_copied_and_one_that_went_is_told(attempt, tmp_path, monkeypatch):
    made = attempt(outputs=["*.pt"], checkpoint={"to": f"file://{tmp_path}/store", "writers": "all"})
    for name in ("a.pt", "b.pt", "c\\.pt"):
        (made.work / name).write_text("weights")

    def link(source, _target):
        if source.name == "b.pt":
            source.unlink()
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(outputs.os, "link", link)
    kept = outputs.Kept("the store")
    outputs.keep(made, kept)
    listed = json.loads(Path(made.layout.outputs_list).read_text())
    assert [each["path"] for each in listed["files"]] == ["a.pt", "c\\.pt"]
    assert (kept.uploaded, len(kept.problems)) == (1, 2)
    assert kept.problems[0].startswith("b.pt: ")
    assert "its name has a backslash" in kept.problems[1]
    kept.cancelled.set()
    outputs._upload(made, SimpleNamespace(put_file=lambda *_given: pytest.fail("there is no time")), kept)


def test_an_output_that_the_disk_has_no_room_for_is_stored_and_leaves_it_to_others(attempt, tmp_path, monkeypatch):
    target = {"to": f"file://{tmp_path}/store", "writers": "all"}
    made, copied = attempt(outputs=["*"], checkpoint=target), shutil.copyfile
    for name in ("large.pt", "small.txt"):
        (made.work / name).write_text(name)

    def link(_source, _target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    def copy(source, target):
        copied(source, target)
        if target.name == "large.pt":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(outputs.os, "link", link)
    monkeypatch.setattr(outputs.shutil, "copyfile", copy)
    kept = outputs.Kept("the store")
    outputs.keep(made, kept)
    assert [each.name for each in Path(made.layout.outputs).iterdir()] == ["small.txt"], "no half of one fills the disk"
    told = "outputs: 1 file, 9 bytes; 1 of them in the store; 1 more there alone; large.pt: [Errno 28] No space left"
    assert str(kept).startswith(told)
    assert {each.key.rpartition("/")[2] for each in open_store(target["to"]).list("r/outputs/")} == {
        "large.pt",
        "small.txt",
    }


def test_what_torchs_flight_recorder_has_is_asked_for_and_told(attempt):
    made, folder = attempt(processes_per_node=3), Path(attempt().layout.stacks(1))
    folder.mkdir()
    pipes = [folder / f"{FLIGHT}{rank}.pipe" for rank in range(3)]
    for pipe in pipes:
        os.mkfifo(pipe)
    hears, full = (os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in pipes[:2])  # nobody reads the third
    os.write(full, bytes(fcntl.fcntl(full, fcntl.F_GETPIPE_SZ)))
    entry = {"process_group": ("0", "pg"), "collective_seq_id": 8, "state": "started", "profiling_name": "nccl:x"}
    (folder / f"{FLIGHT}2").write_bytes(b"half a pickle")

    def sleep(_seconds):
        if not (folder / f"{FLIGHT}0").exists():
            assert os.read(hears, 9) == b"1"
            (folder / f"{FLIGHT}0").write_bytes(pickle.dumps({"entries": [entry]}))

    evidence.collect(made, {}, lambda: 0.0, sleep)
    assert said(made).splitlines() == ["[agent] rank 0, group 0: nccl:x, number 8, is started"]
    os.close(hears)
    os.close(full)


# --- between nodes


def test_nonsense_gets_no_answer_and_a_port_that_is_taken_is_told_once(attempt, monkeypatch, capfd):
    """An address that is not this machine's own, as behind a translation, listens on all."""
    told, heard = [], peers.Peers(attempt(nodes=2).job, lambda text: told.append(text))
    other = peers.Peers(attempt(nodes=2, node_rank=1).job, pytest.fail)
    other.vouch(5.0)
    with heard._server("192.0.2.1", 0) as server:
        port = server.server_address[1]

        def answer(line: bytes) -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(line)
                server.handle_request()
                return connection.makefile("rb").readline()

        assert answer(b"nonsense\n") == b""
        other.hear(answer(other.word()))
        assert heard.known.heard
        assert other.known.heard
        monkeypatch.setattr(heard, "answer", lambda _line: {}[0])
        assert answer(b"a bug\n") == b""
        naps = iter([None, None])
        monkeypatch.setattr(peers, "time", SimpleNamespace(sleep=lambda _seconds: next(naps)))
        with pytest.raises(StopIteration):
            heard._listen("127.0.0.1", port)
    assert len(told) == 1
    assert told[0].startswith(f"the other nodes' agents cannot be heard on port {port}: [Errno 98]")
    assert capfd.readouterr().err == ""
