"""The agent in a container: spoken to as ever, ended in order, seen dead where it was killed."""

from __future__ import annotations

import json

import pytest
from fakes.containers import RUN
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.status.status import Fault, Phase

from mgpu.run.nodes import agent_client

SLEEPS = "import time\nprint('it runs', flush=True)\ntime.sleep(600)\n"


def test_the_agent_is_spoken_to_as_ever(machine, images):
    machine.up(images.first)
    assert 1024 < agent_client.free_ports(machine.node, 1, machine.timeouts)[0] < 65536
    program = (
        "import os, sys\nprint(f'token {os.environ[\"TOKEN\"]} {os.getcwd()} {sys.executable}', flush=True)\n" + SLEEPS
    )
    machine.start(program, secrets=["TOKEN"])
    machine.until(lambda: "it runs" in machine.said)
    assert f"token canary {machine.work}" in machine.said
    assert machine.status["alive"] is True
    agent_client.stop(machine.node, RUN, machine.timeouts)
    machine.until(lambda: not machine.status["alive"])
    assert (machine.status["phase"], machine.status["fault"]) == (Phase.FAILED, Fault.STOPPED)
    running = machine.inside("sh", "-c", "cat /proc/[0-9]*/comm").stdout.split()
    assert len([name for name in running if name.startswith("python")]) == 1, "only what holds it is left"
    assert "canary" not in machine.engine.docker("inspect", machine.container["Id"]).stdout


def test_an_agent_whose_container_was_killed_is_seen_dead(machine, images):
    machine.up(images.first)
    machine.start(SLEEPS)
    machine.until(lambda: "it runs" in machine.said)
    machine.engine.docker("kill", machine.container["Id"])
    status = machine.status
    assert status["alive"] is False
    assert status["phase"] in (Phase.LAUNCHING, Phase.TRAINING)


@pytest.mark.parametrize(
    ("how", "image"), [("down", "first"), ("docker stop", "first"), ("docker stop", "second")],
    ids=["down", "docker stop", "docker stop of an image with a signal of its own"],
)  # fmt: skip
def test_an_agent_whose_container_is_stopped_ends_in_order(machine, images, how, image):
    machine.up(getattr(images, image))
    machine.start(SLEEPS)
    machine.until(lambda: "it runs" in machine.said)
    if how == "down":
        assert machine.down() == 1
    else:
        machine.engine.docker("stop", machine.container["Id"])
    said = json.loads(machine.node.read(str(RunLayout(RUN).status)))
    assert (said["phase"], said["fault"]) == (Phase.FAILED, Fault.STOPPED)
