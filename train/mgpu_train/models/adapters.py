"""Names in a model that has low-rank adapters by peft. Needs no torch."""

from __future__ import annotations

BASE = "base_checksum"  # a buffer: the checksum of the weights that adapters were learned for


def is_lora(name: str) -> bool:
    """Whether a parameter is one of an adapter."""
    return ".lora_" in name
