"""The factor of a loss that is computed in fp16, where small gradients would vanish (Micikevicius et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mgpu_train.parallel import Place

HIGHEST = 2.0**16  # of the loss of one token or sample; the greatest number of fp16 is just below it
GROWS, SHRINKS, EVERY = 2.0, 0.5, 2000  # torch.amp.GradScaler's own


class LossScale:
    """Grows while gradients are finite, and shrinks at once when they are not. It never leaves the device.

    It is the same on all ranks: it begins so, and whether a step is skipped is the same for all.
    """

    def __init__(self, place: Place) -> None:
        self._place, self._begun = place, False
        self.value = torch.zeros((), device=place.device)  # not known yet
        self._tracker = torch.zeros((), dtype=torch.int32, device=place.device)

    @torch.no_grad()
    def begin(self, weight: Tensor | float | None) -> None:
        """Where nothing was loaded, takes the least of what fits the losses of all ranks: each a sum over `weight`
        tokens or samples; None: this rank has no loss. Ranks call it together, before they first scale one up."""
        if self._begun:
            return
        self._begun = True
        known = torch.as_tensor(1.0 if weight is None else weight, dtype=torch.float32).to(self.value.device)
        summed = known.nan_to_num(nan=1.0, posinf=1.0).clamp(min=1.0)  # a bad batch may not decide for all to come
        fits = torch.exp2(torch.floor(torch.log2(HIGHEST / summed)))
        self.value.copy_(torch.where(self.value > 0, self.value, fits))
        if self._place.world_size > 1:
            dist.all_reduce(self.value, dist.ReduceOp.MIN, group=self._place.data)

    def up(self, loss: Tensor) -> Tensor:
        """The loss, scaled."""
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
