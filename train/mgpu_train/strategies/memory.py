"""Activations: kept for the backward pass, or computed again in it."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mgpu_train.config import ActivationCheckpointing
from mgpu_train.errors import TrainError
from mgpu_train.tasks.base import Layout

# What takes long to compute again: matrix products and attention. All else is cheap beside its memory.
_KEPT = {
    getattr(torch.ops.aten, name).default
    for name in (
        "mm", "addmm", "bmm", "convolution", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
}  # fmt: skip


def save(model: nn.Module, layout: Layout, how: ActivationCheckpointing) -> None:
    """Each block keeps its input alone (`full`), or what matrix products gave, too (`selective`).

    Raises TrainError: the task names no blocks.
    """
    if how == "none":
        return
    if not layout.blocks:
        raise TrainError("`train.activation_checkpointing`: the task names no blocks (`Layout.blocks`)")
    for name in layout.blocks:
        block = model.get_submodule(name)
        if how == "full":
            checkpoint(block)
        else:
            checkpoint(block, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy))


def _policy(_context: object, operation: object, *_given: object, **_named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module, layout: Layout) -> None:
    """Each block is compiled by itself: those that are alike share what was compiled, and FSDP gathers in between."""
    for name in layout.blocks or ("",):
        model.get_submodule(name).compile()
