"""`train.precision: fp8`: matrix products of the blocks' linear layers in 8 bits, forward and backward, by torchao.

What they are given and what they give is bf16, and so is all else that bf16 computes in 16 bits. Each tensor is scaled
as a whole, by its largest number of that moment (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mgpu_train import entries
from mgpu_train.config import FP8_CAPABILITY
from mgpu_train.errors import TrainError
from mgpu_train.models.adapters import is_lora
from mgpu_train.tasks.base import Layout

_SIDES = 16  # both of a matrix are multiples of it: what the kernels of cuBLAS take


def require(device: torch.device) -> None:
    """Raises TrainError: this device does not compute in fp8."""
    if device.type != "cuda":
        found = "this rank has none"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if major + minor / 10 >= FP8_CAPABILITY:
            return
        found = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    raise TrainError(
        f"`train.precision`: fp8 needs a GPU of compute capability {FP8_CAPABILITY:g} or more, as L4, L40S, H100 and "
        f"B200 are, and {found}. Take `precision: bf16`, or such a GPU."
    )


def recipe() -> Any:
    """What torchao is told: for gradients of weights, tokens are padded to a multiple of 16."""
    return entries.of_extra("torchao.float8", "torchao", "`train.precision`: fp8").Float8LinearConfig(
        pad_inner_dim=True
    )


def convert(model: nn.Module, layout: Layout) -> None:
    """The linear layers of blocks compute in fp8 from now on: all but adapters, and those whose sides are no multiples
    of 16. Parameters and their names stay.

    Raises TrainError: there is none, or torchao is missing.
    """
    prefixes = tuple(f"{block}." for block in layout.blocks)
    layers = {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name.startswith(prefixes)
        and not is_lora(f"{name}.")
        and not any(side % _SIDES for side in module.weight.shape)
    }
    config = recipe()
    if not layers:
        raise TrainError(
            "`train.precision`: fp8 computes the linear layers of a model's blocks (`Layout.blocks`) whose sides are "
            f"multiples of {_SIDES}, and {type(model).__name__} has none. Take `precision: bf16`."
        )
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in layers, config=config)
