"""Tensor parallelism: several ranks share each layer (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mgpu_train.errors import TrainError
from mgpu_train.parallel import Place
from mgpu_train.tasks.base import Layout

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "heads": lambda: SequenceParallel(sequence_dim=1, use_local_output=True),
}


def share(model: nn.Module, layout: Layout, place: Place) -> None:
    """Parts the layers that the layout says how to part; what it does not name all ranks of a layer hold alike.

    Raises TrainError: it names none, or one that cannot be parted so.
    """
    assert place.mesh is not None  # noqa: S101 - there is more than one rank a layer
    if not layout.tensor:
        raise TrainError("`train.tensor_parallel`: the task does not say how its layers are parted (`Layout.tensor`)")
    names = {name for name, _ in model.named_modules()}
    try:
        plan = {
            name: STYLES[how]() if isinstance(how, str) else how for name, how in layout.tensor.items() if name in names
        }
        parallelize_module(model, place.mesh["tensor"], plan)
    except (RuntimeError, NotImplementedError) as error:
        raise TrainError(f"`train.tensor_parallel`: {str(error).partition(chr(10))[0]}") from error
