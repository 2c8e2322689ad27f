"""A byte-level GPT: rotary positions, RMSNorm before each branch, squared ReLU, no biases.

In shapes, B is sequences and T is bytes of each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mgpu_train.config import ModelConfig

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention and a perceptron, each added to the residual stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm_mlp = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        x = x + self.attention(self.norm_attention(x), rotation)
        return x + self.down(F.relu(self.up(self.norm_mlp(x))).square())


class ByteGPT(nn.Module):
    """Predicts the next byte; called with inputs and targets, it answers the mean loss in nat/byte."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, BYTES, bias=False)
        self.register_buffer("rotation", _rotation(seq_len, config.dim // config.heads), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.embed.weight)
        # every block begins as the identity and the head as "all bytes are equally likely": loss ln 256 at step 0
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            assert isinstance(block, Block)  # noqa: S101 - ModuleList forgets the type
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, T) int64 twice -> the mean loss in nat/byte, a float32 scalar."""
        x = self.embed(inputs)
        rotation = self.get_buffer("rotation")[:, : inputs.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, BYTES), targets.reshape(-1))


def _rotation(length: int, head_dim: int) -> Tensor:
    """Cosines and sines of all positions: (2, length, head_dim / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(length), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of the last dimension by its position's angle."""
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)
