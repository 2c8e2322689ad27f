"""Schedules with nobody awake: passes alone bring a night to its end, wherever they are cut off (I1, I2, I3, I10)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from mgpu.paths import data_dir, state_dir
from mgpu.providers.local import bill
from mgpu.providers.local.procs import marked
from mgpu.run.record.record import supervised

RECOVERY = "recovery: {attempts: 4, wait_minutes: 1}\n"


def passes(project) -> dict:
    """One pass, to its end."""
    done = project.mgpu("reconcile", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def history(project, name: str = "e2e") -> list[dict]:
    return json.loads(project.mgpu("schedule", "show", name, "--json").stdout)["history"]


def log() -> list[dict]:
    """The commit log's entries, of all runs, in their order."""
    return [json.loads(entry.read_text()) for entry in sorted((data_dir() / "checkpoints").glob("*/commits/*.json"))]


def committed(entries: list[dict]) -> list[int]:
    """The steps of checkpoints; logs have other entries, too."""
    return [entry["manifest"]["step"] for entry in entries if entry["kind"] == "checkpoint"]


def begin(project, command: list[str], more: str = "") -> str:
    """A schedule whose time is now; its run."""
    project.write(command, nodes=2, more=RECOVERY + more)
    done = project.mgpu("schedule", "add", "--cron", "0 2 29 2 *", "--yes")
    assert done.returncode == 0, done.stderr
    (due,) = json.loads(project.mgpu("schedule", "run-now", "e2e", "--json").stdout)["history"]
    return due["run_id"]


def most_at_once() -> int:
    """Machines that were billed at the same time."""
    nodes = bill.read(state_dir() / "local").nodes
    return max(sum(other.start.at <= node.start.at < other.end_at for other in nodes) for node in nodes)


def to_the_end(project) -> dict:
    for _ in range(30):
        passes(project)
        (due,) = history(project)
        if due["outcome"] != "running":
            return due
    raise AssertionError("it never ends")


def test_a_machine_that_is_lost_while_nobody_watches_is_replaced_by_the_next_pass(project):
    morning = project.folder / "morning"  # it does not end before
    run = begin(project, ["train.py", "60", "0.1"], f"env: {{COUNT_UNTIL: {morning}}}\n")
    (looked,) = passes(project)["runs"]
    assert (looked["run_id"], looked["why"], looked["state"]) == (run, "queued", "running")
    project.wait(lambda: bool(committed(log())))
    assert not supervised(run), "nobody is awake"
    lost = next(node for node in bill.read(state_dir() / "local").alive if node.start.instance.endswith("-1"))
    for pid in {lost.start.pid, *(process.pid for process in marked().get(lost.start.instance, ()))}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (looked,) = passes(project)["runs"]
    assert (looked["run_id"], looked["state"], supervised(run)) == (run, "running", False), "one pass is enough"
    (_, second) = [number for number, entry in enumerate(log()) if entry["kind"] == "attempt"]
    newest = committed(log()[:second])[-1]
    (lost,) = project.result(project.mgpu("status", run, "--json"))["interruptions"]
    assert (lost["resumed_step"], lost["nodes"]) == (newest, [1])
    assert (project.billed(), most_at_once()) == (2, 2), "the machine was replaced, and no other"
    morning.touch()
    due = to_the_end(project)
    assert (due["outcome"], due["recoveries"], due["exit_code"]) == ("succeeded", 1, 0)
    assert f"from {newest}" in project.mgpu("logs", run, "--node", "1").stdout
    assert project.billed() == 0
    assert passes(project)["runs"] == []


@pytest.mark.parametrize(
    "at", [("▸ provisioning", "creating Fleet"), ("▸ connecting", "▸ starting"), ("left running",)]
)
def test_passes_that_are_killed_leave_one_run_that_the_next_ones_end(project, at: tuple[str, ...]):
    run = begin(project, ["train.py", "20", "0.1"])
    for words in at:
        kill_when(project, words)
    due = to_the_end(project)
    assert (due["run_id"], due["outcome"]) == (run, "succeeded")
    assert [path.parent.name for path in (state_dir() / "runs").glob("*/record.json")] == [run]
    assert project.billed() == 0
    assert most_at_once() <= 2, "never more machines than were asked for"


def kill_when(project, words: str) -> None:
    """A pass whose processes all die as soon as it says this."""
    reconcile = project.start("reconcile")
    assert reconcile.stderr is not None
    for line in reconcile.stderr:
        if words in line:
            break
    for pid in [*children(reconcile), reconcile.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reconcile.wait()


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
