"""Reads what torch.distributed.checkpoint wrote, without torch: which tensors a folder holds, and their bytes.

A folder has `.metadata`, a pickle that says which rectangle of which tensor lies where, and files such as
`__0_0.distcp`. Such a file is a row of archives, one a rectangle (a chunk), or one an object that is no tensor. All of
it is perhaps somebody else's: pickles are read as data (`mgpu_train.pickles`), and every place and
size is compared with the files, and with one another, before any of it is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mgpu_train import pickles
from mgpu_train.checkpoint.formats.archives import Unsupported, archive, are_counts, is_shape
from mgpu_train.pickles import Call, Name, NotPlain
from mgpu_train.store.base import Damaged, NotFound, key_problem
from mgpu_train.store.disk import opened, translated

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_PLAIN = (str, int, float, bool, bytes, type(None))
_DEEPEST = 50

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Some bytes of a file of the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, and the archive that holds it."""

    offset: Shape
    shape: Shape
    piece: Piece


@dataclass(frozen=True)
class Tensor:
    """A tensor: its name in the state, torch's name of its dtype, and chunks that cover each element once. `sharded`:
    it was saved in several, empty ones counted."""

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]
    sharded: bool

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shards:
    """What the `.metadata` of a folder says. `tensors` are in the order of the state; `objects` is all the rest."""

    folder: Path
    tensors: dict[str, Tensor]
    objects: dict[str, Piece] = field(repr=False)

    def value(self, name: str) -> Any:
        """An object that is no tensor, such as `progress.step`.

        Raises KeyError when there is none, Unsupported when it is more than numbers and texts, StoreError.
        """
        piece = self.objects[name]
        with archive(self.folder / piece.file, piece.start, piece.length, name) as found:
            return _plain(found.pickle(), name)

    def read(self, tensor: Tensor, chunk: Chunk) -> Iterator[bytes]:
        """The elements of a chunk in row-major order, a few MiB at a time. Raises StoreError."""
        piece = chunk.piece
        with archive(self.folder / piece.file, piece.start, piece.length, tensor.name) as found:
            raw = found.tensor()
            if (raw.dtype, raw.shape) != (tensor.dtype, chunk.shape):
                expected, there = f"{tensor.dtype}{list(chunk.shape)}", f"{raw.dtype}{list(raw.shape)}"
                raise Damaged(f"{tensor.name} in {self.folder / piece.file} is {there}; {METADATA} says {expected}")
            yield from found.read(raw)


def open_shards(folder: Path) -> Shards:
    """Read the `.metadata` of a checkpoint's folder, and compare it with the files that it names.

    Raises:
        NotFound: there is no `.metadata`, or a file that it names is missing.
        Damaged: it contradicts itself, or the files.
        Unsupported: it is of a kind that needs torch.
    """
    shards = read_metadata(folder)
    _check_files(shards)
    return shards


def read_metadata(folder: Path) -> Shards:
    """Read the `.metadata` alone. Raises what `open_shards` raises of it."""
    data = _bytes(folder / METADATA)
    try:
        content = _state(pickles.loads(data), f"{_DCP}.metadata.Metadata")
        pieces = dict(_piece(index, info) for index, info in _mapping(content["storage_data"]).items())
        shards = Shards(folder, {}, {})
        for name, entry in _mapping(content["state_dict_metadata"]).items():
            _require_text(name)
            kind = entry.name if type(entry) is Call else type(entry).__name__
            if kind == f"{_DCP}.metadata.BytesStorageMetadata":
                shards.objects[name] = pieces[name, None]
            else:
                shards.tensors[name] = _tensor(name, entry, pieces)
    except NotPlain as error:
        raise Damaged(f"{folder / METADATA} cannot be read: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise Damaged(f"{folder / METADATA} is not what torch.distributed.checkpoint writes: {error!r:.200}") from error
    return shards


def _bytes(path: Path) -> bytes:
    with translated(f"cannot read {path}"), opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > pickles.MAX_BYTES:
            raise Damaged(f"{path} has {size} bytes, and {pickles.MAX_BYTES} are the limit")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(size)


def _piece(index: Any, info: Any) -> tuple[tuple[str, Shape | None], Piece]:
    key, place = _state(index, f"{_DCP}.metadata.MetadataIndex"), _state(info, f"{_DCP}.filesystem._StorageInfo")
    name, file, offset = key["fqn"], place["relative_path"], key.get("offset")
    _require_text(name)
    if place.get("transform_descriptors"):
        raise Unsupported(f"{name!r:.200} was written through an extension of torch, which alone can read it")
    if type(file) is not str or key_problem(file) or not are_counts((place["offset"], place["length"])):
        raise ValueError(f"{name!r:.200} lies in no file of this folder")
    return (name, None if offset is None else _size(offset)), Piece(file, place["offset"], place["length"])


def _tensor(name: str, entry: Any, pieces: dict[tuple[str, Shape | None], Piece]) -> Tensor:
    content = _state(entry, f"{_DCP}.metadata.TensorStorageMetadata")
    dtype, shape = content["properties"].state[0], _size(content["size"])
    if type(dtype) is not Name or dtype.module != "torch":
        raise ValueError(f"{name!r:.200} has no dtype")
    described = [_state(each, f"{_DCP}.metadata.ChunkStorageMetadata") for each in content["chunks"]]
    rectangles = dict.fromkeys((_size(each["offsets"]), _size(each["sizes"])) for each in described)
    filled = [rectangle for rectangle in rectangles if math.prod(rectangle[1])]
    _check_cover(name, shape, filled)
    chunks = tuple(Chunk(*each, pieces[name, each[0]]) for each in filled)
    return Tensor(name, dtype.name, shape, chunks, sharded=len(rectangles) > 1)


def _check_cover(name: str, shape: Shape, rectangles: Sequence[tuple[Shape, Shape]]) -> None:
    """Each element lies in one rectangle, and in one only. Raises ValueError."""
    for offset, size in rectangles:
        fits = len(offset) == len(size) == len(shape)
        if not fits or any(o + s > whole for o, s, whole in zip(offset, size, shape, strict=True)):
            raise ValueError(f"a chunk of {name!r:.200} lies outside of it")
    if sum(math.prod(size) for _, size in rectangles) != math.prod(shape):
        raise ValueError(f"the chunks of {name!r:.200} do not make a whole")
    # only those that share the axis along which most of them are cut can overlap: of many, few at a time
    axis = max(range(len(shape)), key=lambda each: len({offset[each] for offset, _ in rectangles}), default=0)
    open_ones: list[tuple[Shape, Shape]] = []
    for offset, size in sorted(rectangles, key=lambda each: each[0][axis : axis + 1]):
        open_ones = [(o, s) for o, s in open_ones if o[axis] + s[axis] > offset[axis]]
        if any(_overlap(offset, size, o, s) for o, s in open_ones):
            raise ValueError(f"chunks of {name!r:.200} overlap")
        if shape:
            open_ones.append((offset, size))


def _overlap(offset: Shape, size: Shape, other: Shape, other_size: Shape) -> bool:
    return all(a < b + t and b < a + s for a, s, b, t in zip(offset, size, other, other_size, strict=True))


def _check_files(shards: Shards) -> None:
    """Every file that holds something of them is there, and long enough."""
    folder, needed = shards.folder, dict[str, int]()
    chunks = [chunk.piece for tensor in shards.tensors.values() for chunk in tensor.chunks]
    for piece in (*shards.objects.values(), *chunks):
        needed[piece.file] = max(needed.get(piece.file, 0), piece.start + piece.length)
    for name, least in sorted(needed.items()):
        try:
            with translated(f"cannot read {folder / name}"), opened(folder / name) as descriptor:
                size = os.fstat(descriptor).st_size
        except NotFound as error:
            raise NotFound(f"{folder / name} is missing: fetch the files of all nodes into this folder") from error
        if size < least:
            raise Damaged(f"{folder / name} has {size} bytes; {METADATA} says that there are {least} or more")


def _state(value: Any, name: str) -> dict[str, Any]:
    """What an object of that class was given. Raises TypeError, or Unsupported where another class stands."""
    if type(value) is not Call:
        raise TypeError(f"a {type(value).__name__} stands where {name} should")
    if value.name != name:
        raise Unsupported(f"{METADATA} has {value.name:.100} where {name} is known: load the checkpoint with torch")
    return _mapping({} if value.state is None else value.state)


def _mapping(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} stands where a dictionary should")
    return value


def _require_text(name: Any) -> None:
    """Raises TypeError: what is no text may be nested so that to compare or to show it takes for ever."""
    if type(name) is not str:
        raise TypeError(f"a {type(name).__name__} stands where a name should")


def _size(value: Any) -> Shape:
    """A `torch.Size`."""
    if type(value) is Call and value.name == "torch.Size" and len(value.args) == 1 and is_shape(value.args[0]):
        return value.args[0]
    raise ValueError("a size in it is none")


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """The value. Raises Unsupported when anything in it is no number, text or collection of them."""
    if depth > _DEEPEST:
        raise Unsupported(f"{name} is nested more than {_DEEPEST} deep")
    inner: list[Any] = []
    if type(value) in (list, tuple):
        inner = list(value)
    elif type(value) is dict:
        inner = [*value, *value.values()]
    elif type(value) not in _PLAIN:
        kind = value.name if type(value) is Call else str(value)
        raise Unsupported(f"{name} has a {kind:.100}, which needs torch or the program that saved it")
    for each in inner:
        _plain(each, name, depth + 1)
    return value
