"""A lock that many machines see: one object of a store, which its holder writes anew before it is old.

How old it is the store's own clock says, so that no machine's clock decides. One that was not written for `lasts_s` may
be taken by anybody; its holder, if it still lives, learns of it when it tries to write it the next time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mgpu_train.store import Ambiguous, NotFound, Store

_LARGEST = 64 << 10  # bytes
_TRIES = 10


@dataclass(frozen=True)
class Seen:
    """A lease as it is in the store. `said`: what its holder says of itself; `over`: it was let go, or is too old."""

    said: dict[str, Any]
    version: str
    over: bool

    @property
    def token(self) -> str:
        """The holder's."""
        return str(self.said.get("token", ""))


class Lease:
    """One holder's grip on one lease. `said`: JSON about the holder, with a `token` that nobody else has, and its
    `host`; the hosts of those before it are kept with it. Every method may raise StoreError: then nothing is known."""

    def __init__(self, store: Store, key: str, said: Mapping[str, Any], lasts_s: float) -> None:
        self._store, self._key, self._said, self._lasts_s = store, key, dict(said), lasts_s
        self._beat = 0

    @property
    def hosts(self) -> frozenset[str]:
        """Of all who have held it before."""
        return frozenset(self._said.get("hosts", ()))

    def take(self, dead: Callable[[Mapping[str, Any]], bool], *, force: bool = False) -> Seen | None:
        """Takes it where nobody holds it; None: taken, else who holds it. `dead`: whether the holder that said this is
        known to be dead; `force` takes it from anybody."""
        for _ in range(_TRIES):  # somebody else may be as fast
            seen = look(self._store, self._key, self._lasts_s)
            if seen is None:
                self._settle(lambda: self._store.put_if_absent(self._key, self._text()))
            elif seen.token == self._said["token"]:
                return None
            elif force or seen.over or dead(seen.said):
                self._said["hosts"] = sorted({*seen.said.get("hosts", ()), str(seen.said.get("host", ""))} - {""})
                self._settle(lambda version=seen.version: self._store.replace(self._key, self._text(), version))
            else:
                return seen
        raise Ambiguous(f"{self._store.url}: nobody could take {self._key}: too many try")

    def renew(self) -> Seen | None:
        """Writes it anew; None: it is still held, else whose it is now."""
        return self._write(released=False)

    def release(self) -> None:
        """Lets go of it, if it is still held."""
        self._write(released=True)

    def _write(self, *, released: bool) -> Seen | None:
        for _ in range(_TRIES):
            seen = look(self._store, self._key, self._lasts_s)
            if seen is None or seen.token != self._said["token"]:
                return seen or Seen({}, "", over=True)
            self._beat += 1
            text, version = self._text(released=released), seen.version
            if self._settle(lambda text=text, version=version: self._store.replace(self._key, text, version)):
                return None
        raise Ambiguous(f"{self._store.url}: {self._key} could not be written")

    def _text(self, *, released: bool = False) -> bytes:
        return json.dumps({**self._said, "beat": self._beat, "released": released}).encode()

    def _settle(self, write: Callable[[], bool]) -> bool:
        """Whether it is certain that it was written; where it is not, who looks again finds out."""
        try:
            return write()
        except Ambiguous:
            return False


def look(store: Store, key: str, lasts_s: float) -> Seen | None:
    """A lease as it is now; None: nobody has ever held it. Raises StoreError."""
    try:
        found = store.read(key, _LARGEST)
    except NotFound:
        return None
    try:
        said = json.loads(found.data)
        released = bool(said["released"])
    except (ValueError, LookupError, TypeError):  # not ours
        said, released = {}, False
    return Seen(said, found.version, released or found.age_s > lasts_s)
