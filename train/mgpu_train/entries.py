"""What packages bring by an entry-point group: ours and anybody's, by name."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mgpu_train.errors import TrainError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,38}")
_T = TypeVar("_T")


_OURS = ("mgpu", "mgpu-train")  # distributions whose entries no other package's take the place of


@dataclass(frozen=True)
class Entries(Generic[_T]):
    """The entries of a group by name, and why some cannot be used."""

    found: dict[str, _T]
    broken: dict[str, str]

    def set_aside(self, name: str, why: str) -> None:
        """Nothing of this name can be used."""
        self.broken[name] = why
        self.found.pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be used, in alphabetical order."""
        return tuple(sorted(self.found))

    def complaint(self, name: str) -> tuple[str, str | None]:
        """Why nothing of this name can be used, and the name that it is nearest to."""
        if not self.found:
            return "none is installed: mgpu itself has to be installed again", None
        if name in self.broken:
            return f"`{name}` is installed, but cannot be used: {self.broken[name]}", None
        near = get_close_matches(name, self.names, 1)
        return f"`{name}` is not one of {', '.join(self.names)}", near[0] if near else None


def read(group: str, kind: type[_T]) -> Entries[_T]:
    """The entries of a group in this environment, each an object of this kind. One that cannot be read is set aside,
    and hinders no other; one with the name of ours is passed over."""
    ours: list[EntryPoint] = []
    theirs: list[EntryPoint] = []
    for point in points().select(group=group):
        (ours if point.dist is not None and point.dist.name in _OURS else theirs).append(point)
    names = {point.name for point in ours}
    entries = Entries[_T]({}, {})
    for point in [*ours, *(point for point in theirs if point.name not in names)]:
        _add(entries, point, kind)
    return entries


@functools.cache
def points() -> Any:  # EntryPoints; before Python 3.12 something that is selected from in the same way
    """All that is installed: to read it takes as long for one group as for all."""
    from importlib.metadata import entry_points  # 30 ms, which a node does not need

    return entry_points()


def need(entries: Entries[_T], name: str, key: str) -> _T:
    """The entry of this name. Raises TrainError: there is none, as `key` of the run file wants it."""
    if name not in entries.found:
        raise TrainError(f"`{key}`: {entries.complaint(name)[0]}")
    return entries.found[name]


def load(path: str, kind: type[Any], key: str) -> Any:
    """The class at "package.module:Class". Raises TrainError: it is not to be had, or is not of this kind."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        if not isinstance(error, ImportError | AttributeError):
            logging.getLogger(__package__).exception("%s:", module)  # the line at fault is the user's own
        why = f"`{key}`: {path} cannot be imported ({type(error).__name__}: {error})"
        cure = "`code:` of the run file sends a folder and installs requirements; an image may bring it"
        raise TrainError(f"{why}. {cure}. Looked for in {Path.cwd()} and by {sys.executable}") from error
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise TrainError(f"`{key}`: {path} is no class that is derived from {kind.__module__}.{kind.__name__}")
    return found


def of_extra(module: str, extra: str, key: str) -> Any:
    """A module that needs packages of one of mgpu-train's extras; what it is imported for is `key` of the run file.

    Raises TrainError: they are missing, or too old.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TrainError(f"{key} needs more packages, `pip install 'mgpu-train[{extra}]'`: {error}") from error


def _add(entries: Entries[_T], point: EntryPoint, kind: type[_T]) -> None:
    try:
        entry = point.load()
    except Exception as error:  # noqa: BLE001  whatever somebody else's package does
        return entries.set_aside(point.name, f"{point.value} cannot be imported ({type(error).__name__}: {error})")
    if not isinstance(entry, kind):
        return entries.set_aside(point.name, f"{point.value} is no {kind.__name__}")
    if not _NAME.fullmatch(point.name):
        return entries.set_aside(point.name, "a name is lower-case letters, digits, `-` and `_`")
    if point.name in entries.found or point.name in entries.broken:
        return entries.set_aside(point.name, "two packages bring one of this name")
    entries.found[point.name] = entry
    return None
