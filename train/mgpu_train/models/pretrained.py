"""Weights in a folder as Hugging Face's libraries lay it out, read into a model that may be sharded.

Each rank reads the part of each tensor that it has. Where a model's tensors are made out of several stored ones (some
mixtures of experts), transformers has to read all of it, and every rank holds the whole model for a moment.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mgpu_train.errors import TrainError
from mgpu_train.models.adapters import BASE, is_lora

if TYPE_CHECKING:
    from mgpu_train.models.nf4 import Nf4Linear

_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")  # of a repository on the hub: all that is needed
_EVERY, _PIECE = 1 << 20, 4096  # of each tensor so many bytes in so many make the checksum
_OLD = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}  # names of TensorFlow's checkpoints

Read = Callable[[tuple[slice, ...]], torch.Tensor]  # a part of a stored tensor


def folder(name: str, revision: str | None, key: str, *, hub: bool) -> Path:
    """The folder of this name, or of the model on the hub, which is downloaded once a node.

    Raises TrainError: there is neither.
    """
    path = Path(name)
    if path.is_dir():
        return path.resolve()
    if not hub:
        raise TrainError(f"`train.options.{key}`: there is no folder {path.resolve()} on this node")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise TrainError(
            f"`train.options.{key}`: {name} is no folder on this node, and the hub does not give it "
            f"({type(error).__name__}: {why}). A model that asks for consent needs HF_TOKEN in `secrets`."
        ) from error


def checksum(folder: Path) -> int:
    """Of all weights in it: of their names and shapes, and of a sample of their values. 63 bits."""
    found = hashlib.sha256()
    for path in _files(folder):
        try:
            with path.open("rb") as file:
                head = file.read(int.from_bytes(file.read(8), "little"))
                found.update(head)
                ends = [each["data_offsets"] for name, each in json.loads(head).items() if name != "__metadata__"]
                first = 8 + len(head)
                for begin, end in ends:
                    for at in range(begin, end, _EVERY):
                        file.seek(first + at)
                        found.update(file.read(min(_PIECE, end - at)))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise TrainError(f"{path} is no file of safetensors: {error}") from error
    return int.from_bytes(found.digest()[:8], "big") >> 1


def fill(model: Any, folder: Path, needed: Callable[[str], bool]) -> set[str]:
    """Gives the model the values that are stored in the folder; returns their names.

    Raises:
        TrainError: one that is `needed` has none, or one of another shape.
        NotImplementedError: the model is sharded, and its tensors are not stored as it has them.
    """
    with ExitStack() as files:
        stored, values = _stored(folder, files), dict(_values(model))
        found = {name: read for name, value in values.items() if (read := _named(stored, model, name, value))}
        lacks = [name for name in values if name not in found and needed(name)]
        if not lacks:
            _read(model, values, found)
            return set(found)
    quantised = _quantised(model)
    if any(isinstance(value, DTensor) or value.is_meta for name, value in values.items() if name not in quantised):
        raise NotImplementedError(f"`{lacks[0]}` is not stored as such")
    found = _converted(model, folder, values)
    lacks = [name for name in values if name not in found and needed(name)]
    if lacks:
        raise TrainError(
            f"the weights in {folder} have no `{lacks[0]}` of shape {tuple(values[lacks[0]].shape)}, and {len(lacks)} "
            f"of {len(values)} are missing: they are of another model than its config.json, or `kind` is another"
        )
    _read(model, values, found)
    return set(found)


def layers(model: nn.Module) -> str:
    """Name of the list of a model's layers: the largest one. Raises TrainError: it has none."""
    sizes = {
        name: sum(each.numel() for each in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    if not sizes:
        raise TrainError(f"{type(model).__name__} has no list of layers that could be spread")
    return max(sizes, key=lambda name: (sizes[name], -len(name)))


def frozen(model: nn.Module) -> set[str]:
    """Names of parameters that are not learned, and of weights that are kept in 4 bits in their place."""
    return {*(name for name, each in model.named_parameters() if not each.requires_grad), *_quantised(model)}


def plain(name: str) -> str:
    """A parameter's name without adapters."""
    return name.replace(".base_layer.", ".")


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise TrainError(
            f"{folder} has no *.safetensors: weights of another kind have to be converted, and `from_scratch: true` "
            "begins with random ones"
        )
    return found


def _stored(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Slices of the folder's tensors, by their names, as long as the files are open."""
    found: dict[str, Any] = {}
    for path in _files(folder):
        try:
            file = files.enter_context(safe_open(path, "pt"))
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        except (OSError, SafetensorError) as error:
            raise TrainError(f"{path} is no file of safetensors: {error}") from error
    return found


def _values(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a folder may have: all but adapters, and buffers that are never saved."""
    saved = model.state_dict(keep_vars=True)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if not is_lora(name) and (isinstance(value, nn.Parameter) or name in saved) and name != BASE:
            yield name, value
    for name, layer in _quantised(model).items():
        yield name, layer.like


def _quantised(model: nn.Module) -> Mapping[str, Nf4Linear]:
    """Layers in 4 bits, by the names of their weights. Their module, and torchao, are not imported for it."""
    module = sys.modules.get("mgpu_train.models.nf4")
    return {} if module is None else module.layers(model)


def _named(stored: Mapping[str, Any], model: Any, name: str, value: torch.Tensor) -> Read | None:
    """What is stored of a parameter: as a part of the body alone, or under the name of one that it is tied to."""
    prefix = f"{model.base_model_prefix}."
    same = [other for other, each in model.named_parameters(remove_duplicate=False) if each is value]
    for bare in map(plain, (name, *same)):
        for one in (bare, bare.removeprefix(prefix), prefix + bare):
            for new, old in (("", ""), *_OLD.items()):
                found = stored.get(one.replace(new, old) if new else one)
                if found is not None and tuple(found.get_shape()) == tuple(value.shape):
                    return found.__getitem__
    return None


def _converted(model: Any, folder: Path, values: Iterable[str]) -> dict[str, Read]:
    """Of a model that transformers reads by itself."""
    try:
        whole, told = type(model).from_pretrained(
            folder, config=model.config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainError(f"transformers cannot load {folder}: {str(error).partition(chr(10))[0]}") from error
    new = {*told["missing_keys"], *(each[0] for each in told["mismatched_keys"])}
    state = {name: value for name, value in whole.state_dict().items() if name not in new}
    return {name: state[plain(name)].__getitem__ for name in values if plain(name) in state}


def _read(model: nn.Module, values: Mapping[str, torch.Tensor], found: Mapping[str, Read]) -> None:
    """This rank's part of each; of a layer in 4 bits the whole, which is rounded before the next one is read."""
    quantised = _quantised(model)
    with torch.no_grad():
        for name, read in found.items():
            value = values[name]
            if name in quantised:
                quantised[name].take(read((slice(None),) * value.ndim))
                continue
            shape, offset = tuple(value.shape), (0,) * value.ndim
            if isinstance(value, DTensor):
                shape, offset = compute_local_shape_and_global_offset(shape, value.device_mesh, value.placements)
            part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            (value.to_local() if isinstance(value, DTensor) else value).copy_(read(part))
