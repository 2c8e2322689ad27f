"""Activations: kept for the backward pass, or computed again in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.nn.modules.batchnorm import _NormBase as Norm
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


def save(model: nn.Module, layout: Layout, how: ActivationCheckpointing, *, compiled: bool = False) -> None:
    """Each block keeps its input alone (`full`), or what matrix products gave, too (`selective`). `compiled`: blocks
    will be.

    Raises TrainError: the task names no blocks.
    """
    if how == "none":
        return
    if not layout.blocks:
        raise TrainError("`train.activation_checkpointing`: the task names no blocks (`Layout.blocks`)")
    contexts: Contexts = noop_context_fn
    if how == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    for name in layout.blocks:
        block = model.get_submodule(name)
        norms = [each for each in block.modules() if isinstance(each, Norm) and each.track_running_stats]
        around = functools.partial(_around, contexts, norms, compiled) if norms or compiled else contexts
        checkpoint(block, context_fn=around)


def _around(contexts: Contexts, norms: Sequence[Norm], compiled: bool) -> tuple[Context, Context]:
    """The forward pass, and what is computed again."""
    first, again = contexts()
    return first, _computed_again(again, norms, compiled)


@contextmanager
def _computed_again(context: Context, norms: Sequence[Norm], compiled: bool) -> Iterator[None]:
    """Norms with statistics have the batch in them already: a second time it would weigh about twice as much."""
    if compiled:
        _compile_backward_without_autocast()
    kept = [(norm, norm.momentum, norm.get_buffer("num_batches_tracked").clone()) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
        with context:
            yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum = momentum
            norm.get_buffer("num_batches_tracked").copy_(count)


def _policy(_context: object, operation: object, *_given: object, **_named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: nn.Module, layout: Layout) -> None:
    """Each block is compiled by itself: those that are alike share what was compiled, and FSDP gathers in between."""
    _compile_backward_without_autocast()
    for name in layout.blocks or ("",):
        model.get_submodule(name).compile()


def _compile_backward_without_autocast() -> None:
    """As it runs. Torch compiles it together with the forward pass, and would take that one's autocast for its own. It
    keeps this by thread: what is computed again beside a GPU is compiled in another one."""
    from torch._functorch import config

    if hasattr(config, "backward_pass_autocast"):  # torch 2.8 may have no such choice
        config.backward_pass_autocast = "off"  # noqa: S105 - no password
