"""What packages bring by an entry-point group: ours and anybody's, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, TypeVar

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,38}")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Entries(Generic[_T]):
    """The entries of a group by name, and why some cannot be used."""

    found: Mapping[str, _T]
    broken: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be used, in alphabetical order."""
        return tuple(sorted(self.found))

    def complaint(self, name: str) -> tuple[str, str | None]:
        """Why nothing of this name can be used, and the name that it is nearest to."""
        if name in self.broken:
            return f"`{name}` is installed, but cannot be used: {self.broken[name]}", None
        near = get_close_matches(name, self.names, 1)
        return f"`{name}` is not one of {', '.join(self.names)}", near[0] if near else None


def read(group: str, kind: type[_T]) -> Entries[_T]:
    """The entries of a group in this environment, each an object of this kind. One that cannot be read is set aside,
    and hinders no other."""
    from importlib.metadata import entry_points  # 30 ms, which a node does not need

    found, broken = dict[str, _T](), dict[str, str]()
    for point in entry_points(group=group):
        try:
            entry = point.load()
        except Exception as error:  # noqa: BLE001  whatever somebody else's package does
            broken[point.name] = f"{point.value} cannot be imported ({type(error).__name__}: {error})"
            continue
        if not isinstance(entry, kind):
            broken[point.name] = f"{point.value} is no {kind.__name__}"
        elif not _NAME.fullmatch(point.name):
            broken[point.name] = "a name is lower-case letters, digits, `-` and `_`"
        elif point.name in found:
            broken[point.name] = "two packages bring one of this name"
        else:
            found[point.name] = entry
    return Entries({name: entry for name, entry in found.items() if name not in broken}, broken)
