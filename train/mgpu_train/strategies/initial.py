"""A model's first values: whole on every rank before it is spread, or shard by shard where it is spread already.

Both ways give the same values: a shard gets what torch's generator would have given its part of the whole parameter.
Then no rank ever holds more of the model than its shards, and of one parameter more than `_CHUNK` values at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_train.config import TrainConfig
from mgpu_train.errors import TrainError
from mgpu_train.parallel import Place, is_sharded
from mgpu_train.strategies import context, fp8, memory, pipeline
from mgpu_train.strategies.base import Strategy
from mgpu_train.tasks.base import Layout, Task

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)

_CHUNK = 1 << 20  # values that are drawn at once
_BLOCK = 16  # torch draws normal numbers in blocks of so many, and the last block of a tensor anew
_NAMES = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
_DRAWS = {getattr(torch.ops.aten, name) for name in _NAMES}
_CALLS = {
    nn.init.kaiming_uniform_,
    nn.init.normal_,
    nn.init.uniform_,
    *(getattr(torch.Tensor, name) for name in _NAMES),
}


def spread(strategy: Strategy, task: Task, config: TrainConfig) -> tuple[nn.Module, Layout]:
    """The task's model with its first values, spread by the strategy: parted by stage, layer and shard, in this order;
    and the layout of what this rank has of it.

    Raises TrainError: it cannot be, or has no value somewhere.
    """
    seed = config.seed
    if not strategy.shards:
        model = whole(task, seed)
        layout = task.layout(model)
        model = _prepare(task, model, layout, config, strategy)
        return strategy.apply(model, layout), layout
    with torch.device("meta"), _Undrawn():
        all_of_it = model = task.model()
    layout, place = task.layout(model), strategy.place
    if place.pipeline > 1:  # what other stages have stays on the meta device
        model, layout = pipeline.cut(model, layout, place)
    if place.tensor > 1:
        from mgpu_train.strategies import tensor  # 0.2 s, which few need

        tensor.share(model, layout, place)
    model = _prepare(task, model, layout, config, strategy)
    model = strategy.apply(model, layout)
    _make_room(model, place.device)
    try:
        with _Shards():
            _initialise(model, task, seed, all_of_it)
    except (_NotByShards, RuntimeError, NotImplementedError) as error:
        size = sum(value.numel() * value.element_size() for _, value in _values(model))
        log.warning(
            "every rank holds the whole model for a moment, %.1f GiB: `initialise` of %s cannot work on shards (%s)",
            size / 2**30,
            type(task).__name__,
            str(error).partition("\n")[0],
        )
        _copy(whole(task, seed), model)
    return model, layout


def _prepare(task: Task, model: nn.Module, layout: Layout, config: TrainConfig, strategy: Strategy) -> nn.Module:
    place = strategy.place
    model.train()  # as each validation leaves it: a resume may begin without one
    if place.context > 1:
        context.share(model, task, place)
    if strategy.policy.fp8:
        fp8.convert(model, layout)
    if place.device.type == "cuda" and place.copies > 1:  # batch norms see the whole batch
        synchronise(model, _stage(place))
    memory.save(model, layout, config.activation_checkpointing, compiled=config.compile)
    if config.compile:
        memory.compile_blocks(model, layout)
        task.compile()
    return model


def synchronise(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Torch's own batch norms inside become those that see the batches of all ranks of a group (default: of all). One
    that is derived from them has more to it, an activation for instance, which torch would leave out: it stays, and
    sees the rank's."""
    for name, child in module.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            setattr(module, name, nn.SyncBatchNorm.convert_sync_batchnorm(child, group))
        else:
            synchronise(child, group)


def _stage(place: Place) -> dist.ProcessGroup | None:
    """The ranks that have the same stage of a pipeline; None: all, since there is but one. Others do not call its batch
    norms, or call their own."""
    if place.pipeline == 1:
        return None
    stages = range(0, place.world_size, place.stage_size)
    made = dist.new_subgroups_by_enumeration([[*range(first, first + place.stage_size)] for first in stages])
    group: Any = made[0]  # each rank has a stage
    return group


def whole(task: Task, seed: int) -> nn.Module:
    """The task's model on the host, the same on all ranks. Raises TrainError for one that has no value somewhere."""
    with torch.device("meta"), _Undrawn():
        model = task.model()
    _make_room(model, torch.device("cpu"))
    _initialise(model, task, seed)
    return model


def _make_room(model: nn.Module, device: torch.device) -> None:
    """Memory for a model of the meta device, which stays empty."""
    tied = _tied(model)
    model._apply(partial(_room, device))  # as `to_empty`, which imports what reckons with shapes that are not known
    for first, *others in tied:  # which that may have parted
        kept = model.get_parameter(first)
        for other in others:
            owner, _, name = other.rpartition(".")
            if model.get_parameter(other) is not kept:
                setattr(model.get_submodule(owner), name, kept)


def _room(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    if is_sharded(value):
        return torch.empty_like(value, device=device)
    if 0 in value.stride():  # what was expanded, of which each element has a place of its own then
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _initialise(model: nn.Module, task: Task, seed: int, all_of_it: nn.Module | None = None) -> None:
    with torch.no_grad():
        for _, value in _values(model):
            if _has_nan(value):
                _local(value).fill_(math.nan)
    # whole numbers have no NaN: what was replaced, or changed in place, has a value
    empty = {name: (value, _local(value)._version) for name, value in _values(model) if not _has_nan(value)}
    torch.manual_seed(seed)
    task.initialise(all_of_it or model)
    for name, value in _values(model):
        kept, version = empty.get(name, (None, 0))
        unchanged = kept is value and _local(value)._version == version
        if unchanged or (_has_nan(value) and _local(value).isnan().any()):
            raise TrainError(f"`initialise` of {type(task).__name__} gives `{name}` no value")


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _has_nan(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _local(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it: the same memory."""
    with torch.no_grad():
        return value.to_local() if is_sharded(value) else value


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one: of the output's and the input's embedding, for instance."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _copy(source: nn.Module, model: nn.Module) -> None:
    """A whole model's values into the shards of the same model."""
    values = dict(_values(source))
    with torch.no_grad():
        for name, value in _values(model):
            part = values[name]
            if is_sharded(value):
                shape, offset = _shape_and_offset(value)
                part = _part(part, shape, offset)
            _local(value).copy_(part)


def _shape_and_offset(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of this rank's shard in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)


def _part(whole: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


class _Undrawn(TorchFunctionMode):
    """Nothing is drawn for the meta device, where torch would import its compiler to find that there are no values."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CALLS and (into := args[0] if args else kwargs["tensor"]).is_meta:
            return into
        return func(*args, **kwargs)


class _NotByShards(Exception):
    """Something was asked of a sharded parameter that its shards cannot do by themselves."""


class _Shards(TorchDispatchMode):
    """Operations on sharded parameters that give each shard what it would have of the whole."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        sharded = first if is_sharded(first) else None
        if first is not None and func.overloadpacket in _DRAWS and (sharded is not None or first.is_meta):
            _draw(func, first, args[1:], kwargs or {})
            return first
        made = func(*args, **kwargs or {})
        if sharded is not None and func.is_view and not _same_memory(sharded, made):
            raise _NotByShards(f"{func} of a shard is a copy")  # and a value that it is given would be lost
        return made


def _same_memory(value: DTensor, view: Any) -> bool:
    return is_sharded(view) and (
        _local(view).untyped_storage().data_ptr() == _local(value).untyped_storage().data_ptr()
    )


def _draw(func: Any, value: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draws the whole parameter, chunk by chunk, and keeps the shard's part of it; nothing of one on the meta device,
    which another stage has."""
    total = value.numel()
    if not is_sharded(value):
        for first, last in _chunks(total):
            func(torch.empty(last - first, dtype=value.dtype), *args, **kwargs)
        return
    shape, offset = _shape_and_offset(value)
    if tuple(shape[1:]) != tuple(value.shape[1:]):  # by columns: this one parameter is whole for a moment
        whole = torch.empty(total, dtype=value.dtype)
        for first, last in _chunks(total):
            func(whole[first:last], *args, **kwargs)
        _local(value).copy_(_part(whole.view(value.shape), shape, offset))
        return
    local, row = _local(value).view(-1), math.prod(value.shape[1:])
    begin = offset[0] * row
    for first, last in _chunks(total):
        drawn = func(torch.empty(last - first, dtype=value.dtype), *args, **kwargs)
        low, high = max(first, begin), min(last, begin + local.numel())
        if low < high:
            local[low - begin : high - begin].copy_(drawn[low - first : high - first])


def _chunks(total: int) -> Iterator[tuple[int, int]]:
    """Of so many values; the last one has a whole block at least."""
    first = 0
    while first < total:
        last = total if total - first - _CHUNK < _BLOCK else first + _CHUNK
        yield first, last
        first = last
