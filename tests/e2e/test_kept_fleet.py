"""Queued runs on a fleet that an earlier run has kept: real passes, processes and machines, and the bill."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import pytest

from mgpu.paths import state_dir
from mgpu.providers.local import bill
from mgpu.providers.local.procs import marked
from mgpu.run.record.record import State, every


@pytest.fixture
def keeper(project, request) -> dict:
    """A run that is over; its fleet of one machine stands."""
    project.write(["train.py", "10", "0.01"])
    keeps = ("teardown=keep", "max_hours=0.5", *getattr(request, "param", ()))
    done = project.mgpu("launch", "--yes", "--json", *(word for each in keeps for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    assert project.billed() == 1
    return project.result(done)


def submit(project, *args: str) -> str:
    done = project.mgpu("submit", "--yes", "--json", *args)
    assert done.returncode == 0, done.stderr
    return project.result(done)["run_id"]


def passes(project) -> dict:
    done = project.mgpu("reconcile", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ends(project, *runs: str) -> list[dict]:
    """Passes until these are over."""
    for _ in range(30):
        passes(project)
        seen = [json.loads(project.mgpu("status", run, "--json").stdout) for run in runs]
        if all(each["state"] in ("succeeded", "failed", "stopped") for each in seen):
            return seen
    raise AssertionError(seen)


def test_two_queued_runs_have_one_kept_fleet_after_each_other(project, keeper):
    project.write(["train.py", "30", "0.1"])  # so long that a pass finds it at work
    first, second = submit(project), submit(project, "--machines", "kept")
    report = passes(project)
    assert [(each["run_id"], each["state"]) for each in report["runs"]] == [(first, "running")]
    assert [(each["run_id"], each["waits_for"]) for each in report["queued"]] == [
        (second, f"kept fleet {keeper['stack']}, which run {first} uses")
    ]
    refused = project.mgpu("down", keeper["run_id"])
    assert (refused.returncode, f"used by run {first}" in refused.stderr) == (2, True)
    for run in ends(project, first, second):
        assert (run["state"], run["teardown"], run["kept_by"]) == ("succeeded", "kept", keeper["run_id"]), run
        assert run["fleet"]["nodes"] == keeper["fleet"]["nodes"]
    assert len(bill.read(state_dir() / "local").nodes) == 1, "one machine was ever rented"
    saved = [*(state_dir() / "local").rglob("runs/*/checkpoints")]
    assert {path.parent.name for path in saved} == {keeper["run_id"], first, second}
    assert [each for path in saved for each in path.iterdir()] == [], "the store has them"
    costs = json.loads(project.mgpu("costs", "--by", "run", "--json").stdout)
    hours = {each["key"]: each["hours"] for each in costs["rows"]}
    (node,) = bill.read(state_dir() / "local").alive
    assert min(hours.values()) > 0, hours
    assert sum(hours.values()) * 3600 < time.time() - node.start.at + 1, "each has paid for its own time"
    done = project.mgpu("down", second)
    assert (done.returncode, project.billed()) == (0, 0), done.stderr


def test_a_run_that_was_stopped_goes_on_with_what_its_fleet_has_and_leaves_none_of_it_when_it_succeeds(
    project, tmp_path
):
    shared = tmp_path / "store"
    shared.mkdir()
    (shared / "tokens").write_text("one two")
    data = f"data: [{{from: 'file://{shared}', to: data}}]\nteardown: keep\n"
    project.write(["train.py", "1000", "0.1"], more=data)
    going = project.start("launch", "--yes")
    project.wait(lambda: any(each.checkpoint_step > 0 for each in every()))
    (record,) = every()
    run = record.run_id
    stopped = project.mgpu("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    going.communicate(timeout=60)
    (home,) = (state_dir() / "local").rglob(f"runs/{run}")

    def there():
        names = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
        return {name for name in names if name.startswith(("checkpoints/", "resume/", "work/data/"))}

    (record,) = every()
    assert record.state is State.STOPPED
    assert f"checkpoints/step-{record.checkpoint_step}" in {name.rpartition("/")[0] for name in there()}
    assert "work/data/tokens" in there()
    project.write(["train.py", str(record.checkpoint_step + 5), "0.1"], more=data)
    done = project.mgpu("run", "--stack", record.stack, "--resume", run, "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert project.result(done)["attempt"] == 2
    said = project.mgpu("logs", run).stdout
    assert "1 file of them kept" in said
    assert any("resume: " in line and ", 0 of them from this disk" not in line for line in said.splitlines())
    assert there() == set()
    assert (home / "work/train.py").exists()
    assert (project.mgpu("down", run).returncode, project.billed()) == (0, 0)


def test_a_run_whose_kept_fleet_has_died_meanwhile_rents(project, keeper):
    run = submit(project)
    (node,) = bill.read(state_dir() / "local").alive
    for pid in {node.start.pid, *(process.pid for process in marked().get(node.start.instance, ()))}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (found,) = ends(project, run)
    assert (found["state"], found["kept_by"], found["recoveries"], found["teardown"]) == (
        "succeeded", None, 0, "confirmed",
    )  # fmt: skip
    assert (found["stack"], project.billed()) == (run, 0)


@pytest.mark.parametrize("keeper", [("share=true", "processes_per_node=2")], indirect=True)
def test_two_queued_runs_share_the_node_of_a_kept_fleet(project, keeper):
    with (project.folder / "train.py").open("a") as program:
        program.write("\nprint('cores', sorted(os.sched_getaffinity(0)))\n")
    project.write(["train.py", "60", "0.1"], more="share: true\n")
    both = submit(project), submit(project)
    waits = submit(project, "--machines", "kept")
    report = passes(project)
    assert {each["run_id"]: each["state"] for each in report["runs"]} == dict.fromkeys(both, "running")
    assert [each["run_id"] for each in report["queued"]] == [waits]
    at_work = [json.loads(project.mgpu("status", run, "--json").stdout) for run in both]
    assert [run["slots"] for run in at_work] == [[0], [1]]
    assert len({run["fleet"]["nodes"][0]["id"] for run in at_work}) == 1
    for run in ends(project, *both, waits):
        assert (run["state"], run["attempt"], run["recoveries"]) == ("succeeded", 1, 0), run
        assert run["checkpoint_step"] == 60, "its own, whatever the others save"
    left = {path.parents[1].name for path in (state_dir() / "local").rglob("runs/*/work/train.py")}
    assert left == {keeper["run_id"]}, "the copies of those who shared it are gone"
    cores = [
        json.loads(line.partition("cores ")[2])
        for run in both
        for line in project.mgpu("logs", run).stdout.splitlines()
        if "cores [" in line
    ]
    assert len(cores) == 2
    assert len(os.sched_getaffinity(0)) == 1 or {*cores[0]}.isdisjoint(cores[1])
    assert len(bill.read(state_dir() / "local").nodes) == 1, "one machine was ever rented"
    assert (project.mgpu("down", keeper["run_id"]).returncode, project.billed()) == (0, 0)
