"""Python processes with torch, forked by a server that has imported it: a start costs milliseconds, not 5 s of CPU.

The server is multiprocessing's fork server, one for each process that runs tests, begun with the first rank. A forked
rank is a process of its own, with an environment, a folder, arguments and output of its own; `/proc` alone shows the
server's command line and environment for it, so who looks for processes by those starts real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

# torch._dynamo comes with the first optimizer, and the other two with the first checkpoint
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "mgpu_train.loop")
_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(IMPORTED))


class Rank:
    """A process like `subprocess.Popen`'s, as far as a test asks."""

    def __init__(self, process: Any, said: Path) -> None:
        self._process, self._said = process, said
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or -signal; None while it runs."""
        return self._process.exitcode

    def wait(self, limit_s: float) -> int:
        """Raises:
        subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(limit_s)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), limit_s)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Sends nothing to one that has ended."""
        if self.returncode is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    @property
    def said(self) -> str:
        """All that it has written so far."""
        return self._said.read_text()


def start(
    what: Path | str,
    arguments: Sequence[object],
    said: Path,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> Rank:
    """Forks a process that runs the script of this path, or the module of this name as `python -m` would.

    Output is appended to `said`. `env` is the whole environment.
    """
    process = _context.Process(
        target=_run,
        args=(what, [str(each) for each in arguments], str(said), dict(env), str(cwd or Path.cwd())),
        daemon=False,
    )
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # read when torch is imported
        process.start()
    return Rank(process, said)


def meet(
    what: Path | str,
    count: int,
    *arguments: object,
    said: Path,
    env: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
) -> list[Rank]:
    """Forks `count` ranks of one node that find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [start(what, arguments, said, place, cwd) for place in places]


def _run(what: Path | str, arguments: list[str], said: str, env: dict[str, str], cwd: str) -> None:
    """In the forked process."""
    with Path(said).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [str(what), *arguments]
    if isinstance(what, Path):
        sys.path.insert(0, str(what.parent))
        runpy.run_path(str(what), run_name="__main__")
    else:
        sys.modules.pop(what, None)  # runpy warns of one that was imported
        runpy.run_module(what, run_name="__main__", alter_sys=True)
