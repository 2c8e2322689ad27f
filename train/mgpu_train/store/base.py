"""What any object store does, and the ways in which it fails.

StoreError              the store cannot do what was asked; the message says what, why and what to do next
├── NoStore             the address leads nowhere: no such bucket, a malformed URL
├── NotFound            no object under this key
├── Denied              credentials are missing or wrong, or do not allow this
│   ├── Expired         they were good, and are no more: others may be to be had
│   └── NoCredentials   there are none here, or whoever gives them does not answer: they may come
├── Unavailable         network, throttling: later it may work
│   ├── NoRoom          a disk is full
│   └── Ambiguous       a conditional put may or may not have been done: read back
├── Changed             what was to be sent was written meanwhile: it works once its writer has ended
└── Damaged             what the store holds is not what was written
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PIECE = 16 << 20  # bytes that one transfer holds in memory
Progress = Callable[[int], None]  # told of bytes that are through since it was last told; from any thread
# what a half-written file is called on disk: never a key, never listed
ASIDE = ".aside-"
_LONGEST_KEY = 1024  # bytes; S3's own limit
_LONGEST_NAME = 255 - 64  # bytes between two slashes; a file system allows 255, and a name aside is longer


class StoreError(Exception):
    """The store cannot do what was asked."""


class NoStore(StoreError):
    """The address leads to no store."""


class NotFound(StoreError):
    """There is no object under this key."""


class Denied(StoreError):
    """The credentials are missing, wrong or expired, or they do not allow this."""


class Expired(Denied):
    """The credentials were good once."""


class NoCredentials(Denied):
    """There are no credentials here now."""


class Unavailable(StoreError):
    """The store did not answer, or not now; trying again later may help."""


class NoRoom(Unavailable):
    """A disk has no room for it."""


class Ambiguous(Unavailable):
    """The answer to a conditional put was lost: the object may be there. Read back before believing anything."""


class Changed(StoreError):
    """What was to be sent was written meanwhile."""


class Damaged(StoreError):
    """What the store holds is not what was written."""


@dataclass(frozen=True)
class Stat:
    """One object. `size` in bytes; `modified` in UNIX seconds of the store's clock.

    `crc64nvme` is the store's own full-object checksum (16 hex digits), or None where it keeps none or was not asked.
    `version`: another one after every write; "" where it was not asked.
    """

    key: str
    size: int
    crc64nvme: str | None
    modified: float
    version: str = ""


@dataclass(frozen=True)
class Versioned:
    """An object as it was read. `age_s`: seconds since it was written, by the store's own clock alone; `now`: what that
    clock showed when it was read, in UNIX seconds."""

    data: bytes
    version: str
    age_s: float
    now: float


class Store(Protocol):
    """A flat set of objects under keys such as `a/b/c`, below one URL. Every method may raise StoreError.

    All methods may be called from several threads.
    """

    url: str

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object; False: the key exists, perhaps by an earlier try of this very call.

        Raises Ambiguous when it may have been done.
        """
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object whole, or not at all."""
        ...

    def replace(self, key: str, data: bytes, version: str) -> bool:
        """Write an object anew where it is still `version`; False: it is not, perhaps by an earlier try of this call.

        Raises Ambiguous when it may have been done.
        """
        ...

    def put_file(self, key: str, path: Path) -> Stat:
        """Write a file; the Stat has the checksum of the bytes that were sent, whatever the store says of them."""
        ...

    def get(self, key: str, limit: int) -> bytes:
        """Read an object of at most `limit` bytes. Raises NotFound, and Damaged when it is longer."""
        ...

    def read(self, key: str, limit: int) -> Versioned:
        """As `get`, with what `replace` goes by."""
        ...

    def get_file(self, key: str, path: Path, *, size: int, crc64nvme: str, progress: Progress | None = None) -> None:
        """Read an object into a file that has its name only once every byte of it was checked.

        It is not flushed to disk: whoever needs that flushes the folder when all of its files are there.

        Raises NotFound, and Damaged when size or checksum differ.
        """
        ...

    def forget(self, key: str) -> None:
        """The next read of an object comes from where it is kept, and not from a cache of this machine's."""
        ...

    def checksum(self, key: str, size: int, progress: Progress | None = None) -> str:
        """Read every byte of an object and return its CRC64NVME. Raises NotFound, and Damaged for another size."""
        ...

    def stat(self, key: str) -> Stat | None:
        """What the store says of an object; None: there is none."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[Stat]:
        """All objects whose key begins with `prefix` and comes after `after`, by their keys' bytes: with versions,
        without checksums.

        The key `after` itself is left out.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine."""
        ...

    def may_delete(self, prefix: str) -> None:
        """Asks for the right to remove what is under `prefix`, and removes nothing.

        Raises Denied where there is none.
        """
        ...

    def sweep(self, prefix: str, dead: Callable[[str], bool]) -> int:
        """End the unfinished writes under `prefix` whose key is `dead`; returns how many there were."""
        ...


def key_problem(key: str) -> str | None:
    """Why this is no key, or None. Only keys that mean the same on every store and file system are good."""
    if not key.isprintable():
        return "has control or invisible characters"
    if len(key.encode()) > _LONGEST_KEY:
        return f"is longer than {_LONGEST_KEY} bytes"
    if "\\" in key:
        return "has a backslash"
    if any(code in key.lower() for code in ("%2e", "%2f", "%5c", "%00")):
        return "has percent-encoded dots or slashes"
    for name in key.split("/"):
        if name in ("", ".", "..") or name.startswith(ASIDE):
            return f"has the part {name!r}"
        if len(name.encode()) > _LONGEST_NAME:
            return f"has a part longer than {_LONGEST_NAME} bytes"
    return None


def check_key(key: str) -> str:
    """The key. Raises StoreError when it is none."""
    if problem := key_problem(key):
        raise StoreError(f"object key {key[:80]!r} {problem}")
    return key
