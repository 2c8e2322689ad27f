"""Ranks of the trainer, forked by a server that has imported torch, which takes 5 s of CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from forks import Forked, Forks
from mgpu_train.agent.machine import ports

# torch._dynamo comes with the first optimizer, and the other two with the first checkpoint
_FORKS = Forks(
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "mgpu_train.loop"),
    env={"OMP_NUM_THREADS": "1"},  # read when torch is imported
)


class Rank:
    """One process; it is ended by whoever has started it."""

    def __init__(self, process: Forked, said: Path) -> None:
        self._said = said
        self.wait, self.send_signal, self.kill = process.wait, process.send_signal, process.kill

    @property
    def said(self) -> str:
        """All that it has written so far, and the others that write there."""
        return self._said.read_text()


def start(what: Path | str, arguments: Sequence[object], said: Path, env: Mapping[str, str]) -> Rank:
    """Runs a script, or the module of this name; output is appended to `said`. `env` is the whole environment."""
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
