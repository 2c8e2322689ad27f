"""The commands as a user and a script meet them: what is on stdout, the exit code, and what they do not touch."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import click
import pytest
from fakes import strange_shell
from mgpu_train.agent.status.status import Phase
from mgpu_train.store import open_store
from waiting import until

from mgpu.backend import location
from mgpu.cli import cli
from mgpu.cli.common import closing
from mgpu.console import Console
from mgpu.context import Context
from mgpu.errors import AuthError, TeardownIncomplete
from mgpu.events import RunEnded, RunStateChanged
from mgpu.providers.base import NodePhase
from mgpu.providers.local.provider import LocalProvider
from mgpu.run.lifecycle import down as downs
from mgpu.run.record import record
from mgpu.run.record.folder import Folder
from mgpu.run.record.record import State
from mgpu.run.record.supervisor_lock import taken_from
from mgpu.spec.schema import schema

EVIL = b"\x1b]0;title\x07plain\n\x1b[31mred\x1b[0m \xff\xfe\r 10%\r100%\nno end"


@pytest.fixture
def running(world):
    """A run with two machines, whose supervisor was killed."""
    world.has_nodes(2)
    world.run_file.write_text(
        "name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\nnodes: 2\n"
        "command: [train.py]\ncheckpoint: none\n"
    )
    (world.folder / "train.py").write_text("pass\n")
    world.stacks["run-1"] = output = world.output(world.cloud.rent("mine-run-1", 2))
    more = {"attempt": 1, "fleet": output.model_dump(mode="json"), "price_usd_per_hour": 1.0, "writer": "token"}
    made = world.record("run-1", state=State.RUNNING, node_phases=["training", "draining"], step=7, steps=10, **more)
    Folder("run-1").run_file.write_text(world.run_file.read_text())
    for node in world.nodes:
        node.says(Phase.TRAINING)
    return made


@pytest.fixture
def supervised(running):
    """The same, with a supervisor that is alive."""
    with record.supervising("run-1") as mine:
        assert mine
        yield running


# --- status, ls -------------------------------------------------------------------------------------------------------


def test_status_json_has_what_a_script_needs_and_no_writer_token(mgpu, running):
    found = mgpu("status", "--json").json
    assert {key: found[key] for key in ("run_id", "state", "attempt", "step", "steps", "teardown", "supervised")} == {
        "run_id": "run-1", "state": "running", "attempt": 1, "step": 7, "steps": 10, "teardown": "none",
        "supervised": False,
    }  # fmt: skip
    wanted = {"exit_code", "reason", "checkpoint_id", "checkpoint_step", "price_usd_per_hour", "hard_cap_at", "live"}
    assert wanted <= set(found)
    assert "writer" not in found


def test_status_says_whether_somebody_watches_and_what_to_do_if_not(mgpu, running):
    done = mgpu("status", "run")
    assert "gone" in done.out
    assert "training, draining" in done.out
    assert "mgpu attach run-1" in done.err
    with record.supervising("run-1"):
        done = mgpu("status", "run")
    assert "watching" in done.out
    assert "mgpu stop run-1" in done.err


@pytest.mark.parametrize(
    ("state", "becomes", "next_line"),
    [
        (State.PROVISIONING, "ends with its lease, at the latest", "mgpu attach run-1"),
        (
            State.RUNNING,
            "train on by themselves; a crashed attempt ends with its lease, at the latest",
            "mgpu stop run-1",
        ),
        (State.REPAIRING, "ends with its lease, at the latest", "mgpu attach run-1"),
        (State.TEARDOWN, "may still be billed", "mgpu ls"),
    ],
)
def test_status_of_a_run_that_nobody_supervises_says_what_becomes_of_it(mgpu, running, state, becomes, next_line):
    running.state, running.hard_cap_at = state, 2e9
    record.save(running)
    done = mgpu("status")
    assert "nobody supervises it" in done.out
    assert becomes in done.out
    assert next_line in done.err
    (line,) = (line for line in done.out.splitlines() if line.strip().startswith("state"))
    assert f"{state}, as it was " in line, "a remembered state is printed with its age"


def test_status_of_a_queued_run_says_that_nothing_is_rented(mgpu, running):
    running.state = State.QUEUED
    record.save(running)
    done = mgpu("status")
    assert "none yet: nothing is rented" in done.out
    assert "mgpu attach run-1    begin with it" in done.err


def test_status_names_who_watches(mgpu, supervised):
    done = mgpu("status")
    assert f"watching: process {os.getpid()} on" in done.out
    assert "as it was" not in done.out


def test_status_prints_what_is_remembered_with_its_age(mgpu, running):
    path = Folder("run-1").record
    path.write_text(path.read_text().replace(f'"updated_at": {running.updated_at}', '"updated_at": 1000.0'))
    (line,) = (line for line in mgpu("status").out.splitlines() if line.strip().startswith("seen"))
    assert int(line.split()[1]) > 1_000_000


def test_status_live_asks_the_provider(mgpu, running, world):
    world.cloud.phases["mine-run-1-1"] = "terminated"
    assert mgpu("status", "--json").json["live"] is None
    live = mgpu("status", "--json", "--live").json["live"]
    assert [node["phase"] for node in live] == ["running", "terminated"]


def test_status_live_asks_the_nodes(mgpu, running, world):
    world.nodes[0].says(Phase.TRAINING, step=7, at_risk_since=5.0)
    world.nodes[1].says(Phase.DRAINING)
    done = mgpu("status", "--live")
    assert "running, training, step 7, the provider may take it soon" in done.out
    assert "running, draining" in done.out
    said = [node["agent"]["phase"] for node in mgpu("status", "--json", "--live").json["live"]]
    assert said == ["training", "draining"]


def test_nodes_that_do_not_answer_cost_no_more_than_the_deadline(mgpu, running, world, monkeypatch):
    monkeypatch.setattr("mgpu.run.supervision.status_probe.NODES_S", 0.3)
    hang, waited = threading.Event(), []
    world.nodes[0].read = lambda _path: str(waited.append(hang.wait(120)))
    world.nodes[1].reachable = False
    done = mgpu("status", "--live")
    assert waited == []
    hang.set()
    assert done.out.count("running, no answer over SSH in time") == 2
    assert done.code == 0


def test_a_machine_that_is_gone_is_not_waited_for(mgpu, running, world, monkeypatch):
    monkeypatch.setattr("mgpu.run.supervision.status_probe.NODES_S", 3600.0)
    world.cloud.phases["mine-run-1-1"] = NodePhase.TERMINATED
    hang, waited = threading.Event(), []
    world.nodes[1].read = lambda _path: str(waited.append(hang.wait(120)))
    assert "terminated\n" in mgpu("status", "--live").out
    assert waited == []
    hang.set()


def test_where_the_provider_cannot_be_asked_the_nodes_still_are(mgpu, running, world):
    world.cloud.refuses["describe"] = [AuthError("the credentials have expired")]
    done = mgpu("status", "--live")
    assert done.code == 3
    assert "the credentials have expired" in done.err
    assert "machine unknown, training" in done.out


def test_of_a_run_that_is_over_no_node_is_asked(mgpu, running, world):
    world.record("run-2", state=State.SUCCEEDED, teardown="kept", fleet=running.fleet, created_at=9.0)
    asked = []
    world.nodes[0].read = lambda path: asked.append(path) or b"{}"
    assert "running\n" in mgpu("status", "run-2", "--live").out
    assert asked == []


def test_ls_json_has_runs_and_what_is_billed(mgpu, running, world):
    world.record("run-0", state=State.SUCCEEDED, created_at=0.5)
    found = mgpu("ls", "--json").json
    assert [run["run_id"] for run in found["runs"]] == ["run-0", "run-1"]
    (fleet,) = found["fleets"]
    assert (fleet["name"], fleet["ids"], fleet["usd_per_hour"]) == ("mine-run-1", ["mine-run-1-0", "mine-run-1-1"], 1.0)


def test_ls_says_what_is_billed_now(mgpu, running):
    done = mgpu("ls")
    assert "7/10" in done.out
    assert "billed now: 2 nodes, $1.00 per hour" in done.out


def test_no_run_at_all_is_bad_input_with_a_hint(mgpu):
    for command in ("status", "logs", "attach", "stop", "down", "ssh"):
        done = mgpu(command)
        assert (done.code, done.raw) == (2, b"")
        assert "there is no run yet" in done.err
        assert "mgpu init" in done.err
        assert "`last`" not in done.err, "nobody has typed it"


def test_what_comes_next_without_a_run_works_where_it_is_typed(mgpu, world):
    world.run_file.unlink(missing_ok=True)
    assert "next: mgpu init\n" in mgpu("ls").err
    world.run_file.write_text("name: a\n")
    assert "next: mgpu launch\n" in mgpu("ls").err


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(running):
    """Two machines in turn had node 0; node 1 said one line."""
    folder = Folder("run-1")
    folder.log(0, "old").write_bytes(EVIL + b"\n")
    folder.log(0, "new").write_bytes(EVIL)
    folder.log(1, "other").write_bytes(b"of node 1\n")
    return running


def test_logs_of_one_node_are_byte_for_byte_what_was_received(mgpu, logged):
    assert mgpu("logs", "run-1", "--node", "0").raw == EVIL + b"\n" + EVIL
    assert mgpu("logs", "run-1", "--node", "1").raw == b"of node 1\n"


def test_logs_of_all_nodes_act_on_no_terminal_and_name_the_node(mgpu, logged):
    done = mgpu("logs")
    assert b"\x1b" not in done.raw
    assert b"\r" not in done.raw
    once = ["[0] plain", "[0] 100%", "[0] no end"]
    assert sorted(done.out.splitlines()) == sorted([*once, *once, "[1] of node 1"])


@pytest.fixture
def timed(running):
    """Two nodes that print in turn; node 0's machine was replaced."""
    folder = Folder("run-1")
    for rank, instance, log, times in (
        (0, "old", b"first\nhalf a", "6 1000.0\n12 1002.0\n"),
        (0, "new", b"anew\nlast\n", "5 1003.5\n10 1009.0\n"),
        (1, "other", b"second\nthird\n", "not a mark\n7 1001.0\n13 1004.0\n99"),
    ):
        path = folder.log(rank, instance)
        path.write_bytes(log)
        path.with_suffix(".times").write_text(times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield folder
    time.tzset()


def test_logs_of_all_nodes_are_in_the_order_of_their_times(mgpu, timed):
    lines = ["[0] first", "[1] second", "[0] half a", "[0] anew", "[1] third", "[0] last"]
    assert mgpu("logs").out.splitlines() == lines
    at = ["00:16:40", "00:16:41", "00:16:42", "00:16:43", "00:16:44", "00:16:49"]
    dated = [f"1970-01-01 {moment} {line}" for moment, line in zip(at, lines, strict=True)]
    assert mgpu("logs", "-t").out.splitlines() == dated
    assert mgpu("logs", "-t", "--node", "1").out.splitlines() == [dated[1], dated[4]]


def test_what_no_time_is_known_of_is_as_old_as_its_copy(mgpu, timed):
    path = timed.log(1, "other")
    path.write_bytes(path.read_bytes() + b"its last words\n")
    os.utime(path, (1020, 1020))
    assert mgpu("logs", "-t").out.splitlines()[-1] == "1970-01-01 00:17:00 [1] its last words"


def test_logs_as_json_are_an_object_a_line(mgpu, timed):
    lines = [json.loads(line) for line in mgpu("logs", "--json").out.splitlines()]
    assert lines[:2] == [
        {"at": 1000.0, "node_rank": 0, "text": "first"},
        {"at": 1001.0, "node_rank": 1, "text": "second"},
    ]
    assert len(lines) == 6


def test_no_log_is_said_and_is_no_error(mgpu, running):
    done = mgpu("logs", "--node", "0")
    assert (done.code, done.raw) == (0, b"")
    assert "no log" in done.err
    assert "mgpu attach run-1" in done.err, "after `launch --detach` nobody receives them"
    with record.supervising("run-1"):
        assert "mgpu attach" not in mgpu("logs").err


# --- stop, down, attach -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.STOPPED])
def test_stop_on_a_run_that_is_over_does_nothing(mgpu, world, state):
    world.record("run-1", state=state, teardown="confirmed")
    done = mgpu("stop")
    assert done.code == 0
    assert f"over already: {state}" in done.err
    assert not Folder("run-1").stop.exists()
    assert world.calls == []


def test_stop_asks_the_supervisor_and_touches_no_machine(mgpu, supervised, world):
    done = mgpu("stop", "--no-wait")
    assert done.code == 0
    assert Folder("run-1").stop.exists()
    assert world.calls == []
    assert len(world.cloud.billed) == 2


def test_stop_without_a_supervisor_takes_over_and_ends_it(mgpu, running, world):
    done = mgpu("stop")
    assert done.code == 0, done.err
    assert [node.stops for node in world.nodes] == [1, 1]
    assert world.cloud.billed == set()
    assert "error:" not in done.err, "it was asked for"
    assert "stopped" in done.out
    assert (record.load("run-1").state, record.load("run-1").teardown) == (State.STOPPED, "confirmed")


def test_stop_tells_by_its_exit_code_that_something_may_be_billed(mgpu, running, world):
    world.cloud.stuck.add("mine-run-1-1")
    done = mgpu("stop")
    assert done.code == 7
    assert "mine-run-1-1" in done.err


@pytest.mark.parametrize("as_json", [True, False])
def test_stop_waits_for_the_supervisor_and_tells_the_end(mgpu, supervised, monkeypatch, as_json):
    def pause(_seconds):
        ended = record.load("run-1")
        ended.state, ended.teardown = State.STOPPED, "confirmed"
        record.save(ended)

    monkeypatch.setattr("mgpu.cli.stop.time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    done = mgpu("stop", *(["--json"] if as_json else []))
    assert done.code == 0
    assert (done.json["state"] if as_json else done.out.splitlines()[2].split()[1]) == "stopped"


@pytest.mark.timeout(20)
def test_stop_does_not_wait_for_ever_for_a_supervisor_that_was_killed_meanwhile(mgpu, running, world):
    """I6."""
    held, killed = threading.Event(), threading.Event()

    def supervise():
        with record.supervising("run-1"):
            held.set()
            killed.wait(5)

    thread = threading.Thread(target=supervise)
    thread.start()
    assert held.wait(5)
    threading.Timer(0.5, killed.set).start()
    done = mgpu("stop")
    thread.join()
    assert done.code == 0, done.err
    assert world.cloud.billed == set()


def test_down_on_a_run_that_was_given_back_does_nothing(mgpu, world):
    world.record("run-1", state=State.SUCCEEDED, teardown="confirmed")
    done = mgpu("down")
    assert done.code == 0
    assert "nothing to do" in done.err
    assert world.calls == []


def test_down_leaves_a_supervised_run_to_its_supervisor(mgpu, supervised, world):
    done = mgpu("down")
    assert done.code == 2
    assert "mgpu stop run-1" in done.err
    assert len(world.cloud.billed) == 2


def test_down_gives_the_machines_back_and_the_run_is_over(mgpu, running, world):
    done = mgpu("down", "run-1")
    assert done.code == 0, done.err
    assert world.cloud.billed == set()
    after = record.load("run-1")
    assert after.teardown == "confirmed"
    assert after.state.final, "without machines it does not go on"
    assert mgpu("status", "--json").json["state"] != "running"


def test_down_tells_how_the_run_ended_and_again_when_machines_are_gone_at_last(running, world):
    context = Context(world.events.append, world.timeouts)
    world.cloud.stuck.add("mine-run-1-0")
    with pytest.raises(TeardownIncomplete):
        downs.down(record.load("run-1"), context)
    assert world.of(RunEnded) == []
    world.cloud.stuck.clear()
    downs.down(record.load("run-1"), context)
    assert [(each.before, each.state) for each in world.of(RunStateChanged)] == [
        ("running", "teardown"),
        ("teardown", "stopped"),
    ]
    (told,) = world.of(RunEnded)
    assert (told.state, told.teardown, told.exit_code) == ("stopped", "confirmed", 130)
    over = record.load("run-1")
    over.teardown = "asked"  # of a run whose own teardown was incomplete
    record.save(over)
    downs.down(record.load("run-1"), context)
    assert [each.teardown for each in world.of(RunEnded)] == ["confirmed", "confirmed"]


def test_down_that_is_incomplete_says_so_with_exit_code_7(mgpu, running, world):
    world.cloud.stuck.add("mine-run-1-0")
    done = mgpu("down")
    assert done.code == 7
    assert "mine-run-1-0" in done.err
    assert record.load("run-1").teardown != "confirmed"
    assert "confirmed" not in done.err


def test_attach_to_a_run_that_is_over_shows_its_result(mgpu, world):
    world.record("run-1", state=State.FAILED, exit_code=6, reason="node 0: exit code 3", teardown="confirmed")
    done = mgpu("attach")
    assert "exit code 3" in done.out
    assert world.calls == []


@pytest.mark.timeout(30)
def test_attach_takes_over_from_a_supervisor_that_is_stuck(mgpu, running, world):
    """One that is stopped (SIGSTOP) holds the lock for ever: nobody would watch the run."""
    code = "import sys, time\nfrom mgpu.run.record import record\nwith record.supervising('run-1') as token:\n"
    code += "    print(token, flush=True)\n    time.sleep(60)\n"
    stuck = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        token = stuck.stdout.readline().strip()
        stuck.send_signal(signal.SIGSTOP)
        for node in world.nodes:
            node.says(Phase.DONE)
        done = mgpu("attach", "--take-over", "--json")
        assert (done.code, done.json["state"]) == (0, "succeeded"), done.err
        assert taken_from(Folder("run-1").lock, token)
        assert world.cloud.billed == set()
    finally:
        stuck.kill()
        stuck.wait()
        stuck.stdout.close()


def test_the_help_of_attach_says_when_to_take_over(mgpu):
    assert "--take-over" in mgpu("attach", "--help").out


# --- ssh --------------------------------------------------------------------------------------------------------------


def test_ssh_writes_a_configuration_with_pinned_keys(mgpu, running, world):
    path = mgpu("ssh", "run-1", "--config").out.strip()
    assert path == str(Folder("run-1").root / "ssh_config")
    config = (Folder("run-1").root / "ssh_config").read_text()
    known = (Folder("run-1").root / "known_hosts").read_text().splitlines()
    assert "StrictHostKeyChecking yes" in config
    assert f"UserKnownHostsFile {Folder('run-1').root / 'known_hosts'}" in config
    assert known == [f"run-1-{rank} {world.nodes[rank].target.host_key}" for rank in (0, 1)]
    assert "Host run-1-1\n" in config
    assert "~" not in config, "ssh -F is started anywhere, by anybody's shell"


def test_what_the_ssh_of_another_command_reads_is_never_half_written(mgpu, running, world, monkeypatch):
    monkeypatch.setattr("os.execv", lambda *_: None)
    read = Folder("run-1").root / "ssh_config"
    read.write_text("as it was before")
    with read.open() as theirs:
        mgpu("ssh", "run-1")
        assert theirs.read() == "as it was before"
    inode = read.stat().st_ino
    mgpu("ssh", "run-1")
    assert read.stat().st_ino == inode, "it says the same"


def test_ssh_starts_the_systems_client_with_the_arguments_as_they_are(mgpu, running, world, monkeypatch):
    started = []
    monkeypatch.setattr("shutil.which", lambda _name: "/usr/bin/ssh")
    monkeypatch.setattr("os.execv", lambda program, argv: started.append([program, *argv]))
    mgpu("ssh", "--node", "1", "run-1", "--", "nvidia-smi", "-L")
    ((program, *argv),) = started
    assert program == argv[0] == "/usr/bin/ssh"
    assert argv[1:] == ["-F", str(Folder("run-1").root / "ssh_config"), "run-1-1", "nvidia-smi", "-L"]


def test_a_command_behind_dashes_is_for_the_newest_run(mgpu, running, world, monkeypatch):
    started = []
    monkeypatch.setattr("shutil.which", lambda _name: "/usr/bin/ssh")
    monkeypatch.setattr("os.execv", lambda _program, argv: started.append(argv[3:]))
    mgpu("ssh", "--", "hostname", "-f")
    mgpu("ssh", "--node", "1", "--", "hostname")
    assert started == [["run-1-0", "hostname", "-f"], ["run-1-1", "hostname"]]


def test_exec_refuses_what_it_cannot_do_before_it_starts_a_client(mgpu, running, world, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a client was started"))
    for args in (
        ["run-1"],
        ["run-1", "--stack", "dev", "--", "ls"],
        ["--node", "2", "--", "ls"],
        ["other", "--", "ls"],
    ):
        assert mgpu("exec", *args).code == 2


def test_exec_says_which_nodes_no_client_could_reach(mgpu, running, world, monkeypatch, tmp_path):
    client = tmp_path / "ssh"
    client.write_text('#!/bin/sh\ncase "$*" in *run-1-1*) echo refused >&2; exit 255;; esac; echo fine\n')
    client.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(client))
    done = mgpu("exec", "--", "hostname")
    assert (done.code, done.out) == (5, "[0] fine\n")
    assert "[1] refused" in done.err
    assert "node 1: no connection" in done.err


@pytest.mark.timeout(60)
def test_exec_comes_to_a_jump_host_by_no_more_at_once_than_sshd_takes(mgpu, running, monkeypatch, tmp_path):
    client, log, go = tmp_path / "ssh", tmp_path / "log", tmp_path / "go"
    client.write_text(
        f"#!/bin/sh\necho come >> {log}\nwhile [ ! -e {go} ]; do sleep 0.01; done\necho logged in >> {log}\n"
        'for word; do case "$word" in\n-oLocalCommand=*)\n'
        '    case "$(echo "$word" | sed s/%%//g)" in *%*) echo unknown key >&2; exit 255;; esac\n'
        '    "$SHELL" -c "$(echo "${word#-oLocalCommand=}" | sed s/%%/%/g)" || echo no shell;;\n'
        "esac; done\necho fine\n"
    )
    (tmp_path / "50%off").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "50%off"))
    client.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(client))
    monkeypatch.setenv("SHELL", "/bin/false")  # a service's user
    first = running.fleet["nodes"][0]
    jump = {name: first[name] for name in ("address", "port", "user", "host_key")}
    running.fleet["nodes"] = [{**first, "rank": rank, "id": f"i-{rank}", "via": jump} for rank in range(24)]
    record.save(running)

    def open_the_door() -> None:
        until(lambda: log.exists() and log.read_text().count("come") >= 8, 30)
        go.touch()

    door = threading.Thread(target=open_the_door)
    door.start()
    done = mgpu("exec", "--", "hostname")
    door.join()
    assert (done.code, sorted(done.out.splitlines())) == (0, sorted(f"[{rank}] fine" for rank in range(24)))
    assert max(accumulate(1 if line == "come" else -1 for line in log.read_text().splitlines())) <= 10


def test_exec_on_many_nodes_from_a_shell_that_lets_programs_open_few_files(mgpu, running, monkeypatch, tmp_path):
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec cat\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(tmp_path / "ssh"))
    first = running.fleet["nodes"][0]
    running.fleet["nodes"] = [{**first, "rank": rank, "id": f"i-{rank}"} for rank in range(24)]
    record.save(running)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (20 + len([*Path("/dev/fd").iterdir()]), hard))
    try:
        assert mgpu("exec", "--", "hostname").code == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(params=["/bin/sh", " ".join(strange_shell.PROGRAM)], ids=["sh", "strange"])
def at_home(request, monkeypatch, tmp_path):
    """An ssh that runs the command here, by a login shell; lines for that one are /bin/sh's."""
    client = tmp_path / "ssh"
    client.write_text(f'#!/bin/sh\nfor last; do :; done\nexec {request.param} -c "$last"\n')
    monkeypatch.setenv("SHELL", "/bin/sh")
    client.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _name: str(client))


@pytest.mark.parametrize("node", [(), ("--node", "1")])
def test_exec_tells_a_programs_own_255_from_no_connection(mgpu, running, at_home, node):
    done = mgpu("exec", *node, "--", "echo told >&2; exit 255 # (")
    assert done.code == 255
    assert "no connection" not in done.err


def test_exec_hands_on_words_as_they_are_and_one_as_a_line(mgpu, running, at_home, tmp_path):
    words, said = ["a\\b!", "two\nlines", "$x"], tmp_path / "said"
    assert mgpu("exec", "--node", "1", "--", "sh", "-c", 'printf "%s|" "$@" > "$0"', str(said), *words).code == 0
    assert said.read_text() == "a\\b!|two\nlines|$x|"
    assert mgpu("exec", "--node", "1", "--", f"x='a!'; echo \"$x\" > {said}").code == 0
    assert said.read_text() == "a!\n"


def test_exec_ends_when_the_reader_of_what_it_prints_has_left(mgpu, running, at_home, monkeypatch):
    monkeypatch.setattr(Console, "text", Mock(side_effect=BrokenPipeError))
    assert mgpu("exec", "--", "echo a line; exec sleep 3").code == 141


def test_ssh_to_what_is_not_there_is_bad_input(mgpu, running, world, monkeypatch):
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("ssh was started"))
    assert mgpu("ssh", "--node", "2", "run-1").code == 2
    world.record("run-1", state=State.SUCCEEDED, teardown="confirmed", fleet=running.fleet)
    done = mgpu("ssh", "run-1")
    assert done.code == 2
    assert "no machines" in done.err


# --- launch and run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run_file(world):
    """A run file that asks for a secret."""
    (world.folder / "train.py").write_text("pass\n")
    world.run_file.write_text(
        "name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [train.py]\nsecrets: [TOKEN]\n"
    )
    return world.run_file


@pytest.mark.parametrize("command", ["launch", "run"])
def test_a_missing_secret_rents_nothing_and_leaves_no_record(mgpu, run_file, world, monkeypatch, command):
    monkeypatch.delenv("TOKEN", raising=False)
    done = mgpu(command, *(["--yes"] if command == "launch" else ["--stack", "dev"]))
    assert done.code == 2
    assert "TOKEN" in done.err
    assert record.ids() == []
    assert world.calls == []


def test_a_plan_that_a_launch_would_refuse_says_so_after_the_price_and_names_no_launch(
    mgpu, run_file, world, monkeypatch
):
    monkeypatch.setattr(world.cloud, "offers", LocalProvider().offers, raising=False)
    (world.folder / ".mgpuignore").write_text("train.py\n")
    done = mgpu("plan")
    assert done.code == mgpu("plan", "--json").code == 2
    assert "per hour for all nodes" in done.err
    assert "error: command: train.py would not be sent\n" in done.err
    assert "next: " not in done.err
    assert "error: max_usd: $0.0001 pays for" in mgpu("plan", "--set", "max_usd=0.0001").err, "both are told"
    assert "error: command: train.py" in mgpu("plan", "--set", "max_usd=0.0001").err
    (world.folder / ".mgpuignore").unlink()
    run_file.write_text(run_file.read_text() + "sinks: {gitlab: {token: T}}\n")
    refused = mgpu("plan")
    assert (refused.code, mgpu("launch", "--yes").code) == (2, 2)
    assert "sinks.gitlab cannot be used" in refused.err
    assert "--code-from" in refused.err


def test_a_plan_as_json_refuses_and_warns_as_any_other(mgpu, run_file, world, monkeypatch):
    monkeypatch.setattr(world.cloud, "offers", LocalProvider().offers, raising=False)
    monkeypatch.delenv("TOKEN", raising=False)
    run_file.write_text(run_file.read_text() + "max_usd: 0.0001\n")
    plain, told = mgpu("plan"), mgpu("plan", "--json")
    assert plain.code == told.code == 2
    assert told.json["price_usd_per_hour"] > 0
    assert "error: max_usd: $0.0001 pays for" in told.err
    assert "warning: secrets: TOKEN not set" in plain.err
    assert "warning: secrets: TOKEN not set" in told.err


def test_a_run_file_that_is_not_there_rents_nothing(mgpu, world):
    done = mgpu("launch", "--yes", "nothing.yaml")
    assert done.code == 2
    assert record.ids() == []
    assert world.calls == []


def test_run_without_a_fleet_leaves_no_record(mgpu, run_file, world, monkeypatch):
    monkeypatch.setenv("TOKEN", "x")
    done = mgpu("run", "--stack", "dev")
    assert done.code == 4
    assert "pulumi up" in done.err
    assert record.ids() == []


@pytest.mark.parametrize("stack", [(), ("--stack", "dev")], ids=["none", "dev"])
def test_who_has_no_program_is_not_told_to_bring_one_up(mgpu, run_file, world, monkeypatch, stack):
    """`. .mgpu/env && pulumi up` works where `mgpu init` was."""
    monkeypatch.setenv("TOKEN", "x")
    (world.folder / "Pulumi.yaml").unlink()
    done = mgpu("run", *stack)
    assert "pulumi up" not in done.err
    assert "Use `mgpu launch`" in done.err


# --- errors as JSON ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("stop", "run-1"), ("down",)], ids="-".join)
def test_what_ends_a_run_tells_it_as_json(mgpu, running, command):
    done = mgpu(*command, "--json")
    assert (done.code, done.json["version"], done.json["run_id"]) == (0, 1, "run-1"), done.err
    assert done.json["teardown"] == "confirmed"
    again = mgpu(*command, "--json")
    assert (again.code, again.json["teardown"]) == (0, "confirmed"), "there is nothing to do any more"


def test_what_is_not_known_is_null_in_json(mgpu, world):
    world.record("run-1")
    found = mgpu("status", "--json").json
    for key in ("step", "steps", "checkpoint_step", "reason", "price_usd_per_hour", "hard_cap_at", "lease_until"):
        assert found[key] is None, key
    assert found["metrics"] == {}


def commands(group=cli, *above):
    """Every command with its options, groups resolved."""
    for name in group.list_commands(None):
        found = group.get_command(None, name)
        if isinstance(found, click.Group):
            yield from commands(found, *above, name)
        else:
            yield " ".join((*above, name)), {option for each in found.params for option in each.opts}


def test_every_command_with_a_result_has_it_as_json():
    """The others pass on what others say, or print documents of others' formats."""
    without = {name for name, options in commands() if "--json" not in options}
    local = {f"local {name}" for name in ("interrupt", "kill", "no-capacity", "lose-answer")}
    assert without == {"ssh", "exec", "policy aws", "completion", *local}


def test_spec_prints_the_keys_of_a_block_or_the_schema(mgpu):
    names = [line.split()[0] for line in mgpu("spec", "recovery").out.splitlines()[2:]]
    assert names == ["recovery", "recovery.attempts", "recovery.wait_minutes"]
    assert "data[].from" in mgpu("spec", "data").out
    assert mgpu("spec", "--json").json == schema()
    assert "Did you mean `recovery`?" in mgpu("spec", "recovry").err


def test_with_json_an_error_is_an_object_on_stdout_and_three_lines_on_stderr(mgpu, world):
    done = mgpu("status", "no-such-run", "--json")
    assert done.code == 2
    error = done.json["error"]
    assert (error["type"], error["exit_code"], error["what"]) == ("InputError", 2, "no run `no-such-run`")
    assert error["what"] in done.err
    assert mgpu("status", "no-such-run").out == ""


@pytest.mark.parametrize(
    ("args", "what", "see"),
    [
        (("status", "--wrong"), "no such option", "`mgpu status --help`"),
        (("launch", "--set", "nodes"), "--set KEY=VALUE", "`mgpu launch --help`"),
        (("checkpoints", "prune", "--keep-last", "none"), "--keep-last", "`mgpu checkpoints prune --help`"),
        (("checkpoints", "prune", "--keep-every-hours", "nan"), "nan is not a number", "prune --help`"),
        (("limits", "set", "--usd-per-month", "nan"), "nan is not a number", "`mgpu limits set --help`"),
        (("limits", "set", "--usd-per-hour", "inf"), "inf is not a number", "`mgpu limits set --help`"),
        (("rm", "--older-than-days", "nan"), "nan is not a number", "`mgpu rm --help`"),
        (("lunch",), "Did you mean `launch`?", "`mgpu --help`"),
    ],
    ids=lambda each: each if isinstance(each, str) else each[0],
)
def test_a_mistake_on_the_command_line_is_an_error_like_any_other(mgpu, args, what, see):
    done = mgpu(*args, "--json")
    error = done.json["error"]
    assert (done.code, error["exit_code"], done.json["version"]) == (2, 2, 1)
    assert what in error["what"]
    assert see in error["next_step"]
    assert done.err.startswith("error: ")
    assert mgpu(*args).raw == b""


def test_mistakes_of_a_run_file_are_objects_with_line_and_field(mgpu, world):
    world.run_file.write_text("name: a\nprovider: local\nnodes: many\nmax_hours: 1\nmax_price_usd_per_hour: 1\n")
    problems = mgpu("plan", "--json").json["error"]["problems"]
    assert {(each["line"], each["field"]) for each in problems} >= {(3, "nodes")}


def test_a_folder_that_this_user_may_not_write_is_told_and_a_bug_is_a_bug(mgpu, world, monkeypatch):
    def fails(error):
        monkeypatch.setattr("mgpu.run.fleet.inventory.survey", Mock(side_effect=error))
        return mgpu("ls", "--json")

    done = fails(PermissionError(errno.EACCES, "Permission denied", "/home/you/.local/state/mgpu"))
    assert (done.code, done.json["error"]["what"]) == (2, "/home/you/.local/state/mgpu: Permission denied")
    with pytest.raises(FileNotFoundError):
        fails(FileNotFoundError(errno.ENOENT, "No such file or directory", "x"))


def test_a_command_that_has_printed_its_result_prints_one_object_alone(mgpu, running, monkeypatch):
    failed = [(None, AuthError("the key has expired"))]
    monkeypatch.setattr("mgpu.run.lifecycle.gc.end_all", lambda _lost, _context: failed)
    done = mgpu("gc", "--yes", "--json")
    assert done.code == AuthError.exit_code
    assert [each["name"] for each in done.json["fleets"]]


def test_what_a_command_waits_for_is_on_stderr_and_its_result_stays_one_object(mgpu, world, monkeypatch):
    """The bucket is slow: it answers once the command has said so."""
    said, store = threading.Event(), open_store(f"file://{world.folder}/bucket")
    monkeypatch.setenv(location.VARIABLE, "s3://team")
    monkeypatch.setattr(location.Backend, "_store", lambda _backend, _address: store)
    monkeypatch.setattr(location, "_SILENCE_S", 0.0)
    monkeypatch.setattr(location, "_said_at", float("-inf"))
    slow, say = store.list, Console.say
    monkeypatch.setattr(type(store), "list", lambda _, prefix: said.wait(10) and slow(prefix))
    monkeypatch.setattr(Console, "say", lambda *given: (say(*given), said.set()))
    done = mgpu("queue", "ls", "--json")
    assert (done.code, done.json["queued"]) == (0, [])
    assert "the backend s3://team is still being asked for its runs" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("outputs", "store", "promised"),
    [
        ("", None, "machine until then next:"),
        ("", None, "or up to 15 min longer"),
        ("outputs: [runs/]\n", "s3://b/p", "machine until then, and outputs come home then next:"),
        ("outputs: [runs/]\n", "s3://b/p", "or up to 30 min longer"),  # it may be left while they come
        ("outputs: [runs/]\n", None, "if nobody does in time, they go with the machines (`checkpoint: none`)"),
    ],
    ids=["no outputs", "its lease", "stored", "its lease while they come", "without a store"],
)
def test_whoever_leaves_a_run_is_promised_what_can_happen(world, outputs, store, promised, capsys):
    left = world.record("run-1", store=store, state=State.RUNNING)
    text = f"name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ncommand: [t.py]\n{outputs}"
    Folder("run-1").run_file.write_text(text)
    closing._left(Console(), left)
    assert promised in " ".join(capsys.readouterr().err.split())
