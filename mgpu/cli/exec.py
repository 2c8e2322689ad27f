"""`mgpu exec`: one command on all nodes of a fleet, on the system's ssh client."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import click
from mgpu_train.agent.machine import procs

from mgpu import writer
from mgpu.cli import complete
from mgpu.cli.common import parameters, wiring
from mgpu.console import Console, LogLines
from mgpu.errors import ConnectionFailed, InputError

PIECE = 1 << 16
LOG_IN, LOOK_S = 8, 0.02  # clients that log in at a time; how often they are looked at
NO_CONNECTION = 255  # what ssh itself ends with
_OWN = "mgpu: the command itself has ended with 255"  # said on its node, the last on standard error
_LAST = 1 << 10  # bytes to find it in


@click.command("exec", cls=parameters.AfterDashes)
@parameters.run_argument
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--stack", shell_complete=complete.stacks, help="A stack of this folder's project instead of a run.")
@click.option("--node", type=int, help="Only on this node_rank.")
def exec(run: str, command: tuple[str, ...], stack: str | None, node: int | None) -> int:  # noqa: A001
    """Run COMMAND on all nodes of RUN at once, in its work folder: `mgpu exec RUN -- nvidia-smi -L`.

    One argument is a line for the login shell ("df -h | tail -1"); several arrive as they are. The exit code is that
    of the first node on which it is not 0. One node's output is passed on byte for byte, and it gets this standard
    input.
    """
    if not command:
        raise InputError("exec: COMMAND is missing", "", "Write it behind `--`: `mgpu exec RUN -- nvidia-smi -L`.")
    route = wiring.ssh_route_to(run, stack)
    ranks = route.ranks if node is None else (route.one(node),)
    script = route.script(command, f"[ $code -ne {NO_CONNECTION} ] || echo '{_OWN}' >&2; exit $code")
    argvs = {rank: [*route.argv(rank, "-oBatchMode=yes"), script] for rank in ranks}
    ended = _at_once(argvs, through=route.through) if len(argvs) > 1 else {ranks[0]: _alone(argvs[ranks[0]])}
    unreached = [rank for rank, (code, own) in ended.items() if code == NO_CONNECTION and not own]
    if unreached:
        where = ", ".join(map(str, unreached))
        raise ConnectionFailed(f"node {where}: no connection", "The lines above are ssh's own.", "See `mgpu status`.")
    return next((code for code, _ in ended.values() if code), 0)


def _alone(argv: list[str]) -> tuple[int, bool]:
    """The exit code, and whether it is the command's own; output and input are passed on byte for byte."""
    writer.settle(sys.stderr)
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        last = b""
        for data in _pieces(process.stderr):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            last = (last + data)[-_LAST:]
        return process.wait(), _OWN.encode() in last


def _at_once(argvs: Mapping[int, list[str]], *, through: bool) -> dict[int, tuple[int, bool]]:
    """By node, what `_alone` returns; every line is printed behind its node_rank as it comes. `through`: something is
    before the nodes. Raises OSError: the lines cannot be passed on, and the clients were ended."""
    console = Console()
    begun = dict[int, subprocess.Popen[bytes]]()
    ended = SimpleQueue[tuple[int, bytes] | OSError]()

    def pass_on(rank: int, stream: IO[bytes] | None, show: Callable[[str], None]) -> None:
        try:
            ended.put((rank, _pass_on(console, rank, stream, show)))
        except OSError as error:  # nobody reads it any more, or a full disk
            ended.put(error)

    with suppress(OSError, ValueError):  # a system that allows fewer than it says
        procs.open_many_files()  # each client is two, and shells give 256 here and there
    try:
        for rank, each in _begun(argvs, through=through):
            begun[rank] = each
            for way in ((each.stdout, console.text), (each.stderr, partial(console.say, whole=True, patient=True))):
                threading.Thread(target=pass_on, args=(rank, *way), daemon=True).start()
        own = set[int]()
        for _ in range(2 * len(begun)):
            found = ended.get()
            if isinstance(found, OSError):
                raise found
            rank, last = found
            own |= {rank} if _OWN.encode() in last else set()
        return {rank: (process.wait(), rank in own) for rank, process in begun.items()}
    finally:
        for process in begun.values():
            process.kill()


def _begun(argvs: Mapping[int, list[str]], *, through: bool) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The clients, as they are started; `through`: the next one waits while so many are not logged in yet. sshd drops
    who comes to a jump host while ten others log in (its MaxStartups)."""
    start = partial(subprocess.Popen, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if not through:
        yield from ((rank, start(argv)) for rank, argv in argvs.items())
        return
    with tempfile.TemporaryDirectory(prefix="mgpu-exec-") as folder:
        begun = dict[Path, subprocess.Popen[bytes]]()

        def log_in() -> int:
            return sum(each.poll() is None and not mark.exists() for mark, each in begun.items())

        for rank, (client, *words) in argvs.items():
            while log_in() >= LOG_IN:
                time.sleep(LOOK_S)
            mark = Path(folder, str(rank))  # which ssh makes once it is logged in
            line = f": > {shlex.quote(str(mark))}".replace("%", "%%")  # ssh puts in what `%h` and the like stand for
            told = ["-oPermitLocalCommand=yes", f"-oLocalCommand={line}"]
            begun[mark] = start([client, *told, *words], env={**os.environ, "SHELL": "/bin/sh"})  # for that line
            yield rank, begun[mark]
        while log_in():
            time.sleep(LOOK_S)


def _pass_on(console: Console, rank: int, stream: IO[bytes] | None, show: Callable[[str], None]) -> bytes:
    """Returns the last bytes of it."""
    lines, last = LogLines(rank), b""
    for data in _pieces(stream):
        for line in lines.feed(data):
            show(line)
        console.flush()
        last = (last + data)[-_LAST:]
    for line in lines.flush():
        show(line)
    return last


def _pieces(stream: IO[bytes] | None) -> Iterator[bytes]:
    """As they come."""
    return iter(partial(stream.read1, PIECE), b"")  # type: ignore[union-attr]
