"""What the nodes tell each other between trials."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

from mgpu_train.config import Job

_LOOK_S = 0.1
_MEET_S = 10.0  # for one word to node 0's


class Store(Protocol):
    """What torch's stores have in common with each other."""

    def set(self, key: str, value: str) -> None:
        """Keeps it."""
        ...

    def get(self, key: str) -> bytes:
        """What is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are."""
        ...


class Alone:
    """Of one node, which needs no torch for it."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Keeps it."""
        self._values[key] = value

    def get(self, key: str) -> bytes:
        """What is there."""
        return self._values[key].encode()

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are."""
        return all(key in self._values for key in keys)


class Board:
    """Words by key. Node 0 holds them, at the address where the launchers of the nodes would meet."""

    def __init__(self, job: Job) -> None:
        """Raises what torch raises: node 0 did not answer in `rendezvous_s`."""
        self._store: Store = Alone()
        if job.nodes > 1:
            from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

            wait = timedelta(seconds=job.timeouts.rendezvous_s)
            leads = job.node_rank == 0
            self._store = TCPStore(job.master_addr, job.master_port, job.nodes, leads, wait, wait_for_workers=False)
            self._store.set_timeout(timedelta(seconds=_MEET_S))

    def put(self, key: str, words: str = "") -> None:
        """Tells it to all."""
        self._store.set(key, words)

    def has(self, key: str) -> bool:
        """Whether anybody has told it."""
        return self._store.check([key])

    def get(self, key: str, wait_s: float) -> str:
        """What somebody tells within so many seconds. Raises TimeoutError: nobody has."""
        end = time.monotonic() + wait_s
        while not self.has(key):  # not in the store's own wait, where no signal is heard
            if time.monotonic() > end:
                raise TimeoutError(f"the nodes have lost each other: no word of {key} in {wait_s:g} s")
            time.sleep(_LOOK_S)
        return self._store.get(key).decode()
