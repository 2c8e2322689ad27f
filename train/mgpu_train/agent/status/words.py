"""Numbers as people read them."""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing}" + ("" if number == 1 else "s")
