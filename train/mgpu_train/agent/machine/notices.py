"""The provider's warnings that it takes this machine: where they stand, and which of them are believed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from mgpu_train.store import disk

ACTIONS = ("terminate", "stop", "hibernate")  # EC2's words; a program ends with each of them
_MAX_BYTES = 4096


@dataclass(frozen=True)
class BelievedNotice:
    """A notice that can be believed. `at` is UNIX seconds, `left_s` what was left when it was read."""

    action: str
    at: float
    left_s: float


class Source(Protocol):
    """Where a provider puts its notices."""

    def read(self) -> bytes | None:
        """What stands there now; None: nothing. Returns at once. Raises OSError."""
        ...

    def hint(self) -> bytes | None:
        """The provider's hint that it may take the machine soon, which is no notice; None: there is none."""
        ...


class NoticeFile:
    """A file that the host writes: `{"action": "terminate", "time": "2026-01-31T12:00:00Z"}`."""

    def __init__(self, path: Path) -> None:
        """The file need not be there."""
        self._path = path

    def read(self) -> bytes | None:
        """See Source; a pipe or a link is an OSError."""
        try:
            with disk.opened(self._path) as file:
                return os.read(file, _MAX_BYTES)
        except FileNotFoundError:
            return None

    def hint(self) -> bytes | None:
        """See Source: such a host gives none."""
        return None


class Notices:
    """Reads a source again and again. The first notice that can be believed stands, whatever the source says later,
    unless it names an earlier time. What cannot be believed is said once, and changes nothing. A hint is told once."""

    def __init__(
        self, source: Source | None, say: Callable[[str], None], clock: Callable[[], float] = time.time
    ) -> None:
        """Without a source there is never a notice. `clock` gives UNIX seconds."""
        self._source, self._say, self._clock = source, say, clock
        self._seen: bytes | None = None
        self._said: set[str] = set()
        self._at: float | None = None
        self._hinted = False

    def poll(self) -> BelievedNotice | None:
        """A notice that is new, or earlier than the one that stood; else None. Raises nothing."""
        try:
            found = self._source.read() if self._source else None
        except OSError as error:
            self._doubt("it cannot be read", str(error))
            return None
        if found is None or found == self._seen:
            return None
        self._seen = found
        try:
            return self._believe(*_parse(found))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._doubt("it is malformed", repr(error))
            return None

    def hinted(self) -> float | None:
        """When the provider gave its first hint that can be believed, UNIX seconds: told once; else None."""
        found = self._source.hint() if self._source and not self._hinted else None
        if found is None:
            return None
        try:
            at = _moment(json.loads(found)["noticeTime"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._doubt("a hint is malformed", repr(error))
            return None
        self._hinted = True
        return at

    def _believe(self, action: str, at: float) -> BelievedNotice | None:
        now = self._clock()
        if self._at is not None and at >= self._at:
            return None
        if action not in ACTIONS:
            self._doubt("its action is unknown", action)
        elif at <= now:  # by a clock that goes wrong: once it is set right the notice may be one
            self._seen = None
            self._doubt("its time is past", f"{now - at:.0f} s ago")
        else:
            self._at = at
            return BelievedNotice(action, at, at - now)
        return None

    def _doubt(self, kind: str, detail: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(f"an interruption notice is not believed: {kind}: {detail[:200]}")


def _parse(data: bytes) -> tuple[str, float]:
    """Action and UNIX seconds. Raises what Python raises for the wrong types and keys, and ValueError."""
    said = json.loads(data)
    action, at = said["action"], _moment(said["time"])
    if not isinstance(action, str):
        raise ValueError("the action is no text")
    return action, at


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text.upper())
    if moment.tzinfo is None:
        raise ValueError("the time has no zone")
    return moment.timestamp()
