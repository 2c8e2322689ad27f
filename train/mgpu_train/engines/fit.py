"""`train.micro_batch: auto`: the most samples that fit into a forward and backward pass, found by passes that grow.

The size doubles. One is tried only where what those before it took says that it fits on every rank: on a CPU nothing
but the kernel's kill would end it. What a GPU lacks nevertheless is caught. The model is as before afterwards, since
gradients are thrown away and buffers put back; what is drawn is no matter, since each step sets its streams anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from mgpu_train.checkpoint.distributed.staging import local
from mgpu_train.engines.buffers import Buffers
from mgpu_train.errors import TrainError
from mgpu_train.health.hardware import forget_most, free_bytes, lacks_memory, resident_bytes
from mgpu_train.parallel import Place, machine
from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Batch, Task

log = logging.getLogger("mgpu_train")

MARGIN = 0.1  # of the memory that is free, for what the first samples do not show: longer ones, fragments
GIB = 1 << 30


class Memory(Protocol):
    """Of a rank's device, in bytes."""

    def restart(self) -> None:
        """Gives back what is only kept; `most` counts from now."""
        ...

    def taken(self) -> float:
        """By this process."""
        ...

    def most(self) -> float:
        """The most that was taken since `restart`."""
        ...

    def free(self) -> float:
        """What this process may still take."""
        ...


class GpuMemory:
    """What torch's allocator has of the GPU, with what is lost between its blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> None:
        """Its cache is given back."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def taken(self) -> float:
        """In whole blocks."""
        return torch.cuda.memory_reserved(self._device)

    def most(self) -> float:
        """In whole blocks."""
        return torch.cuda.max_memory_reserved(self._device)

    def free(self) -> float:
        """By the driver."""
        return torch.cuda.mem_get_info(self._device)[0]


class HostMemory:
    """What this process has of the machine's, which all ranks on it share."""

    def __init__(self, place: Place) -> None:
        self._ranks = place.gather(machine()).count(machine())

    def restart(self) -> None:
        """The C library's heap is given back."""
        forget_most()

    def taken(self) -> float:
        """Resident."""
        return resident_bytes()

    def most(self) -> float:
        """Resident."""
        return resident_bytes(most=True)

    def free(self) -> float:
        """This rank's part."""
        return free_bytes() / self._ranks


class Fit:
    """One rank's. All ranks make one each, and call `largest` together."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        strategy: Strategy,
        read: Callable[[Iterable[range]], Iterator[Batch | None]],
        did: Callable[[], None],
        *,
        compiled: bool,
    ) -> None:
        """`read` gives the samples of these positions, on the device; `did` is called after each pass."""
        self._task, self._model, self._strategy, self._read, self._did = task, model, strategy, read, did
        self._compiled, self._place = compiled, strategy.place
        norms = [each for each in model.modules() if isinstance(each, BatchNorm)]
        self._first = 2 if norms else 1  # of one sample there may be no variance
        synchronised = any(isinstance(each, nn.SyncBatchNorm) for each in norms)
        # others wait in such a pass for a rank that has left it; and FSDP, alone too, leaves what was gathered for one
        self._together = strategy.shards or self._place.context > 1 or (self._place.world_size > 1 and synchronised)
        gpu = self._place.device.type == "cuda"
        self._memory: Memory = GpuMemory(self._place.device) if gpu else HostMemory(self._place)

    def largest(self, most: int, reserve: float) -> int:
        """How many samples of a micro-batch fit on every rank: `most`, or 1, 2, 4 and so on; `reserve` are bytes that
        this rank's device needs later on.

        Raises TrainError: not even the first size fits, or nobody knows how much memory there is.
        """
        room = self._room() - reserve
        self._place.barrier()  # nobody takes any before all have seen what is free
        with self._unchanged():
            return self._grown(most, room)

    def _room(self) -> float:
        """How many bytes this process may take in all, less a margin."""
        try:
            self._memory.restart()
            room = self._memory.taken() + (1 - MARGIN) * self._memory.free()
        except (OSError, StopIteration):
            room = math.inf
        if room == math.inf:
            raise TrainError(
                "`train.micro_batch: auto`: this system does not say how much memory its processes have and may take "
                "(/proc: Linux). Say how many samples."
            )
        return room

    def _grown(self, most: int, room: float) -> int:
        learned = (local(each) for each in self._model.parameters() if each.requires_grad)
        # what passes of no sample would take: the gradients
        size, before, taken = min(self._first, most), 0, self._memory.taken() + sum(each.nbytes for each in learned)
        while True:
            peak, bigger = self._peak(size, whole=size == most), min(2 * size, most)
            expected = peak + (bigger - size) * max(0.0, peak - taken) / (size - before)
            said = self._place.gather((peak, expected, room))
            if any(peak > room for peak, _, room in said):
                break
            size, before, taken = bigger, size, peak
            if before == most or any(expected > room for _, expected, room in said):
                break
        if not before:
            raise TrainError(self._nothing_fits(size, said))
        least = min(room for _, _, room in said)
        log.info("`micro_batch: auto`: %d of %d samples fit into the %.1f GiB of a rank", before, most, least / GIB)
        return before

    def _peak(self, size: int, *, whole: bool) -> float:
        """The most memory, in bytes, in which a step has passes of so many samples; infinite: there is too little.
        `whole`: the step is one pass, and else gradients of one are there when the next one begins."""
        shards = self._strategy.shards  # whose gradients stay whole until they are exchanged
        self._memory.restart()
        if self._compiled:
            torch.compiler.reset()  # for this very size, and not for all that were seen
        try:
            batch = next(self._read([range(size)]))
            assert batch is not None  # noqa: S101 - there are samples in it
            for reduce in (shards,) if whole else (False, shards):
                with self._strategy.forward_pass(self._model, reduce=reduce):
                    total = self._task.loss(self._model, batch).total
                    with torch.autocast(total.device.type, enabled=False):  # as in a step
                        total.backward()
                self._did()
            return self._memory.most()
        except (RuntimeError, MemoryError, OSError) as error:  # of torch.OutOfMemoryError is its GPU allocator alone
            if not lacks_memory(f"{type(error).__name__}: {error}"):
                raise
            log.info("`micro_batch: auto`: %d samples: %s", size, str(error).partition("\n")[0])
            if self._together:
                raise TrainError(
                    f"`train.micro_batch: auto`: {size} samples lack memory on rank {self._place.rank}, though half as "
                    f"many did not say so ({error}). Say `micro_batch: {max(1, size // 2)}`."
                ) from error
        finally:
            self._model.zero_grad()
        return math.inf  # not where it is caught: there the error still holds what was computed

    def _nothing_fits(self, size: int, said: list[tuple[float, float, float]]) -> str:
        rank = max(range(len(said)), key=lambda each: said[each][0] - said[each][2])
        peak, _, room = said[rank]
        needs = "more than there is" if math.isinf(peak) else f"{peak / GIB:.2f} GiB in all"
        return (
            f"`train.micro_batch: auto`: not even {size} at a time: with it rank {rank} takes {needs}, and may take "
            f"{max(0.0, room) / GIB:.2f}, where optimizer and saves have their part and {MARGIN:.0%} stays free. Take "
            "`activation_checkpointing: full`, a strategy that shards the model, or machines with more memory."
        )

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """The model's buffers, such as a batch norm's statistics, are as before afterwards."""
        buffers = Buffers(self._model)
        buffers.keep()
        try:
            yield
        finally:
            buffers.put_back()
            if self._compiled:
                torch.compiler.reset()
            self._memory.restart()  # `memory_gib` is of training
