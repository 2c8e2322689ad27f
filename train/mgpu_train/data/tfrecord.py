"""TFRecord files, and the `tf.train.Example` that each of their records is, without TensorFlow.

A record is its length (8 bytes, little-endian) and the checksum of these, its bytes and their checksum: CRC-32C,
rotated and shifted (tensorflow/core/lib/io/record_writer.h). An Example is a protocol buffer of lists by name
(tensorflow/core/example/feature.proto), of which lists of bytes and of whole numbers are read here.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from awscrt.checksums import crc32c

from mgpu_train.errors import TrainError

_HEAD, _TAIL = struct.Struct("<QI"), struct.Struct("<I")
_NAME = re.compile(r"\.tfrec(ords?)?(-\d{5}-of-\d{5})?$")
_PACKED = b"\x1f\x8b", b"\x78\x9c"  # how GZIP and ZLIB files begin
_FIXED = {1: 8, 5: 4}  # bytes of values by wire type; 0 is a number, 2 has its length before it
_BYTES, _FLOATS, _NUMBERS = 1, 2, 3  # what a Feature is a list of


class Record(NamedTuple):
    """Where one lies in its file: its number there, its bytes' first one and their count, and their masked CRC-32C."""

    number: int
    start: int
    length: int
    crc: int

    @property
    def begin(self) -> int:
        """The first byte of what is before its bytes."""
        return self.start - _HEAD.size

    @property
    def end(self) -> int:
        """The byte after it."""
        return self.start + self.length + _TAIL.size


def is_named(name: str) -> bool:
    """Whether a file is called one: `x.tfrecord`, `x.tfrecords`, `x.tfrec`, or `x.tfrecord-00000-of-00008`, a part."""
    return _NAME.search(name) is not None


def records(path: Path, begin: int = 0) -> Iterator[tuple[Record, memoryview]]:
    """Those of a file from byte `begin`, each with its bytes, of which nothing is read but what is looked at.

    Raises TrainError: it is no TFRecord file, is cut off, or is damaged where a length stands; OSError.
    """
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # closed with its last view
    number = 0
    while begin < len(data):
        record = _record(path, data, number, begin)
        yield record, data[record.start : record.start + record.length]
        begin, number = record.end, number + 1


def _record(path: Path, data: memoryview, number: int, begin: int) -> Record:
    where = f"{path}, record {number} at byte {begin}"
    if len(data) < begin + _HEAD.size:
        raise TrainError(f"{where}: the file ends within it: fetch it anew")
    length, crc = _HEAD.unpack_from(data, begin)
    if crc != masked_crc(data[begin : begin + 8]):
        if begin == 0 and bytes(data[:2]) in _PACKED:
            raise TrainError(f"{path} is compressed as a whole, and its records cannot be found: unpack it")
        what = "it is damaged, or the file is no TFRecord file"
        raise TrainError(f"{where}: {what} (the checksum of its length does not match): fetch it anew")
    record = Record(number, begin + _HEAD.size, length, 0)
    if len(data) < record.end:
        raise TrainError(f"{where}: it has {length} bytes, and the file ends within them: fetch it anew")
    return record._replace(crc=_TAIL.unpack_from(data, record.end - _TAIL.size)[0])


def masked_crc(data: bytes | memoryview) -> int:
    """The checksum that these files have of some bytes."""
    crc = crc32c(data)  # pyright: ignore[reportArgumentType] - it takes any buffer
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def example(record: memoryview, wanted: Collection[str] | None = None) -> dict[str, list[memoryview] | list[int]]:
    """The lists of an Example that are wanted (None: all), by name; one of floating-point numbers is empty. Bytes are
    not copied, nor looked at.

    Raises ValueError: it is none.
    """
    found: dict[str, list[memoryview] | list[int]] = {}
    for features in _of(record, 1):
        for entry in _of(features, 1):
            name = b"".join(_of(entry, 1)).decode()
            if wanted is None or name in wanted:
                found[name] = [each for feature in _of(entry, 2) for each in _list(feature)]  # type: ignore[assignment]
    return found


def _list(feature: memoryview) -> Iterator[memoryview | int]:
    for kind, values in _fields(feature):
        if not isinstance(values, memoryview):
            raise ValueError("a number stands where a list has to be")
        for _, value in _fields(values) if kind != _FLOATS else ():
            if kind == _BYTES and isinstance(value, memoryview):
                yield value
            elif kind == _NUMBERS:
                yield from map(_signed, _packed(value) if isinstance(value, memoryview) else [value])


def _of(message: memoryview, number: int) -> Iterator[memoryview]:
    """The parts of a message that have this number."""
    for found, value in _fields(message):
        if found == number:
            if not isinstance(value, memoryview):
                raise ValueError("a number stands where a part has to be")
            yield value


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Its fields by their numbers, in the wire format of protocol buffers."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size = _FIXED.get(kind)
        if kind == 2:
            size, at = _varint(message, at)
        if size is None or size > len(message) - at:
            raise ValueError(f"a field of type {kind} does not fit at byte {at}")
        yield number, message[at : at + size]
        at += size


def _packed(values: memoryview) -> Iterator[int]:
    at = 0
    while at < len(values):
        value, at = _varint(values, at)
        yield value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, and where it ends."""
    value, begin = 0, at
    for shift in range(0, 70, 7):
        if at == len(data):
            break
        byte = data[at]
        at += 1
        if byte < 0x80:
            return (value | byte << shift) & 0xFFFF_FFFF_FFFF_FFFF, at
        value |= (byte & 0x7F) << shift
    raise ValueError(f"a number has no end at byte {begin}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
