"""Documents that several versions of mgpu write and read: what a newer one has written there is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def known_fields(of: type[Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Of a document those fields that this version's dataclass `of` has."""
    names = {each.name for each in fields(of)}
    return {name: value for name, value in document.items() if name in names}
