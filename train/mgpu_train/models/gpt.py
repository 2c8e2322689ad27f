"""A decoder-only transformer: rotary positions (Su et al. 2021), RMSNorm before each branch, no biases.

In shapes, B is sequences and T is tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mgpu_train.config import ModelConfig
from mgpu_train.models.context import Context


class Norm(nn.RMSNorm):
    """Its gain in the type of what it is given: torch has one kernel for both alike, and none for a mixture."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=torch.finfo(torch.float32).eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention; several heads may share keys and values (GQA: Ainslie et al. 2023)."""

    context: Context | None = None  # with which other ranks this one shares sequences

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.shared = config.head_dim, config.kv_heads is not None
        width, shared = config.heads * config.head_dim, (config.kv_heads or config.heads) * config.head_dim
        self.q = nn.Linear(config.dim, width, bias=False)
        self.k, self.v = (nn.Linear(config.dim, shared, bias=False) for _ in range(2))
        self.out = nn.Linear(width, config.dim, bias=False)
        self.norm_q, self.norm_k = (Norm(config.head_dim) if config.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim). Ranks that share this layer have some of the heads each."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = _rotate(self.norm_q(q), rotation), _rotate(self.norm_k(k), rotation)
        if self.context is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        else:
            y = self.context.attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return self.out(y.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """Squared ReLU (So et al. 2021), or SwiGLU (Shazeer 2020), which has as many weights at two thirds the width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.gate = nn.Linear(config.dim, config.hidden, bias=False) if config.mlp == "swiglu" else None
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        up = self.up(x)
        return self.down(F.relu(up).square() if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """Attention and a perceptron, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_attention, self.attention = Norm(config.dim), Attention(config)
        self.norm_mlp, self.mlp = Norm(config.dim), Perceptron(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        x = x + self.attention(self.norm_attention(x), rotation)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Predicts the next token; `initialise` gives it its values."""

    context: Context | None = None

    def __init__(self, config: ModelConfig, length: int) -> None:
        """`length`: the most tokens of a sequence."""
        super().__init__()
        vocabulary = config.padded_vocabulary
        self.embed = nn.Embedding(vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config.dim)
        self.head = nn.Linear(config.dim, vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.tied, self.base = config.tied, config.rotary_base
        empty = torch.empty(2, length, config.head_dim // 2)  # computed there, torch would import its compiler
        rotation = empty if empty.is_meta else _rotation(length, config.head_dim, self.base)
        self.register_buffer("rotation", rotation, persistent=False)

    def initialise(self) -> None:
        """Draws the weights by their fan-in, and computes the positions."""
        rotation = self.get_buffer("rotation")
        rotation.copy_(_rotation(rotation.shape[1], 2 * rotation.shape[2], self.base))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, Norm):
                module.reset_parameters()
        # a matrix that is read both ways begins as a head does: small beside what the norm before it gives
        nn.init.normal_(self.embed.weight, std=0.02 if self.tied else 1.0)
        # every block begins as the identity, and an untied head as "all tokens are equally likely": loss ln(vocabulary)
        if not self.tied:
            nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            assert isinstance(block, Block)  # noqa: S101 - ModuleList forgets the type
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)

    def share(self, context: Context) -> None:
        """From now on `forward` is given this rank's part of each sequence, and gives the logits of that."""
        self.context = context
        for module in self.modules():
            if isinstance(module, Attention):
                module.context = context

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, T) int64 -> logits of the token that follows each: (B, T, vocabulary), in what is computed in."""
        x = self.embed(inputs)
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16:
            # what blocks add to is in bfloat16 as well, as where shards are gathered in it: 4 % more tokens/s of GPT-2
            # 124M on an H100; float16 has not the range for it
            x = x.bfloat16()
        length = inputs.shape[1] * (1 if self.context is None else self.context.size)
        rotation = self.get_buffer("rotation")[:, :length]
        if self.context is not None:
            rotation = self.context.part(rotation)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def _rotation(length: int, head_dim: int, base: float) -> Tensor:
    """Cosines and sines of all positions: (2, length, head_dim / 2)."""
    frequency = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(length), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of the last dimension by its position's angle, in the angles' type."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)
