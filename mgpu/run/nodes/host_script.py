"""Scripts of `mgpu_train.agent.host` that a node's own Python runs: asked, and what they say of a problem."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mgpu_train.agent.host.python_env import PROBLEM, ProblemKind

from mgpu.errors import RemoteError
from mgpu.remote.node import Node
from mgpu.run.nodes import agent_client

_SPARE_S = 10.0  # for the node's answer to arrive, once it has given up by itself

Words = tuple[str, str]
"""What is wrong, and the cure."""


def ask(
    node: Node,
    script: str,
    *arguments: str,
    seconds: float,
    cures: Mapping[ProblemKind, Words],
    mute: Words,
    stdin: bytes = b"",
) -> dict[str, Any]:
    """What the script answers, which gives up after so many `seconds`. `mute`: for a node that cannot even run it.

    Raises:
        Used: another run has the node.
        RemoteError: a problem, by its `cures`.
    """
    argv = [node.target.python, "-I", f"{agent_client.library()[1]}/mgpu_train/agent/host/{script}", *arguments]
    result = node.run(argv, stdin=stdin, timeout=seconds + _SPARE_S, check=False)
    answer = _object(result.stdout)
    if result.status == 0 and answer:
        return answer
    kind = answer.get("problem") if result.status == PROBLEM else None
    if kind == ProblemKind.USED:
        raise agent_client.used(node, answer)
    if kind in cures:
        what, cure = cures[ProblemKind(kind)]
        raise RemoteError(f"{node.target.label}: {what}", str(answer.get("why", "")), cure)
    why = result.stderr[-500:].decode("utf-8", "replace").strip() or f"It ended with status {result.status}."
    raise RemoteError(f"{node.target.label}: {node.target.python} {mute[0]}", why, mute[1])


def _object(text: bytes) -> dict[str, Any]:
    """Of JSON; empty where it is none."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
