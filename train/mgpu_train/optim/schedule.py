"""The learning rate of each step."""

from __future__ import annotations

import math

from mgpu_train.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of the update that makes step `step` (from 1): linear warm-up, then a cosine down to `min_lr_ratio`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
