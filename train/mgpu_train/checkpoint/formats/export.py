"""A checkpoint as a folder that everybody opens: safetensors and the JSON files of Hugging Face, made without torch.

Whatever the size of a tensor, only a few MiB of it are in memory: what each rank saved is written at its place in the
file. A folder that holds safetensors already passes through, its pickles left behind.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from mgpu_train.checkpoint.formats import adapters, safetensors_file
from mgpu_train.checkpoint.formats.archives import ITEM_BYTES, PIECE, Unsupported
from mgpu_train.checkpoint.formats.safetensors_file import Item
from mgpu_train.checkpoint.formats.shards import METADATA, Chunk, Shards, Tensor, open_shards
from mgpu_train.checkpoint.local import write_aside
from mgpu_train.models.adapters import BASE, is_lora
from mgpu_train.store.base import Damaged, NotFound
from mgpu_train.store.disk import opened, translated, write_all

CONFIG = "config.json"
_META = "meta.json"  # the trainer's, beside the shards
_LARGEST_META = 1 << 20
_COPIED = (".json", ".model", ".safetensors", ".txt")  # of a folder of Hugging Face: all that no program runs

Progress = Callable[[int], None]
Format = Literal["safetensors", "peft"]


@dataclass(frozen=True)
class ExportReport:
    """What was written: names of files in order, tensors, and bytes of tensors."""

    files: tuple[str, ...]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class _File:
    """A file to write: its tensors in order, each with the name that it gets."""

    name: str
    tensors: tuple[tuple[Item, Tensor], ...]


def export(
    folder: Path,
    dest: Path,
    *,
    keys: str = "model",
    form: Format = "safetensors",
    max_shard_bytes: int = 5 << 30,
    provenance: Mapping[str, str | int | float] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the tensors below `keys` of a verified checkpoint's `folder` into the new folder `dest`, flushed to disk.

    Names lose the `keys.` that they begin with; `keys=""` takes everything. A file has at most `max_shard_bytes` bytes
    of tensors, but where one tensor alone has more. With `form="peft"` the folder is one that `peft` loads: adapters in
    one file, by its names, and `adapter_config.json`. `provenance` (run, checkpoint id) is written beside what the
    checkpoint says of itself. `progress` is given bytes that are through; in all they are `size(folder)`.

    Raises:
        Unsupported: this is no checkpoint that can be exported without torch, or `dest` is taken.
        NotFound: a file is missing.
        Damaged: the files contradict one another.
        StoreError: a disk does not work.
    """
    if dest.is_symlink() or (dest.exists() and not (dest.is_dir() and not any(dest.iterdir()))):
        raise Unsupported(f"{dest} exists, and nothing in it is written over: name a new folder")
    tell = progress or (lambda _: None)
    with translated(f"cannot export to {dest}"):
        if _has_safetensors(folder):
            if form != "safetensors":
                raise Unsupported(f"{folder} is no checkpoint of the bundled trainer: nothing is known of its adapters")
            with write_aside(dest) as aside:
                return _copied(folder, aside, _origin(folder, provenance), tell)
        shards, origin = open_shards(folder), _origin(folder, provenance)
        chosen = _chosen(shards, keys, form)
        if form == "peft":
            files = [_File(adapters.FILE, tuple(chosen))]
            config = adapters.CONFIG, adapters.config(origin, [item.name for item, _ in chosen])
        else:
            files = _files(chosen, max_shard_bytes)
            config = CONFIG, _config(origin, _most(item for file in files for item, _ in file.tensors))
        with write_aside(dest) as aside:
            _write_json(aside / config[0], config[1])
            return _written(shards, files, aside, origin, tell)


def size(folder: Path, *, keys: str = "model", form: Format = "safetensors") -> int:
    """Bytes that `export` will have to move. Raises as it does."""
    if _has_safetensors(folder):
        return sum(path.stat().st_size for path in _safetensors(folder))
    return sum(item.size for item, _ in _chosen(open_shards(folder), keys, form))


# --- from the trainer's shards ---


def _chosen(shards: Shards, keys: str, form: Format) -> list[tuple[Item, Tensor]]:
    """The tensors to export with their new names, in the order of the state."""
    prefix = f"{keys}." if keys else ""
    found = [tensor for name, tensor in shards.tensors.items() if name.startswith(prefix)]
    if not found:
        tops = sorted({name.partition(".")[0] for name in shards.tensors})
        raise Unsupported(f"{shards.folder} has no tensors below {keys!r}; it has some below {', '.join(tops) or '-'}")
    names = {tensor.name.removeprefix(prefix): tensor for tensor in found}
    if form == "peft":
        names = {adapters.name(name): tensor for name, tensor in names.items() if name != BASE}
        if not any(map(is_lora, names)):
            raise Unsupported(f"{shards.folder} has no adapters: it was trained without `train.options.lora`")
    return [(_item(tensor, name), tensor) for name, tensor in names.items()]


def _item(tensor: Tensor, name: str) -> Item:
    if tensor.dtype not in safetensors_file.DTYPES:
        raise Unsupported(f"{tensor.name} is of {tensor.dtype}, which safetensors has not: convert it before saving")
    if problem := safetensors_file.name_problem(name):
        raise Unsupported(f"the name {name!r} {problem}")
    return Item(name, tensor.dtype, tensor.shape, tensor.elements * ITEM_BYTES[tensor.dtype])


def _files(chosen: list[tuple[Item, Tensor]], limit: int) -> list[_File]:
    """Which tensor goes into which file."""
    groups: list[list[tuple[Item, Tensor]]] = [[]]
    room = limit
    for item, tensor in chosen:
        if item.size > room and groups[-1]:
            groups.append([])
            room = limit
        groups[-1].append((item, tensor))
        room -= item.size
    count = len(groups)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    # wide elements first: then each tensor begins at a multiple of its element's size
    ordered = [sorted(group, key=lambda each: -ITEM_BYTES[each[0].dtype]) for group in groups]
    return [
        _File(*each) for each in zip(names if count > 1 else ["model.safetensors"], map(tuple, ordered), strict=True)
    ]


def _written(shards: Shards, files: list[_File], aside: Path, origin: dict[str, Any], tell: Progress) -> ExportReport:
    for file in files:
        _write(shards, file, aside / file.name, origin, tell)
    items = [item for file in files for item, _ in file.tensors]
    total = sum(item.size for item in items)
    if len(files) > 1:
        places = {item.name: file.name for file in files for item, _ in file.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        _write_json(aside / "model.safetensors.index.json", index)
    return ExportReport(_names(aside), len(items), total)


def _most(items: Iterable[Item]) -> str:
    """The type that most bytes are of."""
    by_dtype = Counter[str]()
    for item in items:
        by_dtype[item.dtype] += item.size
    return by_dtype.most_common(1)[0][0]


def _write(shards: Shards, file: _File, path: Path, origin: dict[str, Any], tell: Progress) -> None:
    said = {key: str(value) for key, value in origin.items() if isinstance(value, str | int | float)}
    head = safetensors_file.header([item for item, _ in file.tensors], {**said, "format": "pt"})
    with path.open("xb", buffering=0) as out:
        write_all(out.fileno(), head)
        at = len(head)
        for item, tensor in file.tensors:
            for chunk in tensor.chunks:
                _pour(shards.read(tensor, chunk), out.fileno(), *_runs(tensor, chunk, at), tell)
            at += item.size


def _runs(tensor: Tensor, chunk: Chunk, at: int) -> tuple[Iterator[int], int]:
    """Where in the file a chunk of a tensor that begins at `at` goes: the places of its runs, and bytes of each.

    A run is what lies together in the chunk and in the whole tensor.
    """
    shape, item = tensor.shape, ITEM_BYTES[tensor.dtype]
    strides = [math.prod(shape[axis + 1 :]) * item for axis in range(len(shape))]
    outer = len(shape)
    while outer and chunk.shape[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)  # the first axis of a run need not be whole
    first = at + sum(map(int.__mul__, chunk.offset, strides))
    places = (first + sum(map(int.__mul__, index, strides)) for index in product(*map(range, chunk.shape[:outer])))
    return places, math.prod(chunk.shape[outer:]) * item


def _pour(pieces: Iterable[bytes], out: int, places: Iterator[int], run: int, tell: Progress) -> None:
    """Write a stream of bytes to its places, `run` bytes at each."""
    at = left = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            if not left:
                at, left = next(places), run
            done = os.pwrite(out, view[:left], at)
            view, at, left = view[done:], at + done, left - done
        tell(len(piece))


# --- what is exported already ---


def _has_safetensors(folder: Path) -> bool:
    """True for a folder to copy, False for one of shards. Raises NotFound and Unsupported for any other."""
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}")
    if (folder / METADATA).exists():
        return False
    if _safetensors(folder):
        return True
    raise Unsupported(
        f"{folder} has neither {METADATA}, as checkpoints of torch.distributed.checkpoint have, nor *.safetensors: "
        "only the program that saved it knows what is in it"
    )


def _safetensors(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def _copied(folder: Path, aside: Path, origin: dict[str, Any], tell: Progress) -> ExportReport:
    contents = [safetensors_file.read_contents(path) for path in _safetensors(folder)]
    for path in sorted(folder.iterdir()):
        if path.suffix in _COPIED and path.name != _META and path.is_file():
            _copy(path, aside / path.name, tell if path.suffix == ".safetensors" else lambda _: None)
    if not (aside / CONFIG).exists():
        _write_json(aside / CONFIG, _config(origin, None))
    return ExportReport(_names(aside), sum(each.tensors for each in contents), sum(each.bytes for each in contents))


def _copy(source: Path, target: Path, tell: Progress) -> None:
    with opened(source) as descriptor, target.open("xb", buffering=0) as out:
        while piece := os.read(descriptor, PIECE):
            write_all(out.fileno(), piece)
            tell(len(piece))


# --- the JSON beside it ---


def _origin(folder: Path, provenance: Mapping[str, str | int | float] | None) -> dict[str, Any]:
    """What is known of the checkpoint: by its own `meta.json`, and by who exports it."""
    path = folder / _META
    if not path.exists():
        return dict(provenance or {})
    with opened(path) as descriptor:
        text = os.read(descriptor, _LARGEST_META)
    try:
        return {**json.loads(text), **(provenance or {})}
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is no JSON object: {error!s:.200}") from error


def _config(origin: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The trainer's configuration, and where the numbers come from."""
    config = origin.get("config")
    config = config if isinstance(config, dict) else {}
    provenance = {key: value for key, value in origin.items() if key != "config"}
    kind = {"model_type": f"mgpu_{config.get('task', 'model')}"} | ({"dtype": dtype} if dtype else {})
    return {**kind, "config": config, "provenance": provenance}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))
