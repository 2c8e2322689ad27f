"""Where a process stands among the others, and what they do together.

The device is what is there: NCCL and the GPU of this local rank, or else gloo and the CPU. The same code runs on both.
Where GPUs are demanded it is never the CPU.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from mgpu_train.errors import MachineError, TrainError
from mgpu_train.health import hardware
from mgpu_train.health.gpus import Demand

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")  # of a mesh, from the furthest ranks to neighbours


@dataclass(frozen=True)
class Place:
    """One process among all. `control` is a gloo group of its own: decisions and checkpoint work never share NCCL's.

    `saving` is another one, for saves in the background: two threads in one group would take each other's messages.
    `copy` numbers the copies of the model: ranks that have parts of the same one share it, and its data. `dp_rank`
    numbers parts of a batch: copies that share sequences share it.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    tensor: int = 1  # ranks that share each layer; neighbours
    context: int = 1  # copies that share each sequence; neighbours
    pipeline: int = 1  # stages, each of so many blocks; furthest from one another
    mesh: DeviceMesh | None = None  # where ranks are parted by more than their data: DIMENSIONS

    @property
    def dp_rank(self) -> int:
        """Which of `dp_size` parts of each batch this rank learns from, alone or with others."""
        return self.copy // self.context

    @property
    def dp_size(self) -> int:
        """How many parts of each batch there are."""
        return self.copies // self.context

    @property
    def copy(self) -> int:
        """Which of `copies` of the model, each with tokens or samples of its own, this rank has a part of."""
        return self.rank // self.tensor % self.copies

    @property
    def copies(self) -> int:
        """How many copies of the model there are, whose gradients are added up."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def parted(self) -> bool:
        """Whether this rank has but a part of each copy of the model, whatever the strategy."""
        return self.tensor * self.pipeline > 1

    @property
    def stage(self) -> int:
        """Which of the pipeline's stages this rank belongs to."""
        return self.rank // self.stage_size

    @property
    def stage_size(self) -> int:
        """Ranks of one stage, which hold alike what none of them shards."""
        return self.world_size // self.pipeline

    @property
    def tells(self) -> bool:
        """Whether this rank's losses count: one rank of each copy of the model has them all."""
        return self.rank % self.tensor == 0 and self.stage == self.pipeline - 1

    @property
    def data(self) -> dist.ProcessGroup | None:
        """What tensors of the device are exchanged by: NCCL's group, or gloo's of decisions."""
        return self.control if self.device.type == "cpu" else None

    @property
    def background(self) -> Place:
        """The same place, as the thread that saves sees it."""
        return replace(self, control=self.saving)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self.control)

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, in the order of ranks."""
        values = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values


def join(timeout_s: float, save_s: float, gpus: Demand | None = None) -> Place:
    """Meet the other ranks where torchrun's variables say; without them, be the only one.

    A collective that takes longer than `timeout_s` seconds is an error, also of a group that anybody makes later, and
    one of a save longer than `save_s`: ranks wait there for each other's disks. `gpus` are those that this node has to
    have.

    Raises:
        MachineError: it has fewer, and was waited for.
        TrainError: there is none for this rank, or its PyTorch cannot use them.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local_rank, gpus)
    timeout = timedelta(seconds=timeout_s)
    default: Any = dist.distributed_c10d  # a mesh, DTensors and DeepSpeed name no limit to the groups that they make
    default.default_pg_timeout = default.default_pg_nccl_timeout = timeout
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        # with its device a rank need not guess it, and connects at once: what cannot connect is seen here
        dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - documented, yet not in __all__
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    control, saving = (dist.new_group(backend="gloo", timeout=limit) for limit in (timeout, timedelta(seconds=save_s)))
    assert isinstance(control, dist.ProcessGroup)  # noqa: S101 - every rank is a member
    assert isinstance(saving, dist.ProcessGroup)  # noqa: S101
    return Place(dist.get_rank(), local_rank, dist.get_world_size(), device, control, saving)


def leave() -> None:
    """Part from the other ranks in good order."""
    dist.destroy_process_group()


def _device(local_rank: int, gpus: Demand | None) -> torch.device:
    if gpus is not None and (lack := gpus.unmet()):
        raise (MachineError if lack.machine else TrainError)(lack.words)
    if not torch.cuda.is_available():
        if gpus is None:
            return torch.device("cpu")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"PyTorch {torch.__version__}" + ("" if hidden is None else f", CUDA_VISIBLE_DEVICES={hidden!r}")
        raise TrainError(
            f"{gpus.node} has its {gpus.count} GPUs, but PyTorch sees none of them ({why}). "
            "Take a PyTorch that is built for CUDA and for this driver."
        )
    if local_rank >= torch.cuda.device_count():
        raise TrainError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}. "
            "Start at most one process a GPU (`gpus_per_node`, torchrun's --nproc-per-node)."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def pin_threads(place: Place, threads: int | None) -> int:
    """Fix the number of CPU threads of this process, since sums depend on it; by default this machine's fair share.

    Ranks that run under the same kernel share its cores, whatever node they belong to.
    """
    neighbours = place.gather(machine()).count(machine())
    count = threads or max(1, hardware.cores() // neighbours)
    torch.set_num_threads(count)
    return count


def machine() -> str:
    """What processes under the same kernel have in common, and no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:  # not Linux
        return platform.node()


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor. Its module, which takes half a second to import, is not imported by this: who has one
    has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)  # absent while another thread imports it
    return kind is not None and isinstance(value, kind)


def mean_statistics(model: nn.Module, place: Place) -> None:
    """Batch norms that see a rank's own batches alone get the mean of what all ranks have seen, so that validation and
    checkpoints are of one model. All ranks call it together."""
    kept = [
        each
        for module in model.modules()
        if isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for each in (module.running_mean, module.running_var)
        if each is not None
    ]
    if not kept or place.copies == 1:
        return
    groups = [place.data]
    if place.parted:  # those that have the same part of the model, in this mesh
        assert place.mesh is not None  # noqa: S101
        groups = [place.mesh[name].get_group() for name in ("replicate", "shard")]
    for each in kept:
        mine = each.to_local() if is_sharded(each) else each
        for group in groups:
            dist.all_reduce(mine, group=group)
        mine /= place.copies
