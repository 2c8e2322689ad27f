"""Containers of a node of provider local: its engine outlives it, so they are ended with it, and no others."""

from __future__ import annotations

import os

import pytest

from mgpu.providers.local import containers, nodes, procs


@pytest.fixture
def home(tmp_path):
    """A node's home; its node has had a container."""
    made = tmp_path / "home"
    (made / ".mgpu").mkdir(parents=True)
    (made / ".mgpu" / "container.lock").touch()
    return made


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """`docker(says, sleeps)`: a program of that name; returns the file with a line for each call."""

    def make(says="c1\\nc2\\n", sleeps=""):
        folder, calls = tmp_path / "bin", tmp_path / "calls"
        folder.mkdir()
        calls.touch()
        program = folder / "docker"
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{sleeps}\ntest "$1" != ps || printf "{says}"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return calls

    return make


def test_those_of_its_home_are_removed_and_no_others(home, docker):
    calls = docker()
    containers.remove(home)
    assert calls.read_text().splitlines() == [
        f"ps --all --quiet --filter=label=dev.mgpu.home={home}", "rm --force --volumes c1 c2"
    ]  # fmt: skip


def test_where_there_is_none_nothing_is_removed(home, docker):
    calls = docker(says="")
    containers.remove(home)
    assert len(calls.read_text().splitlines()) == 1


def test_a_node_that_never_had_one_asks_nobody(home, docker):
    calls = docker()
    (home / ".mgpu" / "container.lock").unlink()
    containers.remove(home)
    assert calls.read_text() == ""


def test_an_engine_that_is_silent_keeps_no_node_alive(home, docker, monkeypatch):
    monkeypatch.setattr(containers, "_DOCKER_S", 0.1)
    docker(sleeps="exec sleep 60")
    containers.remove(home)


def test_without_docker_nothing_is_done(home, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    containers.remove(home)


def test_sessions_speak_to_this_machines_engine_and_its_containers_carry_the_mark(tmp_path):
    from mgpu_train.agent.host import container

    environment = nodes.login_environment(nodes.Instance(tmp_path, "i-1"), {"DOCKER_HOST": "unix:///x", "OTHER": "1"})
    assert environment["DOCKER_HOST"] == "unix:///x"
    assert "OTHER" not in environment
    assert procs.MARK in container._PASSED, "what runs in there is found and ended as a process of the node"
