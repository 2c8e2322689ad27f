"""The pull: by digest, with a password that stays nowhere, again while that helps, and only where there is room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import pyimage
from fakes.containers import WANTED, Machine, script
from fakes.engine import free_port, running_engine, running_registry
from fakes.registries import wire

from mgpu.image.registry import auth
from mgpu.run.job.images import ImageToRun
from mgpu.run.nodes import agent_client


def test_a_registrys_password_is_left_nowhere(machine, images, locked_registry, engine, monkeypatch):
    engine.docker("rmi", "--force", images.locked, check=False)
    given: list[list[str]] = []
    run = machine.node.run
    monkeypatch.setattr(machine.node, "run", lambda argv, **more: (given.append(argv), run(argv, **more))[1])
    login = auth.password(locked_registry.user, locked_registry.password)
    machine.up(ImageToRun(images.locked, 1000, login))
    assert "pulled on 1 of 1 node," in machine.noted
    folders = {call.split()[-1] for call in machine.calls if call.startswith("config ")}
    assert all(call.startswith("config 700 ") for call in machine.calls if call.startswith("config "))
    assert len(folders) == 1
    assert not Path(*folders).exists()
    assert locked_registry.password not in "\n".join([*machine.calls, *(" ".join(argv) for argv in given)])
    for file in (path for path in machine.home.rglob("*") if path.is_file()):
        assert locked_registry.password.encode() not in file.read_bytes()
    assert locked_registry.password not in json.dumps(machine.container)


def test_a_credential_store_of_the_node_is_not_asked(machine, images, locked_registry, engine, programs, tmp_path):
    """Docker's program takes one that it finds on PATH, unless its configuration has a login."""
    engine.docker("rmi", "--force", images.locked, check=False)
    for name in ("secretservice", "pass"):
        store = programs / f"docker-credential-{name}"
        store.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/stored\ncat >> {tmp_path}/stored\nexit 1\n')
        store.chmod(0o755)
    machine.up(ImageToRun(images.locked, 1000, auth.password(locked_registry.user, locked_registry.password)))
    assert "pulled on 1 of 1 node," in machine.noted
    assert not (tmp_path / "stored").exists()


def test_a_wrong_password_is_told_apart(machine, images, locked_registry, engine):
    engine.docker("rmi", "--force", images.locked, check=False)
    login = auth.password(locked_registry.user, "wr0ng-canary")
    error = machine.refused(ImageToRun(images.locked, None, login), "the registry refuses")
    assert "wr0ng-canary" not in str(error)
    assert machine.ids() == []


def test_a_pull_that_is_ended_leaves_no_password(machine, images, locked_registry, engine, programs):
    engine.docker("rmi", "--force", images.locked, check=False)
    agent_client.send_library(machine.nodes)
    login = {"username": locked_registry.user, "password": locked_registry.password}
    wanted = WANTED | {"reference": images.locked, "login": login | {"registry": locked_registry.address}}
    os.kill(locked_registry.pid, signal.SIGSTOP)
    process = _up_here(machine, programs, wanted)
    try:
        machine.until(lambda: any(call.startswith("config ") for call in machine.calls))
        (folder,) = {Path(call.split()[-1]) for call in machine.calls if call.startswith("config ")}
        assert folder.exists()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not folder.exists()
    finally:
        process.kill()
        os.kill(locked_registry.pid, signal.SIGCONT)


def test_a_digest_that_is_not_there_is_told_at_once(machine, images):
    machine.refused(images.first[:-8] + "0" * 8, "not in its registry")
    assert machine.pulls == 1


def test_a_tag_is_refused(machine, images):
    machine.refused(images.first.partition("@")[0] + ":1", "not named by its digest")
    assert machine.pulls == 0


def test_a_registry_that_is_away_for_a_while_is_waited_for(machine, images, registry, engine):
    """F45."""
    engine.docker("rmi", "--force", images.second, check=False)
    with wire(registry.address, cut_after=0) as line, ThreadPoolExecutor(1) as pool:
        reference = f"{line.address}/{images.second.partition('/')[2]}"
        up = pool.submit(machine.up, reference)
        machine.until(lambda: up.done() or machine.pulls > 1)  # the first has failed
        line.cut_after = None
        up.result()
    assert machine.pulls > 1
    assert machine.container["Config"]["Image"] == reference


def test_a_registry_that_stays_away_is_named_when_time_is_over(machine, images):
    """F45."""
    reference = f"127.0.0.1:{free_port()}/{images.first.partition('/')[2]}"
    error = machine.refused(reference, "could not be pulled in time", times={"prepare_s": 4})
    assert "refused" in error.why


def test_no_room_is_known_before_the_pull(machine, images, engine):
    """F45."""
    engine.docker("rmi", "--force", images.bare, check=False)
    error = machine.refused(ImageToRun(images.bare, 1 << 50), "no room for the image")
    assert "GiB free" in error.why
    assert machine.pulls == 0


def test_no_room_during_the_pull_is_not_tried_again(new_machine, images):
    """F45."""
    with running_engine(48) as small:
        machine = new_machine(small)
        machine.refused(images.first, "no room for the image")
        assert machine.pulls == 1


@pytest.mark.usefixtures("registry")  # skips where no registry can run
def test_a_registry_that_gives_other_bytes_than_were_named_is_not_believed(machine, engine, tmp_path):
    """F45."""
    with running_registry() as lying:
        pyimage.dockerfile(engine, tmp_path, "small:1", "FROM base:1\nLABEL small=1\n")
        reference = pyimage.push(engine, lying, "small:1")
        (manifest,) = lying.folder.rglob(f"blobs/sha256/*/{reference[-64:]}/data")
        manifest.write_bytes(manifest.read_bytes().replace(b"\n", b" "))
        error = machine.refused(reference, "another image came")
        assert "verification failed" in error.why
        assert machine.ids() == []


def _up_here(machine: Machine, programs: Path, wanted) -> subprocess.Popen:
    environment = {**os.environ, **machine.engine.env, "PATH": f"{programs}:{machine.engine.env['PATH']}"}
    environment.pop("DOCKER_CONFIG")
    command = [sys.executable, "-I", script(machine.home), "up"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    process.stdin.write(json.dumps(wanted).encode())
    process.stdin.close()
    return process
