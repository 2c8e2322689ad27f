"""What training has to find again after an interruption: named parts, each of which knows its own state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class Part(Protocol):
    """One part of a checkpoint: nested dictionaries of tensors (sharded ones as DTensors) and plain values.

    Ranks that hold a tensor alike hold the same bits. All ranks call each method together.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, not copied."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from it; it has the names and shapes of `state_dict`."""
        ...

    def steady(self) -> Iterable[torch.Tensor]:
        """Tensors that only an optimizer step changes: a save may copy them until the next one."""
        ...


class ModelPart:
    """Parameters and buffers, by the names of the model that is not spread."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """By name."""
        return get_model_state_dict(self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On this rank's device."""
        set_model_state_dict(self._model, state)

    def steady(self) -> Iterable[torch.Tensor]:
        """The parameters; a forward pass may change buffers."""
        return self._model.parameters()


class OptimizerPart:
    """What optimizers keep of each parameter, by the parameter's name."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self._model, self._optimizers = model, optimizers

    def state_dict(self) -> dict[str, Any]:
        """By name. What it is set to (rate, decay) is not kept: that follows from the run file."""
        return {"state": get_optimizer_state_dict(self._model, self._optimizers)["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On this rank's device."""
        now = get_optimizer_state_dict(self._model, self._optimizers)
        set_optimizer_state_dict(self._model, self._optimizers, {**now, **state})

    def steady(self) -> Iterable[torch.Tensor]:
        """All of it."""
        kept = (each for one in self._optimizers for values in one.state.values() for each in values.values())
        return (each for each in kept if isinstance(each, torch.Tensor))
