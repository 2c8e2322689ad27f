"""`python3 -m mgpu_train agent ...`: what the operator calls over SSH. The working directory is the node's home.

A result is one line of JSON on standard output; an error is one line on standard error, with exit code 2 for a mistake
in what was given, 3 (and JSON, as `python_env.py` prints it) where another run has the node, and 1 for the rest.

What needs models imports them by itself: with pydantic a command takes ten times as long, and an operator waits for it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mgpu_train.agent.host.layout import RunLayout
from mgpu_train.agent.machine import identity
from mgpu_train.agent.status.log import clean
from mgpu_train.errors import Refused
from mgpu_train.names import RUN_ID

if TYPE_CHECKING:
    from pydantic import ValidationError

    from mgpu_train.config import Secrets

_MAX_STDIN = 1 << 20


class BadInput(Exception):
    """A mistake in what was given; one line."""


class HostProblem(Exception):
    """What `python_env.py` calls so: its answer and exit status are the command's."""

    def __init__(self, answer: dict[str, Any], status: int) -> None:
        super().__init__(str(answer))
        self.answer, self.status = answer, status


def add_parser(commands: Any) -> None:
    """Adds `agent` and its commands to a set of argparse subcommands."""
    agent = commands.add_parser("agent", help="start, stop or look at the node's agent")
    verbs = agent.add_subparsers(dest="verb", required=True)
    parser = verbs.add_parser("start", help="start the attempt that a job.json describes; secrets come by stdin")
    parser.add_argument("--job", required=True, metavar="PATH", help="runs/<run id>/job.json")
    parser.set_defaults(call=_start)
    parser = verbs.add_parser("stop", help="ask the agent to let the program save, to stop it, and to upload")
    parser.add_argument("--run", required=True, metavar="ID")
    parser.add_argument("--now", action="store_true", help="do not wait for the program to save")
    parser.set_defaults(call=_stop)
    parser = verbs.add_parser("status", help="print the agent's status, and whether it is alive")
    parser.add_argument("--run", required=True, metavar="ID")
    parser.set_defaults(call=_status)
    parser = verbs.add_parser("renew", help="give the living agent fresh credentials of the store, by stdin")
    parser.add_argument("--run", required=True, metavar="ID")
    parser.set_defaults(call=_renew)
    parser = verbs.add_parser("free-ports", help="print TCP ports that are free on this node")
    parser.add_argument("count", type=int, choices=range(1, 17), metavar="COUNT")
    parser.set_defaults(call=_free_ports)
    parser = verbs.add_parser("facts", help="print this machine's driver, GPUs, torch and docker")
    parser.set_defaults(call=_facts)


def call(arguments: argparse.Namespace) -> int:
    """Carries a parsed `agent` command out; returns the exit code."""
    try:
        answer = arguments.call(arguments)
    except BadInput as error:
        print(f"mgpu_train agent {arguments.verb}: {clean(str(error))}", file=sys.stderr)  # noqa: T201
        return 2
    except HostProblem as problem:
        print(json.dumps(problem.answer), file=sys.stderr)  # noqa: T201
        return problem.status
    except (Refused, OSError) as error:
        print(f"mgpu_train agent {arguments.verb}: {clean(str(error))}", file=sys.stderr)  # noqa: T201
        return 1
    print(json.dumps(answer))  # noqa: T201 - the result
    return 0


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    from pydantic import ValidationError

    from mgpu_train.agent import start
    from mgpu_train.agent.host import python_env
    from mgpu_train.config import Job

    path = Path(arguments.job)
    try:
        job = Job.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist") from error
    except ValidationError as error:
        raise BadInput(f"{path}: {_problems(error)}") from error
    layout = _layout(job.run_id)
    if path.absolute() != Path(layout.job):
        raise BadInput(f"{path} is not the job file of run {job.run_id}: {layout.job}")
    try:
        return start.start(job, _secrets(), layout)
    except python_env.Problem as problem:
        raise HostProblem(problem.answer, python_env.PROBLEM) from problem


def _secrets() -> Secrets:
    from pydantic import ValidationError

    from mgpu_train.config import Secrets

    data = sys.stdin.buffer.read(_MAX_STDIN + 1)
    if len(data) > _MAX_STDIN:
        raise BadInput(f"more than {_MAX_STDIN} bytes of secrets on standard input")
    try:
        return Secrets.model_validate_json(data)
    except ValidationError as error:
        raise BadInput(f"secrets on standard input: {_problems(error)}") from None  # the cause holds their values


def _stop(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"asked": identity.stop(_layout(arguments.run), now=arguments.now)}


def _renew(arguments: argparse.Namespace) -> dict[str, Any]:
    from mgpu_train.agent import start

    return {"renewed": start.renew(_layout(arguments.run), _secrets())}


def _status(arguments: argparse.Namespace) -> dict[str, Any]:
    from mgpu_train.agent import start

    return start.status(_layout(arguments.run))


def _free_ports(arguments: argparse.Namespace) -> dict[str, Any]:
    from mgpu_train.agent.machine.ports import free

    return {"ports": free(arguments.count)}


def _facts(_arguments: argparse.Namespace) -> dict[str, Any]:
    from mgpu_train.agent.machine.facts import facts

    return facts().model_dump()


def _layout(run_id: str) -> RunLayout:
    if not re.fullmatch(RUN_ID, run_id):
        raise BadInput(f"{run_id!r} is not a run id")
    return RunLayout(run_id, PurePosixPath(Path.cwd()))


def _problems(error: ValidationError) -> str:
    """All mistakes on one line, without the values: they may be secret."""
    found = error.errors(include_input=False, include_url=False)
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'document'}: {one['msg']}" for one in found)
