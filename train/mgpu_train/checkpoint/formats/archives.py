"""A zip archive as `torch.save` writes it, somewhere inside a file: its pickle, and the bytes of its tensor."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any, Literal

from mgpu_train import pickles
from mgpu_train.pickles import PERSISTENT, Call, Name, NotPlain
from mgpu_train.store.base import Damaged, StoreError
from mgpu_train.store.disk import opened, translated

PIECE = 4 << 20  # bytes that are in memory at a time
_MOST = 1 << 48  # elements of a tensor, bytes of a file
_LARGEST_DIRECTORY = 64 << 20
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
_STORAGES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}  # memoryview's
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, then the lengths of name and extra field
_V2, _V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"

Shape = tuple[int, ...]


class Unsupported(StoreError):
    """Nothing is damaged, but this cannot be read or written without torch; the message says why."""


@dataclass(frozen=True)
class Raw:
    """A tensor in an open file: `size` bytes from `at` on, of which the elements are by `first` and `strides`.

    Those count elements. `crc32` is of all the bytes; 0: torch was told to write none.
    """

    at: int
    size: int
    crc32: int
    dtype: str
    first: int
    shape: Shape
    strides: Shape

    @property
    def contiguous(self) -> bool:
        """True when the bytes are the elements, all of them and in row-major order."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype] == self.size and all(
            length == 1 or stride == math.prod(self.shape[axis + 1 :])
            for axis, (length, stride) in enumerate(zip(self.shape, self.strides, strict=True))
        )


@contextmanager
def archive(path: Path, start: int, length: int, what: str) -> Iterator[Archive]:
    """The archive of `length` bytes from byte `start` of a file on; `what` it holds is for messages.

    Raises StoreError.
    """
    with translated(f"cannot read {path}"), opened(path) as descriptor:
        yield Archive(descriptor, start, length, f"{what} in {path}")


class Archive:
    """One archive of an open file; `where` names it in messages. Its methods raise Damaged and Unsupported."""

    def __init__(self, descriptor: int, start: int, length: int, where: str) -> None:
        self._descriptor, self._start, self._length, self._where = descriptor, start, length, where
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(_Window(descriptor, start, length)))
            (self._prefix,) = {name[: -len("data.pkl")] for name in self._zip.namelist() if name.endswith("/data.pkl")}
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            raise Damaged(f"{where} is no archive of torch.save: {error}") from error

    def pickle(self) -> Any:
        """What its pickle says."""
        try:
            return pickles.loads(self._content("data.pkl", pickles.MAX_BYTES))
        except NotPlain as error:
            raise Damaged(f"the pickle of {self._where} cannot be read: {error}") from error

    def tensor(self) -> Raw:
        """Where its one tensor lies."""
        call = self._rebuild()
        if len(call.args) < 6:
            raise Damaged(f"the pickle of {self._where} has a tensor without a shape")
        storage, first, shape, strides, _, _, *rest = call.args
        kind, key = self._storage(storage)
        dtype = _STORAGES.get(kind) if call.name == _V2 else _dtype(rest.pop(0), kind) if rest else None
        if dtype not in ITEM_BYTES:
            raise Unsupported(f"{self._where} has elements of {dtype or kind:.100}, which only torch can read")
        if any(rest):
            raise Unsupported(f"{self._where} is conjugated or negated lazily: save it after `.resolve_conj()`")
        if self._content("byteorder", 16) != b"little":
            raise Unsupported(f"{self._where} was not written by a little-endian machine: load it with torch")
        raw = Raw(*self._bytes(f"data/{key}"), dtype, first, shape, strides)
        self._check(raw)
        return raw

    def read(self, raw: Raw) -> Iterator[bytes]:
        """The elements in row-major order, in pieces of at most `PIECE` bytes."""
        with translated(f"cannot read {self._where}"):
            if math.prod(raw.shape):
                yield from (self._straight if raw.contiguous else self._gathered)(raw)

    def _rebuild(self) -> Call:
        """The call by which torch would make the tensor; a parameter is a tensor, too."""
        call = self.pickle()
        if type(call) is Call and call.name == "torch._utils._rebuild_parameter" and call.args:
            call = call.args[0]
        if type(call) is Call and call.name in (_V2, _V3):
            return call
        kind = call.name if type(call) is Call else type(call).__name__
        raise Unsupported(f"{self._where} is no plain tensor but {kind:.100}: only torch can make something of it")

    def _storage(self, call: Any) -> tuple[str, str]:
        """Name of the storage's class, and of the member that holds it."""
        try:
            (what, kind, key, _, _) = call.args[0]
        except (AttributeError, IndexError, TypeError, ValueError):
            what = kind = key = None
        if what != "storage" or call.name != PERSISTENT or type(kind) is not Name or type(key) is not str:
            raise Damaged(f"the pickle of {self._where} has a tensor without a storage")
        return kind.name, key

    def _member(self, name: str) -> zipfile.ZipInfo:
        try:
            info = self._zip.getinfo(self._prefix + name)
        except KeyError as error:
            raise Damaged(f"{self._where} has no {name}") from error
        plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
        if not plain or info.file_size != info.compress_size:
            raise Damaged(f"{name} of {self._where} is compressed or encrypted; torch writes neither")
        return info

    def _content(self, name: str, limit: int) -> bytes:
        """A small member, whole."""
        at, size, crc32 = self._bytes(name)
        if size > limit:
            raise Damaged(f"{name} of {self._where} has {size} bytes, and {limit} are the limit")
        content = os.pread(self._descriptor, size, at)
        if len(content) < size or crc32 not in (0, zlib.crc32(content)):
            raise Damaged(f"{name} of {self._where} is not as it was written")
        return content

    def _bytes(self, name: str) -> tuple[int, int, int]:
        """Where a member's bytes begin in the file, how many there are, and their CRC-32."""
        info = self._member(name)
        header = b""
        if 0 <= info.header_offset <= self._length - _LOCAL_HEADER.size:
            header = os.pread(self._descriptor, _LOCAL_HEADER.size, self._start + info.header_offset)
        if len(header) != _LOCAL_HEADER.size or not header.startswith(b"PK\x03\x04"):
            raise Damaged(f"{name} of {self._where} is not where the archive says")
        at = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header)[1:])
        if at + info.file_size > self._length:
            raise Damaged(f"{name} of {self._where} ends behind the archive")
        return self._start + at, info.file_size, info.CRC

    def _check(self, raw: Raw) -> None:
        """Every element lies within the bytes."""
        sane = is_shape(raw.shape) and are_counts(raw.strides) and len(raw.shape) == len(raw.strides)
        if not sane or not are_counts((raw.first,)):
            raise Damaged(f"the pickle of {self._where} has a tensor of impossible shape")
        steps = sum((length - 1) * stride for length, stride in zip(raw.shape, raw.strides, strict=True))
        if math.prod(raw.shape) and (raw.first + steps + 1) * ITEM_BYTES[raw.dtype] > raw.size:
            raise Damaged(f"{self._where} has {raw.size} bytes, too few for {raw.dtype}{list(raw.shape)}")

    def _straight(self, raw: Raw) -> Iterator[bytes]:
        crc = done = 0
        while done < raw.size:
            piece = os.pread(self._descriptor, min(PIECE, raw.size - done), raw.at + done)
            if not piece:
                raise Damaged(f"{self._where} became shorter while it was read")
            crc = zlib.crc32(piece, crc)
            done += len(piece)
            yield piece
        if raw.crc32 not in (0, crc):
            raise Damaged(f"{self._where} does not have the CRC-32 that it was written with")

    def _gathered(self, raw: Raw) -> Iterator[bytes]:
        """Element by element where memory has another order, as for a matrix that was saved transposed."""
        skipped = raw.at % ALLOCATIONGRANULARITY
        with (
            mmap(self._descriptor, skipped + raw.size, access=ACCESS_READ, offset=raw.at - skipped) as mapped,
            memoryview(mapped) as view,
            view[skipped:] as storage,
        ):
            if raw.crc32 not in (0, zlib.crc32(storage)):
                raise Damaged(f"{self._where} does not have the CRC-32 that it was written with")
            yield from _rows(storage, raw)


def is_shape(value: Any) -> bool:
    """True for a tuple of lengths that a tensor may have."""
    return are_counts(value) and len(value) <= 64 and math.prod(filter(None, value)) <= _MOST


def are_counts(value: Any) -> bool:
    """True for a tuple of numbers from 0 to what files and tensors can have."""
    return type(value) is tuple and all(type(count) is int and 0 <= count <= _MOST for count in value)


def _dtype(name: Any, kind: str) -> str | None:
    """Torch's name of a dtype that the pickle gives beside a storage of mere bytes."""
    return name.name if type(name) is Name and name.module == "torch" and kind == "UntypedStorage" else None


def _rows(storage: memoryview, raw: Raw) -> Iterator[bytes]:
    """The elements in row-major order, copied out a row at a time, or less where a row is long."""
    item, first = ITEM_BYTES[raw.dtype], raw.first
    shape, strides = raw.shape or (1,), raw.strides or (1,)  # one number may lie in the memory of many
    if item == 16:  # no format of memoryview's: two halves that follow one another
        item, first, shape, strides = 8, first * 2, (*shape, 2), (*(stride * 2 for stride in strides), 1)
    with storage[: len(storage) // item * item].cast(_FORMATS[item]) as elements:
        for index in product(*map(range, shape[:-1])):
            row = first + sum(place * stride for place, stride in zip(index, strides, strict=False))
            for begin in range(0, shape[-1], PIECE // item):
                count = min(PIECE // item, shape[-1] - begin)
                yield _run(elements, row + begin * strides[-1], count, strides[-1])


def _run(elements: memoryview, first: int, count: int, stride: int) -> bytes:
    if not stride:  # one element that stands for many
        return elements[first : first + 1].tobytes() * count
    return elements[first : first + (count - 1) * stride + 1 : stride].tobytes()


class _Window(io.RawIOBase):
    """A part of a file, as a file; what is read of it is an archive's directory, and that is small."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._start, self._length, self._at = descriptor, start, length, 0
        self._left = _LARGEST_DIRECTORY

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("it points before its own beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        self._left -= wanted
        if self._left < 0:
            raise zipfile.BadZipFile("its directory is too long")
        data = os.pread(self._descriptor, wanted, self._start + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
