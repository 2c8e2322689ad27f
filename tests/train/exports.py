"""What the tests of the export look at: checkpoints of so many ranks, by the trainer itself and by hand.

`exports.py OUT` saves in OUT/<world size>-<name>.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from mgpu_train import parallel
from mgpu_train.config import Job
from mgpu_train.environment import Folders
from mgpu_train.loop import Trainer
from mgpu_train.signals import StopRequest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

SHAPE = {"layers": 2, "dim": 10, "heads": 1}  # four ranks share 10 rows as 3, 3, 3 and 1


def train(out: Path, place: parallel.Place, strategy: str) -> None:
    job = Job.model_validate({
        "run_id": "test", "attempt": 1, "writer": "w", "node_rank": 0, "nodes": 1, "processes_per_node": 1,
        "master_addr": "127.0.0.1", "master_port": 1,
        "train": {"steps": 2, "global_batch": 8, "seq_len": 16, "threads": 1, "model": SHAPE, "strategy": strategy,
                  "text": str(out / "text"), "validate_batches": 1},
        "checkpoint": {"to": "file:///x", "every_steps": 2, "writers": "all"},
    })  # fmt: skip
    Trainer(job, Folders(out / f"{place.world_size}-{strategy}"), place, StopRequest()).run()


def by_hand(out: Path, place: parallel.Place) -> None:
    """Cut along one axis, the other, both and none; of dtypes that the trainer does not save."""
    whole = torch.arange(6 * 9 * 4).reshape(6, 9, 4)
    mesh = init_device_mesh("cpu", (2, place.world_size // 2))
    cuts = {
        "rows": (torch.float32, (Replicate(), Shard(0))),
        "columns": (torch.bfloat16, (Replicate(), Shard(1))),
        "depth": (torch.int64, (Shard(2), Replicate())),
        "both": (torch.float16, (Shard(0), Shard(1))),
        "twice": (torch.float64, (Shard(1), Shard(1))),
        "none": (torch.int8, (Replicate(), Replicate())),
    }
    state = {name: distribute_tensor(whole.to(dtype), mesh, cut) for name, (dtype, cut) in cuts.items()}
    dcp.save(
        {"model": state}, checkpoint_id=out / f"{place.world_size}-by-hand" / "step-2", process_group=place.control
    )


def main() -> None:
    out, place = Path(sys.argv[1]), parallel.join(60, 60)
    for strategy in ("single",) if place.world_size == 1 else ("ddp", "fsdp"):
        train(out, place, strategy)
    if place.world_size == 4:
        by_hand(out, place)
    parallel.leave()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
    os._exit(0)  # as the trainer ends, and for its reason
