"""The learning rate of each step."""

from __future__ import annotations

import math

from mgpu_train.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Of the update that makes step `step` (from 1): linear warm-up, then a cosine down to `min_lr_ratio`. With
    `lr_from` it grows by the same factor in each step (the range test of Smith 2017, with an exponential's steps)."""
    if config.lr_from is not None:
        return config.lr_from * (config.lr / config.lr_from) ** ((step - 1) / max(1, config.steps - 1))
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    share = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
