"""Names that are derived from a stack, the same in the plugin, its SDK and the driver."""

from __future__ import annotations

import hashlib

PROJECT = "mgpu"
"""The name of the Pulumi project in a checkout of mgpu. A folder that `mgpu init` made has a name of its own."""

BASE_PROJECT = "mgpu-base"
"""The project of what machines stand on. One for all folders: its stacks are named by account and region."""

PASSES_PROJECT = "mgpu-passes"
"""The project of what calls `mgpu reconcile` in an AWS account. One stack for each backend, which is kept there."""

RUNS_PROJECT = "mgpu-runs"
"""The project of runs whose folder has no Pulumi program of its own. Its stacks are named by run."""


_LABEL = 63  # characters of a Kubernetes label, the shortest that a provider's marks may have


def fleet_name(project: str, stack: str) -> str:
    """The fleet of a stack that has none yet: the stack's own name. A project under another name puts it in front: two
    projects may both have a stack `dev`, and the guard of one must never take the machines of the other. What a hash
    adds: `llm` with stack `ft-dev`, and `llm-ft` with stack `dev`, are two. Names of runs are random.
    """
    if project in (PROJECT, RUNS_PROJECT):
        return stack
    mark = f"-{hashlib.sha256(f'{project}/{stack}'.encode()).hexdigest()[:8]}"
    room = _LABEL - len(mark)
    return f"{unmarked(project[: max(1, room - len(stack) - 1)], stack)[:room]}{mark}"  # names of runs stay whole


def unmarked(project: str, stack: str) -> str:
    """The fleet that the stack may have had before its name had a hash, and has still."""
    return stack if project in (PROJECT, RUNS_PROJECT) else f"{project}-{stack}"


def file_name(owner: str, fleet: str) -> str:
    """How this machine's files are named after a fleet: stacks of two backends may have the same name, and machines of
    two owners."""
    return f"{fleet}@{hashlib.sha256(owner.encode()).hexdigest()[:12]}"
