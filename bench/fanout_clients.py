"""The programs of bench/fanout.py, each run by the Python of its own environment:
`fanout_clients.py NAME cold|held FLEET SCRATCH`.

`held` prints one line of JSON: seconds of a command over connections that stand, the median of several.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HOST, COMMAND, SAYS, LIMIT_S = "127.0.0.1", "echo ready", "ready", 120
TIMES = 5  # commands over connections that stand, after the first one
Ask = Callable[[], list[str]]  # what each server says to COMMAND


@contextlib.contextmanager
def ours(fleet: dict[str, Any], _scratch: Path) -> Iterator[Ask]:
    """What mgpu does with the nodes of a fleet; host keys are pinned."""
    from mgpu_train.timeouts import Timeouts

    from mgpu.remote.nodeset import NodeSet
    from mgpu.remote.targets import Target

    servers = enumerate(fleet["servers"])
    targets = [Target(rank, HOST, port, fleet["user"], key) for rank, (port, key) in servers]
    with NodeSet.connect(targets, Path(fleet["key"]), Timeouts()) as nodes:
        yield lambda: [
            each.stdout.decode() for each in nodes.each(lambda node: node.run(COMMAND.split(), timeout=LIMIT_S))
        ]


@contextlib.contextmanager
def with_asyncssh(fleet: dict[str, Any], _scratch: Path) -> Iterator[Ask]:
    """One event loop, one task a server; host keys are pinned."""
    import asyncssh

    key = asyncssh.read_private_key(fleet["key"])

    async def connect(port: int, host_key: str) -> Any:
        pinned = ([asyncssh.import_public_key(host_key)], [], [])
        return await asyncssh.connect(
            HOST, port, username=fleet["user"], client_keys=[key], known_hosts=pinned, config=None, agent_path=None
        )

    async def ask(held: list[Any]) -> list[str]:
        return [str(each.stdout) for each in await asyncio.gather(*(each.run(COMMAND) for each in held))]

    async def connect_all() -> list[Any]:
        return await asyncio.gather(*(connect(*server) for server in fleet["servers"]))

    async def close(held: list[Any]) -> None:
        for each in held:
            each.close()
        await asyncio.gather(*(each.wait_closed() for each in held))

    with asyncio.Runner() as loop:
        held = loop.run(connect_all())
        yield lambda: loop.run(ask(held))
        loop.run(close(held))


@contextlib.contextmanager
def with_fabric(fleet: dict[str, Any], _scratch: Path) -> Iterator[Ask]:
    """One thread a server. It takes every host key, as it does by itself."""
    from fabric import Config, Connection, ThreadingGroup

    login = {"key_filename": fleet["key"], "look_for_keys": False, "allow_agent": False}
    config = Config(overrides={"load_ssh_configs": False})
    held = [Connection(HOST, fleet["user"], port, config, connect_kwargs=login) for port, _ in fleet["servers"]]
    with ThreadingGroup.from_connections(held) as group:
        yield lambda: [each.stdout for each in group.run(COMMAND, hide=True, in_stream=False).values()]


@contextlib.contextmanager
def with_ssh(fleet: dict[str, Any], scratch: Path) -> Iterator[Ask]:
    """A client a server, all at once; where connections are to stand, the first ones stay and hold them."""
    held = ["ControlMaster=auto", "ControlPersist=300", f"ControlPath={scratch}/%p"] if sys.argv[2] == "held" else []
    argv = ["ssh", *_ssh_options(fleet, held), f"{fleet['user']}@{HOST}"]

    def ask() -> list[str]:
        asked = [
            subprocess.Popen([*argv, "-p", str(port), COMMAND], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for port, _ in fleet["servers"]
        ]
        return [each.communicate()[0].decode() for each in asked]

    yield ask


@contextlib.contextmanager
def with_ansible(fleet: dict[str, Any], scratch: Path) -> Iterator[Ask]:
    """Its own program, with a fork a server; clients of ssh that stay hold the connections for the next call."""
    argv, env = [_beside("ansible"), "all", "-m", "raw", "-a", COMMAND], _ansible(fleet, scratch)

    def ask() -> list[str]:
        said = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        return [line for line in said.splitlines() if line == SAYS]

    yield ask


def playbook(fleet: dict[str, Any], scratch: Path) -> None:
    """Its other program, which runs one task after another: prints what each but the first one takes."""
    timer, tasks = scratch / "plugins" / "timer.py", [{"raw": COMMAND}] * (1 + TIMES)
    timer.parent.mkdir()
    timer.write_text(TIMER)
    plan = scratch / "playbook.json"
    plan.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    env = _ansible(fleet, scratch) | {"ANSIBLE_CALLBACK_PLUGINS": str(timer.parent), "ANSIBLE_STDOUT_CALLBACK": "timer"}
    argv = [_beside("ansible-playbook"), str(plan)]
    said = json.loads(subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout)
    _check(said["answers"], fleet["servers"] * len(tasks))
    _tell(said["moments"][1:])


TIMER = """
import json, os, time
from ansible.plugins.callback import CallbackBase


class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "stdout", "timer"

    def __init__(self):
        super().__init__()
        self.moments, self.answers = [], []

    def v2_playbook_on_task_start(self, task, is_conditional):
        self.moments.append((time.perf_counter(), sum(os.times()[:4])))

    def v2_runner_on_ok(self, result):
        self.answers.append(result._result["stdout"].strip())

    def v2_playbook_on_stats(self, stats):
        self.v2_playbook_on_task_start(None, False)
        print(json.dumps({"moments": self.moments, "answers": self.answers}))
"""

PROGRAMS = {
    "ours": ours,
    "asyncssh": with_asyncssh,
    "fabric": with_fabric,
    "64 x ssh": with_ssh,
    "ansible": with_ansible,
}


def main() -> None:
    """Asks once, or several times and prints what each but the first one takes."""
    name, kind, fleet, scratch = sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text()), Path(sys.argv[4])
    if name not in PROGRAMS:
        playbook(fleet, scratch)
        return
    with PROGRAMS[name](fleet, scratch) as ask:
        moments = list[tuple[float, float]]()
        for _ in range(1 + (TIMES if kind == "held" else 0)):
            _check([each.strip() for each in ask()], fleet["servers"])
            moments.append((time.perf_counter(), sum(os.times()[:4])))
    if kind == "held":
        _tell(moments)


def _check(answers: list[str], servers: list[Any]) -> None:
    if answers != [SAYS] * len(servers):
        raise SystemExit(f"{answers.count(SAYS)} of {len(servers)} answered")


def _tell(moments: list[tuple[float, float]]) -> None:
    """Prints the medians of what lies between moments: wall and CPU seconds."""
    wall, cpu = ([after - before for before, after in itertools.pairwise(each)] for each in zip(*moments, strict=True))
    print(json.dumps({"wall_s": statistics.median(wall), "cpu_s": statistics.median(cpu)}))


def _ansible(fleet: dict[str, Any], scratch: Path) -> dict[str, str]:
    """Its environment: all that makes it faster, nothing of the user's own."""
    inventory = scratch / "inventory"
    lines = (f"node{port} ansible_host={HOST} ansible_port={port}\n" for port, _ in fleet["servers"])
    inventory.write_text("".join(lines))
    return os.environ | {
        "ANSIBLE_HOME": str(scratch),
        "ANSIBLE_INVENTORY": str(inventory),
        "ANSIBLE_FORKS": str(len(fleet["servers"])),
        "ANSIBLE_PIPELINING": "true",
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(scratch / "cp"),
        "ANSIBLE_SSH_COMMON_ARGS": shlex.join(_ssh_options(fleet)),
        "ANSIBLE_REMOTE_USER": fleet["user"],
    }


def _beside(program: str) -> str:
    return str(Path(sys.executable).with_name(program))


def _ssh_options(fleet: dict[str, Any], more: Sequence[str] = ()) -> list[str]:
    """For OpenSSH's client: our key, the pinned host keys, nothing of the user's own."""
    only = ["IdentitiesOnly=yes", "IdentityAgent=none", f"UserKnownHostsFile={fleet['known_hosts']}", "BatchMode=yes"]
    return ["-F", "none", "-i", fleet["key"], *(word for each in (*only, *more) for word in ("-o", each))]


if __name__ == "__main__":
    main()
