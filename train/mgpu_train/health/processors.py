"""What one processor of each node and the network between the nodes do, where there are no GPUs.

The launchers of the nodes meet and measure it before they start any rank: each of them has imported torch for
torchrun's sake, so that this takes 50 ms of a processor, where a process of its own would need 2 s for the import
alone. Only several nodes do it: one alone has no link, and no other to be compared with. It needs the standard library,
and any torch with gloo.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from mgpu_train.health import figures

# the side of the matrices, and the numbers that are summed up: 1 MiB, 10 ms of a wire of 1 Gbit/s each time
_SIDE, _COUNT = 512, 1 << 18
_TIMES = 10


@dataclass(frozen=True)
class Meeting:
    """Where the nodes meet: a port of node 0's. Seconds: until all have come, and for one collective after that."""

    node_rank: int
    nodes: int
    host: str
    port: int
    meet_s: float
    collective_s: float

    def told(self) -> dict[str, Any]:
        """As plain values, by which it is made again."""
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """What was found, in words. `machine`: this one is not fit; `network`: no single one is to blame."""

    said: str
    machine: str | None = None
    network: str | None = None


def examine(at: Meeting) -> Found:
    """Measures this node with all others. A gloo that cannot be used here says nothing of the machine.

    Raises:
        RuntimeError: they have not met in time, or the port is taken (torch's DistError).
    """
    from torch import distributed as dist

    if not dist.is_gloo_available():
        return Found("nothing is measured: this torch has no gloo")
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

    store = TCPStore(at.host, at.port, at.nodes, at.node_rank == 0, timedelta(seconds=at.meet_s))
    try:
        known = _measured(at, store)
    except RuntimeError as error:
        return Found(f"nothing is measured: {error}")
    return judged(known, at.node_rank)


def judged(known: list[dict[str, Any]], node_rank: int) -> Found:
    """What the figures of all nodes say of this one."""
    odd = figures.by_figures(known, node_rank, 1, figures.PROCESSORS)
    return Found(figures.summary(known, figures.PROCESSORS), odd, figures.between(known))


def _measured(at: Meeting, store: Any) -> list[dict[str, Any]]:
    """The figures of all nodes. Raises RuntimeError: gloo failed."""
    import torch
    from torch import distributed as dist

    limit = timedelta(seconds=at.collective_s)
    dist.init_process_group("gloo", store=store, rank=at.node_rank, world_size=at.nodes, timeout=limit)
    try:
        torch.set_num_threads(1)
        one = torch.ones(_SIDE, _SIDE)
        # its own time: what else runs on a machine is no fault of the machine's
        seconds = _least(time.thread_time, lambda: torch.mm(one, one))
        mine = {"rank": at.node_rank, "tflops": 2 * _SIDE**3 / seconds / 1e12}
        values = torch.full((_COUNT,), float(at.node_rank + 1))
        dist.all_reduce(values)
        right = bool((values == at.nodes * (at.nodes + 1) / 2).all())
        took = _least(time.perf_counter, lambda: dist.all_reduce(values.zero_()))
        sent = 2 * (at.nodes - 1) / at.nodes * values.nbytes / took / 1e9  # as NCCL's own tests count
        alone = {"right": True, "gb_per_s": None}
        known: list[Any] = [None] * at.nodes
        dist.all_gather_object(known, mine | {"inside": alone, "between": {"right": right, "gb_per_s": sent}})
        return known
    finally:
        dist.destroy_process_group()


def _least(clock: Callable[[], float], work: Callable[[], object]) -> float:
    """What it takes when nothing comes between."""
    times = []
    for _ in range(_TIMES):
        began = clock()
        work()
        times.append(clock() - began)
    return max(min(times), 1e-9)
