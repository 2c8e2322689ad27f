"""Which parameters have moments of 8 bits under `optimizer: adamw8bit`. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = (256, 128, 64)  # numbers that share a scale
LEAST = 4096  # numbers of a parameter, as bitsandbytes and torchao have it: smaller ones take no memory


def block_of(shape: Sequence[int]) -> int | None:
    """Numbers of a row that share a scale: as many as divide it. No block has parts of two rows, so that ranks that
    share the rows share the blocks, too, however many they are. None: its moments stay float32."""
    if len(shape) < 2 or math.prod(shape) < LEAST:
        return None
    row = math.prod(shape[1:])
    return next((block for block in BLOCKS if row % block == 0), None)


def moments_bytes(shape: Sequence[int]) -> float:
    """Of both moments of a parameter: a byte a number and moment, and a scale (float32) a block; else float32."""
    block = block_of(shape)
    return 2.0 * math.prod(shape) * (4 if block is None else 1 + 4 / block)
