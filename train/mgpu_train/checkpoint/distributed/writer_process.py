"""Shards written by a process of their own: next to a GPU, training keeps the interpreter to itself.

It is handed a plan, and where the data lies in memory that both processes map (`Staging`); it writes the file, flushes
it, and answers where each tensor lies in it. It meets no other rank, so it can die and be started again.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import serialization
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mgpu_train.checkpoint.distributed.staging import Slot, Staging

Data = Slot | torch.Tensor | BytesIO


@dataclass(frozen=True)
class Order:
    """One rank's part of one checkpoint: what to write into `folder`, and the size of the shared memory in bytes."""

    folder: Path
    plan: SavePlan
    data: Mapping[MetadataIndex, Data]
    size: int


class Outside:
    """The process of one rank; it starts at once, and again when it died, and ends when this one closes it or ends."""

    def __init__(self, staging: Staging, deadline_s: float) -> None:
        """An answer that takes longer than `deadline_s` seconds is an error."""
        self._staging, self._deadline_s = staging, deadline_s
        self._start()

    def write(self, order: Order) -> list[WriteResult]:
        """Where each item lies, once all are on disk. Raises OSError, also when the process died or took too long."""
        if self._process.poll() is not None:
            self._line.close()
            self._start()
        try:
            # not `send`: it hands tensors over by way of shared memory and threads, which are needed for none here
            self._line.send_bytes(pickle.dumps(order))
            if not self._line.poll(self._deadline_s):
                self._process.kill()
                self._process.wait()
                raise TimeoutError(f"the process that writes did not answer in {self._deadline_s:g} s (save_s)")
            answer = pickle.loads(self._line.recv_bytes())  # noqa: S301 - of a process of ours
        except (EOFError, ConnectionError) as error:
            raise OSError(f"the process that writes died, exit code {self._process.wait()}") from error
        if isinstance(answer, OSError):
            raise answer
        return answer

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """End the process. It has nothing to lose: what is not renamed is no checkpoint."""
        self._line.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> None:
        self._line, far = Pipe()
        # `-c`, not `-m`: the package's module would be loaded twice, and what it sends would be of unknown classes
        program = "from mgpu_train.checkpoint.distributed.writer_process import serve; serve()"
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(far.fileno()), str(self._staging.fd)],
                pass_fds=(far.fileno(), self._staging.fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},  # no part of it on the GPU
            )


class ShardWriter(FileSystemWriter):
    """DCP's writer, but that what every rank reads again is in a file of its own, beside the shards, which few do.

    It says why a disk took no more: torch then complains of its unfinished archive instead. And it leaves out each
    tensor's CRC-32, which takes as much time as all else of a save and which `torch.load` does not look at: the whole
    file has its CRC-64 (`mgpu_train.checkpoint.transfer`).
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP's own contract."""
        shards = [item for item in plan.items if item.type is WriteItemType.SHARD]
        others = [item for item in plan.items if item.type is not WriteItemType.SHARD]
        prefix: str = plan.storage_data.prefix
        parts = [replace(plan, items=shards or others)]
        if shards and others:
            parts.append(
                replace(plan, items=others, storage_data=replace(plan.storage_data, prefix=f"{prefix}common_"))
            )
        written: Future[list[WriteResult]] = Future()
        try:
            with _no_crc32():
                results = [super(ShardWriter, self).write_data(part, planner).wait() for part in parts]
        except RuntimeError as error:
            raise _of_the_system(error) or error from error
        written.set_result([result for each in results for result in each])
        return written


class OutsideWriter(FileSystemWriter):
    """DCP's writer, but that the data is written by `outside`. Plans and metadata stay here."""

    def __init__(self, folder: Path, staging: Staging, outside: Outside) -> None:
        super().__init__(folder)
        self._folder, self._staging, self._outside = folder, staging, outside

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """DCP's own contract."""
        data = {item.index: self._hand_over(planner.resolve_data(item)) for item in plan.items}
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._outside.write(Order(self._folder, plan, data, self._staging.size)))
        return written

    def _hand_over(self, data: torch.Tensor | BytesIO) -> Data:
        return data if isinstance(data, BytesIO) else self._staging.slot(data) or data


class _Handed(DefaultSavePlanner):
    """Gives the writer what was handed over."""

    def __init__(self, order: Order, memory: mmap.mmap) -> None:
        super().__init__()
        self._data, self._memory = order.data, memory

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | BytesIO:
        data = self._data[write_item.index]
        return data.within(self._memory) if isinstance(data, Slot) else data


@contextmanager
def _no_crc32() -> Iterator[None]:
    before = serialization.get_crc32_options()
    serialization.set_crc32_options(False)
    try:
        yield
    finally:
        serialization.set_crc32_options(before)


def _of_the_system(error: BaseException) -> OSError | None:
    """What the operating system had said, when another error came up while that one was handled."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__cause__ or inner.__context__
    return inner


def serve() -> None:
    """The other process: orders come by the first descriptor, the second is the memory; ends when nobody is there."""
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to all of a group; whoever gave the order decides
        signal.signal(number, signal.SIG_IGN)
    line, memory_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    try:
        while True:
            order = pickle.loads(line.recv_bytes())  # noqa: S301 - of the process that started this one
            line.send_bytes(pickle.dumps(_carry_out(order, memory_fd)))
    except (EOFError, ConnectionError):
        os._exit(0)  # as the trainer ends, and for its reason


def _carry_out(order: Order, memory_fd: int) -> list[WriteResult] | OSError:
    try:
        memory: Any = mmap.mmap(memory_fd, order.size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return ShardWriter(order.folder).write_data(order.plan, _Handed(order, memory)).wait()
    except OSError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a bug costs this save, not all that follow
        return OSError(f"{type(error).__name__}: {error}")
