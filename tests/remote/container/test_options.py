"""What a container is made of: labels, limits, the run's code, folders of data."""

from __future__ import annotations

import os
from pathlib import Path

from fakes.containers import OWNER, RUN

from mgpu.events import Warned


def test_it_is_made_as_a_machine_for_training_is(machine, images):
    machine.up(images.first)
    made = machine.container
    host, config = made["HostConfig"], made["Config"]
    labels = {key: value for key, value in config["Labels"].items() if key.startswith("dev.mgpu.")}
    assert len(labels.pop("dev.mgpu.settings")) == 32
    assert labels == {f"dev.mgpu.{key}": value for key, value in
                      {"owner": OWNER, "fleet": "f-1", "run": RUN, "home": str(machine.home)}.items()}  # fmt: skip
    assert (host["NetworkMode"], host["IpcMode"], host["Init"]) == ("host", "private", True)
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host["ShmSize"] == memory // 2
    limits = {limit["Name"]: limit["Hard"] for limit in host["Ulimits"]}
    assert limits["stack"] == 64 << 20
    # an engine without the right to lift the limit leaves it, and that is said where it matters
    warned = any(isinstance(event, Warned) and "locked memory" in event.text for event in machine.events)
    assert warned == ("memlock" not in limits and Path("/dev/infiniband").exists())
    assert limits.get("memlock", -1) == -1
    assert config["StopTimeout"] == 10
    assert config["User"] == f"{os.getuid()}:{os.getgid()}"
    assert config["Image"] == images.first


def test_code_can_be_read_and_is_seen_as_the_operator_sends_it(machine, images):
    machine.up(images.first)
    (machine.work / "late.txt").write_text("sent later")
    path = machine.work / "late.txt"
    assert machine.inside("cat", str(path)).stdout == "sent later"
    refused = machine.inside("sh", "-c", f"echo changed > {path}", check=False)
    assert "Read-only file system" in refused.stderr
    assert path.read_text() == "sent later"


def test_data_can_be_written_beside_the_code_and_in_it(machine, images, tmp_path):
    beside = tmp_path / "disk, fast"
    data = [{"from": "s3://data/a", "to": "tokens"}, {"from": "s3://data/c", "to": str(beside)}]
    machine.up(images.first, data=data)
    for folder in (machine.work / "tokens", beside):
        machine.inside("sh", "-c", f"echo written > '{folder}/file'")
        assert (folder / "file").read_text() == "written\n"


def test_a_folder_that_cannot_be_made_is_named(machine, images, tmp_path):
    (tmp_path / "file").write_text("")
    error = machine.refused(images.first, "cannot be made", data=[{"from": "s3://data/c", "to": f"{tmp_path}/file/x"}])
    assert f"{tmp_path}/file/x" in error.why
    assert machine.ids() == []
