"""Tensor parallelism: several ranks share each layer (Shoeybi et al. 2019)."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from mgpu_train.errors import TrainError
from mgpu_train.parallel import Place
from mgpu_train.tasks.base import Layout


def share(model: nn.Module, layout: Layout, place: Place) -> None:
    """Parts the layers that the layout says how to part; what it does not name all ranks of a layer hold alike.

    Raises TrainError: it names none, or one that cannot be parted so.
    """
    assert place.mesh is not None  # noqa: S101 - there is more than one rank a layer
    if not layout.tensor:
        raise TrainError("`train.tensor_parallel`: the task does not say how its layers are parted (`Layout.tensor`)")
    names = {name for name, _ in model.named_modules()}
    try:
        parallelize_module(model, place.mesh["tensor"], {k: how for k, how in layout.tensor.items() if k in names})
    except (RuntimeError, NotImplementedError) as error:
        raise TrainError(f"`train.tensor_parallel`: {str(error).partition(chr(10))[0]}") from error
