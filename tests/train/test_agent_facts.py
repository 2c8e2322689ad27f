"""What a machine says of itself, with the programs that it asks replaced by ones that answer as the real ones do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mgpu_train.agent.machine import facts as module
from mgpu_train.agent.machine.facts import Gpu, facts, parsed

EIGHT = "\n".join(["NVIDIA H100 80GB HBM3, 580.105.08, 81559, Disabled, 9.0"] * 8)
FAILED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running."
)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with the shell's few programs and what the test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "cat", "sleep"):
        (folder / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, text: str = "", *, status: int = 0, error: str = "", first: str = "") -> None:
    path = folder / name
    path.write_text(
        f"#!/bin/sh\n{first}\ncat <<'END'\n{text}\nEND\ncat >&2 <<'END'\n{error}\nEND\necho \"$@\" >> {path}.asked\n"
        f"exit {status}\n"
    )
    path.chmod(0o755)


def test_eight_gpus_and_their_driver_are_told(programs: Path):
    program(programs, "nvidia-smi", EIGHT)
    found = facts()
    assert found.driver == "580.105.08"
    assert found.gpus == (Gpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559, compute_capability="9.0", mig=False),) * 8
    assert found.gpu_problem is None
    asked = (programs / "nvidia-smi.asked").read_text()
    assert (
        asked
        == "--query-gpu=name,driver_version,memory.total,mig.mode.current,compute_cap --format=csv,noheader,nounits\n"
    )


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        (
            "NVIDIA A100-SXM4-40GB, 535.183.01, 40960, Enabled, 8.0",
            Gpu(name="NVIDIA A100-SXM4-40GB", memory_mib=40960, compute_capability="8.0", mig=True),
        ),
        ("Tesla T4, 535.183.01, 15360, [N/A], 7.5", Gpu(name="Tesla T4", memory_mib=15360, compute_capability="7.5")),
        ("Tesla V100-SXM2-32GB, 440.118.02, 32510", Gpu(name="Tesla V100-SXM2-32GB", memory_mib=32510)),
        ("NVIDIA GB10, 580.95.05, [N/A], [N/A], 12.1", Gpu(name="NVIDIA GB10", compute_capability="12.1")),
        ("NVIDIA A10G, 550.1, [Unknown Error], [N/A], [N/A]", Gpu(name="NVIDIA A10G")),
    ],
    ids=["divided", "all", "old driver", "no memory of its own", "ill"],
)
def test_what_a_driver_does_not_tell_is_none(text, gpu):
    assert parsed(text + "\n")[1] == (gpu,)


@pytest.mark.parametrize("text", ["no csv at all", "a, b", "a, 1, 2, 3, 4, 5"])
def test_what_is_no_table_is_no_answer(programs: Path, text: str):
    with pytest.raises(ValueError, match="printed"):
        parsed(text)
    program(programs, "nvidia-smi", text)
    assert text in (facts().gpu_problem or "")


def test_an_old_driver_is_asked_again_without_what_it_does_not_know(programs: Path):
    """Those before 510 do not know `compute_cap`, and those before 450 no MIG."""
    refused = "echo 'Field \"{0}\" is not a valid field to query.'; exit 2"
    first = f"case $1 in *compute_cap*) {refused.format('compute_cap')};; esac"
    program(programs, "nvidia-smi", "Tesla V100-SXM2-16GB, 470.256.02, 16160, [N/A]", first=first)
    found = facts()
    assert found.gpus == (Gpu(name="Tesla V100-SXM2-16GB", memory_mib=16160),)
    assert found.driver == "470.256.02"
    first += f"; case $1 in *mig*) {refused.format('mig.mode.current')};; esac"
    program(programs, "nvidia-smi", "Tesla V100-SXM2-16GB, 440.118.02, 16160", first=first)
    assert (facts().driver, facts().gpus) == ("440.118.02", found.gpus)


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        (FAILED, 9, "couldn't communicate with the NVIDIA driver"),
        ("No devices were found", 6, "No devices were found"),
        ("", 12, "no word (exit status 12)"),
        ("", 0, "lists no GPU"),
    ],
    ids=["driver", "no devices", "silent", "empty"],
)
def test_a_machine_without_gpus_says_so(programs: Path, text: str, status: int, told: str):
    program(programs, "nvidia-smi", text, status=status)
    found = facts()
    assert (found.driver, found.gpus) == (None, ())
    assert told in (found.gpu_problem or "")


def test_a_machine_without_the_programs_says_so(programs: Path):
    found = facts()
    assert found.gpu_problem == "there is no program nvidia-smi"
    assert found.docker_problem == "there is no program docker"
    assert (found.docker, found.docker_root, found.docker_free_bytes) == (None, None, None)


def test_a_program_that_hangs_is_waited_for_no_longer_than_its_deadline(programs: Path, monkeypatch):
    program(programs, "nvidia-smi", EIGHT, first="sleep 60")
    monkeypatch.setattr(module, "SMI_S", 0.2)
    assert facts().gpu_problem == "nvidia-smi did not answer within 0.2 s"


def test_docker_and_the_room_on_its_disk_are_told(programs: Path, tmp_path: Path):
    program(programs, "docker", json.dumps(["27.5.1", str(tmp_path)]))
    found = facts()
    assert (found.docker, found.docker_root, found.docker_problem) == ("27.5.1", str(tmp_path), None)
    free = os.statvfs(tmp_path)
    assert found.docker_free_bytes == pytest.approx(free.f_bavail * free.f_frsize, rel=0.2)


def test_a_data_root_that_cannot_be_seen_has_no_room_that_is_known(programs: Path):
    program(programs, "docker", '["27.5.1", "/not/here"]')
    found = facts()
    assert (found.docker, found.docker_free_bytes) == ("27.5.1", None)


@pytest.mark.parametrize(
    ("text", "status", "error", "told"),
    [
        ("", 1, "permission denied while trying to connect to the Docker daemon socket", "permission denied"),
        ('["", ""]', 0, "", "no daemon that answers"),
        ("[null,null]", 0, "", "no daemon that answers"),
        ("<html>", 0, "", "Expecting value"),
    ],
    ids=["permission", "old client", "null", "nonsense"],
)
def test_docker_without_its_daemon_is_none(programs: Path, text: str, status: int, error: str, told: str):
    program(programs, "docker", text, status=status, error=error)
    found = facts()
    assert found.docker is None
    assert told in (found.docker_problem or "")


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n", "13.2"),
        ("cuda = '12.1'\n", "12.1"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", None),
    ],
    ids=["now", "before", "without"],
)
def test_the_cuda_of_torch_is_read_without_importing_it(programs: Path, tmp_path: Path, monkeypatch, text, cuda):
    (tmp_path / "torch-9.9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert (facts().torch, facts().cuda) == ("9.9.9", cuda)


def test_the_command_prints_one_line_of_json(programs: Path):
    program(programs, "nvidia-smi", EIGHT)
    done = subprocess.run(
        [sys.executable, "-m", "mgpu_train", "agent", "facts"], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert found["gpus"][7] == {
        "name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559, "compute_capability": "9.0", "mig": False,
    }  # fmt: skip
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["machine"] == os.uname().machine


def test_a_python_without_torch_has_none(programs: Path, monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> str:
        raise module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.importlib.metadata, "version", absent)
    assert (facts().torch, facts().cuda) == (None, None)
