"""What is sent to nodes to speak with is what speaks here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import mgpu_train
import pytest
from mgpu_train.agent.host.layout import LIB, RunLayout
from mgpu_train.agent.machine import identity
from mgpu_train.timeouts import Timeouts

from mgpu.errors import CommandFailed
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


class Older:
    """A node on which another version of mgpu has started the run's agent."""

    def __init__(self, agent: bytes) -> None:
        self.target, self.agent, self.asked = SimpleNamespace(rank=0), agent, []

    def run(self, argv, **_):
        home = argv[1].removeprefix("PYTHONPATH=")
        if home != str(LIB / "of-another"):
            raise CommandFailed("node 0: env ended with exit code 127", status=127)
        assert argv[2] == f"{home}/python"
        self.asked.append(argv[argv.index("agent") + 1 :])
        return SimpleNamespace(stdout=b'{"alive": true}')

    def read(self, path):
        assert path == str(RunLayout("r").agent)
        if not self.agent:
            raise FileNotFoundError(path)
        return self.agent


def test_an_agent_of_another_version_is_asked_in_its_own_folder():
    node = Older(b'{"attempt": 1, "process": {"pid": 1, "start_ticks": 2}, "library": "of-another"}')
    assert agent_client.status(node, "r", Timeouts()) == {"alive": True}
    agent_client.stop(node, "r", Timeouts(), now=True)
    agent_client.renew(node, "r", {}, Timeouts())
    assert [words[0] for words in node.asked] == ["status", "stop", "renew"]


@pytest.mark.parametrize("agent", [b"", b"{", b"[]", b"{}"])
def test_where_no_agent_has_been_there_is_none_to_ask(agent):
    with pytest.raises(CommandFailed, match="127"):
        agent_client.stop(Older(agent), "r", Timeouts())


def test_an_agent_says_where_its_code_lies(tmp_path):
    layout = RunLayout("r", tmp_path)
    layout.agent.parent.mkdir(parents=True)
    identity.write(layout, 3)
    said = json.loads(layout.agent.read_bytes())
    assert (tmp_path / said["library"]).name == Path(mgpu_train.__file__).parents[1].name
    assert identity.read(layout).attempt == 3
