"""What the GPUs and the links between them do, measured before a program starts: `-m mgpu_train.health.preflight`.

Started once per process, as a trainer is; it reads torchrun's variables and MGPU_PREFLIGHT_FILE. The first rank of each
node writes there which part has begun, {"part": "matmul"}, and at the end what was measured on all ranks, an object a
rank: its `rank`, `tflops` of a product of matrices, and of a sum over the node (`inside`) and over all (`between`)
whether it was `right` and how many GB/s went through a link. It needs the standard library, and any torch with NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

FILE = "MGPU_PREFLIGHT_FILE"
TIMEOUT_S = "MGPU_PREFLIGHT_S"
PARTS = ("matmul", "inside", "between")
# sides of the matrices, and MiB that are summed up: enough for a GPU to show what it has, in under a second
_SIDE, _MIB = 8192, 256
_TIMES = 10


def main() -> int:
    """Measures; returns the exit code."""
    import torch
    from torch import distributed as dist

    cuda = torch.cuda.is_available()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=float(os.environ.get(TIMEOUT_S, "600")))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    places = [range(first, first + here) for first in range(0, size, here)]
    groups = [dist.new_group(list(place), timeout=timeout) for place in places]  # all ranks make all of them
    figures: dict[str, Any] = {"rank": rank}

    _tell(local, {"part": "matmul"})
    figures["tflops"] = matmul(device)
    _tell(local, {"part": "inside"})
    figures["inside"] = _all_reduce(device, groups[rank // here], list(places[rank // here]))
    _tell(local, {"part": "between"})
    figures["between"] = _all_reduce(device, None, list(range(size)))
    known: list[Any] = [None] * size
    dist.all_gather_object(known, figures)
    _tell(local, {"ranks": known})
    dist.destroy_process_group()
    return 0


def _tell(local: int, what: dict[str, Any]) -> None:
    if local == 0:
        path = Path(os.environ[FILE])
        aside = path.with_name(f".{path.name}")
        aside.write_text(json.dumps(what), encoding="utf-8")
        aside.replace(path)


def matmul(device: Any) -> float:
    """TFLOPS of this GPU, in the format that training has: bf16, or fp16 where that is emulated."""
    import torch

    cuda = device.type == "cuda"
    half = torch.bfloat16 if not cuda or torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    side = _SIDE if cuda else 256
    one = torch.ones(side, side, dtype=half, device=device)
    seconds = _seconds(device, lambda: torch.mm(one, one))
    return 2 * side**3 / seconds / 1e12


def _all_reduce(device: Any, group: Any, ranks: list[int]) -> dict[str, Any]:
    """Whether a sum over the ranks is right, and the bytes that each link carried, as NCCL's own tests count them."""
    import torch
    from torch import distributed as dist

    if len(ranks) == 1:
        return {"right": True, "gb_per_s": None}
    count = (_MIB << 18) if device.type == "cuda" else 1 << 16
    values = torch.full((count,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values, group=group)
    right = bool((values == sum(ranks) + len(ranks)).all())
    values.zero_()
    seconds = _seconds(device, lambda: dist.all_reduce(values, group=group))
    return {"right": right, "gb_per_s": 2 * (len(ranks) - 1) / len(ranks) * 4 * count / seconds / 1e9}


def _seconds(device: Any, work: Any) -> float:
    """What one of `_TIMES` takes, once the first three are over."""
    import torch

    def through() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for _ in range(3):
        work()
    began = through()
    for _ in range(_TIMES):
        work()
    return max((through() - began) / _TIMES, 1e-9)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as the trainer ends, and for its reason
