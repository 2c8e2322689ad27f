"""AdamW (Loshchilov, Hutter 2019), in torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mgpu_train.config import TrainConfig

MOMENTS = 2  # values that it keeps of each parameter


def make(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices only, never on the gains of norms."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:  # a kernel takes parameters of one mesh at a time
            groups.setdefault((parameter.ndim >= 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    decay = {True: config.weight_decay, False: 0.0}
    given = [{"params": each, "weight_decay": decay[matrices]} for (matrices, _), each in groups.items()]
    return torch.optim.AdamW(given, lr=config.lr, betas=(0.9, 0.95), fused=True)
