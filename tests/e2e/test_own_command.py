"""A user's own program from `mgpu init` to nothing left: I1, I7, I8, and the fault F45 for requirements."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from mgpu.paths import state_dir


def records() -> list[dict]:
    return [json.loads(path.read_text()) for path in (state_dir() / "runs").glob("*/record.json")]


def phase() -> str:
    return records()[0]["state"] if records() else ""


def test_launch_runs_keeps_the_checkpoint_and_gives_everything_back(project):
    project.write(["train.py", "20", "0.02"], nodes=1, more="checkpoint: {keep_last: 3}\n")
    done = project.mgpu("launch", "--yes", "--json", "--set", "nodes=2")
    assert done.returncode == 0, done.stderr
    run = project.result(done)
    assert (run["state"], run["teardown"]) == ("succeeded", "confirmed")
    assert run["checkpoint_step"] == 20
    assert project.billed() == 0
    assert not (state_dir() / "local" / "nodes").exists() or not any((state_dir() / "local" / "nodes").iterdir())

    # what stays readable after the machines are gone
    run_id = run["run_id"]
    assert "rank 1 of 2 from 0" in project.mgpu("logs", run_id, "--node", "1").stdout
    lines = project.mgpu("logs", run_id, "-t").stdout.splitlines()
    assert lines == sorted(lines, key=lambda line: line[:19]), "two nodes' lines, in the order of their times"
    assert lines[0][:19] >= time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["created_at"]))
    assert {line[20:23] for line in lines} == {"[0]", "[1]"}
    assert "succeeded" in project.mgpu("status", run_id).stdout
    assert project.mgpu("checkpoints", "verify", "--deep", run_id).returncode == 0
    pulled = project.mgpu("checkpoints", "pull", run_id)
    assert pulled.returncode == 0, pulled.stderr
    assert (project.folder / "mgpu-runs" / run_id / "step-20" / "count.txt").read_text() == "20"
    assert "billed now: 0 nodes" in project.mgpu("ls").stdout
    assert not list(project.folder.glob("Pulumi.e2e*")), "launch leaves no stack settings in the user's folder"


def test_a_resumed_run_goes_on_from_its_newest_checkpoint(project):
    project.write(["train.py", "10", "0.01"])
    first = project.result(project.mgpu("launch", "--yes", "--json"))
    project.write(["train.py", "20", "0.01"])
    done = project.mgpu("launch", "--yes", "--json", "--resume", first["run_id"])
    assert done.returncode == 0, done.stderr
    again = project.result(done)
    assert (again["run_id"], again["attempt"]) == (first["run_id"], 2)
    assert again["checkpoint_step"] == 20
    assert "from 10" in project.mgpu("logs", again["run_id"]).stdout
    assert project.billed() == 0


def test_a_failing_program_is_named_and_its_machines_go(project):
    (project.folder / "train.py").write_text("import sys\nprint('about to fail')\nsys.exit(3)\n")
    project.write(["train.py"], more="checkpoint: none\n")
    done = project.mgpu("launch", "--yes")
    assert done.returncode == 6
    assert "exit code 3" in done.stderr
    assert "Traceback" not in done.stderr
    assert project.billed() == 0
    assert "about to fail" in project.mgpu("logs").stdout


def test_success_needs_a_checkpoint_unless_none_is_asked_for(project):
    (project.folder / "train.py").write_text("print('saved nothing')\n")
    project.write(["train.py"])
    assert project.mgpu("launch", "--yes").returncode == 6
    project.write(["train.py"], more="checkpoint: none\n")
    assert project.mgpu("launch", "--yes").returncode == 0


def test_a_requirement_that_cannot_be_had_is_named(project):
    (project.folder / "requirements.txt").write_text("./no-such-package-of-anybody\n")
    project.write(["train.py", "1", "0"], more="code: {requirements: requirements.txt}\n")
    done = project.mgpu("launch", "--yes")
    assert done.returncode == 6
    assert "no-such-package-of-anybody" in done.stderr
    assert project.billed() == 0


def test_stop_saves_a_checkpoint_and_ends_it(project):
    project.write(["train.py", "100000", "0.02"])
    launch = project.start("launch", "--yes", "--json")
    try:
        project.wait(lambda: bool(records()) and records()[0]["checkpoint_step"] > 0)
        stopped = project.mgpu("stop")
        assert stopped.returncode == 0, stopped.stderr
        out, err = launch.communicate(timeout=60)
    finally:
        launch.kill()
    assert launch.returncode == 130, err
    run = json.loads(out)
    assert (run["state"], run["teardown"]) == ("stopped", "confirmed")
    assert project.billed() == 0
    committed = json.loads(project.mgpu("checkpoints", "ls", "--json").stdout)["checkpoints"]
    assert committed[0]["step"] == run["checkpoint_step"]


def test_a_signal_while_machines_are_made_undoes_it(project):
    project.write(["train.py", "10", "0.1"], nodes=2)
    launch = project.start("launch", "--yes")
    try:
        project.wait(lambda: phase() == "provisioning")
        launch.send_signal(signal.SIGTERM)
        _, err = launch.communicate(timeout=90)
    finally:
        launch.kill()
    assert launch.returncode == 130, err
    assert project.billed() == 0
    assert "Traceback" not in err


def test_a_secret_reaches_the_program_and_nothing_else(project):
    canary = "canary-5d1f0c"
    (project.folder / "train.py").write_text(
        "import os\nassert os.environ['TOKEN'].startswith('canary')\n"
        "assert 'AWS_SECRET_ACCESS_KEY' not in os.environ\nprint('token is here')\n"
    )
    project.env |= {"TOKEN": canary, "AWS_ACCESS_KEY_ID": canary, "AWS_SECRET_ACCESS_KEY": canary}
    project.write(["train.py"], more="secrets: [TOKEN]\ncheckpoint: none\n")
    done = project.mgpu("launch", "--yes")
    assert done.returncode == 0, done.stderr
    assert "token is here" in project.mgpu("logs").stdout
    assert canary not in done.stdout + done.stderr
    holding = [path for path in _files(state_dir().parent.parent) if canary.encode() in path.read_bytes()]
    assert holding == []


def test_a_missing_secret_costs_nothing(project):
    project.env.pop("TOKEN", None)
    project.write(["train.py"], more="secrets: [TOKEN]\n")
    done = project.mgpu("launch", "--yes")
    assert done.returncode == 2
    assert "TOKEN" in done.stderr
    assert records() == []


def _files(root: Path) -> list[Path]:
    return [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
