"""Shards written by a process of their own: next to a GPU, training keeps the interpreter to itself.

It is handed a plan, and where the data lies in memory that both processes map (`Staging`); it writes the file, flushes
it, and answers where each tensor lies in it. It meets no other rank, so it can die and be started again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mgpu_train.checkpoint.distributed.staging import Slot, Staging

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

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
        program = "from mgpu_train.checkpoint.distributed.writers import serve; serve()"
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(far.fileno()), str(self._staging.fd)],
                pass_fds=(far.fileno(), self._staging.fd),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},  # no part of it on the GPU
            )
