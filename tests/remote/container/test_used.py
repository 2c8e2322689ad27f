"""A second operator on the same nodes: whoever trains there goes on, whoever comes then is told by whom it is used."""

from __future__ import annotations

import json

import pytest
from fakes.containers import OWNER, RUN
from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.status.status import Phase

from mgpu.run.nodes import agent_client

SLEEPS = "import time\nprint('it runs', flush=True)\ntime.sleep(600)\n"
OTHER = "run-2"


@pytest.fixture(params=["container", "machine"])
def training(request, machine, images):
    """A run that trains, in a container or on the machine itself; at the end of the test its agent still does."""
    machine.up(images.first) if request.param == "container" else machine.equip()
    machine.start(SLEEPS)
    machine.until(lambda: "it runs" in machine.said)
    before = machine.ids()
    yield machine
    status = machine.status
    assert (status["alive"], machine.ids()) == (True, before)
    agent_client.stop(machine.node, RUN, machine.timeouts, now=True)
    machine.until(lambda: not machine.status["alive"])


def is_named(error) -> None:
    assert f"used by run {RUN}" in error.what
    assert f"owner {OWNER}, from " in error.why
    assert f"`mgpu stop {RUN}`" in error.next_step


def refused(call, *given, **more) -> agent_client.Used:
    with pytest.raises(agent_client.Used) as caught:
        call(*given, **more)
    return caught.value


@pytest.mark.drawn("runs that meet on a machine")
@pytest.mark.parametrize("owner", [OWNER, "other"])
@pytest.mark.parametrize("kind", ["container", "machine"])
def test_whoever_comes_second_is_refused(training, images, owner, kind):
    if kind == "container":
        is_named(refused(training.up, images.first, OTHER, owner=owner))
    else:
        is_named(refused(training.equip, OTHER, owner=owner))


def test_the_run_itself_may_come_again(machine, images):
    """A later attempt, or a takeover."""
    machine.up(images.first)
    machine.start(SLEEPS)
    machine.until(lambda: "it runs" in machine.said)
    machine.up(images.first)
    assert machine.status["alive"] is True
    machine.up(images.second)
    assert machine.container["Config"]["Labels"]["number"] == "2"


def test_an_agent_that_was_killed_keeps_nobody_out(machine, images):
    machine.up(images.first)
    machine.start(SLEEPS)
    machine.until(lambda: "it runs" in machine.said)
    machine.engine.docker("kill", machine.container["Id"])
    machine.up(images.first, OTHER)
    assert machine.container["Config"]["Labels"]["dev.mgpu.run"] == OTHER


@pytest.mark.parametrize("kind", ["container", "machine"])
def test_who_was_overtaken_before_its_agent_started_starts_none(machine, images, kind):
    """Not in the other's container, and not outside of its own image."""
    machine.up(images.first)
    machine.up(images.second, OTHER) if kind == "container" else machine.equip(OTHER)
    error = refused(machine.start, SLEEPS)
    assert f"used by run {OTHER}" in error.what
    assert not (machine.home / RunLayout(RUN).status).exists()
    machine.start(SLEEPS, OTHER)
    said = json.loads(machine.node.read(str(RunLayout(OTHER).status)))
    assert not Phase(said["phase"]).final
    agent_client.stop(machine.node, OTHER, machine.timeouts, now=True)


def test_a_run_that_is_over_ends_nobody_elses_container(machine, images):
    machine.up(images.first, OTHER)
    machine.up(images.first)
    assert machine.down(OTHER) == 0
    assert len(machine.ids()) == 1
