"""Who likes what, in the manner of DLRM (Naumov et al. 2019): tables of users and items, and a perceptron.

In shapes, B is pairs of a user and an item.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_SPREAD = 0.05  # standard deviation of a table's first values: the mean rating is nearly all that is guessed at first


class DLRM(nn.Module):
    """A rating is the sum of what user and item give alone, of how well they fit (the product of their vectors), and
    of a perceptron on all of these. `initialise` gives it its values."""

    def __init__(self, users: int, items: int, *, dim: int, hidden: Sequence[int]) -> None:
        """`dim`: numbers of a user's or item's vector, beside the one that counts alone; `hidden`: the perceptron's
        widths."""
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim + 1), nn.Embedding(items, dim + 1)
        widths = [2 * dim + 1, *hidden]
        self.hidden = nn.ModuleList(nn.Linear(given, made) for given, made in pairwise(widths))
        self.out = nn.Linear(widths[-1], 1)

    def initialise(self, mean: float) -> None:
        """Small random tables; the guess begins at `mean`."""
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=_SPREAD)
        for layer in self.hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        nn.init.zeros_(self.out.weight)
        nn.init.constant_(self.out.bias, mean)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Numbers of users and items, (B,) each -> ratings (B,) float32."""
        user, item = self.users(users), self.items(items)
        fit = (user[:, 1:] * item[:, 1:]).sum(1, keepdim=True)
        x = torch.cat((user[:, 1:], item[:, 1:], fit), 1)
        for layer in self.hidden:
            x = torch.relu(layer(x))
        alone = user[:, :1] + item[:, :1]
        return (self.out(x).float() + alone.float() + fit.float()).squeeze(1)
