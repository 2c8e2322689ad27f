"""What the plugin asks of a resource type: six calls on plain data. `servicer.py` speaks to the engine for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mgpu.events import Event

Properties = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The provider's configuration: explicit, and kept in state, so that `destroy` uses what `up` used."""

    state_dir: Path
    owner: str
    more: Mapping[str, str] = field(default_factory=dict)
    """What else the program has configured, for the resource types that read it."""


@dataclass(frozen=True)
class Call:
    """One request of the engine: for which resource, and how to speak back while it runs."""

    urn: str
    settings: Settings
    emit: Callable[[Event], None]
    cancelled: threading.Event
    preview: bool = False

    @property
    def project(self) -> str:
        """The project's name, from the URN `urn:pulumi:<stack>::<project>::<type>::<name>`."""
        return self.urn.split("::")[1]

    @property
    def stack(self) -> str:
        """The stack's name."""
        return self.urn.split("::")[0].removeprefix("urn:pulumi:")


@dataclass(frozen=True)
class Checked:
    """Inputs with their defaults filled in, and what is wrong with them: property -> reason."""

    inputs: Properties
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The inputs that changed: those that an update takes over, and those that need another resource.

    `delete_first` is what happens at a replacement: the old one goes before the new one comes.
    """

    updates: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    delete_first: bool = True


@dataclass(frozen=True)
class ReadResult:
    """What `read` saw: a resource, with the inputs that would make it."""

    resource_id: str
    inputs: Properties
    outputs: Properties


class Handler(Protocol):
    """One resource type. Calls come from several threads; nothing is remembered between them."""

    secret: frozenset[str]
    refresh_before_update: bool

    def check(self, call: Call, old: Properties, new: Properties) -> Checked:
        """Validates all inputs at once and fills in defaults; `old` is empty for a new resource."""
        ...

    def diff(self, old_inputs: Properties, old: Properties, new: Properties) -> Difference:
        """What changed between the old inputs and outputs and the new inputs."""
        ...

    def create(self, call: Call, inputs: Properties) -> tuple[str, Properties]:
        """Makes the resource: its id and outputs. With `call.preview` nothing is made; unknown outputs are UNKNOWN."""
        ...

    def read(self, call: Call, resource_id: str, old: Properties, inputs: Properties) -> ReadResult | None:
        """The resource as it is now; None: gone. `old` is empty for an import."""
        ...

    def update(self, call: Call, resource_id: str, old: Properties, new: Properties) -> Properties:
        """Changes the resource in place; its outputs."""
        ...

    def delete(self, call: Call, resource_id: str, old: Properties) -> None:
        """Ends the resource; absent is success."""
        ...


def changed(keys: tuple[str, ...], old: Properties, new: Properties) -> tuple[str, ...]:
    """The keys whose values differ; an absent one equals null."""
    return tuple(key for key in keys if old.get(key) != new.get(key))
