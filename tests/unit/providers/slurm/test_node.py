"""How a node of provider slurm ends, without a Slurm: what it removes, what it leaves, and when it says so."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mgpu_train.agent.machine import procs
from mgpu_train.system import prctl

from mgpu.providers.slurm import node

TOKEN = "f0" * 20
Make = Callable[[], node.Node]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A keeper of rank 0, whose gang and node folders are the test's; no process of anybody's is ended."""
    (tmp_path / "gang").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(node, "GANG", tmp_path / "gang")
    monkeypatch.setenv("MGPU_KILL_WAIT", "30")
    monkeypatch.setattr(procs, "kill_all", lambda *_, **__: True)
    told = {"token": TOKEN, "node_folder": str(tmp_path / "disk"), "ends_by": 0, "hard_cap_s": 600, "lease_s": 300}
    return lambda: node.Node({**told, "ssh_public_key": "ssh-ed25519 AAAA"}, 0)


def said(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "gang").iterdir())


def test_a_folder_that_was_there_before_stays(make: Make, tmp_path: Path):
    keeper = make()
    (keeper.folder / "home").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        keeper.furnish()
    assert keeper.end("no folder")
    assert make().sweep() == 0
    assert keeper.home.exists()
    assert said(tmp_path) == ["ended-0.json"]


def test_the_folder_of_a_keeper_that_was_killed_goes(make: Make, tmp_path: Path):
    make().furnish()
    assert make().sweep() == 0
    assert list((tmp_path / "disk").iterdir()) == []
    assert json.loads((tmp_path / "gang" / "ended-0.json").read_text())["why"] == "its keeper was killed"


def test_a_node_whose_processes_live_on_has_not_ended_and_is_swept_again(make: Make, tmp_path: Path, monkeypatch):
    keeper = make()
    with monkeypatch.context() as stuck:
        stuck.setattr(procs, "kill_all", lambda *_, **__: False)
        stuck.setattr(prctl, "become_subreaper", lambda: None)
        stuck.setattr(keeper, "listen", lambda: 0)
        stuck.setattr(keeper, "serve", lambda: setattr(keeper, "ending", "given back"))
        assert keeper.run() == 1
        assert said(tmp_path) == ["made-0"]
    make().sweep()
    assert said(tmp_path) == ["ended-0.json", "made-0"]


def test_containers_of_the_node_go_with_it(make: Make, tmp_path: Path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "disk").rmdir()
    (tmp_path / "disk").symlink_to("real")  # the label has the path without links
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/called\n[ "$1" = ps ] && echo c1 c2\nexit 0\n')
    docker.chmod(0o755)
    keeper = make()
    keeper.furnish()
    (keeper.home / ".mgpu" / "container.lock").touch()
    monkeypatch.setenv("PATH", f"{docker.parent}:/usr/bin:/bin")
    assert keeper.end("given back")
    assert (tmp_path / "called").read_text().splitlines() == [
        f"ps --all --quiet --filter=label=dev.mgpu.home={tmp_path}/real/mgpu-{TOKEN[:10]}-0/home",
        "rm --force --volumes c1 c2",
    ]


def test_what_programs_have_made_read_only_goes_too(make: Make, monkeypatch):
    """As root nothing is read-only: what is looked at is how folders stand when they are removed the second time."""
    keeper, real = make(), shutil.rmtree
    keeper.furnish()
    inner = keeper.home / "cache" / "go"
    inner.mkdir(parents=True)
    inner.chmod(0o500)
    inner.parent.chmod(0o000)
    modes = list[int]()

    def rmtree(path: Path, **given: bool) -> None:
        modes.append(inner.stat().st_mode & 0o777)
        if len(modes) == 2:
            real(path, **given)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    keeper.end("given back")
    assert modes == [0o500, 0o700]
    assert not keeper.folder.exists()


def test_a_job_that_can_write_nothing_ends_and_claims_nothing(tmp_path: Path):
    (tmp_path / "job.7").symlink_to("/dev/full")
    script = Path(node.__file__).with_name("batch.sh")
    env = {"PATH": "/usr/bin:/bin", "MGPU_GANG": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=10)
    assert (done.returncode, (tmp_path / "job").exists()) == (1, False)
    assert "nothing can be written" in done.stderr


def test_a_node_has_all_cores_of_its_job_whatever_a_site_binds_tasks_to(tmp_path: Path):
    for name, line in (("srun", f'echo "$*" >{tmp_path}/asked'), ("scontrol", "echo KillWait = 30 sec")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    script = Path(node.__file__).with_name("batch.sh")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MGPU_GANG": str(tmp_path), "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", script], env={**env, "SLURM_JOB_NUM_NODES": "2"}, check=True, timeout=10)
    assert "--cpu-bind=none" in (tmp_path / "asked").read_text().split()
