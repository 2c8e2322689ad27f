"""Activations: kept for the backward pass, or computed again in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from mgpu_train.config import ActivationCheckpointing
from mgpu_train.errors import TrainError
from mgpu_train.tasks.base import Layout

Context = AbstractContextManager[object]
Contexts = Callable[[], tuple[Context, Context]]

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
    contexts: Contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    for name in layout.blocks:
        block = model.get_submodule(name)
        norms = [each for each in block.modules() if isinstance(each, BatchNorm) and each.track_running_stats]
        each = contexts if how == "selective" else noop_context_fn
        checkpoint(block, context_fn=functools.partial(_counted_once, each, norms) if norms else each)


def _counted_once(contexts: Contexts, norms: Sequence[BatchNorm]) -> tuple[Context, Context]:
    """Around the forward pass, and around what is computed again."""
    first, again = contexts()
    return first, _counted(norms, again)


@contextmanager
def _counted(norms: Sequence[BatchNorm], again: Context) -> Iterator[None]:
    """Batch norms have the batch in their statistics already: a second time it would weigh about twice as much."""
    kept = [(norm, norm.momentum, norm.get_buffer("num_batches_tracked").clone()) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
        with again:
            yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum = momentum
            norm.get_buffer("num_batches_tracked").copy_(count)


def _policy(_context: object, operation: object, *_given: object, **_named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module, layout: Layout) -> None:
    """Each block is compiled by itself: those that are alike share what was compiled, and FSDP gathers in between."""
    for name in layout.blocks or ("",):
        model.get_submodule(name).compile()
