"""The node's interpreter is made ready before anything is started there, and what is wrong with it is said by name."""

from __future__ import annotations

import json

import pytest
from mgpu_train.agent.host.python_env import PROBLEM

from mgpu.errors import RemoteError
from mgpu.events import Note
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.providers.base import NETWORK
from mgpu.remote.targets import Result, Target
from mgpu.run.job.stack_output import targets
from mgpu.run.nodes import python_setup
from mgpu.run.nodes.python_setup import needs_torch
from mgpu.spec.model import RunSpec

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGtra2tra2tra2tra2tra2tra2tra2tra2tra2tra2tr"


def spec(**more) -> RunSpec:
    base = {"name": "a", "provider": "aws", "max_hours": 1, "max_price_usd_per_hour": 1}
    return RunSpec.model_validate({**base, "command": ["t.py"], **more} if "train" not in more else {**base, **more})


def answers(node, status, **said):
    node.equipped = Result(status, json.dumps(said).encode(), b"")


@pytest.mark.parametrize(
    ("kind", "words", "cure"),
    [
        ("old", "Python 3.11 or newer is needed", "aws: {python: /path/to/python}"),
        ("torch", "PyTorch is needed", "aws: {python: /path/to/python}"),
        ("pip", "cannot be installed", "python3-venv"),
        ("packages", "cannot be installed", "package index"),
        ("busy", "somebody else installs", "other `mgpu` is done"),
    ],
)
def test_a_problem_is_named_with_its_cause_and_its_cure(world, kind, words, cure):
    nodes = world.has_nodes(2)
    answers(world.nodes[1], PROBLEM, problem=kind, why="that is why")
    with pytest.raises(RemoteError) as caught:
        python_setup.equip(nodes, spec(), world.timeouts, world.events.append)
    assert caught.value.what.startswith("node 1 (")
    assert words in caught.value.what
    assert caught.value.why == "that is why"
    assert cure in caught.value.next_step


def test_an_interpreter_that_is_not_there_is_named(world):
    nodes = world.has_nodes(1)
    world.nodes[0].target = Target(0, "127.0.0.1", 22, "u", KEY, None, "/opt/pytorch/bin/python")
    world.nodes[0].equipped = Result(127, b"", b"sh: 1: /opt/pytorch/bin/python: not found\n")
    with pytest.raises(RemoteError, match="/opt/pytorch/bin/python cannot run the agent") as caught:
        python_setup.equip(nodes, spec(), world.timeouts, world.events.append)
    assert "not found" in caught.value.why


def test_what_was_installed_is_told_once(world):
    nodes = world.has_nodes(3)
    answers(world.nodes[1], 0, python="/x", installed=True)
    python_setup.equip(nodes, spec(), world.timeouts, world.events.append)
    (note,) = world.of(Note)
    assert "on 1 of 3 nodes" in note.text


@pytest.mark.parametrize(
    ("more", "needed"),
    [
        ({"train": {}}, True),
        ({}, True),
        ({"code": {"workdir": "."}}, True),
        ({"code": {"requirements": "r.txt"}}, False),
        ({"launcher": "python"}, False),
    ],
)
def test_torch_is_asked_of_the_image_where_nothing_else_brings_it(more, needed):
    assert needs_torch(spec(**more)) is needed


def test_the_nodes_interpreter_is_that_of_the_stack_output():
    node = NodeOutput(rank=0, id="i", address="h", user="u", host_key=KEY, python="/opt/pytorch/bin/python")
    fleet = StackOutput(version=1, fleet="f", provider="aws", private_key_file="/k", nodes=(node,))
    assert targets(fleet)[0].python == "/opt/pytorch/bin/python"


def test_from_within_their_network_nodes_are_reached_at_their_private_addresses(monkeypatch):
    node = NodeOutput(rank=0, id="i", address="198.51.100.1", private_address="10.0.0.1", user="u", host_key=KEY)
    fleet = StackOutput(version=1, fleet="f", provider="aws", private_key_file="/k", nodes=(node,))
    assert targets(fleet)[0].address == "198.51.100.1"
    monkeypatch.setenv(NETWORK, "vpc-1")
    assert targets(fleet)[0].address == "10.0.0.1"
