"""Documents that several versions of mgpu read and write: what a newer one has written there an older one carries
through, when it writes the document again, without knowing what it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_NEWER = "newer"


@dataclass(kw_only=True)
class Document:
    """The base of dataclasses that are kept as documents, or in them."""

    newer: dict[str, Any] = field(default_factory=dict)  # what this version does not know, as it was found


def known_fields(of: type[Document], document: Mapping[str, Any]) -> dict[str, Any]:
    """Of a document those fields that this version's dataclass `of` has, and the others under `newer`."""
    names = {each.name for each in fields(of)}
    known = {name: value for name, value in document.items() if name in names}
    return {**known, _NEWER: {name: value for name, value in document.items() if name not in names}}


def plain(document: Document) -> dict[str, Any]:
    """As plain data, with all that was found in it, within its parts as well."""
    return asdict(document, dict_factory=_flat)


def _flat(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    return {**known.pop(_NEWER, {}), **known}
