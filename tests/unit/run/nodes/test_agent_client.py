"""What is sent to nodes to speak with is what speaks here."""

from __future__ import annotations

from types import SimpleNamespace

import mgpu_train
import pytest

from mgpu.run.nodes import agent_client


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "mgpu_train"
    folder.mkdir()
    (folder / "__init__.py").write_text("version = 1")
    monkeypatch.setattr(mgpu_train, "__file__", str(folder / "__init__.py"))
    agent_client.library.cache_clear()
    yield folder
    agent_client.library.cache_clear()


def test_an_upgrade_does_not_change_the_agent_under_a_supervisor_that_runs(package):
    """Its other nodes, and other runs on them, have the folder of that name."""
    sent = []
    nodes = SimpleNamespace(
        sync=lambda snapshot, dest: sent.append((dest, b"".join(snapshot.stream([*snapshot.entries]))))
    )
    agent_client.send_library(nodes)
    (package / "__init__.py").write_text("version = 2")
    (package / "more.py").write_text("")
    agent_client.send_library(nodes)
    assert sent[0] == sent[1]
    agent_client.library.cache_clear()  # another process
    agent_client.send_library(nodes)
    assert sent[2][0] != sent[0][0]
    assert b"version = 2" in sent[2][1]


def test_its_folder_has_the_same_name_wherever_the_same_version_is(package):
    """Who attaches from another machine asks the agents there."""
    _, home = agent_client.library()
    (package / "__init__.py").chmod(0o777)  # a file system without modes
    (package / ".DS_Store").write_text("of a desktop")
    agent_client.library.cache_clear()  # another machine
    assert agent_client.library()[1] == home
