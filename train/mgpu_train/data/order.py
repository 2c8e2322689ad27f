"""The order in which samples are seen: a pure function of the seed and of how many were consumed before.

The world size does not enter: all ranks compute the same global batch and each takes its slice, so 8 ranks and 4 see
the same data, and the whole state of the data loader is one number. A keyed Feistel network permutes the samples of an
epoch one by one, without a table, so it costs the same for a thousand samples and for 10^12. It is written out here,
since NumPy and torch may change what their generators draw between versions.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_ROUNDS = 6


class Order:
    """An endless sequence of sample numbers; each epoch holds each of `samples` once, in an order of its own."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise ValueError("an order needs at least one sample")
        self.samples = samples
        self._seed = _mix(seed)
        # the network permutes 2^(2 * half) numbers, the next power of four that holds all samples
        self._half = max(1, ((samples - 1).bit_length() + 1) // 2)

    def __getitem__(self, position: int) -> int:
        """The sample at `position`, counted from the start of training over all ranks."""
        epoch, number = divmod(position, self.samples)
        key = _mix(self._seed + epoch)
        number = self._permute(number, key)
        while number >= self.samples:  # walk the cycle back into range: it stays a permutation
            number = self._permute(number, key)
        return number

    def batch(self, consumed: int, size: int, rank: int = 0, world_size: int = 1) -> list[int]:
        """A rank's slice of the global batch of `size` samples that follows `consumed` samples."""
        local = size // world_size
        first = consumed + rank * local
        return [self[position] for position in range(first, first + local)]

    def _permute(self, number: int, key: int) -> int:
        low_bits = (1 << self._half) - 1
        left, right = number >> self._half, number & low_bits
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(key + turn * 0x9E3779B97F4A7C15 + right) & low_bits)
        return left << self._half | right


def _mix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): every bit of the result depends on every bit of `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
