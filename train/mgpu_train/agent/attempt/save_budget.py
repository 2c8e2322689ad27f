"""What one more save would take, by what the earlier ones took, and whether a machine that goes leaves time for it.

Values only: no I/O, no clock of its own. All times are of one monotonic clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mgpu_train.agent.status.status import Fault

FACTOR = 1.5  # a save in a hurry is slower than the earlier ones: all nodes are at it, and at the store, at once
MARGIN_S = 1.0  # until agent and launcher have passed a signal on, and the ranks are at the end of their step
# Each half, save and upload, where nothing is known of it. Small on purpose: before the first checkpoint all work of
# the attempt is at stake, and a save that does not fit after all costs no more than the few seconds that it was tried.
UNKNOWN_S = 2.5


@dataclass(frozen=True)
class Need:
    """What one more save takes: until the ranks have ended, and from there until it is safe in the store."""

    save_s: float = 0.0
    upload_s: float = 0.0


NOTHING = Need()  # there is nothing that a save could keep


def need(saves: Sequence[float], step_s: float, upload_s: float | None) -> Need:
    """From what the recent saves took until they stood on disk, what a step takes at most, and what one more upload
    would take. How long they held up training says nothing: the last one has to stand before the ranks end.

    No saves, and None, mean that nothing is known of it.
    """
    save_s = FACTOR * (max(saves) + step_s) if saves else max(UNKNOWN_S, FACTOR * step_s)
    return Need(MARGIN_S + save_s, UNKNOWN_S if upload_s is None else FACTOR * upload_s)


@dataclass(frozen=True)
class Going:
    """This machine goes at `at`, whatever its agent does. `save_by`: after that no upload would be through in time."""

    fault: Fault
    reason: str
    at: float
    save_by: float
    fits: bool


def going(fault: Fault, why: str, *, now: float, left_s: float, wanted: Need, grace_s: float) -> Going:
    """What follows from a machine that goes in `left_s`: is there time for what is `wanted`?

    A save that needs more than `grace_s`, the most that a program gets at any stop, never fits: it would be cut off.
    """
    fits = left_s >= wanted.save_s + wanted.upload_s and wanted.save_s <= grace_s
    late = "" if fits else f", too soon for a save of {wanted.save_s + wanted.upload_s:.0f} s"
    at = now + left_s
    return Going(fault, f"{why} in {left_s:.0f} s{late}", at, at - wanted.upload_s, fits)
