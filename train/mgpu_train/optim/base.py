"""Optimizers: which one changes which parameter, and how all of them take a step together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mgpu_train import entries
from mgpu_train.checkpoint.distributed.staging import local
from mgpu_train.config import TrainConfig
from mgpu_train.errors import TrainError
from mgpu_train.optim.blocks import block_of, moments_bytes
from mgpu_train.tasks.base import Layout


class Optimizers:
    """Several that are one. `state_bytes`: what they keep of all parameters, whole; `held_bytes`: of this rank's."""

    def __init__(self, each: Sequence[torch.optim.Optimizer], state_bytes: float, held_bytes: float) -> None:
        self.each, self.state_bytes, self.held_bytes = list(each), state_bytes, held_bytes

    def step(self, lr: float, factor: Tensor, skipped: Tensor) -> None:
        """Changes parameters by their gradients times `factor`, and nothing where `skipped` is 1. Waits for no GPU."""
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's name: its step sees to both
                optimizer.grad_scale, optimizer.found_inf = (1 / factor).float(), skipped  # type: ignore[attr-defined]
                optimizer.step()
            else:
                _step_unless(optimizer, factor, skipped)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for optimizer in self.each:
            optimizer.zero_grad()


def make(model: nn.Module, layout: Layout, config: TrainConfig) -> Optimizers:
    """What `train.optimizer` says: AdamW for all, Muon for the matrices of blocks and AdamW for the rest, or AdamW with
    moments of 8 bits for what has blocks (`block_of`) and of 32 for the rest.

    Raises TrainError: this PyTorch does not have it, or torchao is missing.
    """
    learned = {name: each for name, each in model.named_parameters() if each.requires_grad}
    prefixes = tuple(f"{around}{block}." for block in layout.blocks for around in ("", "module."))
    muons = [
        name
        for name, each in learned.items()
        if config.optimizer == "muon" and each.ndim == 2 and name.startswith(prefixes)
    ]
    eights = [name for name, each in learned.items() if config.optimizer == "adamw8bit" and block_of(each.shape)]
    rest = learned.keys() - {*muons, *eights}
    each = [_adamw([learned[name] for name in learned if name in rest], config)] if rest else []
    if muons:
        each.append(_muon([learned[name] for name in muons], config))
    if eights:
        each.append(_eight_bit([learned[name] for name in eights], config))
    whole = held = 0.0
    for name, one in learned.items():
        moments = moments_bytes(one.shape) if name in eights else (4.0 if name in muons else 8.0) * one.numel()
        whole, held = whole + moments, held + moments * local(one).numel() / one.numel()
    return Optimizers(each, whole, held)


class AdamW(torch.optim.AdamW):
    """Torch's own methods without the wrappers that keep its compiler out of them, and import it to do so: a second of
    each start. Nothing here is called in what is compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)


def _adamw(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov, Hutter 2019), in torch's fused kernel; decay on matrices only, never on the gains of norms."""
    decay = {True: config.weight_decay, False: 0.0}
    groups = _groups(parameters, lambda each: each.ndim >= 2)
    given = [{"params": each, "weight_decay": decay[matrices]} for matrices, each in groups]
    return AdamW(given, lr=config.lr, betas=(0.9, 0.95), fused=True)


def _muon(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """Muon (Jordan 2024), with the updates' size that lets it share AdamW's rate and decay (Liu et al. 2025)."""
    if not hasattr(torch.optim, "Muon"):
        raise TrainError(f"`train.optimizer`: muon comes with PyTorch 2.9, and this is {torch.__version__}")
    given = [{"params": each} for _, each in _groups(parameters, lambda _: True)]
    return torch.optim.Muon(given, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")


def _eight_bit(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """As `_adamw`, with moments of 8 bits; torchao takes 2.5 s to import."""
    eight_bit = entries.of_extra("mgpu_train.optim.eight_bit", "torchao", "`train.optimizer`: adamw8bit")
    return eight_bit.AdamW8bit(parameters, lr=config.lr, weight_decay=config.weight_decay)


@torch.no_grad()
def _step_unless(muon: torch.optim.Optimizer, factor: Tensor, skipped: Tensor) -> None:
    """One matrix after the other, so that no more than one is kept twice: whether the step is to be skipped is known to
    the GPU alone. The momentum of such a step moves towards itself."""
    groups, skip = muon.param_groups, skipped.bool()
    try:
        for group in groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                before, gradient = local(each).clone(), local(each.grad)
                momentum = muon.state[each].get("momentum_buffer")
                instead = torch.zeros_like(gradient) if momentum is None else local(momentum)
                gradient.copy_(torch.where(skip, instead, gradient * factor.float()))
                muon.param_groups = [{**group, "params": [each]}]
                muon.step()
                local(each).copy_(torch.where(skip, before, local(each)))
    finally:
        muon.param_groups = groups


def _groups(
    parameters: Iterable[nn.Parameter], kind: Callable[[nn.Parameter], Any]
) -> Iterable[tuple[Any, list[nn.Parameter]]]:
    """Of one kind and one mesh each: a kernel takes no others at a time."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for each in parameters:
        groups.setdefault((kind(each), getattr(each, "device_mesh", None)), []).append(each)
    return ((which, each) for (which, _), each in groups.items())
