"""Host memory that holds a copy of a rank's state while it is written, so that training goes on meanwhile.

It is laid out once and used again by every save: fresh pages from the system cost more than the copy into them.
Next to a GPU it is pinned, and shared with the process that writes
(`mgpu_train.checkpoint.distributed.writer_process`).
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from mgpu_train.parallel import is_sharded

log = logging.getLogger("mgpu_train")

_ALIGN = 64  # bytes


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the memory; `offset` in bytes."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The byte after it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def within(self, memory: mmap.mmap) -> torch.Tensor:
        """The tensor, with a storage of its own, so that it can be written as it is."""
        count = math.prod(self.shape)
        if count == 0:  # a shard of a tensor with fewer rows than ranks
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(self.shape)


class Staging:
    """The memory of one rank. One copy at a time: the next `lay_out` gives the same places away again."""

    def __init__(self, device: torch.device, *, shared: bool = False) -> None:
        """`shared`: it is a file without a name, `fd`, that another process can map (Linux alone has them)."""
        self.fd = os.memfd_create("mgpu-staging") if shared else -1
        self.size = 0  # bytes
        self._slots: list[Slot] = []
        self._places: list[torch.Tensor] = []
        self._slot_at: dict[int, Slot] = {}
        self._pinned: torch.Tensor | None = None
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def lay_out(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A place for each tensor; new memory only when they are other ones than the last time."""
        slots = list(_slots(tensors))
        if slots != self._slots or not self.size:
            self._take(slots)
        return self._places

    def slot(self, place: torch.Tensor) -> Slot | None:
        """Where a place lies; None for a tensor that is none."""
        return self._slot_at.get(place.data_ptr()) if place.numel() else None

    def copy(self, tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor], *, after: Any = None) -> None:
        """Fill the places; returns when they are full. A GPU does it beside its other work, once it is past `after`.

        None: nothing that a GPU computes is copied.
        """
        with torch.no_grad(), torch.cuda.stream(self._side) if self._side else nullcontext():
            if self._side is not None and after is not None:
                self._side.wait_event(after)
            for tensor, place in zip(tensors, places, strict=True):
                place.copy_(tensor, non_blocking=self._side is not None)
        if self._side is not None:
            self._side.synchronize()

    def close(self) -> None:
        """Give the memory back, once nobody holds a place any more."""
        self._forget()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _take(self, slots: list[Slot]) -> None:
        self._forget()
        self.size = max(mmap.PAGESIZE, max((slot.end for slot in slots), default=0))
        if self.fd >= 0:
            os.ftruncate(self.fd, self.size)
            memory = mmap.mmap(self.fd, self.size)
        else:
            memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots, self._places = slots, [slot.within(memory) for slot in slots]
        self._slot_at = {place.data_ptr(): slot for place, slot in zip(self._places, slots, strict=True)}
        if self._side is not None:
            self._pin(torch.frombuffer(memory, dtype=torch.uint8))

    def _pin(self, memory: torch.Tensor) -> None:
        """Pages that do not move: the GPU copies into them by itself."""
        with ThreadPoolExecutor(1) as alone:  # a CUDA error stays its thread's last one, and training would find it
            code = alone.submit(self._register, memory.data_ptr()).result()
        if code:
            log.warning("%d MiB of memory cannot be pinned (CUDA error %d): saves copy slower", self.size >> 20, code)
        else:
            self._pinned = memory

    def _register(self, address: int) -> int:
        torch.cuda.set_device(self._device)
        return int(_cuda_runtime().cudaHostRegister(address, self.size, 0))

    def _forget(self) -> None:
        if self._pinned is not None:
            _cuda_runtime().cudaHostUnregister(self._pinned.data_ptr())
        self._pinned = None
        self._slots, self._places, self._slot_at = [], [], {}


class Snapshot:
    """The state of one step. What only an optimizer step changes is copied later, by `fill`; all else is copied now."""

    def __init__(self, state: dict[str, Any], unchanged: set[int], staging: Staging) -> None:
        """`unchanged`: the storages, by address, that stay as they are until `filled` is set."""
        self.state = state
        self.filled = threading.Event()
        self._staging = staging
        self._late: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        for leaf in _tensors(state):
            tensor = local(leaf)
            if staging.slot(tensor):  # it is a copy already: `gathered`
                continue
            if tensor.untyped_storage().data_ptr() in unchanged:
                self._late[id(leaf)] = tensor
            else:
                self._copies[id(leaf)] = tensor.to("cpu", copy=True)
        self._after = _computed(self._late.values())

    def lay_out(self) -> None:
        """Take the memory for the rest, and copy nothing."""
        self._staging.lay_out(list(self._late.values()))

    def fill(self) -> None:
        """Copy the rest. Any thread may do it; training waits for `filled` before it changes anything."""
        try:
            late = list(self._late.values())
            if late or not self._staging.size:  # of nothing, too: the other process maps what there is
                places = self._staging.lay_out(late)
                self._staging.copy(late, places, after=self._after)
                self._copies.update(zip(self._late, places, strict=True))
        finally:
            self._late.clear()
            self.filled.set()

    def copy_of(self, leaf: Any) -> torch.Tensor | None:
        """The copy of a tensor of `state`; None for any other value."""
        return self._copies.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None


def gathered(state: dict[str, Any], staging: Staging | None) -> dict[str, Any]:
    """The state with whole tensors in place of sharded ones, in the memory of `staging`; without one, nothing.

    All ranks call it together; one tensor after the other is whole on each of them, for a moment.
    """
    sharded = [leaf for leaf in _tensors(state) if is_sharded(leaf)]
    places = staging.lay_out(sharded) if staging else []
    for number, leaf in enumerate(sharded):
        with torch.no_grad():
            whole = leaf.full_tensor()
        if staging:
            staging.copy([whole], [places[number]], after=_computed([whole]))
        del whole  # before the next one
    return _replaced(state, dict(zip(map(id, sharded), places, strict=True))) if staging else {}


def _computed(tensors: Iterable[torch.Tensor]) -> Any:
    """What a GPU has to be past before these can be copied."""
    return torch.cuda.current_stream().record_event() if any(tensor.is_cuda for tensor in tensors) else None


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, outside of autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def _slots(tensors: Sequence[torch.Tensor]) -> Iterator[Slot]:
    end = 0
    for tensor in tensors:
        slot = Slot(-(-end // _ALIGN) * _ALIGN, tensor.dtype, tuple(tensor.shape))
        yield slot
        end = slot.end


def _replaced(value: Any, by: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(inner, by) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(inner, by) for inner in value)
    return by.get(id(value), value)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)
