"""AdamW (Loshchilov, Hutter 2019), in torch's fused kernel."""

from __future__ import annotations

import torch
from torch import nn

from mgpu_train.config import TrainConfig

MOMENTS = 2  # values that it keeps of each parameter


def make(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Weight decay on matrices only, never on the gains of norms."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in learned if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in learned if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
