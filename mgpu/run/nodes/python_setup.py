"""What runs the agent on a node: the node's own interpreter, or an environment beside it that has what it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mgpu_train import launchers
from mgpu_train.agent.host.python_env import OLDEST, ProblemKind
from mgpu_train.timeouts import Timeouts

from mgpu.events import Emit, Note
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.nodes import host_script
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import installed, on_this_machine

_BASE = ".mgpu/base"  # where `python_env.py ready` makes environments, too
_NOBODY: Mapping[str, Any] = {}  # the agent of any run may start


def equip(nodes: NodeSet, spec: RunSpec, timeouts: Timeouts, emit: Emit, claim: Mapping[str, Any] = _NOBODY) -> None:
    """Makes every node able to run the agent that `agent_client.send_library` has sent; quick where nothing is missing.
    `claim`: for whom (`agent_client.claim`).

    Raises:
        Used: another run trains on a node; it is left alone.
        RemoteError: an interpreter that is not there, is too old, or lacks torch; packages that cannot be had.
    """
    fresh = nodes.each(lambda node: _equip(node, spec, timeouts, claim))
    if count := sum(fresh):
        emit(Note(f"the packages that the agent needs were installed on {count} of {len(fresh)} nodes"))


def needs_torch(spec: RunSpec) -> bool:
    """Whether the node's interpreter has to bring torch; the requirements of a program may."""
    brings = spec.code is not None and spec.code.requirements is not None
    return "torch" in launchers.installed().found[spec.launcher].needs and not brings


def find(node: Node, provider: str, timeouts: Timeouts) -> str:
    """The machine's own interpreter that can run what `agent_client.send_library` has sent; what runs stays as it is.

    Raises:
        RemoteError: as `equip` does.
    """
    seconds = timeouts.prepare_s
    return str(_ask(node, provider, ["find", f"{seconds:g}", _BASE], seconds)["python"])


def _equip(node: Node, spec: RunSpec, timeouts: Timeouts, claim: Mapping[str, Any]) -> bool:
    """True when packages were installed."""
    seconds = timeouts.prepare_s
    torch = ["torch"] if needs_torch(spec) else []
    arguments = ["ready", f"{seconds:g}", json.dumps(dict(claim)), *torch]
    return bool(_ask(node, spec.provider, arguments, seconds).get("installed"))


def _ask(node: Node, provider: str, arguments: list[str], seconds: float) -> dict[str, Any]:
    another, cannot = _another(provider), "what the agent needs cannot be installed"
    cures = {
        ProblemKind.OLD: (f"Python {'.'.join(map(str, OLDEST))} or newer is needed", another),
        ProblemKind.TORCH: ("PyTorch is needed", f"{another} Or name torch in requirements."),
        ProblemKind.BUSY: (
            "somebody else installs what the agent needs",
            "Wait until the other `mgpu` is done, and run again.",
        ),
        ProblemKind.PIP: (
            cannot,
            "Install its venv and pip on the machine image (Debian: python3-venv), or take another interpreter.",
        ),
        ProblemKind.PACKAGES: (
            cannot,
            "Give the nodes a way to a package index, or a machine image that has pydantic, boto3 and awscrt.",
        ),
    }
    mute = ("cannot run the agent", another)
    return host_script.ask(node, "python_env.py", *arguments, seconds=seconds, cures=cures, mute=mute)


def _another(provider: str) -> str:
    entry = installed().found.get(provider)
    if entry is not None and "python" not in entry.options.model_fields:
        return "Name an image that has one: `image:` in the run file."
    key = f"`{provider}: {{python: /path/to/python}}`"
    image = "" if on_this_machine(provider) else ", or a machine image that has one"
    return f"Name an interpreter with torch, {key}{image}."
