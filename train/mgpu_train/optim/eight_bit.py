"""AdamW whose moments are kept in 8 bits, block by block (Dettmers et al. 2021, "8-bit Optimizers via Block-wise
Quantization"), by torchao's rounding.

Its own optimizer cannot skip a step without waiting for the device, and keeps its state in a tensor of its own kind.
Here the state is plain tensors: codes of the parameter's shape and scales of (rows, blocks of a row), sharded as the
parameter is. So checkpoints know nothing of torchao, and hold the very bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor

from mgpu_train.checkpoint.distributed.staging import local
from mgpu_train.optim.blocks import block_of
from mgpu_train.parallel import is_sharded

BETAS, EPS = (0.9, 0.95), 1e-8
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name: whether it has a sign


class _Moment(NamedTuple):
    """What a rank holds of one."""

    codes: Tensor  # uint8
    scale: Tensor
    map: Tensor


class AdamW8bit(torch.optim.Optimizer):
    """For parameters that `block_of` gives a block. On a GPU the step is compiled, once for each shape: as it stands it
    would keep several whole numbers of 64 bits for each that it rounds."""

    # a step takes `grad_scale`, by which gradients are divided, and `found_inf`, at which nothing changes: as torch's
    # fused AdamW, and without waiting for the device
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. `closure` is none."""
        assert closure is None  # noqa: S101 - nobody has one
        for group in self.param_groups:
            rate = torch.as_tensor(group["lr"], dtype=torch.float32)  # as a number it would be compiled in
            for each in group["params"]:
                if each.grad is not None:
                    self._change(each, local(each.grad), rate, group["weight_decay"])

    def _change(self, parameter: nn.Parameter, gradient: Tensor, rate: Tensor, decay: float) -> None:
        state, held = self.state[parameter] or self._begin(parameter), local(parameter)
        first, second = (
            _Moment(local(state[f"{name}_codes"]), local(state[f"{name}_scale"]), _map(signed, held.device))
            for name, signed in _MOMENTS.items()
        )
        factor = held.new_ones(()) if self.grad_scale is None else 1 / self.grad_scale
        skipped = held.new_zeros(()) if self.found_inf is None else self.found_inf
        if not held.numel():  # a rank without a row has the same state as the others, and may be who saves the step
            state["step"] += skipped == 0
            return
        update, unlimited = _update_on(held.device)
        with unlimited():
            update(held, gradient, factor, skipped.bool(), state["step"], first, second, rate, decay)

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Moments of nothing: codes of scale 0."""
        held, block = local(parameter), block_of(parameter.shape)
        assert block is not None  # noqa: S101 - `optim.base` sees to it
        rows, blocks = len(held), math.prod(parameter.shape[1:]) // block
        state = self.state[parameter]
        state["step"] = torch.zeros((), device=held.device)
        for name in _MOMENTS:
            state[f"{name}_codes"] = _as(parameter, torch.zeros(held.shape, dtype=torch.uint8, device=held.device))
            state[f"{name}_scale"] = _as(parameter, torch.zeros(rows, blocks, device=held.device))
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In place: torch's own would make codes floating-point."""
        ours, theirs = _parameters(self.param_groups), _parameters(state_dict["param_groups"])
        for parameter, name in zip(ours, theirs, strict=True):
            kept = state_dict["state"].get(name)
            if not kept:  # as torch's own: it begins anew
                self.state.pop(parameter, None)
                continue
            state = self.state[parameter] or self._begin(parameter)
            for key, value in kept.items():
                local(state[key]).copy_(local(value))


def _parameters(groups: list[dict[str, Any]]) -> Iterator[Any]:
    return (each for group in groups for each in group["params"])


def _as(parameter: Tensor, held: Tensor) -> Tensor:
    """What this rank holds of something that is shared out by rows as the parameter is."""
    if not is_sharded(parameter):
        return held
    from torch.distributed.tensor import DTensor

    shape = torch.Size((parameter.shape[0], *held.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(held, mesh, placements, run_check=False, shape=shape, stride=stride)


@functools.cache
def _map(signed: bool, device: torch.device) -> Tensor:
    """The number that each code stands for, in float32."""
    return torch.tensor(create_dynamic_map(signed=signed), device=device)


@functools.cache
def _update_on(device: torch.device) -> tuple[Callable[..., None], Callable[[], AbstractContextManager[Any]]]:
    if device.type == "cpu":
        return _update, nullcontext
    # a model has more shapes than the compiler expects of one function
    return torch.compile(_update, fullgraph=True, dynamic=False), torch._dynamo.utils.disable_cache_limit


def _update(
    parameter: Tensor,
    gradient: Tensor,
    factor: Tensor,
    skipped: Tensor,
    step: Tensor,
    first: _Moment,
    second: _Moment,
    rate: Tensor,
    decay: float,
) -> None:
    """AdamW's own (Loshchilov, Hutter 2019), in place; nothing changes where `skipped`."""
    gradient, now = gradient * factor, step + 1
    mean = _numbers(first).lerp(gradient, 1 - BETAS[0])
    square = _numbers(second).lerp(gradient.square(), 1 - BETAS[1])
    change = mean / (1 - BETAS[0] ** now) / ((square / (1 - BETAS[1] ** now)).sqrt() + EPS)
    changed = (parameter, step, first.codes, first.scale, second.codes, second.scale)
    values = (parameter - rate * (decay * parameter + change), now, *_rounded(mean, first), *_rounded(square, second))
    for each, value in zip(changed, values, strict=True):
        each.copy_(torch.where(skipped, each, value))


def _numbers(moment: _Moment) -> Tensor:
    return dequant_with_qmap(moment.codes, moment.map, moment.scale.view(-1))


def _rounded(numbers: Tensor, like: _Moment) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    scaled, scale = scale_tensor(numbers, numbers.numel() // like.scale.numel())
    return quantize_8bit_with_qmap(scaled, like.map), scale.view(like.scale.shape)
