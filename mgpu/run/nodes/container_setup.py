"""The container that runs the agent on every node: made before an attempt, where the run has an image."""

from __future__ import annotations

import json
import time
from typing import Any

from mgpu_train.agent.host.python_env import OLDEST, ProblemKind
from mgpu_train.timeouts import Timeouts

from mgpu.errors import InputError
from mgpu.events import Emit, Note, Warned
from mgpu.iac.outputs import StackOutput
from mgpu.image.registry.reference import Reference
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.job.images import ImageToRun
from mgpu.run.nodes import agent_client, host_script
from mgpu.run.nodes.python_setup import needs_torch
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import on_this_machine
from mgpu.words import count

_BOOT_S = 60.0  # an engine starts with its machine, and SSH may be there before it
_MUTE = ("cannot make a container", "The machine's own Python has to be 3.8 or newer.")
_CURES = {
    ProblemKind.PERMISSION: (
        "this user may not speak to Docker",
        "Put the user into the group `docker` on the machine image: `usermod -aG docker <user>`.",
    ),
    ProblemKind.GPU: (
        "Docker has no GPUs for containers",
        "Take a machine image with NVIDIA's driver and container toolkit: `nvidia-ctk runtime configure`.",
    ),
    ProblemKind.DISK: ("no room for the image", "Raise `disk_gib`, or make the image smaller."),
    ProblemKind.ABSENT: ("the image is not in its registry", "Push it again: `mgpu image push`."),
    ProblemKind.DENIED: (
        "the registry refuses the image",
        "Log in where mgpu runs (`docker login`) as somebody who may pull it. From ECR machines pull by their own "
        "role: `mgpu bootstrap aws --repository NAME` lets them.",
    ),
    ProblemKind.LIMIT: (
        "the registry lets nobody pull as often as that",
        "Log in where mgpu runs (`docker login`), push the image to a registry of your own, or wait and run again.",
    ),
    ProblemKind.PULL: (
        "the image could not be pulled in time",
        "Give the nodes a way to the registry (a NAT gateway, or endpoints of the subnet), or a faster one, and run "
        "again.",
    ),
    ProblemKind.UNPACK: (
        "Docker cannot unpack the image",
        "Look at its storage there (`docker info`, `journalctl -u docker`), or take another machine image.",
    ),
    ProblemKind.DIGEST: (
        "another image came than was asked for",
        "It was not started. Look at what stands between the nodes and the registry, and push again.",
    ),
    ProblemKind.PLATFORM: ("the image is for other machines", "Build it for these: `image: {platform: ...}`."),
    ProblemKind.REFERENCE: ("the image is not named by its digest", "Give it as repository@sha256:..."),
    ProblemKind.MOUNT: ("a folder cannot be made for the container", "Make it on the machine image, for this user."),
    ProblemKind.OLD: (
        f"the image needs Python {'.'.join(map(str, OLDEST))} or newer as `python3` on its PATH",
        "Build it from another base, or set PATH in its Dockerfile.",
    ),
    ProblemKind.TORCH: (
        "the image needs PyTorch for its `python3`",
        "Install it there, or name torch in requirements.",
    ),
    ProblemKind.PIP: (
        "what the agent needs cannot be installed",
        "Install venv and pip in the image (Debian: python3-venv).",
    ),
    ProblemKind.PACKAGES: (
        "what the agent needs cannot be installed",
        "Put pydantic, boto3 and awscrt into the image, or give the nodes a way to a package index.",
    ),
    ProblemKind.BUSY: ("somebody else makes its container", "Wait until the other `mgpu` is done, and run again."),
    ProblemKind.RUN: ("the container does not run", "See what Docker says there: `docker ps --all`, `docker logs`."),
}


def up(
    nodes: NodeSet,
    image: ImageToRun,
    spec: RunSpec,
    fleet: StackOutput,
    run_id: str,
    timeouts: Timeouts,
    emit: Emit,
    folders: tuple[str, ...] = (),
) -> None:
    """Makes every node run the agent in the image, once `agent_client.send_library` has sent it; quick where that
    stands. What is called later (`agent_client`) stays as it is. `folders`: of the node, that the agent reads and
    writes.

    Raises:
        Used: another run trains on a node; it is left alone.
        RemoteError: a node that cannot pull or run it: why, and the cure.
        ImageError: nobody gives a login for its registry.
        InputError: a login that cannot be handed on.
    """
    begin = time.monotonic()
    wanted = _wanted(image, spec, fleet, run_id, timeouts) | {"writable": [*(item.to for item in spec.data), *folders]}
    lacks = {node.target.rank for node in nodes.nodes} - _having(nodes, image, timeouts)
    login = _login(image) if lacks else {}  # nobody is told a password without need
    answers = nodes.each(
        lambda node: _call(
            node, "up", {**wanted, **(login if node.target.rank in lacks else {})}, fleet.provider, timeouts
        )
    )
    _tell(answers, time.monotonic() - begin, emit)


def _tell(answers: list[dict[str, Any]], seconds: float, emit: Emit) -> None:
    pulled, nodes = sum(answer["pulled"] for answer in answers), count(len(answers), "node")
    there = [f"{how} on {on}" for how, on in (("pulled", pulled), ("already", len(answers) - pulled)) if on]
    emit(Note(f"image: {', '.join(there)} of {nodes}, containers ready in {seconds:.0f} s"))
    if fresh := sum(answer["installed"] for answer in answers):
        emit(Note(f"the packages that the agent needs were installed for the image on {fresh} of {nodes}"))
    if capped := sum(answer["capped"] for answer in answers):
        why = "its engine cannot lift the limit of locked memory: InfiniBand may not work"
        emit(Warned(f"in the containers of {capped} of {nodes} {why}"))


def down(nodes: NodeSet, fleet: StackOutput, run_id: str, timeouts: Timeouts) -> int:
    """Ends a run's containers on a fleet that stays, and returns how many there were; an agent in one stops in order
    first.

    Raises:
        RemoteError: a node could not be reached, or its Docker refuses.
    """
    wanted = {**agent_client.claim(run_id, fleet), "stop_s": timeouts.stop_grace_s, "seconds": _down_s(timeouts)}
    return sum(
        answer["removed"] for answer in nodes.each(lambda node: _call(node, "down", wanted, fleet.provider, timeouts))
    )


def docker_cure(provider: str) -> str:
    """What to do where a node of this provider has no Docker that answers."""
    get = "Start Docker here" if on_this_machine(provider) else "Take a machine image that has Docker, and runs it"
    return f"{get}. Or leave `image:` out: the agent then runs without a container."


def _down_s(timeouts: Timeouts) -> float:
    return timeouts.stop_grace_s + timeouts.kill_s + timeouts.command_s


def _wanted(image: ImageToRun, spec: RunSpec, fleet: StackOutput, run_id: str, timeouts: Timeouts) -> dict[str, Any]:
    """What `mgpu_train.agent.host.container.Wanted` says; nothing secret."""
    return {
        **agent_client.claim(run_id, fleet),
        "fleet": fleet.fleet,
        "reference": image.reference,
        "bytes": image.compressed_bytes,
        "gpus": spec.gpus_per_node,
        "torch": needs_torch(spec),
        "stop_s": timeouts.stop_grace_s,
        "boot_s": 0.0 if on_this_machine(fleet.provider) else _BOOT_S,
        "seconds": timeouts.prepare_s,
    }


def _having(nodes: NodeSet, image: ImageToRun, timeouts: Timeouts) -> set[int]:
    """Ranks of the nodes that have the image already."""
    ask = ["docker", "image", "inspect", "--format", "{{.Id}}", image.reference]
    answers = nodes.each(lambda node: node.run(ask, timeout=timeouts.command_s, check=False))
    return {node.target.rank for node, answer in zip(nodes.nodes, answers, strict=True) if answer.status == 0}


def _login(image: ImageToRun) -> dict[str, dict[str, str]]:
    """What nodes are told of who pulls: that it is their own role, or a name and a password."""
    registry = Reference.parse(image.reference).registry
    if image.by_role:
        return {"role_login": {"registry": registry, **image.by_role}}
    login = image.auth()
    if login is None:
        return {}
    if login.identity_token:
        raise InputError(
            f"the login for {registry} cannot be handed to the nodes",
            "It is an identity token, which only the program that got it can use.",
            f"Log in with a name and a password: `docker login --username ... {registry}`.",
        )
    return {"login": {"registry": registry, "username": login.username, "password": login.password}}


def _call(node: Node, verb: str, wanted: dict[str, Any], provider: str, timeouts: Timeouts) -> dict[str, Any]:
    # what is there already is stopped first, in the worst case
    limit, told = wanted["seconds"] + timeouts.stop_grace_s, json.dumps(wanted).encode()
    cures = {**_CURES, ProblemKind.DOCKER: ("Docker does not answer", docker_cure(provider))}
    return host_script.ask(node, "container.py", verb, seconds=limit, cures=cures, mute=_MUTE, stdin=told)
