"""A diffusion transformer (DiT: Peebles & Xie 2023) that says in which direction an image lies, and how it is followed.

In shapes, B is images of C channels, H and W pixels, N is patches of each, D the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

LEVELS = 1000  # of noise: at 0 there is none, at LEVELS nothing else; whole numbers stay exact in any precision
_WAVES = 256  # numbers that a level is told by


class Embed(nn.Module):
    """Patches as tokens, and before them a token of their condition: how much noise there is, and which class."""

    def __init__(self, channels: int, size: tuple[int, int], classes: int, *, patch: int, dim: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(torch.empty(size[0] // patch, size[1] // patch, dim))
        self.level_in, self.level_out = nn.Linear(_WAVES, dim), nn.Linear(dim, dim)
        self.classes = nn.Embedding(classes + 1, dim)  # the last one: not told

    def forward(self, noisy: Tensor, level: Tensor, label: Tensor) -> Tensor:
        """(B, C, H, W), (B,), (B,) -> (B, 1 + N, D)."""
        x = self.patches(noisy).permute(0, 2, 3, 1) + self.positions
        condition = self.level_out(F.silu(self.level_in(_waves(level)))) + self.classes(label)
        return torch.cat((condition[:, None], x.flatten(1, 2)), 1)


class Block(nn.Module):
    """Attention and a perceptron, each shifted, scaled and gated as the condition says (adaLN-Zero)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(dim, 6 * dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, D) -> (B, 1 + N, D), of which the first token stays: so all that blocks need is handed on in one
        tensor, from one stage of a pipeline to the next."""
        condition, x = x[:, :1], x[:, 1:]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(F.silu(condition)).chunk(6, -1)
        x = x + gate * self._attention(self.norm(x) * (1 + scale) + shift)
        inner = self.up(self.norm(x) * (1 + mlp_scale) + mlp_shift)
        x = x + mlp_gate * self.down(F.gelu(inner, approximate="tanh"))
        return torch.cat((condition, x), 1)

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Head(nn.Module):
    """Tokens as pixels."""

    def __init__(self, channels: int, size: tuple[int, int], *, patch: int, dim: int) -> None:
        super().__init__()
        self.patch, self.grid = patch, (size[0] // patch, size[1] // patch)
        self.modulation = nn.Linear(dim, 2 * dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.out = nn.Linear(dim, channels * patch * patch)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, D) -> (B, C, H, W) float32."""
        shift, scale = self.modulation(F.silu(x[:, :1])).chunk(2, -1)
        x = self.out(self.norm(x[:, 1:]) * (1 + scale) + shift)
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(2, self.grid), self.patch).float()


class DiT(nn.Module):
    """The mean direction from images to noise at a noisy image; `initialise` gives it its values."""

    def __init__(
        self,
        channels: int,
        height: int,
        width: int,
        classes: int,
        *,
        patch: int,
        layers: int,
        dim: int,
        heads: int,
    ) -> None:
        """Height and width are multiples of `patch`, the side of a patch."""
        super().__init__()
        size, self.shape = (height, width), (channels, height, width)
        self.embed = Embed(channels, size, classes, patch=patch, dim=dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = Head(channels, size, patch=patch, dim=dim)

    def initialise(self) -> None:
        """Each block begins as the identity, and the model with the guess 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        patches = self.embed.patches
        nn.init.normal_(patches.weight, std=(patches.in_channels * patches.kernel_size[0] ** 2) ** -0.5)
        nn.init.zeros_(patches.bias)  # type: ignore[arg-type]
        for table in (self.embed.positions, self.embed.classes.weight):
            nn.init.normal_(table, std=0.02)
        zeros = [*(module.modulation for module in self.modules() if isinstance(module, Block | Head)), self.head.out]
        for layer in zeros:
            nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor, *condition: Tensor) -> Tensor:
        """Noisy images (B, C, H, W), their level of noise and their class, int64 (B,) each -> (B, C, H, W) float32."""
        x = self.embed(x, *condition)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def follow(
    direction: Callable[[Tensor, Tensor, Tensor], Tensor],
    noise: Tensor,
    label: Tensor,
    *,
    untold: int,
    guidance: float,
    steps: int,
) -> Tensor:
    """The images that a model makes of noise (B, C, H, W), in steps of the same size (Euler's method).

    `direction` is the model; `untold` the class of which nothing is told. `guidance`: 0 is without classes, 1 by them,
    and more goes beyond them, away from what images are without classes (classifier-free: Ho & Salimans 2022).
    """
    levels = [round(LEVELS * left / steps) for left in range(steps, -1, -1)]
    x, nothing = noise, torch.full_like(label, untold)
    for before, after in pairwise(levels):
        level = torch.full_like(label, before)
        way = direction(x, level, label)
        if guidance != 1:
            without = direction(x, level, nothing)
            way = without + guidance * (way - without)
        x = x + (after - before) / LEVELS * way
    return x


def _waves(level: Tensor) -> Tensor:
    """Cosines and sines of (B,) levels: (B, _WAVES) float32."""
    half = _WAVES // 2
    frequency = torch.exp(torch.arange(half, device=level.device) * (-math.log(10_000) / half))
    angle = level[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1)
