"""Which samples a rank sees, when, and what of them: a pure function of the seed and of how many were consumed before.

The world size does not enter: all ranks compute the same global batch and each takes its slice, so 8 ranks, 4 and 3 see
the same data, and the whole state of the data loader is one number. A keyed Feistel network permutes the samples of an
epoch one by one, without a table, so it costs the same for a thousand samples and for 10^12. It is written out here,
since NumPy and torch may change what their generators draw between versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mgpu_train.data.seeds import splitmix

_ROUNDS = 6


class Order:
    """An endless sequence of sample numbers; each epoch holds each of `samples` once, in an order of its own."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise ValueError("an order needs at least one sample")
        self.samples = samples
        self._seed = splitmix(seed)
        # the network permutes 2^(2 * half) numbers, the next power of four that holds all samples
        self._half = max(1, ((samples - 1).bit_length() + 1) // 2)

    def __getitem__(self, position: int) -> int:
        """The sample at `position`, counted from the start of training over all ranks."""
        epoch, number = divmod(position, self.samples)
        key = splitmix(self._seed + epoch)
        number = self._permute(number, key)
        while number >= self.samples:  # walk the cycle back into range: it stays a permutation
            number = self._permute(number, key)
        return number

    def _permute(self, number: int, key: int) -> int:
        low_bits = (1 << self._half) - 1
        left, right = number >> self._half, number & low_bits
        for turn in range(_ROUNDS):
            left, right = right, left ^ (splitmix(key + turn * 0x9E3779B97F4A7C15 + right) & low_bits)
        return left << self._half | right


@dataclass(frozen=True)
class Slices:
    """A rank's part of each global batch, cut into micro-batches.

    Replicas need not divide the batch: their parts differ by one sample at most. Each of them makes as many
    micro-batches as the one with the largest part, since they reduce and gather together; what is missing is empty.
    """

    global_batch: int  # samples
    micro_batch: int | Literal["auto"] | None  # samples at most; None: all at once; auto: not known yet
    rank: int  # among the replicas
    replicas: int

    def refuse(self, stages: int) -> str | None:
        """Why it cannot be trained on by a pipeline of so many stages."""
        batch, replicas, size = self.global_batch, self.replicas, self.micro_batch
        if batch < replicas:
            return f"{batch} samples are not one for each of {replicas} processes"
        if stages > 1 and (batch % (replicas * (size if isinstance(size, int) else 1)) or self.count < stages):
            return (
                f"a pipeline of {stages} stages takes {stages} micro-batches or more, all of the same size, in each "
                f"step: {batch} samples for {replicas} replicas, {size or 'all'} at a time, are not that"
            )
        return None

    @property
    def size(self) -> int:
        """The most samples of a micro-batch."""
        return min(self.micro_batch, self._largest) if isinstance(self.micro_batch, int) else self._largest

    @property
    def count(self) -> int:
        """Micro-batches of a global batch, on every replica."""
        return -(-self._largest // self.size)

    @property
    def _largest(self) -> int:
        return -(-self.global_batch // self.replicas)

    def of(self, consumed: int) -> Iterator[range]:
        """The positions of the micro-batches of the global batch that follows `consumed` samples."""
        first, last = (consumed + self.global_batch * rank // self.replicas for rank in (self.rank, self.rank + 1))
        for number in range(self.count):
            begin = min(first + number * self.size, last)
            yield range(begin, min(begin + self.size, last))


@dataclass(frozen=True)
class Chunks:
    """A rank's part of each sequence that `size` ranks share: of twice as many chunks one, and its counterpart from the
    end. So all have as many tokens, and as many before them."""

    rank: int  # among those that share it
    size: int

    def refuse(self, tokens: int) -> str | None:
        """Why a sequence of so many tokens cannot be shared."""
        if tokens % (2 * self.size) == 0:
            return None
        return f"{self.size} ranks share sequences of a multiple of {2 * self.size} tokens, and {tokens} is none"

    @property
    def numbers(self) -> tuple[int, int]:
        """Of this rank's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank
