"""Random numbers that follow from what they are for, and never from the process that draws them.

A step's streams follow from the run's seed, the step and the place among the replicas; a sample's from the run's seed
and its position in training. So nothing of them is in a checkpoint, and a resumed run draws what an uninterrupted one
would have drawn.
"""

from __future__ import annotations

MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A number of 64 bits, each of which depends on every bit of all given ones."""
    value = 0
    for number in numbers:
        value = splitmix(value + number)
    return value


def splitmix(value: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): every bit of the result depends on every bit of `value`."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
