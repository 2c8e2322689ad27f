"""What training has to find again after an interruption: named parts, each of which knows its own state.

What reads and sets state is torch's, and imported as it is asked for: it takes most of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Part(Protocol):
    """One part of a checkpoint: nested dictionaries of tensors (sharded ones as DTensors) and plain values.

    Ranks that hold a tensor alike hold the same bits. All ranks call each method together.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, not copied."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from it; it has the names and shapes of `state_dict`, less dictionaries of which nothing is saved."""
        ...

    def steady(self) -> Iterable[torch.Tensor]:
        """Tensors that only an optimizer step changes: a save may copy them until the next one."""
        ...


class ModelPart:
    """Parameters that are learned, and buffers, by the names of the model that is not spread. What is frozen is as the
    task begins it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """By name."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        inner = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
        # torch's `ignore_frozen_params` leaves the second name of one that is tied
        frozen = {name for name, each in inner.named_parameters(remove_duplicate=False) if not each.requires_grad}
        return {name: each for name, each in get_model_state_dict(self._model).items() if name not in frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On this rank's device."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(self._model, state, options=StateDictOptions(strict=False))

    def steady(self) -> Iterable[torch.Tensor]:
        """The parameters; a forward pass may change buffers."""
        return self._model.parameters()


class OptimizerPart:
    """What optimizers keep of each parameter, by the parameter's name."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers

    def state_dict(self) -> dict[str, Any]:
        """By name. What it is set to (rate, decay) is not kept: that follows from the run file."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return {"state": get_optimizer_state_dict(self._model, self._optimizers)["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On this rank's device. A parameter that is not in it begins anew: none of its gradients had come yet."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

        now: dict[str, Any] = {**get_optimizer_state_dict(self._model, self._optimizers)}
        names = [name for group in now["param_groups"] for name in group["params"]]
        # torch 2.8 wants all of them, whatever `strict` says
        every = {**{name: {} for name in names}, **state["state"]}
        set_optimizer_state_dict(self._model, self._optimizers, {**now, "state": every})
        for kept in (one.state for one in self._optimizers):
            for parameter in [each for each, values in kept.items() if not values]:
                del kept[parameter]

    def steady(self) -> Iterable[torch.Tensor]:
        """All of it."""
        kept = (each for one in self._optimizers for values in one.state.values() for each in values.values())
        return (each for each in kept if isinstance(each, torch.Tensor))
