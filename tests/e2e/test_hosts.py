"""A run on hosts that were there already, from `launch` to the last lock: one loses its power, a spare one goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

import pytest
from fakes import gateway
from fakes.hosts import Rack

from mgpu.paths import state_dir

RUN_FILE = """
name: rack
provider: hosts
hosts: {{inventory: hosts.txt, ssh_config: {config}, python: {python}}}
nodes: 2
disk_gib: 1
max_price_usd_per_hour: 0.20
max_hours: 0.2
launcher: python
command: [train.py, "60", "0.1"]
checkpoint: {{to: "s3://backends/runs"}}
recovery: {{attempts: 3, wait_minutes: 1}}
"""


@pytest.fixture
def bucket(require, tmp_path, monkeypatch) -> Iterator[Mapping[str, str]]:
    """A store, open to the operator and, by keys of their own, to the nodes."""
    program = gateway.program()
    require("versitygw", program is not None, "it is not built: scripts/setup-go-tools.sh versitygw")
    (tmp_path / "buckets").mkdir()
    with gateway.serving(str(program), tmp_path / "buckets") as env:
        gateway.make_bucket(env)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"MGPU_STORE_{name}", env[f"AWS_{name}"])
        yield env


def record() -> dict:
    found = list((state_dir() / "runs").glob("*/record.json"))
    return json.loads(found[0].read_text()) if found else {}


def test_a_host_without_power_is_replaced_by_a_spare_one_and_nothing_is_left(rack: Rack, bucket, project):
    (project.folder / "hosts.txt").write_text("".join(f"{machine.name}  # in order\n" for machine in rack.machines))
    (project.folder / "mgpu.yaml").write_text(RUN_FILE.format(config=rack.config, python=sys.executable))
    project.env |= {"MGPU_TIMEOUTS": '{"silence_s": 3}'}
    launch = project.start("launch", "--yes", "--json")
    try:
        project.wait(lambda: record().get("checkpoint_step", -1) >= 10)
        before = [node["id"] for node in record()["fleet"]["nodes"]]
        rack.machine(before[1]).lose_power()
        out, err = launch.communicate(timeout=600)
    finally:
        launch.kill()
    assert launch.returncode == 0, err
    run = json.loads(out)
    after = [node["id"] for node in run["fleet"]["nodes"]]
    assert [each.partition("/")[0] for each in before] == ["host-0", "host-1"], "in the order of the list"
    assert after[0] == before[0], "the survivor stays"
    assert after[1].startswith("host-2/")
    assert (run["state"], run["attempt"], run["recoveries"], run["checkpoint_step"]) == ("succeeded", 2, 1, 60)
    rack.serve()
    rack.provider().list_owned("whoever asks")  # a host that was away ends what it has of an earlier boot
    for machine in rack.machines:
        assert not machine.held
        assert "mgpu" not in machine.keys
        assert not [*(machine.home / ".mgpu" / "hosts").iterdir()]
