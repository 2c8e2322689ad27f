"""Ranks of the trainer, forked by a server that has imported torch, which takes 5 s of CPU."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from forks import Forked, Forks
from mgpu_train.agent.machine import ports, procs
from waiting import until

# torch._dynamo comes with the first optimizer, and the other two with the first checkpoint
_FORKS = Forks(
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "mgpu_train.loop"),
    env={"OMP_NUM_THREADS": "1"},  # read when torch is imported
)

HANGS_S = 600.0  # no machine is as slow as that: collectives of ranks that share two busy cores wait for the scheduler


class Rank:
    """One process; it is ended by whoever has started it."""

    def __init__(self, process: Forked, said: Path) -> None:
        self._process, self._said = process, said
        self.send_signal, self.kill = process.send_signal, process.kill

    def wait(self, limit_s: float = HANGS_S) -> int:
        """The exit code, or -signal.

        Raises:
            AssertionError: it still runs, and where all that it has forked stands.
        """
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            for each in [procs.of(self._process.pid), *procs.descendants(self._process.pid)]:
                if each and each.send(signal.SIGABRT):  # it writes its stacks
                    until(lambda each=each: not each.alive, HANGS_S)
            raise AssertionError(f"it has run for {limit_s:.0f} s:\n{self.said}") from None

    @property
    def said(self) -> str:
        """All that it has written so far, and the others that write there."""
        return self._said.read_text()


def start(what: Path | str, arguments: Sequence[object], said: Path, env: Mapping[str, str]) -> Rank:
    """Runs a script, or the module of this name; output is appended to `said`. `env` is the whole environment."""
    env = {**env, "PYTHONFAULTHANDLER": "1"}
    with said.open("ab") as file:
        return Rank(_FORKS.start(what, arguments, env, stdout=file.fileno(), stderr=file.fileno()), said)


def meet(
    what: Path | str, count: int, *arguments: object, said: Path, env: Mapping[str, str] = os.environ
) -> list[Rank]:
    """Forks `count` ranks of one node that find each other."""
    port = str(ports.free(1)[0])
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [{**env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [start(what, arguments, said, place) for place in places]
