"""SSH's way to a machine through Session Manager: the proxy command of a connection.

    python -P -m mgpu.providers.aws.session_proxy REGION MACHINE [--profile NAME] [--endpoint-url URL]

Begins a session and becomes AWS's own program, which carries it: nothing of Python stays in memory. The session's token
goes by a variable, which others cannot read as they can arguments. The program ends when its input does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mgpu.errors import MgpuError, Transient
from mgpu.providers.aws.failures import calling, unless
from mgpu.providers.aws.instances import session_manager
from mgpu.providers.aws.options import Options
from mgpu.providers.aws.session import Account

# An agent that has just started comes and goes for a while. Less than what an SSH client waits for a greeting, 15 s
_PATIENCE_S = 8.0
_PAUSE_S = 1.0
_RESPONSE = "AWS_SSM_START_SESSION_RESPONSE"  # the variable's name, as the program knows it


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Becomes the program, or ends with what is in the way on stderr."""
    parser = argparse.ArgumentParser(prog="session_proxy")
    parser.add_argument("region")
    parser.add_argument("machine")
    parser.add_argument("--profile", default="")
    parser.add_argument("--endpoint-url", default="")
    given = parser.parse_args(argv)
    try:
        options = Options.of({"profile": given.profile, "endpoint_url": given.endpoint_url})
        command, variables = begin(Account(options), given.region, given.machine)
    except MgpuError as error:
        print(error, file=sys.stderr)  # noqa: T201  ssh shows it, and so does mgpu
        sys.exit(error.exit_code)
    os.execve(command[0], command, {**os.environ, **variables})  # noqa: S606  no shell is in it


def begin(
    account: Account,
    region: str,
    machine: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[list[str], dict[str, str]]:
    """Begins a session: the argument list that carries it, and the variables that it needs.

    Raises:
        InputError: the program is not on PATH.
        Transient: the machine's agent is not connected.
        ProviderError: AWS refused, or did not answer.
    """
    program = shutil.which(session_manager.PROGRAM) or session_manager.require_program()
    asked = {"Target": machine, "DocumentName": session_manager.DOCUMENT, "Parameters": {"portNumber": ["22"]}}
    client, until = account.client("ssm", region), clock() + _PATIENCE_S
    with calling(f"beginning a session with {machine}", region):
        while (session := unless(("TargetNotConnected",), client.start_session, **asked)) is None:
            if clock() >= until:
                raise Transient(f"aws {region}: {machine}: {session_manager.NOT_REGISTERED}", "", "Try again.")
            sleep(_PAUSE_S)
    told: dict[str, Any] = {name: session[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
    profile = account.options.profile or ""
    words = [_RESPONSE, region, "StartSession", profile, json.dumps(asked), client.meta.endpoint_url]
    return [program, *words], {_RESPONSE: json.dumps(told)}


if __name__ == "__main__":
    main()
