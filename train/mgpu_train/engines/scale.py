"""The factor of a loss that is computed in fp16, where small gradients would vanish (Micikevicius et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

HIGHEST = 2.0**16  # of the loss of one token or sample; the greatest number of fp16 is just below it
GROWS, SHRINKS, EVERY = 2.0, 0.5, 2000  # torch.amp.GradScaler's own


class LossScale:
    """Grows while gradients are finite, and shrinks at once when they are not. It never leaves the device."""

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros((), device=device)  # not known yet
        self._tracker = torch.zeros((), dtype=torch.int32, device=device)

    def up(self, loss: Tensor, weight: Tensor | float) -> Tensor:
        """The loss, a sum over `weight` tokens or samples, scaled. The first one says where the scale begins."""
        first = HIGHEST / torch.as_tensor(weight, dtype=torch.float32).clamp(min=1.0).to(self.value.device)
        begin = torch.exp2(torch.floor(torch.log2(first)))
        self.value.copy_(torch.where(self.value > 0, self.value, begin))
        return loss * self.value

    def update(self, skipped: Tensor) -> None:
        """After a step that was skipped (1) or not (0)."""
        torch._amp_update_scale_(self.value, self._tracker, skipped, GROWS, SHRINKS, EVERY)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - GradScaler's own way

    def state_dict(self) -> dict[str, Any]:
        """Two numbers."""
        return {"value": self.value, "tracker": self._tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """In place."""
        self.value.copy_(state["value"])
        self._tracker.copy_(state["tracker"])

    def steady(self) -> Iterable[Tensor]:
        """None: a forward pass may set it."""
        return ()
