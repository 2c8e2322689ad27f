"""Nodes are asked for their containers together, a password goes only where it is needed, and problems have cures."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest
from mgpu_train.agent.host import container
from mgpu_train.agent.host.container import Wanted
from mgpu_train.agent.host.python_env import PROBLEM, ProblemKind

from mgpu.errors import ImageError, InputError, RemoteError
from mgpu.events import Note, Warned
from mgpu.iac.outputs import NodeOutput, StackOutput
from mgpu.image.registry.auth import Login
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.targets import Result, Target
from mgpu.run.job.images import ImageToRun
from mgpu.run.nodes import agent_client, container_setup
from mgpu.spec.model import RunSpec

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGtra2tra2tra2tra2tra2tra2tra2tra2tra2tr"
REFERENCE = "registry.example:5000/train@sha256:" + "a" * 64
ANSWER = {"container": "c", "made": True, "pulled": False, "capped": False, "python": "/p", "installed": False}


class Node:
    """A node's answers, and what it was asked."""

    def __init__(self, rank: int, *, has: bool = True, **said) -> None:
        self.target = Target(rank, "127.0.0.1", 22, "u", KEY)
        self.has = has
        self.result = Result(0, json.dumps({**ANSWER, "pulled": not has, **said}).encode(), b"")
        self.wanted: dict = {}
        self.verb, self.argv = "", []

    def run(self, argv, *, stdin=b"", timeout, check):
        assert timeout > 0
        assert check is False
        if argv[0] == "docker":
            return Result(0 if self.has else 1, b"", b"")
        self.argv, self.verb, self.wanted, self.limit = argv, argv[3], json.loads(stdin), timeout
        return self.result


def spec(**more) -> RunSpec:
    base = {"name": "a", "provider": "aws", "max_hours": 1, "max_price_usd_per_hour": 1, "command": ["t.py"]}
    return RunSpec.model_validate(base | more)


def fleet(owner: str = "me") -> StackOutput:
    node = NodeOutput(rank=0, id="i", address="h", user="u", host_key=KEY)
    return StackOutput(version=1, fleet="f", owner=owner, provider="aws", private_key_file="/k", nodes=(node,))


def up(nodes, timeouts, image=None, **more) -> list:
    events: list = []
    container_setup.up(
        NodeSet(nodes), image or ImageToRun(REFERENCE), spec(**more), fleet(), "r", timeouts, events.append
    )
    return events


@pytest.fixture
def timeouts(world):
    return world.timeouts


def test_a_login_goes_only_to_nodes_that_pull_and_is_asked_for_only_then(timeouts):
    asked: list[int] = []

    def auth() -> Login:
        asked.append(1)
        return Login("user", "canary")

    image = ImageToRun(REFERENCE, 5, auth)
    up([Node(0), Node(1)], timeouts, image)
    assert asked == []
    nodes = [Node(0), Node(1, has=False), Node(2, has=False)]
    up(nodes, timeouts, image)
    up(nodes[:2], timeouts, image)
    assert asked == [1, 1], "once each time, for all nodes"
    login = {"registry": "registry.example:5000", "username": "user", "password": "canary"}
    assert [node.wanted.get("login") for node in nodes] == [None, login, login]
    assert not any("canary" in " ".join(node.argv) for node in nodes)


def test_where_machines_pull_by_their_own_role_nobody_is_asked_for_a_login(timeouts):
    def auth() -> Login:
        raise AssertionError("no token of the operator's leaves this machine")

    nodes = [Node(0), Node(1, has=False)]
    up(nodes, timeouts, ImageToRun(REFERENCE, 5, auth, {"region": "eu-west-1", "endpoint": ""}))
    by_role = {"registry": "registry.example:5000", "region": "eu-west-1", "endpoint": ""}
    assert [node.wanted.get("role_login") for node in nodes] == [None, by_role]
    assert not any("login" in node.wanted for node in nodes)


def test_a_password_is_not_printed():
    auth = partial(Login, "user", "canary")
    assert "canary" in repr(auth)
    assert "canary" not in repr(ImageToRun(REFERENCE, None, auth))


def test_an_identity_token_is_not_handed_on(timeouts):
    image = ImageToRun(REFERENCE, None, lambda: Login("", "", identity_token="canary"))
    with pytest.raises(InputError, match="cannot be handed") as caught:
        up([Node(0, has=False)], timeouts, image)
    assert "canary" not in str(caught.value)


def test_a_login_that_nobody_gives_is_an_error_only_where_it_is_needed(timeouts):
    def auth() -> Login:
        raise ImageError("no login")

    up([Node(0)], timeouts, ImageToRun(REFERENCE, None, auth))
    with pytest.raises(ImageError, match="no login"):
        up([Node(0, has=False)], timeouts, ImageToRun(REFERENCE, None, auth))


def test_what_is_wanted_is_what_a_node_reads(timeouts):
    node = Node(0)
    data = [{"from": "s3://data/a", "to": "/fast"}]
    up([node], timeouts, ImageToRun(REFERENCE, 7), gpus_per_node=8, data=data, launcher="torchrun")
    assert container._read(json.dumps(node.wanted)) == Wanted(
        owner="me", host=os.uname().nodename, seconds=timeouts.prepare_s, stop_s=timeouts.stop_grace_s, boot_s=60,
        fleet="f", run="r", reference=REFERENCE, bytes=7, gpus=8, torch=True, writable=("/fast",), login=None,
    )  # fmt: skip
    assert node.limit > timeouts.prepare_s, "the node's own deadline comes first"


def test_what_was_done_is_told(timeouts):
    events = up([Node(0), Node(1, has=False), Node(2, installed=True, capped=True)], timeouts)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes[0].startswith("image: pulled on 1, already on 2 of 3 nodes, containers ready in")
    assert "installed for the image on 1 of 3 nodes" in notes[1]
    (warned,) = [event.text for event in events if isinstance(event, Warned)]
    assert "1 of 3 nodes" in warned


@pytest.mark.parametrize(("has", "said"), [(True, "already"), (False, "pulled")])
def test_what_was_done_on_all_nodes_is_one_word(timeouts, has, said):
    (note,) = up([Node(0, has=has), Node(1, has=has)], timeouts)
    assert note.text.startswith(f"image: {said} on 2 of 2 nodes, containers ready")


@pytest.mark.parametrize(
    ("provider", "boot_s", "cure"), [("local", 0, "Start Docker here"), ("aws", 60, "machine image")]
)
def test_an_engine_that_cannot_be_starting_is_not_waited_for_and_is_started_by_the_user(
    timeouts, provider, boot_s, cure
):
    node, told = Node(0), json.dumps({"problem": "docker", "why": "w"}).encode()
    node.result = Result(PROBLEM, told, b"")
    there = fleet().model_copy(update={"provider": provider})
    with pytest.raises(RemoteError, match="Docker does not answer") as caught:
        container_setup.up(NodeSet([node]), ImageToRun(REFERENCE), spec(), there, "r", timeouts, lambda _: None)
    assert cure in caught.value.next_step
    assert node.wanted["boot_s"] == boot_s


@pytest.mark.parametrize("kind", sorted(set(ProblemKind) - {ProblemKind.USED}))
def test_a_problem_is_named_with_its_cause_and_its_cure(timeouts, kind):
    node = Node(1)
    node.result = Result(PROBLEM, json.dumps({"problem": kind, "why": "that is why"}).encode(), b"")
    with pytest.raises(RemoteError) as caught:
        up([Node(0), node], timeouts)
    assert caught.value.what.startswith("node 1 (")
    assert caught.value.why == "that is why"
    assert caught.value.next_step


def test_every_problem_that_a_node_may_name_has_a_cure():
    assert set(ProblemKind) == {ProblemKind.USED, ProblemKind.DOCKER, *container_setup._CURES}


def test_another_run_on_a_node_is_named_with_what_to_do(timeouts):
    node = Node(1)
    why = {"problem": "used", "why": "Run theirs (owner you, from there) trains there.", "run": "theirs"}
    node.result = Result(PROBLEM, json.dumps(why).encode(), b"")
    with pytest.raises(agent_client.Used, match=r"node 1 .* is used by run theirs") as caught:
        up([Node(0), node], timeouts)
    assert caught.value.why == why["why"]
    assert "`mgpu stop theirs`" in caught.value.next_step


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (Result(127, b"", b"sh: 1: python3: not found\n"), "not found"),
        (Result(1, b"", b"SyntaxError: invalid syntax"), "SyntaxError"),
        (Result(PROBLEM, b"[]", b""), "status 3"),
        (Result(PROBLEM, b'{"problem": "new"}', b""), "status 3"),
        (Result(0, b"", b""), "status 0"),
    ],
    ids=["no python", "too old", "no object", "unknown", "silent"],
)
def test_a_machine_that_cannot_even_answer_is_named(timeouts, result, why):
    node = Node(0)
    node.result = result
    with pytest.raises(RemoteError, match="python3 cannot make a container") as caught:
        up([node], timeouts)
    assert why in caught.value.why


def test_down_asks_all_and_counts(timeouts):
    nodes = [Node(0), Node(1)]
    for node in nodes:
        node.result = Result(0, b'{"removed": 1}', b"")
    assert container_setup.down(NodeSet(nodes), fleet(), "r", timeouts) == 2
    assert nodes[0].verb == "down"
    read = container._read(json.dumps(nodes[0].wanted))
    assert (read.owner, read.run) == ("me", "r"), "of other runs none"


def test_machines_without_an_owner_are_known_by_their_fleet(timeouts):
    node = Node(0)
    container_setup.up(NodeSet([node]), ImageToRun(REFERENCE), spec(), fleet(""), "r", timeouts, lambda _: None)
    assert node.wanted["owner"] == "f"
    node.result = Result(0, b'{"removed": 0}', b"")
    container_setup.down(NodeSet([node]), fleet(""), "r", timeouts)
    assert node.wanted["owner"] == "f"
