"""The safetensors file format: a length, a JSON header, and the tensors' bytes, one after the other.

https://huggingface.co/docs/safetensors has it. Nothing in such a file can be run.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_train.store.base import Damaged
from mgpu_train.store.disk import opened, translated

# torch's names of the dtypes that the format has
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # bytes; what other readers take

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """One tensor: its name, torch's name of its dtype, its shape and its bytes."""

    name: str
    dtype: str
    shape: Shape
    size: int


@dataclass(frozen=True)
class Contents:
    """What the header of a file says, compared with the file: tensors, and bytes of tensors."""

    tensors: int
    bytes: int


def header(items: list[Item], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor of a file that holds `items` in this order; a multiple of 8."""
    described: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for item in items:
        described[item.name] = {
            "dtype": DTYPES[item.dtype],
            "shape": _shape(item),
            "data_offsets": [at, at + item.size],
        }
        at += item.size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _shape(item: Item) -> list[int]:
    if item.dtype != "float4_e2m1fn_x2":
        return list(item.shape)
    *outer, last = item.shape or (1,)
    return [*outer, 2 * last]  # torch counts bytes, each of two numbers; the format counts numbers


def name_problem(name: str) -> str | None:
    """Why no tensor can have this name, or None."""
    return "is what the format calls its own metadata" if name == _METADATA else None


def read_contents(path: Path) -> Contents:
    """What a file holds. Raises Damaged when it is no whole safetensors file, and StoreError."""
    with translated(f"cannot read {path}"), opened(path) as descriptor:
        whole = os.fstat(descriptor).st_size
        with open(descriptor, "rb", closefd=False) as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))
            if length > min(_LONGEST_HEADER, whole - _LENGTH.size):
                raise Damaged(f"{path} is no safetensors file: its header would be longer than the file")
            text = file.read(length)
    return _contents(path, text, whole - _LENGTH.size - length)


def _contents(path: Path, text: bytes, size: int) -> Contents:
    try:
        described = json.loads(text)
        described.pop(_METADATA, None)
        spans = sorted(tuple(entry["data_offsets"]) for entry in described.values())
        at = 0
        for begin, end in spans:
            if begin != at or end < begin:
                raise ValueError("tensors overlap, or leave a hole")
            at = end
        if at != size:
            raise ValueError(f"the header speaks of {at} bytes, and there are {size}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path} is no whole safetensors file: {error!s:.200}") from error
    return Contents(len(spans), size)
