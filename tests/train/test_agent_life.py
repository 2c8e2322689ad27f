"""Whole lives of agents: real processes, programs of a few lines, a store in a folder, no torch."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent.machine import ports, procs
from mgpu_train.agent.machine.ports import EPHEMERAL
from mgpu_train.store import open_store

CANARY = "canary-7f3a91"
SAVE = "import os, pathlib\nfrom saving import save\n"
WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(120)\n"


def ended(*nodes: Any) -> list[dict[str, Any]]:
    """The final statuses; every agent and everything it started has ended."""
    return [node.ended() for node in nodes]


# --- the straight line ---------------------------------------------------------------------------------------------


def test_a_program_runs_and_its_checkpoint_is_committed(node):
    node.program(SAVE + "import sys\nsave(3)\nsys.stdout.buffer.write(b'raw \\xff\\x1b[2J no newline')\n")
    node.job()
    answer = node.start()
    assert answer["already"] is False
    (status,) = ended(node)
    assert (status["phase"], status["fault"], status["exit_code"]) == ("done", None, 0)
    assert status["agent_pid"] == answer["pid"]
    assert status["checkpoint"]["committed_step"] == 3
    assert status["checkpoint"]["committed_id"] == "a001-step-3"
    assert node.commits == [3]
    assert b"raw \xff\x1b[2J no newline" in (node.run / "log").read_bytes()
    assert int((node.home / ".mgpu" / "lease").read_text()) > time.clock_gettime(time.CLOCK_BOOTTIME) + 800
    assert {"preparing", "launching", "draining"} <= set(status["phase_seconds"])
    assert node.status() == {**status, "alive": False}
    # a second start of the same attempt starts nothing
    assert node.start() == {"pid": answer["pid"], "already": True}
    assert node.commits == [3]


def test_the_environment_that_a_program_gets(node):
    node.program("import json, os, sys\nprint('ENV', json.dumps([dict(os.environ), sys.argv, os.getcwd()]))\n")
    node.job(checkpoint=None, command=["prog.py", "$(id)", "a b"], env={"A": "1"}, secrets=["TOKEN"])
    node.start({"env": {"TOKEN": CANARY}, "store": {"AWS_SECRET_ACCESS_KEY": f"store-{CANARY}"}})
    (status,) = ended(node)
    assert status["phase"] == "done"
    line = next(line for line in node.log.splitlines() if line.startswith("ENV "))
    environment, argv, folder = json.loads(line.removeprefix("ENV "))
    assert (environment["A"], environment["TOKEN"]) == ("1", CANARY)
    assert not [name for name in environment if name.startswith("AWS_")]
    assert json.loads(Path(environment["MGPU_JOB"]).read_text())["run_id"] == "r"
    assert environment["MGPU_METRICS_DIR"] == str(node.run / "metrics")
    assert "MGPU_RESUME_DIR" not in environment
    assert (argv, folder) == (["prog.py", "$(id)", "a b"], str(node.run / "work"))


def test_what_the_program_says_of_its_saves_is_in_the_status_without_secrets(node):
    node.program(
        "import os, time\nfrom saving import metric, save\n"
        f"metric('save_failed', step=1, reason='{'x' * 100} ' + os.environ['TOKEN'])\n"
        "save(2)\nmetric('checkpoint', step=2, stall_s=0.02, save_s=0.5)\nmetric('save_skipped', step=3)\n"
        "time.sleep(1)\nsave(4)\n"
    )
    node.job(secrets=["TOKEN"])
    node.start({"env": {"TOKEN": CANARY * 20}})
    (status,) = ended(node)
    said = status["checkpoint"]
    assert status["phase"] == "done"
    assert said["committed_step"] == 4
    assert [said[f"save_{name}"] for name in ("s", "failed", "skipped")] == [0.5, 1, 1]
    assert said["stall_s"] == 0.02
    assert said["save_problem"].startswith("step-1 was not saved: xxx")
    assert node.log.count("[agent] checkpoint: step-1 was not saved: xxx") == 1
    assert CANARY not in json.dumps(status) + node.log


def test_a_program_gets_its_signals_as_from_a_shell(node):
    node.program("import signal\nprint(signal.getsignal(signal.SIGINT))\n")
    node.job(checkpoint=None)
    node.start()
    ended(node)
    assert "default_int_handler" in node.log


def test_a_secret_is_in_no_file_and_in_no_command_line(node):
    node.program("import os, time\nopen('got', 'w').write(str(len(os.environ['TOKEN'])))\n" + WAIT)
    node.job(checkpoint=None, secrets=["TOKEN"])
    node.start({"env": {"TOKEN": CANARY}, "store": {"AWS_SESSION_TOKEN": CANARY}})
    node.until(lambda: (node.run / "work" / "got").exists() and "ready" in node.log)
    assert (node.run / "work" / "got").read_text() == str(len(CANARY))
    agent = json.loads((node.run / "agent.json").read_text())["process"]["pid"]
    os.kill(agent, signal.SIGSTOP)  # what it renames now would be missed
    everywhere = [path for path in node.home.rglob("*") if path.is_file()]
    assert everywhere
    assert not [path for path in everywhere if CANARY.encode() in path.read_bytes()]
    os.kill(agent, signal.SIGCONT)
    for pid in [agent, *(process.pid for process in node.processes)]:
        assert CANARY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert CANARY.encode() not in Path(f"/proc/{agent}/environ").read_bytes()
    node.call("stop", "--run", "r", "--now")
    ended(node)


def test_the_reason_of_a_failure_hides_secrets(node):
    node.program("import os\nraise ValueError('bad token ' + os.environ['TOKEN'])\n")
    node.job(checkpoint=None, secrets=["TOKEN"])
    node.start({"env": {"TOKEN": CANARY}})
    (status,) = ended(node)
    assert (status["fault"], status["exit_code"]) == ("user", 1)
    assert status["reason"] == "the program ended with exit code 1: ValueError: bad token ***"


def test_metrics_become_status(node):
    node.program(
        "import json, os\n"
        "with open(os.environ['MGPU_METRICS_DIR'] + '/rank-0.jsonl', 'a') as f:\n"
        "    for line in ({'kind': 'step', 'step': 4, 'steps': 9, 'loss': 2.5, 'tokens_per_s': 10},"
        " {'kind': 'validation', 'step': 4, 'loss': 3.5}): print(json.dumps(line), file=f)\n"
    )
    node.job(checkpoint=None)
    node.start()
    (status,) = ended(node)
    assert (status["step"], status["steps"]) == (4, 9)
    said = {"loss": 2.5, "tokens_per_s": 10, "validation_loss": 3.5}
    assert status["first_metrics"] == {"validation_loss": 3.5}
    assert said.items() <= status["metrics"].items()
    assert status["progress_at"]


# --- one agent, one attempt ----------------------------------------------------------------------------------------


def test_two_starts_at_once_make_one_agent(node):
    node.program("open('starts', 'a').write('x')\n" + WAIT)
    node.job(checkpoint=None)
    starters = [node.popen("start", "--job", "runs/r/job.json") for _ in range(2)]
    answers = [json.loads(starter.communicate(b"{}", timeout=60)[0]) for starter in starters]
    assert sorted(answer["already"] for answer in answers) == [False, True]
    assert len({answer["pid"] for answer in answers}) == 1
    node.until(lambda: "ready" in node.log)
    node.job(checkpoint=None, attempt=2)
    refused = node.start(code=1)["error"]
    assert "the agent of attempt 1" in refused
    assert refused.count("\n") == 1
    node.call("stop", "--run", "r", "--now")
    ended(node)
    assert (node.run / "work" / "starts").read_text() == "x"


def test_a_newer_attempt_follows_and_an_older_one_does_not(node):
    node.program(
        "import os\nprint('attempt', os.environ['MGPU_ATTEMPT'], os.listdir(os.environ['MGPU_CHECKPOINT_DIR']))\n"
    )
    (node.run / "checkpoints" / "step-1").mkdir(parents=True)
    (node.run / "checkpoints" / ".tmp-step-2").mkdir()
    node.job(checkpoint=None, attempt=2)
    node.start()
    ended(node)
    assert "attempt 2 []" in node.log  # what older attempts left has gone
    node.job(checkpoint=None)
    assert "attempt 1 is over" in node.start(code=1)["error"]


def test_an_agent_that_was_killed_leaves_no_program_and_is_not_started_again(node):
    node.program(WAIT)
    node.job(checkpoint=None)
    pid = node.start()["pid"]
    node.until(lambda: "ready" in node.log)
    os.kill(pid, signal.SIGKILL)
    node.until(lambda: node.processes == [])
    assert node.status()["alive"] is False
    assert node.start() == {"pid": pid, "already": True}
    assert (node.said["phase"], node.said["fault"]) == ("failed", "infrastructure")
    assert "the agent died" in node.said["reason"]


def test_a_new_attempt_ends_what_an_older_one_left(node):
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(120)"],
        env={**os.environ, "MGPU_CHECKPOINT_DIR": str(node.run / "checkpoints")},
    )
    try:
        node.program("print('hello')\n")
        node.job(checkpoint=None)
        node.start()
        ended(node)
        assert stray.wait(10) == -signal.SIGKILL
    finally:
        stray.kill()
        stray.wait()


# --- stopping and failing ------------------------------------------------------------------------------------------

POLITE = SAVE + (
    "import signal, sys, time\n"
    "def stop(*_):\n    save(7)\n    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(120)\n"
)


def test_a_stop_lets_the_program_save_and_uploads(node):
    node.program(POLITE)
    node.job()
    node.start()
    node.until(lambda: "ready" in node.log)
    assert node.call("stop", "--run", "r") == {"asked": True}
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "stopped")
    assert "[agent] attempt 1: stopped: this node was asked to stop\n" in node.log
    assert "failed" not in node.log
    assert node.commits == [7]
    assert node.call("stop", "--run", "r") == {"asked": False}


def test_ranks_that_a_stopped_peer_took_along_were_stopped(node):
    end = '{"kind": "end", "step": 3, "reason": "stopped"}'
    node.program(
        SAVE + "import signal, time\n"
        f"with open(os.environ['MGPU_METRICS_DIR'] + '/rank-0.jsonl', 'a') as file: print('{end}', file=file)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\nsave(3)\nprint('ready', flush=True)\n"
        "while not os.path.exists('go'):\n    time.sleep(0.01)\n"
    )
    node.job(timeouts={"poll_s": 2})  # most likely the launcher ends before the agent looks again
    node.start()
    node.until(lambda: "ready" in node.log)
    node.call("stop", "--run", "r")
    (node.run / "work" / "go").touch()
    (status,) = ended(node)
    assert (status["phase"], status["fault"], status["exit_code"]) == ("failed", "stopped", 0)
    assert node.commits == [3]


def test_a_node_whose_peer_is_gone_does_not_drain_for_long(nodes):
    end = '{"kind": "end", "step": 3, "reason": "stopped"}'
    _, node = nodes(2)  # node 0 asks for no upload
    node.program(
        SAVE + "save(3)\n"
        f"with open(os.environ['MGPU_METRICS_DIR'] + '/rank-0.jsonl', 'a') as file: print('{end}', file=file)\n"
    )
    node.job(timeouts={"peers_s": 0.5, "drain_s": 3600})
    node.start()
    node.until(lambda: node.said["phase"] == "failed")
    assert (node.said["fault"], node.said["exit_code"]) == ("infrastructure", 0)
    assert "not by this agent" in node.said["reason"]


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(node):
    node.program("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT)
    node.job(timeouts={"stop_grace_s": 0.3})
    node.start()
    node.until(lambda: "ready" in node.log)
    node.call("stop", "--run", "r")
    (status,) = ended(node)
    assert (status["fault"], status["exit_code"]) == ("stopped", -signal.SIGKILL)


SLOW = """
import signal, sys, time
from saving import metric, save
def stop(*_):
    time.sleep(2)
    save(2)
    metric("end", step=2, reason="stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
save(1)
metric("checkpoint", step=1, stall_s=0.0, save_s={save_s})
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize(("save_s", "commits"), [(60, [2, 1]), (0, [1])])
def test_a_stop_waits_for_as_long_as_the_last_save_took(node, save_s, commits):
    node.program(SLOW.format(save_s=save_s))
    node.job(timeouts={"stop_grace_s": 0.3})
    node.start()
    node.until(lambda: "ready" in node.log and node.said["checkpoint"]["save_s"] is not None)
    node.until(lambda: node.commits == [1])
    node.call("stop", "--run", "r")
    (status,) = ended(node)
    assert status["fault"] == "stopped"
    assert node.commits == commits


def test_before_a_machine_goes_a_save_has_as_long_as_the_last_one_took(node):
    node.program(SLOW.format(save_s=20))
    node.job(timeouts={"stop_grace_s": 0.3})
    node.start()
    node.until(lambda: "ready" in node.log and node.said["checkpoint"]["save_s"] is not None)
    node.until(lambda: node.commits == [1])
    node.notice(120)
    (status,) = ended(node)
    assert (status["fault"], status["notice"]["fits"]) == ("provider", True)
    assert node.commits == [2, 1]


def test_a_stop_without_grace_does_not_wait_for_the_program(node):
    node.program(POLITE)
    node.job()
    node.start()
    node.until(lambda: "ready" in node.log)
    node.call("stop", "--run", "r", "--now")
    (status,) = ended(node)
    assert (status["fault"], status["exit_code"]) == ("stopped", -signal.SIGKILL)
    assert node.commits == []


def test_a_killed_launcher_leaves_no_survivors(node):
    # as torchrun does: the rank is in a session of its own and would outlive its launcher
    node.program(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], start_new_session=True)\n" + WAIT
    )
    node.job(checkpoint=None)
    pid = node.start()["pid"]
    node.until(lambda: "ready" in node.log and len(node.processes) == 2)
    launcher = next(
        process
        for process in procs.descendants(pid)
        if Path(f"/proc/{process.pid}/stat").read_text().split(") ")[1].split()[1] == str(pid)
    )
    launcher.send(signal.SIGKILL)
    (status,) = ended(node)  # asserts that nothing is left
    assert (status["phase"], status["fault"]) == ("failed", "user")  # out of memory, most often
    assert "SIGKILL" in status["reason"]


def test_silence_is_a_stall(node):
    node.program("import time\ntime.sleep(120)\n")
    node.job(timeouts={"first_step_s": 0.5})
    node.start()
    (status,) = ended(node)
    assert (status["fault"], "timeouts.first_step_minutes" in status["reason"]) == ("user", True)


def test_a_program_that_stops_moving_is_a_stall(node):
    node.program(WAIT)
    node.job(checkpoint=None, timeouts={"stall_s": 1.5})
    node.start()
    node.until(lambda: node.said["phase"] == "training")
    (status,) = ended(node)
    assert (status["fault"], "timeouts.training_minutes" in status["reason"]) == ("user", True)


def test_success_without_a_checkpoint_is_none(node):
    node.program("print('forgot to save')\n")
    node.job()
    node.start()
    (status,) = ended(node)
    assert (status["fault"], "MGPU_CHECKPOINT_DIR" in status["reason"]) == ("user", True)


def test_a_final_checkpoint_that_cannot_be_stored_is_no_success(node):
    node.program(SAVE + "save(1)\n")
    node.job(timeouts={"drain_s": 1})
    shutil.rmtree(node.store)
    node.store.write_text("a file, no folder")
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "infrastructure")
    assert "step-1, is not safe" in status["reason"]


@pytest.mark.parametrize(
    ("left", "why"),
    [("(d / 'last').symlink_to('model')", "it is no regular file"), ("", "a001-step-4 has no file")],
    ids=["a-link", "nothing"],
)
def test_a_final_checkpoint_that_nobody_could_keep_is_the_programs_to_mend(node, left, why):
    """Another attempt would leave the same: it is not made."""
    node.program(SAVE + f"save(3)\nd = pathlib.Path(os.environ['MGPU_CHECKPOINT_DIR'], 'step-4')\nd.mkdir()\n{left}\n")
    node.job()
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "user")
    assert "the final checkpoint, step-4, is not safe: " in status["reason"]
    assert why in status["reason"]


def test_a_newer_attempt_elsewhere_ends_this_one(node):
    node.program(SAVE + "save(1)\n" + WAIT)
    node.job()
    node.commit_log.begin_attempt(2, "writer-2")
    node.start()
    (status,) = ended(node)
    assert (status["fault"], status["checkpoint"]["committed_step"]) == ("infrastructure", -1)
    assert "attempt 2" in status["reason"]
    assert node.commits == []


# --- more than one node --------------------------------------------------------------------------------------------


def test_two_nodes_commit_the_same_checkpoints(nodes):
    pair = nodes(2)
    for node in pair:
        node.program(SAVE + "import time\nfor step in (1, 2, 3):\n    save(step)\n    time.sleep(0.2)\n")
        node.job()
    for node in pair:
        node.start()
    first, second = ended(*pair)
    assert (first["phase"], second["phase"]) == ("done", "done")
    assert first["checkpoint"]["committed_step"] == second["checkpoint"]["uploaded_step"] == 3
    log = pair[0].commit_log
    assert sorted(file.path for file in log.manifest(log.checkpoints()[0]).files) == ["node-0.bin", "node-1.bin"]


def test_with_one_writer_the_other_nodes_upload_nothing(nodes):
    pair = nodes(2)
    for node in pair:
        node.program(SAVE + "save(1)\nsave(2)\nsave(3)\n")
        node.job(checkpoint={"to": f"file://{node.store}", "every_steps": 1, "writers": "rank0"})
        node.start()
    first, second = ended(*pair)
    assert (first["phase"], second["phase"]) == ("done", "done")
    assert (first["checkpoint"]["committed_step"], second["checkpoint"]["uploaded_step"]) == (3, -1)
    assert sorted(path.name for path in (pair[1].run / "checkpoints").iterdir()) == ["step-2", "step-3"]


# --- resume, requirements, data ------------------------------------------------------------------------------------


def committed(node: Any) -> dict[str, Any]:
    """Runs attempt 1 to a committed step 3; what attempt 2 resumes from."""
    node.program(SAVE + "save(3)\n")
    node.job()
    node.start()
    ended(node)
    entry = node.commit_log.checkpoints()[0]
    return {"checkpoint_id": entry.checkpoint_id, "seq": entry.seq}


RESUMED = SAVE + (
    "folder = pathlib.Path(os.environ['MGPU_RESUME_DIR'])\n"
    "print('resumed', sorted((p.name, p.stat().st_size) for p in folder.iterdir()))\nsave(4)\n"
)


def test_an_attempt_resumes_from_the_store(node):
    resume = committed(node)
    for path in (node.run / "checkpoints").glob("step-*/*"):
        path.write_bytes(b"damaged on this disk")  # a local copy that does not verify is not taken
    node.program(RESUMED)
    node.job(attempt=2, writer="writer-2", resume=resume)
    node.start()
    (status,) = ended(node)
    assert status["phase"] == "done", status["reason"]
    assert "resumed [('node-0.bin', 700)]" in node.log
    assert "resuming" in status["phase_seconds"]
    assert node.commits == [4, 3]


def test_a_program_that_begins_anew_commits_nothing(node):
    resume = committed(node)
    node.program(SAVE + "save(1)\n" + WAIT)
    node.job(attempt=2, writer="writer-2", resume=resume)
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "user")
    assert "load MGPU_RESUME_DIR" in status["reason"]
    assert node.commits == [3]


def test_a_damaged_checkpoint_is_refused_before_the_launcher(node):
    resume = committed(node)
    for path in (node.run / "checkpoints").glob("step-*/*"):
        path.write_bytes(b"damaged on this disk")
    (stored,) = node.store.rglob("*.pack-0")
    stored.write_bytes(b"X" + stored.read_bytes()[1:])
    node.program("print('started')\n")
    node.job(attempt=2, writer="writer-2", resume=resume)
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "infrastructure")
    assert status["reason"].startswith("resume:")
    assert status["damaged"] == resume["checkpoint_id"]
    assert "started" not in node.log


def test_a_checkpoint_that_is_not_in_the_commit_log_is_refused(node):
    resume = committed(node)
    node.job(attempt=2, writer="writer-2", resume={**resume, "seq": 77})
    node.start()
    (status,) = ended(node)
    assert status["reason"].startswith("resume:")


def wheel(folder: Path, name: str) -> str:
    """A wheel of one module, made by hand: building one needs a network."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": "VALUE = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        for path, text in files.items()
    }
    record = "".join(f"{path},sha256={digests[path].decode()},{len(text)}\n" for path, text in files.items())
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    (folder / f"{name}-1.0-py3-none-any.whl").write_bytes(data.getvalue())
    return f"./{name}-1.0-py3-none-any.whl"


def test_requirements_are_installed_beside_what_the_node_has(node):
    line = wheel(node.run / "work", "mgpu_tiny")
    (node.run / "work" / "req.txt").write_text(f"--no-index\n{line}\npydantic>=2\n")
    node.program("import mgpu_tiny, pydantic, mgpu_train, sys\nprint('got', mgpu_tiny.VALUE, sys.prefix)\n")
    node.job(checkpoint=None, requirements="req.txt")
    node.start()
    (status,) = ended(node)
    assert status["phase"] == "done", node.log
    assert f"got 42 {node.home / '.mgpu' / 'env'}" in node.log
    node.job(checkpoint=None, requirements="req.txt", attempt=2)
    node.start()
    ended(node)
    assert "req.txt: already installed" in node.log


def test_the_requirement_that_cannot_be_installed_is_named(node):
    (node.run / "work" / "req.txt").write_text("--no-index\npydantic>=2\nno-such-package-of-mgpu==9.9\n")
    node.program("print('started')\n")
    node.job(checkpoint=None, requirements="req.txt")
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "user")
    assert "req.txt: `no-such-package-of-mgpu==9.9` cannot be installed" in status["reason"]
    assert "started" not in node.log
    assert "[agent] pip: ERROR" in node.log


@pytest.mark.parametrize("name", ["../../../etc/passwd", "absent.txt"])
def test_requirements_that_cannot_be_read_are_the_users_fault(node, name):
    node.program("print('started')\n")
    node.job(checkpoint=None, requirements=name)
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "user")


def test_data_is_there_before_the_program(node, tmp_path):
    source = open_store(f"file://{tmp_path / 'data'}")
    source.put("a/b.txt", b"hello")
    source.put("c.txt", b"")
    node.program("print('data', open('in/a/b.txt').read(), open('in/c.txt').read() == '')\n")
    node.job(checkpoint=None, data=[{"from": f"file://{tmp_path / 'data'}", "to": "in"}])
    node.start()
    (status,) = ended(node)
    assert status["phase"] == "done", status["reason"]
    assert "data hello True" in node.log


@pytest.mark.parametrize(("source", "to"), [("data", "../out"), ("nothing", "in")])
def test_data_that_cannot_be_had_is_the_users_fault(node, tmp_path, source, to):
    open_store(f"file://{tmp_path / 'data'}").put("x", b"1")
    node.program("print('started')\n")
    node.job(checkpoint=None, data=[{"from": f"file://{tmp_path / source}", "to": to}])
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"]) == ("failed", "user")
    assert status["reason"].startswith("data:")


# --- the command line ----------------------------------------------------------------------------------------------


def test_bad_input_is_one_line_and_exit_code_2(node):
    node.job()
    assert "version" in node.call("start", "--job", "runs/r/job.json", stdin=b'{"version": 3}', code=2)["error"]
    wrong = node.call("start", "--job", "runs/r/job.json", stdin={"env": {"A": [CANARY]}}, code=2)["error"]
    assert CANARY not in wrong
    assert "env.A" in wrong
    assert wrong.count("\n") == 1
    (node.home / "other.json").write_text((node.run / "job.json").read_text())
    assert "is not the job file" in node.call("start", "--job", "other.json", code=2)["error"]
    assert "does not exist" in node.call("start", "--job", "absent.json", code=2)["error"]
    assert "is not a run id" in node.call("stop", "--run", "../../etc", code=2)["error"]
    assert "no agent was started" in node.call("status", "--run", "r", code=1)["error"]
    node.job(secrets=["TOKEN"])
    assert "no value came for the secrets TOKEN" in node.start(code=1)["error"]


def test_free_ports_are_all_different_can_be_bound_and_no_connection_of_others_takes_one(node):
    ports = node.call("free-ports", "16")["ports"]
    assert len(set(ports)) == 16
    first, last = map(int, EPHEMERAL.read_text().split())
    assert not [port for port in ports if first <= port <= last]
    with socket.socket() as probe:
        probe.bind(("", ports[0]))
        assert probe.getsockname()[1] == ports[0]


# --- torchrun ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    return ports.free(1)[0]


def test_torchrun_on_two_nodes_of_one_machine(nodes):
    port = free_port()
    pair = nodes(2)
    for node in pair:
        node.program(
            SAVE + "import torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "total = torch.tensor([float(dist.get_rank() + 1)])\n"
            "dist.all_reduce(total)\n"
            "print(f'total {total.item()} {dist.get_rank()}', flush=True)\n"
            "save(1)\n"
            "dist.barrier()\n"
            "dist.destroy_process_group()\n"
        )
        node.job(launcher="torchrun", master_port=port)
        node.start()
    first, second = ended(*pair)
    assert (first["phase"], second["phase"]) == ("done", "done"), (pair[0].log, pair[1].log)
    assert "total 3.0 0" in pair[0].log
    assert "total 3.0 1" in pair[1].log
    assert pair[0].commits == [1]


def test_the_rank_that_failed_first_is_named_with_its_own_exit_code(node):
    node.program(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('no such file: x')\ntime.sleep(60)\n"
    )
    node.job(launcher="torchrun", processes_per_node=2, master_port=free_port(), checkpoint=None)
    node.start()
    (status,) = ended(node)
    assert (status["phase"], status["fault"], status["exit_code"]) == ("failed", "user", 1)
    assert status["reason"] == "rank 1 ended with exit code 1: no such file: x"
