"""Task `lm`: a byte-level GPT on text files. Rotary positions, RMSNorm before each branch, squared ReLU, no biases.

In shapes, B is sequences and T is bytes of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mgpu_train.config import LmOptions, ModelConfig
from mgpu_train.data.text import Text, open_split
from mgpu_train.tasks.base import Batch, Data, Layout, Loss, Split, Task

BYTES = 256


class ByteLM(Task):
    """Predicts the next byte of text files."""

    Options = LmOptions
    unit = "tokens"  # bytes
    options: LmOptions

    def data(self, split: Split) -> Data:
        """Sequences of the training or of the validation text."""
        return Sequences(self._texts[split == "validation"], self.options.seq_len)

    def model(self) -> ByteGPT:
        """A GPT of the shape that the run file gives."""
        return ByteGPT(self.options.model, self.options.seq_len)

    def initialise(self, model: nn.Module) -> None:
        """Weights by their fan-in."""
        assert isinstance(model, ByteGPT)  # noqa: S101
        model.initialise()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy of every next byte, in nat."""
        tokens = batch["bytes"]
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        return Loss(F.cross_entropy(logits.reshape(-1, BYTES), targets.reshape(-1), reduction="sum"), targets.numel())

    def layout(self, model: nn.Module) -> Layout:
        """The transformer's blocks."""
        return Layout(tuple(f"blocks.{number}" for number in range(self.options.model.layers)))

    def facts(self) -> Mapping[str, float]:
        """What a model reaches that counts bytes, and pairs of them, in the validation text: nat/byte."""
        unigram, bigram = self._texts[1].entropies()
        return {"unigram_entropy": round(unigram, 4), "bigram_entropy": round(bigram, 4)}

    @cached_property
    def _texts(self) -> tuple[Text, Text]:
        return open_split(self.options.text, self.options.seq_len)


@dataclass(frozen=True)
class Sequences:
    """A text, cut into sequences."""

    text: Text
    seq_len: int

    @property
    def fingerprint(self) -> str:
        """The text's."""
        return self.text.fingerprint

    def __len__(self) -> int:
        """How many there are."""
        return self.text.samples(self.seq_len)

    def batch(self, samples: Sequence[int], seeds: Sequence[int]) -> Batch:
        """Sequences with the byte that follows each: int64, shape (samples, seq_len + 1)."""
        return {"bytes": self.text.tensor(samples, self.seq_len)}


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
    """Predicts the next byte; `initialise` gives it its values."""

    def __init__(self, config: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, BYTES, bias=False)
        self.register_buffer("rotation", _rotation(seq_len, config.dim // config.heads), persistent=False)

    def initialise(self) -> None:
        """Draws the weights, and computes the positions."""
        rotation = self.get_buffer("rotation")
        rotation.copy_(_rotation(rotation.shape[1], 2 * rotation.shape[2]))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        nn.init.normal_(self.embed.weight)
        # every block begins as the identity and the head as "all bytes are equally likely": loss ln 256 at step 0
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            assert isinstance(block, Block)  # noqa: S101 - ModuleList forgets the type
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """(B, T) int64 -> logits of the byte that follows each: (B, T, 256) float32."""
        x = self.embed(inputs)
        rotation = self.get_buffer("rotation")[:, : inputs.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x)).float()


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
