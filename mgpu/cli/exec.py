"""`mgpu exec`: one command on all nodes of a fleet, on the system's ssh client."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO

import click

from mgpu.cli import complete
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console, LogLines
from mgpu.errors import ConnectionFailed, InputError

PIECE = 1 << 16
NO_CONNECTION = 255  # what ssh itself ends with


@click.command("exec", cls=parameters.AfterDashes)
@parameters.run_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--stack", shell_complete=complete.stacks, help="A stack of this folder's project instead of a run.")
@click.option("--node", type=int, help="Only on this node_rank.")
def exec(run: str, command: tuple[str, ...], stack: str | None, node: int | None) -> int:  # noqa: A001
    """Run COMMAND on all nodes of RUN at once, in its work folder: `mgpu exec RUN -- nvidia-smi -L`.

    One argument is a line of shell ("df -h | tail -1"); several arrive as they are. The exit code is that of the
    first node on which it is not 0. One node's output is passed on byte for byte, and it gets this standard input.
    """
    if not command:
        raise InputError("exec: COMMAND is missing", "", "Write it behind `--`: `mgpu exec RUN -- nvidia-smi -L`.")
    route = wiring.ssh_route_to(run, stack)
    ranks = route.ranks if node is None else (route.one(node),)
    argvs = {rank: [*route.argv(rank, "-oBatchMode=yes"), route.script(command)] for rank in ranks}
    codes = _at_once(argvs) if len(argvs) > 1 else {ranks[0]: subprocess.run(argvs[ranks[0]], check=False).returncode}
    unreached = [rank for rank, code in codes.items() if code == NO_CONNECTION]
    if unreached:
        where = ", ".join(map(str, unreached))
        raise ConnectionFailed(f"node {where}: no connection", "The lines above are ssh's own.", "See `mgpu status`.")
    return next((code for code in codes.values() if code), 0)


def _at_once(argvs: Mapping[int, list[str]]) -> dict[int, int]:
    """Exit codes by node; every line is printed behind its node_rank as it comes."""
    console = Console()
    begun = {
        rank: subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank, argv in argvs.items()
    }
    try:
        threads = [
            threading.Thread(target=_pass_on, args=(console, rank, stream, show), daemon=True)
            for rank, process in begun.items()
            for stream, show in ((process.stdout, console.text), (process.stderr, partial(console.say, whole=True)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {rank: process.wait() for rank, process in begun.items()}
    finally:
        for process in begun.values():
            process.kill()


def _pass_on(console: Console, rank: int, stream: IO[bytes], show: Callable[[str], None]) -> None:
    lines = LogLines(rank)
    while data := stream.read1(PIECE):  # type: ignore[attr-defined]
        for line in lines.feed(data):
            show(line)
        console.flush()
    for line in lines.flush():
        show(line)
