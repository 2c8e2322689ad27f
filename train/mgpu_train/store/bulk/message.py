"""What an engine and its process say to each other: one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Route:
    """Where a bucket is: `url` without a path, `base` what stands before the key there, `proxy` with its credentials.

    `ca` is the file of the authorities that are trusted.
    """

    url: str
    base: str
    region: str
    proxy: str | None = None
    ca: str | None = None


@dataclass(frozen=True)
class Task:
    """`length` bytes at `offset` of a file, sent (PUT) or received (GET: the same bytes of the object).

    `path` is percent-encoded. `identity` is what the file must be: (device, inode, bytes, changed in ns). A GET
    without a file only reads.
    """

    id: int
    method: str
    route: Route
    path: str
    offset: int
    length: int
    file: str | None
    identity: tuple[int, ...] = ()
    query: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Keys:
    """What requests are signed with; nothing of it is in its repr."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Settings:
    """How a process works; times in seconds, `pace` the descriptor of a shared Pace."""

    connections: int
    connect_s: float
    read_s: float
    retry_s: float
    idle_s: float
    bytes_per_s: int | None = None
    pace: int | None = None


def task_of(told: dict[str, Any]) -> Task:
    """The task that went through JSON."""
    exact = {
        "route": Route(**told["route"]),
        "identity": tuple(told["identity"]),
        "query": tuple((name, value) for name, value in told["query"]),
    }
    return Task(**{**told, **exact})
