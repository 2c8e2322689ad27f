"""What the operator says to a node's agent: code and config over SFTP, commands as argument lists, answers as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import mgpu_train
from mgpu_train.agent.host.layout import LEASE, LIB, RunLayout
from mgpu_train.agent.host.python_env import PROBLEM
from mgpu_train.agent.machine import identity
from mgpu_train.config import Job, Secrets
from mgpu_train.timeouts import Timeouts

from mgpu.errors import CommandFailed, RemoteError
from mgpu.iac.outputs import StackOutput
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.remote.snapshot import Snapshot, scan

_NOT_FOUND = 127  # env's status where there is no such program
FACTS_S = 80.0  # a driver that no program uses wakes every GPU first


class Used(RemoteError):
    """Another run has the node: nothing of it was touched."""


def claim(run_id: str, fleet: StackOutput, slots: Sequence[int] = ()) -> dict[str, Any]:
    """What a run says of itself on its nodes (`mgpu_train.agent.host.python_env.Claim`); nothing secret."""
    # machines that are not mgpu's have no owner: their fleet has its name
    said = {"run": run_id, "owner": fleet.owner or fleet.fleet, "host": os.uname().nodename}
    return {**said, "slots": [*slots]} if slots else said


def used(node: Node, answer: dict[str, Any]) -> Used:
    """What a node's problem `used` is to the user, and its cure."""
    run = answer.get("run", "")
    return Used(
        f"{node.target.label} is used by run {run}",
        str(answer.get("why", "")),
        f"Wait until it is over, end it where it was started (`mgpu stop {run}`), or take another stack.",
    )


@cache
def library() -> tuple[Snapshot, str]:
    """The node side's own package, and the folder that it gets on a node: named by its content. As it was when this
    process asked first: an upgrade of mgpu meanwhile changes what lies on the disk.

    The name is the same wherever this version is, for who attaches elsewhere asks the agents in that folder: modes are
    a file system's, files of editors and desktops are no part of it.
    """
    package = scan(Path(mgpu_train.__file__).parent, ignore_files=False)
    parts = {path: entry.identity[2:] for path, entry in package.entries.items() if path.endswith((".py", ".txt"))}
    content = json.dumps(parts, sort_keys=True)
    return package, str(LIB / hashlib.sha256(content.encode()).hexdigest()[:16])


def send_library(nodes: NodeSet) -> None:
    """Sends the node side's package to the nodes that do not have just this one."""
    package, home = library()
    nodes.sync(package, f"{home}/mgpu_train")


def send_job(node: Node, job: Job) -> None:
    """Writes `job.json`. It holds nothing secret."""
    node.write(str(RunLayout(job.run_id).job), job.model_dump_json(indent=1, by_alias=True).encode())


def start(node: Node, run_id: str, secrets: Secrets, timeouts: Timeouts) -> None:
    """Starts the attempt that `job.json` describes; a second call starts nothing. Secrets go by standard input.

    Raises:
        Used: another run has come to the node since it was made ready.
        RemoteError: the agent did not start.
    """
    job = str(RunLayout(run_id).job)
    try:
        _call(node, ["start", "--job", job], timeouts.command_s, secrets.model_dump_json().encode())
    except CommandFailed as error:
        if error.status != PROBLEM:
            raise
        raise used(node, json.loads(error.stderr.splitlines()[-1])) from error


def stop(node: Node, run_id: str, timeouts: Timeouts, *, now: bool = False) -> None:
    """Asks the agent to save, stop and upload (`now`: without the save); returns at once."""
    _ask(node, run_id, ["stop", "--run", run_id, *(["--now"] if now else [])], timeouts.command_s)


def renew(node: Node, run_id: str, store: dict[str, str], timeouts: Timeouts) -> None:
    """Gives the living agent fresh credentials of the store, by standard input."""
    secrets = Secrets(store=store)
    _ask(node, run_id, ["renew", "--run", run_id], timeouts.command_s, secrets.model_dump_json().encode())


def free_ports(node: Node, count: int, timeouts: Timeouts) -> list[int]:
    """So many TCP ports that are free on the node now."""
    return [int(port) for port in _call(node, ["free-ports", str(count)], timeouts.command_s)["ports"]]


def status(node: Node, run_id: str, timeouts: Timeouts) -> dict[str, Any]:
    """The agent's status and whether the agent is alive."""
    return _ask(node, run_id, ["status", "--run", run_id], timeouts.command_s)


def renew_lease(node: Node, minutes: float, timeouts: Timeouts) -> None:
    """Gives a node that no run uses this many minutes; never past its hard cap, which the host holds."""
    uptime = float(node.run(["cat", "/proc/uptime"], timeout=timeouts.command_s).stdout.split()[0])
    node.write(str(LEASE), f"{int(uptime + minutes * 60)}\n".encode())


def hold(nodes: NodeSet, timeouts: Timeouts, lost: Container[int] = (), *, busy_s: float = 0) -> None:
    """While no agent renews them, nodes live for `lease_s` after what comes next, which may take `busy_s` seconds. Who
    cannot be asked is seen by that."""
    minutes = (busy_s + timeouts.lease_s) / 60
    with suppress(RemoteError):
        nodes.each(lambda node: node.target.rank in lost or renew_lease(node, minutes, timeouts))


def facts(node: Node, python: str, timeouts: Timeouts) -> dict[str, Any]:
    """What the machine is made of (`mgpu_train.agent.machine.facts.Facts`), as this interpreter of its own sees it."""
    return _call(node, ["facts"], timeouts.command_s + FACTS_S, program=python)


def _ask(node: Node, run_id: str, arguments: list[str], timeout: float, stdin: bytes = b"") -> dict[str, Any]:
    """Asks the run's agent. One that another version of mgpu has started is asked in that one's words, and its folder:
    this one's was never sent there."""
    try:
        return _call(node, arguments, timeout, stdin)
    except CommandFailed as error:
        if error.status != _NOT_FOUND:
            raise
        try:
            folder = json.loads(node.read(str(RunLayout(run_id).agent)))[identity.LIBRARY]
        except (OSError, ValueError, TypeError, KeyError):
            raise error from None
        return _call(node, arguments, timeout, stdin, home=str(LIB / str(folder)))


def _call(
    node: Node, arguments: list[str], timeout: float, stdin: bytes = b"", program: str = "", home: str = ""
) -> dict[str, Any]:
    home = home or library()[1]
    # the program that `python_setup.equip` or `container_setup.up` has left there
    argv = ["env", f"PYTHONPATH={home}", program or f"{home}/python", "-m", "mgpu_train", "agent", *arguments]
    result = node.run(argv, stdin=stdin, timeout=timeout)
    try:
        answer = json.loads(result.stdout)
        if not isinstance(answer, dict):
            raise ValueError("no object")
    except ValueError as error:
        raise RemoteError(
            f"node {node.target.rank}: the agent's answer to `{arguments[0]}` cannot be read",
            f"It printed {result.stdout[:200]!r}.",
            "See the node's log: `mgpu logs`.",
        ) from error
    return answer
