"""Attention over sequences of which each rank of a group has a part of the tokens (context parallelism).

As Llama 3 was trained (Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2): each sequence is cut into twice as
many chunks as there are ranks, and rank i has chunk i and the i-th from the end: causal attention is as much work for
each. Keys and values of all tokens are gathered in each layer; queries, and all else of a token, stay where they are.

In shapes, N is ranks of a group, B sequences, H heads, T tokens of a sequence, L of a chunk, D the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mgpu_train.data.order import Chunks
from mgpu_train.errors import TrainError


@dataclass(frozen=True)
class Context(Chunks):
    """The part that this rank has of each sequence, and how it sees the others'."""

    group: Any  # the torch.distributed.ProcessGroup

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Of what stands for all tokens in this dimension, T of them, what is this rank's: T / N.

        Raises TrainError: they are no multiple of 2 N.
        """
        if why := self.refuse(whole.shape[dim]):
            raise TrainError(f"`train.context_parallel`: {why}")
        length = whole.shape[dim] // (2 * self.size)
        return torch.cat([whole.narrow(dim, number * length, length) for number in self.numbers], dim)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, **named: Any) -> Tensor:
        """As torch's `scaled_dot_product_attention` of all tokens, with its arguments but for a mask: q, k and v are of
        this rank's tokens, (B, H, T / N, D) -> (B, H, T / N, D); k and v may have fewer heads. All ranks of the group
        call it together."""
        kind = q.device.type
        if torch.is_autocast_enabled(
            kind
        ):  # sees to torch's own function, and neither to what is gathered nor to masks
            q, k, v = (each.to(torch.get_autocast_dtype(kind)) for each in (q, k, v))
        k, v = self._of_all(k, v)
        return causal_part(q, k, v, self, **named) if is_causal else F.scaled_dot_product_attention(q, k, v, **named)

    def _of_all(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Of all tokens, in their order."""
        own = torch.stack((k, v)).unflatten(-2, (2, -1))  # 2, B, H, 2, L, D
        head, tail = self._gathered(own).unbind(4)  # N, 2, B, H, L, D each
        found = torch.cat((head, tail.flip(0))).movedim(0, 3).flatten(3, 4)  # 2, B, H, T, D
        return found[0], found[1]

    def _gathered(self, own: Tensor) -> Tensor:
        """What each rank has, by rank."""
        return _Gather.apply(own, self.group, self.size)


def causal_part(q: Tensor, k: Tensor, v: Tensor, part: Chunks, **named: Any) -> Tensor:
    """Causal attention of a rank's queries, q (B, H, T / N, D), to k and v of all tokens (B, H or fewer, T, D)."""
    length = q.shape[-2] // 2
    lower_right = _masks(q.device)
    found = []
    for own, number in zip(q.split(length, -2), part.numbers, strict=True):
        seen = (number + 1) * length  # the chunk's own tokens are the last of them
        mask, keys, values = lower_right(length, seen), k[..., :seen, :], v[..., :seen, :]
        found.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, **named))
    return torch.cat(found, -2)


def _masks(device: torch.device) -> Callable[[int, int], Tensor]:
    """How a mask is made by which the last query sees all keys. For GPUs it is one that has no numbers, so that flash
    attention, which knows it, leaves out what is not seen."""
    if device.type == "cpu":
        return lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    from torch.nn.attention.bias import causal_lower_right  # 2 s, with torch's compiler

    return causal_lower_right


class _Gather(torch.autograd.Function):
    """What each of N ranks has, (N, ...); backwards, the sum of all ranks' gradients of what this one has."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, size: int) -> Tensor:
        ctx.group = group
        whole = own.new_empty((size * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(whole, own.contiguous(), group=group)
        return whole.unflatten(0, (size, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # as many bytes as a reduce-scatter takes, and of 16 bits the sum is made in 32
        (gradient,) = gradients
        received = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, gradient.contiguous(), group=ctx.group)
        return received.sum(0), None, None
