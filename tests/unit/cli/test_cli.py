"""The command line: quick to start, clear about mistakes, exit codes of DESIGN section 9."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mgpu import paths
from mgpu.cli import COMMANDS
from mgpu.run.record.record import State

HEAVY = {"torch", "pulumi", "boto3", "paramiko", "docker", "asyncssh", "grpc"}
PROBE = """
import json, sys
from mgpu.cli import main
try:
    main({args!r})
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted(set(sys.modules) & {heavy!r})]))
"""


def probe(args, cwd):
    code = PROBE.format(args=args, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done


@pytest.fixture
def run_file(tmp_path, xdg):
    path = tmp_path / "mgpu.yaml"
    path.write_text("name: a\nprovider: local\nmax_hours: 1\nmax_price_usd_per_hour: 1\ntrain: {steps: 2}\n")
    return path


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["plan"],
        ["offers"],
        ["ls"],
        ["spec"],
        ["launch", "--help"],
        ["checkpoints", "--help"],
    ],
)
def test_nothing_heavy_is_imported(args, run_file, tmp_path):
    (code, loaded), _ = probe(args, tmp_path)
    assert code == 0
    assert loaded == []


def test_status_imports_nothing_heavy(run_file, tmp_path):
    (code, loaded), done = probe(["status"], tmp_path)
    assert code == 2
    assert "no run" in done.stderr
    assert loaded == []


@pytest.mark.parametrize("args", [["status"], ["status", "--json"], ["ls"], ["logs"]])
def test_a_remembered_run_is_shown_without_anything_heavy(args, world, tmp_path):
    world.record("run-1", fleet=None, state=State.RUNNING, step=3, steps=9)
    (code, loaded), _ = probe(args, tmp_path)
    assert (code, loaded) == (0, [])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_listed_is_there_and_has_help(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mgpu", command, "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0
    assert "Usage: mgpu" in done.stdout


def mgpu(args, cwd, stdin=subprocess.DEVNULL):
    return subprocess.run([sys.executable, "-m", "mgpu", *args], capture_output=True, text=True, cwd=cwd, stdin=stdin)


def test_a_run_file_is_utf_8_whatever_locale_somebody_has(run_file, tmp_path, monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)  # ASCII: a stand-in for Latin-1, which a machine may lack
    text = run_file.read_text(encoding="utf-8") + "# Größe → 2\n"
    run_file.write_text(text, encoding="utf-8")
    done = mgpu(["submit", "--yes"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.read_text(encoding="utf-8") for path in paths.state_dir().rglob("runs/*/mgpu.yaml")] == [text]
    done = mgpu(["ls"], tmp_path)
    assert (done.returncode, "queued" in done.stdout.lower()) == (0, True), done.stderr


def test_a_typing_error_gets_the_nearest_command(tmp_path):
    done = mgpu(["lanch"], tmp_path)
    assert done.returncode == 2
    assert "Did you mean `launch`?" in done.stderr


@pytest.mark.parametrize("args", [["spec"], ["ls", "--json"], ["offers", "--json"]])
def test_whoever_stops_reading_ends_a_command_without_a_word(args, run_file, tmp_path):
    """As SIGPIPE ends a program: `mgpu spec | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mgpu", *args], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["spec"], ["ls", "--json"]])
def test_a_disk_that_is_full_is_told_without_a_traceback(args, unbuffered, run_file, tmp_path, monkeypatch):
    """Standard output is full when it is written to, or, if it is buffered, when the command is over."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-m", "mgpu", *args], stdout=full, stderr=subprocess.PIPE, cwd=tmp_path)
    said = done.stderr.decode()  # before it, where it takes a while, what is asked meanwhile
    error, *rest = said[said.index("error: ") :].splitlines()
    assert (done.returncode, len(rest)) == (2, 2), said
    assert "No space left on device" in error


SHORT = """
import threading
from mgpu.cli import main

def full(_thread):
    raise RuntimeError("can't start new thread")

threading.Thread.start = full
main(["ls"])
"""


def test_a_command_that_no_thread_is_left_for_is_told_without_a_traceback(tmp_path, xdg):
    """It asks every provider, side by side, what there is."""
    done = subprocess.run([sys.executable, "-c", SHORT], capture_output=True, text=True, cwd=tmp_path)
    error, *rest = done.stderr.splitlines()
    assert (done.returncode, len(rest)) == (2, 2), done.stderr
    assert "this machine has not enough threads" in error


BILLED = """
import click
from mgpu.cli import cli, main
from mgpu.cli.common import closing
from mgpu.console import Console
from mgpu.errors import TeardownIncomplete
from mgpu.run.lifecycle.outcome import Outcome
from mgpu.run.record.record import Record

text = dict.fromkeys(("name", "project", "project_base", "run_file", "stack", "fleet_name"), "a")
record = Record(run_id="a-1", own_stack=True, provider="local", nodes=2, teardown="asked", **text)
outcome = Outcome(record, TeardownIncomplete("2 machines may still be billed"))
cli.get_command = lambda *_: click.Command("down", callback=lambda: closing.finish(Console(), outcome))
main(["down"])
"""


@pytest.mark.parametrize(("shell", "encoding"), [("<&- >&-", ""), ("| :", ""), ("", "latin-1")])
def test_what_may_be_billed_is_told_wherever_the_closing_table_goes(tmp_path, xdg, monkeypatch, shell, encoding):
    """Standard output is closed, nobody reads it, or its encoding lacks the table's lines."""
    if encoding:
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
    line = f'set -o pipefail; "$0" -c "$1" {shell}'
    done = subprocess.run(["bash", "-c", line, sys.executable, BILLED], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stderr.startswith("error: 2 machines may still be billed\n")
    assert "Traceback" not in done.stderr


def test_mistakes_in_the_run_file_are_shown_at_once_with_exit_code_2(run_file, tmp_path):
    run_file.write_text("name: a\nprovider: local\nmax_huors: 1\nmax_price_usd_per_hour: -1\ntrain: {}\n")
    done = mgpu(["plan"], tmp_path)
    assert done.returncode == 2
    assert "max_hours" in done.stderr
    assert "max_price_usd_per_hour" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_run_file_is_bad_input(tmp_path, xdg):
    done = mgpu(["plan", "nothing.yaml"], tmp_path)
    assert done.returncode == 2
    assert "nothing.yaml" in done.stderr


def test_plan_refuses_what_launch_would_and_tells_the_price_all_the_same(run_file, tmp_path):
    (tmp_path / "t.py").touch()
    (tmp_path / "host").symlink_to("/etc/hostname")
    run_file.write_text(run_file.read_text().replace("train: {steps: 2}", "command: [t.py]"))
    done = mgpu(["plan"], tmp_path)
    assert (done.returncode, "1 of its files cannot be sent" in done.stderr) == (2, True), done.stderr
    assert "per hour for all nodes" in done.stderr
    assert "next: mgpu launch" not in done.stderr
    (tmp_path / "host").unlink()
    assert mgpu(["plan"], tmp_path).returncode == 0


def test_plan_prints_the_price_of_all_nodes(run_file, tmp_path):
    run_file.write_text(run_file.read_text() + "nodes: 4\n")
    done = mgpu(["plan", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["price_usd_per_hour"] == pytest.approx(4 * plan["offers"][0]["price_usd_per_hour"])


def test_money_is_not_spent_when_nobody_can_be_asked(run_file, tmp_path):
    (tmp_path / "Pulumi.yaml").write_text("name: a\nruntime: python\n")
    done = mgpu(["launch"], tmp_path)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "per hour" in done.stderr
