"""One container for the run that uses a node, as long as it does; nobody else's is touched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fakes.containers import RUN

from mgpu.run.nodes import agent_client


def test_it_is_made_once_and_kept(machine, images, engine):
    engine.docker("rmi", "--force", images.first, check=False)
    machine.up(images.first)
    first = machine.container
    machine.up(images.first)
    assert machine.container["Id"] == first["Id"]
    assert "pulled on 1 of 1 node," in machine.noted
    assert "already on 1 of 1 node," in machine.noted
    assert machine.pulls == 1


def test_two_operators_at_once_make_one(machine, images):
    agent_client.send_library(machine.nodes)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: machine.up(images.first, send=False), range(2)))
    assert len(machine.ids()) == 1


def test_another_digest_of_the_same_run_takes_its_place(machine, images):
    machine.up(images.first)
    old = machine.container
    machine.up(images.second)
    assert machine.container["Id"] != old["Id"]
    assert machine.container["Config"]["Labels"]["number"] == "2"


def test_another_run_takes_its_place(machine, images):
    machine.up(images.first, "older-run")
    machine.up(images.first)
    assert machine.container["Config"]["Labels"]["dev.mgpu.run"] == RUN
    assert machine.container["Name"].startswith(f"/mgpu-{RUN}-")


def test_what_was_killed_is_made_anew(machine, images):
    """F44."""
    machine.up(images.first)
    old = machine.container["Id"]
    machine.engine.docker("kill", old)
    machine.up(images.first)
    assert machine.container["Id"] != old
    assert machine.container["State"]["Running"]


def test_what_is_paused_is_made_anew(machine, images):
    machine.up(images.first)
    old = machine.container["Id"]
    machine.engine.docker("pause", old)
    machine.up(images.first)
    assert machine.container["Id"] != old


def test_nobody_elses_container_is_touched(new_machine, images):
    """F44."""
    machine, neighbour = new_machine(), new_machine()
    neighbour.up(images.first)
    machine.up(images.first, owner="other")
    run = ["run", "--detach", "--network=host", "--init"]
    named = machine.engine.docker(*run, "--name", f"mgpu-{RUN}", "base:1", "sleep", "600").stdout.strip()
    try:
        machine.up(images.first)
        assert machine.down() == 1
        assert machine.ids() == []
        running = machine.engine.docker("ps", "--quiet", "--no-trunc").stdout.split()
        assert {named, *machine.ids("other"), *neighbour.ids()} <= set(running)
        assert len(machine.ids("other")) == len(neighbour.ids()) == 1
    finally:
        machine.engine.docker("rm", "--force", named)


def test_what_ignores_the_request_is_killed_after_the_grace(machine, images):
    """F44."""
    machine.up(images.first)
    machine.inside("sh", "-c", "(trap '' TERM; exec sleep 600) > /dev/null 2>&1 &")
    assert machine.down(stop_grace_s=1) == 1
    assert machine.ids() == []


def test_down_is_content_with_nothing(machine, images):
    agent_client.send_library(machine.nodes)
    assert machine.down() == 0
    machine.up(images.first)
    assert (machine.down(), machine.down()) == (1, 0)
