"""Nodes with containers: a real engine, real registries, SSH, and the real agent in an image that has what it needs.

The nodes are processes of this machine; their commands speak to the engine of the tests.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import pyimage
from fakes.containers import OWNER, Machine


@pytest.fixture(scope="session")
def images(engine, registry, locked_registry, tmp_path_factory) -> SimpleNamespace:
    """References by digest: images that run the agent, one of them in a registry with a lock; one without Python."""
    folder = tmp_path_factory.mktemp("image")
    pyimage.build(engine, folder)
    for number in (2, 3):
        lines = f"FROM python:1\nLABEL number={number}\nSTOPSIGNAL SIGQUIT\n"  # a user's image may have any
        pyimage.dockerfile(engine, folder, f"python:{number}", lines)
    pyimage.dockerfile(engine, folder, "bare:1", "FROM base:1\nLABEL bare=1\n")
    return SimpleNamespace(
        locked=pyimage.push(engine, locked_registry, "python:3"),
        second=pyimage.push(engine, registry, "python:2"),
        first=pyimage.push(engine, registry, "python:1"),
        bare=pyimage.push(engine, registry, "bare:1"),
    )


@pytest.fixture
def programs(tmp_path, engine) -> Path:
    """A folder before all others on PATH: its `docker` writes down how it was called, and calls the real one."""
    folder, log = tmp_path / "programs", tmp_path / "calls"
    folder.mkdir()
    real = shutil.which("docker", path=engine.env["PATH"])
    (folder / "docker").write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\n'
        f'test -z "$DOCKER_CONFIG" || stat --format "config %a %n" "$DOCKER_CONFIG" >> {log}\nexec {real} "$@"\n'
    )
    (folder / "docker").chmod(0o755)
    return folder


@pytest.fixture
def new_machine(tmp_path, engine, programs, timeouts, new_server, open_node, monkeypatch):
    """`new_machine()`: a node whose commands speak to the engine; `environment` lies over theirs."""
    made = []

    def make(on=engine, **environment: str) -> Machine:
        given = {"DOCKER_HOST": on.host, "PATH": f"{programs}:{on.env['PATH']}", **environment}
        with monkeypatch.context() as patch:
            patch.delenv("DOCKER_CONFIG", raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            server = new_server()
        times = timeouts.model_copy(update={"prepare_s": 120, "stop_grace_s": 10, "kill_s": 10})
        made.append(Machine(on, server, open_node(server, python=sys.executable), times, tmp_path / "calls"))
        return made[-1]

    yield make
    for machine in made:
        for owner in (OWNER, "other") if (machine.engine.folder / "sock").exists() else ():
            if ids := machine.ids(owner):
                machine.engine.docker("rm", "--force", "--volumes", *ids)


@pytest.fixture
def machine(new_machine) -> Machine:
    return new_machine()
