"""What runs the agent on a node: the node's own interpreter, or an environment beside it that has what it lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mgpu_train import launchers
from mgpu_train.agent.host.python_env import OLDEST, PROBLEM
from mgpu_train.timeouts import Timeouts

from mgpu.errors import RemoteError
from mgpu.events import Emit, Note
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.targets import Result
from mgpu.run.nodes import agent_client
from mgpu.spec.model import RunSpec
from mgpu.spec.provider import installed, on_this_machine

_BASE = ".mgpu/base"  # where `python_env.py ready` makes environments, too
_NOBODY: Mapping[str, Any] = {}  # the agent of any run may start
_SPARE_S = 10.0  # for the node's answer to arrive, once it has given up by itself


def equip(nodes: NodeSet, spec: RunSpec, timeouts: Timeouts, emit: Emit, claim: Mapping[str, Any] = _NOBODY) -> None:
    """Makes every node able to run the agent that `agents.send_library` has sent; quick where nothing is missing.
    `claim`: for whom (`agents.claim`).

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
    """The machine's own interpreter that can run what `agents.send_library` has sent; what runs there stays as it is.

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
    script = f"{agent_client.library()[1]}/mgpu_train/agent/host/python_env.py"
    result = node.run([node.target.python, "-I", script, *arguments], timeout=seconds + _SPARE_S, check=False)
    answer = answer_of(result)
    if result.status == 0 and answer:
        return answer
    if result.status == PROBLEM and answer.get("problem") == "used":
        raise agent_client.used(node, answer)
    if result.status == PROBLEM and "problem" in answer:
        raise _problem(node, provider, str(answer["problem"]), str(answer.get("why", "")))
    why = result.stderr[-500:].decode("utf-8", "replace").strip() or f"It ended with status {result.status}."
    raise RemoteError(f"{node.target.label}: {node.target.python} cannot run the agent", why, _another(provider))


def answer_of(result: Result) -> dict[str, Any]:
    """What a script of the node side's has printed, its answer or its problem; empty: neither."""
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _problem(node: Node, provider: str, kind: str, why: str) -> RemoteError:
    name, oldest = node.target.label, ".".join(map(str, OLDEST))
    if kind == "old":
        return RemoteError(f"{name}: Python {oldest} or newer is needed", why, _another(provider))
    if kind == "torch":
        return RemoteError(f"{name}: PyTorch is needed", why, f"{_another(provider)} Or name torch in requirements.")
    if kind == "busy":
        cure = "Wait until the other `mgpu` is done, and run again."
        return RemoteError(f"{name}: somebody else installs what the agent needs", why, cure)
    cure = "Give the nodes a way to a package index, or a machine image that has pydantic, boto3 and awscrt."
    if kind == "pip":
        cure = "Install its venv and pip on the machine image (Debian: python3-venv), or take another interpreter."
    return RemoteError(f"{name}: what the agent needs cannot be installed", why, cure)


def _another(provider: str) -> str:
    entry = installed().found.get(provider)
    if entry is not None and "python" not in entry.options.model_fields:
        return "Name an image that has one: `image:` in the run file."
    key = f"`{provider}: {{python: /path/to/python}}`"
    image = "" if on_this_machine(provider) else ", or a machine image that has one"
    return f"Name an interpreter with torch, {key}{image}."
