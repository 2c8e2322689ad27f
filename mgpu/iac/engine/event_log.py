"""What the engine tells while it works: its event stream, read as it grows.

The raw stream holds debug-level messages with secrets in plain text. So it goes to a file without a name, which no
crash leaves behind, and nothing of it is kept but what is picked out here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mgpu.events import Emit, Note, Warned

_VERBS = {"create": "creating", "update": "updating", "delete": "deleting", "replace": "replacing"}
_STACK = "pulumi:pulumi:Stack"
_KEPT = ("delete", "mgpu:index:Image")  # its handler says what becomes of it


@dataclass(frozen=True)
class Change:
    """What an `up` would do to one resource; `properties` names the inputs that cause it, old value and new."""

    op: str
    type: str
    name: str
    properties: tuple[str, ...] = ()


@dataclass
class EngineLog:
    """Follows the events in the file `fd`; emits progress, keeps errors and changes. `planned`: nothing is done."""

    fd: int
    emit: Emit
    planned: bool = False
    errors: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    outputs: dict[str, Any] | None = None
    """What the stack exports, as it was last said."""
    _offset: int = 0
    _partial: bytes = b""

    def follow(self) -> None:
        """Takes in what is new."""
        for event in self._events():
            if "diagnosticEvent" in event:
                self._diagnostic(event["diagnosticEvent"])
            elif "resourcePreEvent" in event:
                self._resource(event["resourcePreEvent"]["metadata"])
            elif "resOutputsEvent" in event and event["resOutputsEvent"]["metadata"]["type"] == _STACK:
                self.outputs = (event["resOutputsEvent"]["metadata"].get("new") or {}).get("outputs") or {}

    def _events(self) -> Iterator[dict[str, Any]]:
        while chunk := os.pread(self.fd, 1 << 20, self._offset):
            self._offset += len(chunk)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # a full disk has cut it off, and the next one stands behind it
                    continue
                yield event

    def _diagnostic(self, event: dict[str, Any]) -> None:
        text = event.get("message", "").strip()
        severity = event.get("severity", "")
        if severity == "error":
            self.errors.append(text)
        elif text and severity == "warning":
            self.emit(Warned(text))
        elif text and severity == "info":  # never "debug", and not what a program prints ("info#err")
            self.emit(Note(text))

    def _resource(self, step: dict[str, Any]) -> None:
        if step["op"] not in _VERBS or step["type"].startswith("pulumi:"):
            return  # a look, a step of a replacement, or the engine's own bookkeeping
        name = step["urn"].rpartition("::")[2]
        self.changes.append(Change(step["op"], step["type"], name, tuple(_properties(step))))
        if not self.planned and (step["op"], step["type"]) != _KEPT:
            self.emit(Note(f"{_VERBS[step['op']]} {step['type'].rpartition(':')[2]} {name}"))


def _properties(step: dict[str, Any]) -> Iterator[str]:
    old, new = ((step.get(side) or {}).get("inputs") or {} for side in ("old", "new"))
    for key in sorted(step.get("detailedDiff") or step.get("diffs") or ()):
        yield f"{key}: {_show(old.get(key))} => {_show(new.get(key))}"


def _show(value: Any) -> str:
    text = json.dumps(value) if value is not None else "none"
    return text if len(text) <= 80 else f"{text[:77]}..."
