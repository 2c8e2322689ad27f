"""What DeepSpeed's ZeRO shares out, as parts of a checkpoint that any strategy and number of ranks goes on from.

ZeRO cuts a long vector of all parameters, wherever that may be. Here each tensor is shared out by rows, as FSDP2 does
it, in copies on the host: a save gathers one tensor after the other, and each rank keeps its rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_train.checkpoint.distributed.staging import local
from mgpu_train.checkpoint.state import ModelPart
from mgpu_train.parallel import Place, is_sharded

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's, by torch's names


class Model(ModelPart):
    """Of stages 1 and 2: whole on every rank."""

    def __init__(self, model: nn.Module, zero: Any) -> None:
        super().__init__(model)
        self._zero = zero

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """DeepSpeed's optimizer changes a copy of its own."""
        super().load_state_dict(state)
        self._zero.refresh_fp32_params()


class ShardedModel:
    """Of stage 3: buffers are whole on every rank, and parameters are shared out."""

    def __init__(self, model: nn.Module, zero: Any, place: Place) -> None:
        self._model, self._place = model, place
        self._learned = _learned(model)
        self._copies = _Copies(place, {name: each.ds_shape for name, each in self._learned.items()})
        names = {id(each): name for name, each in self._learned.items()}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name: names[id(each)] for name, each in every if id(each) in names}  # tied ones have several

    def state_dict(self) -> dict[str, Any]:
        """By name."""
        for name, each in self._learned.items():
            self._copies.keep(name, safe_get_full_fp32_param(each))
        copies = self._copies.tensors
        return {**self._buffers(), **{name: copies[kept] for name, kept in self._names.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On this rank's device. Buffers by the model itself, which may refuse what is of another one: adapters do."""
        self._model.load_state_dict({name: state[name] for name in self._buffers()}, strict=False)
        for name, each in self._learned.items():
            whole = _whole(state[name]).to(self._place.device)
            with deepspeed.zero.GatheredParameters([each], modifier_rank=0), torch.no_grad():
                each.copy_(whole)
            safe_set_local_fp32_param(each, _part(each, whole, self._place.rank))  # what the optimizer changes

    def steady(self) -> Iterable[Tensor]:
        """The copies."""
        return self._copies.tensors.values()

    def _buffers(self) -> dict[str, Tensor]:
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        return {name: each for name, each in self._model.state_dict().items() if name not in parameters}


class Moments:
    """What AdamW keeps of each parameter, by the parameter's name."""

    def __init__(self, model: nn.Module, zero: Any, place: Place) -> None:
        self._zero, self._place = zero, place
        self._learned = _learned(model)
        shapes = {name: getattr(each, "ds_shape", each.shape) for name, each in self._learned.items()}
        self._copies = _Copies(place, {f"{name}.{key}": shape for name, shape in shapes.items() for key in MOMENTS})
        for flat in self._flat:  # as AdamW begins, which does so at its first step
            begin = {key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS}
            zero.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **begin}
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):  # of stages 1 and 2: parameters know their part
            zero._lazy_init_hp_params_optimizer_state()

    @property
    def _flat(self) -> list[Tensor]:
        """The vectors that AdamW changes, of which each parameter is a part."""
        return getattr(self._zero, "single_partition_of_fp32_groups", None) or self._zero.fp32_partitioned_groups_flat

    def state_dict(self) -> dict[str, Any]:
        """As torch's own. What it is set to (rate, decay) is not kept: that follows from the run file."""
        for name, each in self._learned.items():
            for key in MOMENTS:
                self._copies.keep(f"{name}.{key}", safe_get_full_optimizer_state(each, key))
        step, copies = self._zero.optimizer.state[self._flat[0]]["step"], self._copies.tensors
        kept = {name: {key: copies[f"{name}.{key}"] for key in MOMENTS} for name in self._learned}
        return {"state": {name: {"step": step.clone(), **moments} for name, moments in kept.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """On this rank's device. A parameter that is not in it begins anew."""
        there = state["state"]
        for name, kept in there.items():
            for key in MOMENTS:
                whole, each = _whole(kept[key]).to(self._place.device), self._learned[name]
                if hasattr(each, "ds_tensor"):  # of stage 3
                    safe_set_local_optimizer_state(each, _part(each, whole, self._place.rank), key)
                else:
                    safe_set_full_optimizer_state(each, whole, key)
        for flat in self._flat if there else ():
            self._zero.optimizer.state[flat]["step"].copy_(max(kept["step"] for kept in there.values()))

    def steady(self) -> Iterable[Tensor]:
        """The copies."""
        return self._copies.tensors.values()


class _Copies:
    """Tensors of these shapes, shared out by rows on the host."""

    def __init__(self, place: Place, shapes: Mapping[str, torch.Size]) -> None:
        self._place, self._shapes = place, shapes

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """By name; memory is taken when somebody asks first."""
        mesh = DeviceMesh.from_group(self._place.control, "cpu")
        return {name: self._made(shape, mesh) for name, shape in self._shapes.items()}

    def keep(self, name: str, whole: Tensor | None) -> None:
        """This rank's rows."""
        assert whole is not None  # noqa: S101 - DeepSpeed has none of what it does not change
        local(self.tensors[name]).copy_(whole[self._rows(whole.shape)])

    def _made(self, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        whole = torch.empty(shape, device="meta")
        mine = torch.zeros_like(whole[self._rows(shape)], device="cpu")
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())

    def _rows(self, shape: torch.Size) -> slice:
        each = -(-shape[0] // self._place.world_size)
        return slice(self._place.rank * each, (self._place.rank + 1) * each)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if is_sharded(value) else value


def _part(parameter: Any, whole: Tensor, rank: int) -> Tensor:
    """What this rank holds under stage 3, where the last one's is filled up: DeepSpeed's own way to set all of it does
    not do that."""
    size = parameter.ds_tensor.numel()
    part = whole.new_zeros(size)
    held = whole.flatten()[rank * size : (rank + 1) * size]
    part[: held.numel()] = held
    return part


def _learned(model: nn.Module) -> dict[str, Any]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}
