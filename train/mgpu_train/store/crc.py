"""CRC64NVME, 16 hex digits: the checksum that S3 keeps of a whole object and that is faster than any disk."""

from __future__ import annotations

import base64
from collections.abc import Iterable

from awscrt.checksums import combine_crc64nvme, crc64nvme


def of_bytes(data: bytes | memoryview) -> str:
    """The checksum of some bytes."""
    return to_hex(more(data))


def more(data: bytes | memoryview, value: int = 0) -> int:
    """The checksum, as a number, of what had the checksum `value` and of these bytes after it."""
    return crc64nvme(data, value)  # pyright: ignore[reportArgumentType]  any buffer is as good


def joined(parts: Iterable[tuple[int, int]]) -> str:
    """The checksum of parts that follow one another, each given as (checksum, bytes)."""
    value = 0
    for crc, size in parts:
        value = combine_crc64nvme(value, crc, size)
    return to_hex(value)


def to_hex(value: int) -> str:
    """16 digits."""
    return f"{value:016x}"


def to_base64(digits: str) -> str:
    """The same sum as S3 writes it."""
    return base64.b64encode(bytes.fromhex(digits)).decode()


def from_base64(text: str | None) -> str | None:
    """S3's writing as 16 digits; None where it has no full-object CRC64NVME."""
    return base64.b64decode(text).hex() if text else None
