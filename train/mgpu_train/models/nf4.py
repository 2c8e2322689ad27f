"""Frozen linear layers whose weights are kept in NF4, 4 bits a number (Dettmers et al. 2023, "QLoRA"), by torchao.

A weight is kept in parts, as buffers that are in no checkpoint, and not in torchao's own tensor: strategies, saves and
the compiler then see plain tensors. Each rank has all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import NF4Tensor, to_nf4
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import SubclassTensorArgs, linear_nf4

BLOCK = 64  # numbers that share a scale
_Nf4: Any = NF4Tensor  # whose constructor has a wrapper of the compiler's around it
SCALES = 256  # scales that share one of their own, at most ("double quantisation")


class Nf4Linear(nn.Module):
    """In place of a linear layer that is not learned. It has no weight until `take` is called."""

    codes: Tensor  # uint8, two numbers each
    scales: Tensor  # int8, one a block
    factors: Tensor  # of scales, and with their mean: float32
    mean: Tensor
    levels: Tensor  # the 16 numbers that codes stand for

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, *, transposed: bool) -> None:
        """Of `weight` only shape and device are taken: (outputs, inputs), or (inputs, outputs) if `transposed`."""
        super().__init__()
        self.like, self.transposed, self.bias = torch.empty_like(weight, device="meta"), transposed, bias
        blocks = weight.numel() // BLOCK
        self._scales = math.gcd(blocks, SCALES)
        parts = {
            "codes": (weight.numel() // 2, torch.uint8),
            "scales": (blocks, torch.int8),
            "factors": (blocks // self._scales, torch.float32),
            "mean": ((), torch.float32),
            "levels": (16, torch.float32),
        }
        for name, (size, dtype) in parts.items():
            self.register_buffer(name, torch.empty(size, dtype=dtype, device=weight.device), persistent=False)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """The nearest that NF4 has to a weight of any type. A GPU rounds where there is one: a core takes half a second
        a million numbers."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else self.codes.device
        whole = weight.to(device, torch.float32)
        made = to_nf4((whole.t() if self.transposed else whole).contiguous(), BLOCK, self._scales)
        self.codes.copy_(made.quantized_data)
        self.scales.copy_(made.quantized_scalers)
        self.factors.copy_(made.quantization_factor)
        self.mean.copy_(made.scaler_mean)
        self.levels.copy_(made.nf4)

    def forward(self, given: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs), in the type that autocast computes in, else in that of what is given. The
        weight is made of its parts for the moment, once more in the backward pass."""
        kind = given.device.type
        if torch.is_autocast_enabled(kind):
            given = given.to(torch.get_autocast_dtype(kind))
        made = linear_nf4(given, self.weight)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    @property
    def weight(self) -> Any:
        """torchao's tensor of the parts: (outputs, inputs)."""
        shape = self.like.shape[::-1] if self.transposed else self.like.shape
        meta = SubclassTensorArgs(shape, (shape[1], 1), 0, torch.float32, self.codes.device, requires_grad=False)
        blocks = len(self.scales)
        made = _Nf4(
            meta, BLOCK, blocks, self._scales, self.scales, self.factors, self.mean, self.codes, nf4=self.levels
        )
        made._is_hf_initialized = True  # transformers begins some weights by name, and would begin this one
        return made

    def extra_repr(self) -> str:
        """Its size."""
        return f"{tuple(self.like.shape)}, nf4"


def layers(model: nn.Module) -> Mapping[str, Nf4Linear]:
    """By the names that their weights would have."""
    return {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, Nf4Linear)}
