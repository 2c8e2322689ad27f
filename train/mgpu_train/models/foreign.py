"""Networks that timm has made, and first values that somebody else has learned."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mgpu_train.errors import TrainError

log = logging.getLogger(__name__)

_BLOCKS = ("blocks", "stages", "layers")  # where most of timm's networks have theirs; residual ones: layer1 to layer4


def made_by_timm(name: str, channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """The network of this name, for images of this height and width; random, and on the device of the context.

    Raises TrainError: timm is not installed, or has none of this name.
    """
    try:
        import timm
    except ImportError as error:
        raise TrainError(
            "`train.options.model`: timm is not installed here: `pip install mgpu-train[timm]`, or take resnet18, "
            "resnet34 or resnet50"
        ) from error
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), 3)
        raise TrainError(f"`train.options.model`: timm {timm.__version__} has no {name}; near it: {', '.join(near)}")
    known = timm.get_pretrained_cfg(name)
    positions = known is not None and known.fixed_input_size  # of transformers, which are told the size
    fixed: dict[str, Any] = {"img_size": size} if positions else {}
    return timm.create_model(name, num_classes=classes, in_chans=channels, **fixed)


def blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of what such a network runs one after the other; none where that is not known."""
    children = dict(model.named_children())
    first = next((name for name in _BLOCKS if name in children), None)
    tops = [first] if first else [name for name in ("layer1", "layer2", "layer3", "layer4") if name in children]
    return tuple(f"{top}.{name}" for top in tops for name, _ in children[top].named_children())


def copy_values(source: nn.Module, model: nn.Module) -> None:
    """All values of the same network."""
    values = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(values[name])


def copy_file(file: str, model: nn.Module) -> None:
    """The values of a file by name. A tensor of another shape is left out, and told of.

    Raises TrainError: it cannot be read, or has other names.
    """
    values = _read(Path(file))
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in values and not name.endswith("num_batches_tracked")]
    unknown = [name for name in values if name not in wanted]
    if missing or unknown:
        first = (
            f"lacks `{missing[0]}` and {len(missing) - 1} more" if missing else f"has `{unknown[0]}`, which is unknown"
        )
        raise TrainError(f"`train.options.weights`: {file} {first}: its values are of another model")
    others = [name for name, value in wanted.items() if name in values and values[name].shape != value.shape]
    for name in others:
        log.warning("%s: %s is of another shape, and stays random", file, name)
    with torch.no_grad():
        for name, value in wanted.items():
            if name in values and name not in others:
                value.copy_(values[name])


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        values = torch.load(path, map_location="cpu", weights_only=True)
    except ImportError as error:
        raise TrainError(
            f"{path} is read by safetensors, which is not installed here: pip install safetensors"
        ) from error
    except OSError as error:
        why = error.strerror or error
        raise TrainError(f"`train.options.weights`: cannot read {path} on this node: {why}") from error
    except (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise TrainError(f"`train.options.weights`: {path} is no file of tensors alone: {why}") from error
    if not isinstance(values, Mapping) or not all(isinstance(each, Tensor) for each in values.values()):
        raise TrainError(f"`train.options.weights`: {path} has more in it than tensors by name (a `state_dict`)")
    return values
