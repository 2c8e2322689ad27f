"""How attempts end before their time: the machine goes, its lease goes, the operator is in haste. Real processes."""

from __future__ import annotations

import json
import shutil
import signal
import time
from typing import Any

import pytest
from mgpu_train.agent.machine import ports, procs

SAVE = "import os, time\nfrom saving import metric, save\n"
POLITE = SAVE + (
    "import signal, sys\n"
    "def stop(*_):\n    print('asked', flush=True)\n    save(7)\n    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\n"
    "while True:\n    time.sleep(0.1)\n    print('.', flush=True)\n"
)
CRASHED = SAVE + "save(3)\nraise SystemExit(3)\n"  # and its peer never has its part in the store
HOUR = 3600.0


def ready(node: Any) -> None:
    node.until(lambda: "ready" in node.log)


def beats(node: Any, count: int = 3) -> None:
    """Waits until the agent has written its status so many times."""
    seen = node.said["beat"]
    node.until(lambda: node.said["beat"] >= seen + count)


# --- a shell ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [["scripts/run.sh", "a b", "2"], ["-c", 'bash scripts/run.sh "a b" 2; echo never']],
    ids=["script", "line"],
)
def test_a_script_and_what_it_runs_are_asked_to_end_and_waited_for(node, command):
    """bash alone would end at once, without a word to its program."""
    node.program(POLITE.replace("save(7)", "time.sleep(1); save(7)"))
    scripts = node.run / "work" / "scripts"
    scripts.mkdir()
    (scripts / "run.sh").write_text(
        'set -eu\ncd "$(dirname "$0")/.."\necho "got $# $1 $PET_NNODES $NODE_RANK"\nexec python prog.py\n'
    )
    node.job(launcher="bash", command=command)
    node.start()
    ready(node)
    node.notice(25)
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("failed", "provider")
    assert "got 2 a b 1 0" in node.log
    assert node.log.count("asked") == 1
    assert "never" not in node.log
    assert node.commits == [7]


@pytest.mark.parametrize(
    ("line", "code"), [("echo first\nexit 3", 3), ("false\necho first", 1), ("kill -9 $BASHPID", 137)]
)
def test_a_line_that_fails_ends_the_program_with_its_code(node, line, code):
    node.job(launcher="bash", command=["-c", line], checkpoint=None)
    node.start()
    status = node.ended()
    assert (status["phase"], status["fault"], status["exit_code"]) == ("failed", "user", code)
    assert f"exit code {code}" in status["reason"]
    assert ("first" in node.log) == (code == 3)


def test_a_shells_processes_end_with_its_agent(node):
    node.program(POLITE)
    node.job(launcher="bash", command=["-c", "python prog.py; true"])
    node.start()
    ready(node)
    procs.Process(**json.loads((node.run / "agent.json").read_text())["process"]).send(signal.SIGKILL)
    node.until(lambda: "asked" in node.log)


# --- notices ----------------------------------------------------------------------------------------------------------


def test_a_save_that_fits_is_made_once_and_committed(node):
    """F20"""
    node.program(POLITE)
    node.job()
    node.start()
    ready(node)
    node.notice(25)
    node.until(lambda: node.said["notice"])
    node.notice(20, "stop")  # earlier; the save is under way, or through
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("failed", "provider")
    assert status["reason"] == "the provider takes this machine in 25 s"
    assert status["notice"]["fits"] is True
    assert node.log.count("asked") == 1
    assert node.commits == [7]
    end = node.commit_log.ended(1)
    assert (end.succeeded, end.fault, end.reason) == (False, "provider", status["reason"])


def test_a_save_that_does_not_fit_is_not_begun(node):
    """F20"""
    node.program(POLITE)
    node.job()
    node.start()
    ready(node)
    node.notice(3)
    status = node.ended()
    assert (status["fault"], status["exit_code"]) == ("provider", -signal.SIGKILL)
    assert (status["notice"]["action"], status["notice"]["fits"]) == ("terminate", False)
    assert "asked" not in node.log
    assert node.commits == []


def test_a_notice_before_the_launcher_ends_the_attempt(node):
    node.program(SAVE + "save(1)\n")
    node.job()
    node.notice(60)
    node.start()
    status = node.ended()
    assert (status["phase"], status["fault"], status["exit_code"]) == ("failed", "provider", None)
    assert "launching" not in status["phase_seconds"]
    assert node.commit_log.ended(1).fault == "provider"


def test_a_run_that_finishes_within_the_notice_is_done(node):
    node.program(
        SAVE + "import signal\nasked = []\nsignal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "print('ready', flush=True)\nwhile not asked:\n    time.sleep(0.01)\n"
        "save(9)\nmetric('end', step=9, reason='done')\n"
    )
    node.job()
    node.start()
    ready(node)
    node.notice(30)
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("done", None)
    assert status["notice"]
    assert node.commits == [9]
    assert node.commit_log.ended(1).succeeded


@pytest.mark.parametrize("how", ["sys.exit(0)", "os.kill(os.getpid(), signal.SIGTERM)"], ids=["saved", "killed"])
def test_a_program_that_the_provider_ends_before_the_agent_hears_of_it_has_not_finished(node, how):
    """Slurm sends SIGTERM to all that runs on a node."""
    notice = node.home / ".mgpu" / "notice.json"
    says = f"os.rename({str(notice.with_suffix('.new'))!r}, {str(notice)!r})"
    node.program(SAVE + f"import signal, sys\nsave(7)\n{says}\n{how}\n")
    node.job()
    node.notice(25)
    notice.rename(notice.with_suffix(".new"))
    node.start()
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("failed", "provider")
    assert node.commits == [7]


def test_a_notice_while_a_good_end_is_uploaded_changes_nothing(nodes):
    pair = nodes(2)
    for node in pair:
        node.program(SAVE + "save(1)\n")
        node.job()
    first, second = pair
    first.start()
    first.until(lambda: first.said["phase"] == "draining")
    first.notice(20)
    first.until(lambda: first.said["notice"])
    assert first.said["notice"]["fits"] is True  # nothing is left to save: nobody need be in haste
    second.start()
    assert [node.ended()["phase"] for node in pair] == ["done", "done"]
    assert first.commits == [1]


def test_after_a_notice_peers_are_waited_for_as_long_as_the_machine_is_there(nodes):
    _, node = nodes(2)  # node 0 never asks for the upload
    node.program(POLITE)
    node.job(timeouts={"peers_s": HOUR, "drain_s": HOUR})
    node.start()
    ready(node)
    node.notice(8)
    node.until(lambda: node.said["phase"] == "draining")
    assert (node.said["fault"], node.said["notice"]["fits"]) == ("provider", True)  # peers need not wait to hear it
    node.until(lambda: node.said["phase"] == "failed")
    assert time.time() > node.said["notice"]["at"] - 1


def test_nonsense_in_the_place_of_a_notice_does_not_touch_training(node):
    """F21"""
    node.program("import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\nprint('through')\n")
    node.job(checkpoint=None)
    node.start()
    path = node.home / ".mgpu" / "notice.json"
    for data in (b"{", b'{"action": "reboot", "time": "2999-01-01T00:00:00Z"}', b"{", None):
        path.write_bytes(data) if data else path.unlink()
        beats(node)
    node.notice(-60)
    beats(node)
    (node.run / "work" / "go").touch()
    status = node.ended()
    assert (status["phase"], status["notice"]) == ("done", None)
    assert node.log.count("is not believed: it is malformed") == 1
    assert node.log.count("is not believed: its action is unknown: reboot") == 1
    assert node.log.count("is not believed: its time is past") == 1


def test_ranks_that_were_stopped_along_with_a_peers_name_no_fault_while_their_part_is_wanted(nodes):
    """The peer's agent knows why; whoever heard of a fault here would not wait for the last save."""
    pair = nodes(2)
    along = SAVE + "save(3)\nmetric('end', step=3, reason='stopped')\n"
    for node in pair:
        node.program(along)
        node.job()
    first, second = pair
    second.start()
    second.until(lambda: second.said["phase"] == "draining")
    beats(second)
    assert (second.said["fault"], second.said["exit_code"]) == (None, 0)
    first.start()
    assert [node.ended()["fault"] for node in pair] == ["infrastructure"] * 2
    assert first.commits == [3]


def test_a_launcher_that_waits_for_the_launchers_of_stopped_peers_is_ended(node):
    node.program(SAVE + "save(3)\nmetric('end', step=3, reason='stopped')\ntime.sleep(120)\n")
    node.job()
    node.start()
    status = node.ended()
    assert (status["fault"], status["exit_code"]) == ("infrastructure", -signal.SIGTERM)
    assert "not by this agent" in status["reason"]
    assert node.commits == [3]


# --- the lease --------------------------------------------------------------------------------------------------------


def test_a_lease_that_cannot_be_renewed_leaves_time_for_a_last_save(node):
    """F50"""
    node.program(POLITE)
    node.job(lease_file=".mgpu/host/lease", timeouts={"lease_s": 14})
    (node.home / ".mgpu" / "host").mkdir()
    node.start()
    ready(node)
    node.until(lambda: (node.home / ".mgpu" / "host" / "lease").exists())
    shutil.rmtree(node.home / ".mgpu" / "host")
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("failed", "infrastructure")
    why = "the lease cannot be renewed (No such file or directory), and ends this machine in"
    assert status["reason"].startswith(why)
    assert status["notice"]["fits"] is True
    assert time.time() < status["notice"]["at"]
    assert node.commits == [7]


# --- haste ------------------------------------------------------------------------------------------------------------


def test_a_survivor_is_through_at_once_when_it_is_told_not_to_wait(nodes):
    node, _ = nodes(2)
    node.program(CRASHED)
    node.job(timeouts={"peers_s": HOUR, "drain_s": HOUR, "poll_s": 0.5})
    node.start()
    node.until(lambda: node.said["checkpoint"]["uploaded_step"] == 3 and node.said["phase"] == "draining")
    node.stop()
    beats(node)
    assert (node.said["phase"], node.said["fault"]) == ("draining", "user")  # a plain stop changes nothing
    node.stop("--now")
    asked = time.monotonic()
    node.until(lambda: node.said["phase"] == "failed")
    assert time.monotonic() - asked < 5  # 2 s and what a busy machine adds
    status = node.ended()
    assert (status["fault"], status["checkpoint"]["failed"]) == ("user", 1)
    assert "parts are missing" in status["checkpoint"]["problem"]
    assert node.commit_log.ended(1).fault == "user"


def test_haste_after_a_good_end_is_a_stop(nodes):
    node, _ = nodes(2)
    node.program(SAVE + "save(3)\n")
    node.job(timeouts={"peers_s": HOUR, "drain_s": HOUR})
    node.start()
    node.until(lambda: node.said["checkpoint"]["uploaded_step"] == 3 and node.said["phase"] == "draining")
    node.stop("--now")
    status = node.ended()
    assert (status["phase"], status["fault"]) == ("failed", "stopped")
    assert "did not wait for the uploads: the final checkpoint, step-3, is not safe" in status["reason"]


def test_node_1_does_not_wait_for_node_0_in_haste(nodes):
    _, node = nodes(2)
    node.program(CRASHED)
    node.job(timeouts={"peers_s": HOUR, "drain_s": HOUR})
    node.start()
    node.until(lambda: node.said["phase"] == "draining")
    node.stop("--now")
    assert node.ended()["fault"] == "user"


# --- the end in the commit log ----------------------------------------------------------------------------------------


def test_the_end_is_in_the_commit_log_without_a_secret(node):
    node.program("import os\nraise ValueError('bad \\x1b[2J token ' + os.environ['TOKEN'])\n")
    node.job(secrets=["TOKEN"])
    node.start({"env": {"TOKEN": "hush-hush"}})
    status = node.ended()
    end = node.commit_log.ended(1)
    assert (end.attempt, end.writer, end.succeeded) == (1, "writer-1", False)
    assert (end.fault, end.reason) == ("user", status["reason"])
    assert end.reason.endswith("ValueError: bad token ***")


def test_only_node_0_says_the_end(nodes):
    """Another node may be done long before it."""
    first, second = nodes(2)
    first.program(SAVE + "save(1)\nwhile not os.path.exists('go'):\n    time.sleep(0.02)\nraise SystemExit(3)\n")
    second.program(SAVE + "save(1)\n")
    for node in (first, second):
        node.job()
        node.start()
    assert second.ended()["phase"] == "done"
    (first.run / "work" / "go").touch()
    assert first.ended()["phase"] == "failed"
    assert [entry.kind for entry in first.commit_log.entries()] == ["attempt", "checkpoint", "end"]
    assert (first.commit_log.ended(1).succeeded, first.commit_log.ended(1).fault) == (False, "user")


def test_a_program_that_stopped_along_with_a_peers_has_not_succeeded(nodes):
    """F20, and nobody supervises: exit code 0 is all that node 0 sees of a program of the user's that was stopped."""
    first, second = nodes(2)
    first.program(SAVE + "while not os.path.exists('go'):\n    time.sleep(0.02)\nsave(7)\n")
    second.program(POLITE)
    for node in (first, second):
        node.job()
        node.start()
    ready(second)
    second.notice(40)
    second.until(lambda: "asked" in second.log)
    (first.run / "work" / "go").touch()  # what the ranks agreed on
    assert [node.ended()["fault"] for node in (first, second)] == [None, "provider"]
    assert first.commits == [7]
    end = first.commit_log.ended(1)
    assert (end.succeeded, end.fault) == (False, "provider")
    assert end.reason == f"node 1: {second.said['reason']}"


@pytest.mark.parametrize("hasty", [False, True])
def test_what_a_peer_does_not_say_is_no_success(nodes, hasty):
    first, second = nodes(2)
    first.program(SAVE + "save(1)\n")
    second.program("import time\ntime.sleep(600)\n")
    for node in (first, second):
        target = {"to": f"file://{node.store}", "every_steps": 1, "writers": "rank0"}
        node.job(checkpoint=target, timeouts={"drain_s": HOUR if hasty else 2})
        node.start()
    first.until(lambda: first.commits == [1])
    if hasty:
        beats(first)
        first.stop("--now")
    assert first.ended()["phase"] == "done"  # what it knows of itself: a supervisor has the others' word
    end = first.commit_log.ended(1)
    assert (end.succeeded, end.fault, end.reason) == (False, "infrastructure", "node 1 has not said how it ended")
    second.stop("--now")
    assert second.ended()["fault"] == "stopped"


def test_an_attempt_that_was_fenced_says_nothing(node):
    node.program("print('over')\n")
    node.job()
    node.commit_log.begin_attempt(2, "writer-2")
    node.start()
    assert node.ended()["fault"] == "user"
    assert [entry.kind for entry in node.commit_log.entries()] == ["attempt", "attempt"]
    assert "the end is not in the commit log: attempt 2 of run r has begun" in node.log


def test_an_end_that_cannot_be_written_changes_nothing(node):
    node.program("raise SystemExit(3)\n")
    node.job()
    shutil.rmtree(node.store)
    node.store.write_text("a file, no folder")
    node.start()
    status = node.ended()
    assert (status["fault"], status["exit_code"]) == ("user", 3)
    assert node.log.count("the end is not in the commit log: ") == 1


def test_without_a_store_there_is_no_last_word(node):
    node.program("print('over')\n")
    node.job(checkpoint=None)
    node.start()
    assert node.ended()["phase"] == "done"
    assert "commit log" not in node.log


# --- two nodes, the bundled trainer -----------------------------------------------------------------------------------


def test_a_notice_to_one_node_saves_on_all_at_one_step(nodes, tmp_path):
    """The ranks agree at a step boundary; the other node's agent needs no word of it to bring its part."""
    for number in range(12):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}").write_text("the quick brown fox " * 20)
    port = ports.free(1)[0]
    train = {
        "steps": 100_000, "global_batch": 4, "seq_len": 16, "validate_batches": 1, "validate_every": 100_000,
        "strategy": "fsdp", "threads": 1, "text": str(tmp_path / "text"), "model": {"layers": 1, "dim": 16, "heads": 2},
    }  # fmt: skip
    pair = nodes(2)
    for node in pair:
        target = {"to": f"file://{node.store}", "every_steps": 100_000, "writers": "all"}
        node.job(launcher="torchrun", master_port=port, command=None, train=train, workdir=None, checkpoint=target)
        node.start()
    first, second = pair
    second.until(lambda: second.said["step"] > 0)
    second.notice(600)  # whatever else this machine does, the save fits
    last = [node.ended() for node in pair]
    assert [status["fault"] for status in last] == ["infrastructure", "provider"], (first.log, second.log)
    assert "a peer was stopped" in last[0]["reason"]
    (step,) = first.commits
    assert [status["checkpoint"]["saved_step"] for status in last] == [step, step]
    assert last[1]["updated_at"] < last[1]["notice"]["at"]
    assert "Warning" not in first.log + second.log
