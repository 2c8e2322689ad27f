"""Batches that are made by threads, ahead of need, and lie where the model is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch

from mgpu_train.data.base import Batch, Data
from mgpu_train.data.seeds import mix

AHEAD = 2  # micro-batches beside the one that is trained on


class Loader:
    """One rank's. `waited_s` is how long training has stood still for data, in seconds."""

    def __init__(self, device: torch.device, seed: int, threads: int = 1) -> None:
        self.waited_s = 0.0
        self._device, self._seed, self.threads = device, seed, threads
        self._pinned = device.type == "cuda"
        self._pool = ThreadPoolExecutor(threads, "loader")

    def read(self, data: Data, pick: Callable[[int], int], wanted: Iterable[range]) -> Iterator[Batch | None]:
        """A batch for each range of positions, in their order; None for an empty one. `pick` names a position's sample.

        Raises what the data raises, where its batch would have come.
        """
        rest = iter(wanted)

        def begin(count: int) -> Iterator[Future[Batch | None]]:
            return (self._pool.submit(self._make, data, pick, positions) for positions in islice(rest, count))

        begun = deque(begin(AHEAD + self.threads))
        while begun:
            began = time.perf_counter()
            batch = begun.popleft().result()
            self.waited_s += time.perf_counter() - began
            begun.extend(begin(1))
            yield batch and {name: each.to(self._device, non_blocking=self._pinned) for name, each in batch.items()}

    def close(self) -> None:
        """Nothing more is read."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, data: Data, pick: Callable[[int], int], positions: range) -> Batch | None:
        if not positions:
            return None
        samples = [pick(position) for position in positions]
        batch = data.batch(samples, [mix(self._seed, position) for position in positions])
        return {name: each.pin_memory() for name, each in batch.items()} if self._pinned else batch
