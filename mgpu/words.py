"""Numbers and lines as people read them, the same everywhere."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence

from mgpu_train.agent.status.words import count

__all__ = ["amount", "count", "duration", "number", "seconds_of", "sparkline", "utc", "wrapped"]

_HELD = "\x00"  # a blank at which no line is broken


def amount(size: float) -> str:
    """`size` bytes in the unit that fits: `512 B`, `1.5 MiB`."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:  # 1024.0 KiB is 1.0 MiB
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """`45 s`, `13 min`, `2 h`: minutes from two on, hours from one on."""
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.0f} s"


_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def seconds_of(text: str) -> float:
    """`90s`, `50m`, `4h`, `1h30m`, `7d` as seconds; `0` needs no unit. Raises ValueError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.lower())
    if text.strip() == "0":
        return 0.0
    if not parts or "".join("".join(part) for part in parts) != re.sub(r"\s", "", text.lower()):
        raise ValueError(f"`{text}` is no time: write 90s, 50m, 4h, 1h30m or 7d")
    if unknown := [unit for _, unit in parts if unit not in _UNITS]:
        raise ValueError(f"`{text}`: `{unknown[0]}` is no unit of time: s, m, h, d or w")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def utc(at: float) -> str:
    """UNIX seconds as `2026-11-03 11:30 UTC`: what a provider sells for a time, the same for everybody."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))


def number(value: float, digits: int = 4) -> str:
    """A value in so many digits, but all of a whole part: `1.893`, `51234`."""
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def sparkline(values: Sequence[float | None], *, blocks: bool = True) -> str:
    """A character for each value, the higher the higher: a block, or a digit from 1 to 8. None is a dot."""
    levels, gap = ("▁▂▃▄▅▆▇█", "·") if blocks else ("12345678", ".")
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low or 1.0
    last = len(levels) - 1
    return "".join(gap if value is None else levels[round((value - low) / span * last)] for value in values)


def wrapped(text: str, width: int) -> list[str]:
    """`text` in lines of so many columns, broken between words and outside of a `command`; what is longer stays."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        held = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _HELD), line)
        parts = textwrap.wrap(
            held, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, expand_tabs=False
        )
        lines += [part.replace(_HELD, " ") for part in parts] or [""]
    return lines


def usd(amount: float) -> str:
    """Dollars: cents, and less than them where it is little; never nothing for what costs something."""
    if amount >= 0.1 or not amount:
        return f"${amount:.2f}"
    return f"${amount:.3f}" if amount >= 0.001 else f"${max(amount, 0.0001):.4f}"
