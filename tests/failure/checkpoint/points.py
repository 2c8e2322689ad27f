"""The calls of a process by which a checkpoint is written, sent and committed, and death at one of them.

A point is the moment before a call to the disk or the store, or after one that changes something. It has a name that is
the same in every run of the same program: the call, the path or key, and how often that was met before.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_DISK = ("open", "write", "pwrite", "ftruncate", "truncate", "fsync", "rename", "replace", "link", "unlink", "remove")
_DISK += ("mkdir", "rmdir")
_STORE_CHANGES = ("put_if_absent", "put", "put_file", "delete", "sweep")
_STORE_LOOKS = ("get", "get_file", "checksum", "stat", "list")
_VARIES = re.compile(r"(?<=\.aside-)[0-9a-f]{12}")


class Points:
    """What is met, in order; at the point `die_at` this process is killed. Only paths below `world` count."""

    def __init__(self, world: Path, die_at: str | None = None) -> None:
        self.met: list[str] = []
        self._world, self._die_at = str(world), die_at
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def meet(self, name: str) -> None:
        """Passes a point, or dies at it."""
        with self._lock:
            self._counts[name] += 1
            self.met.append(f"{name} #{self._counts[name]}")
            if self.met[-1] == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def around(self, name: str, *, changes: bool) -> Iterator[None]:
        """A call. After one that fails nothing is met: it has changed nothing."""
        self.meet(f"before {name}")
        yield
        if changes:
            self.meet(f"after {name}")

    def watch_disk(self) -> None:
        """From here on every call of this process that may change what is on disk is a point."""
        for name in _DISK:
            setattr(os, name, self._disk(name, getattr(os, name)))

    def _disk(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(what: Any, *rest: Any, **named: Any) -> Any:
            path = _path(what, named.get("dir_fd"))
            if not path.startswith(self._world):
                return call(what, *rest, **named)
            creates = name != "open" or bool(rest and rest[0] & os.O_CREAT)
            with self.around(f"{name} {self._named(path)}", changes=creates):
                return call(what, *rest, **named)

        return watched

    def _named(self, path: str) -> str:
        """From the world's folder on; its own name is the run's, which differs from world to world."""
        run, below = Path(self._world).name, path.removeprefix(self._world)
        return _VARIES.sub("*", "/".join("RUN" if part == run else part for part in below.split("/")))

    def write(self, path: Path) -> None:
        """Writes the names down."""
        path.write_text(json.dumps(self.met))


class WatchedStore:
    """A store each of whose calls is a point; keys are named from the run's folder on."""

    def __init__(self, inner: Any, points: Points, run: str) -> None:
        self._inner, self._points, self._run = inner, points, run

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in _STORE_CHANGES + _STORE_LOOKS:
            return found

        def call(key: str, *rest: Any, **named: Any) -> Any:
            with self._points.around(f"store.{name} {key.removeprefix(self._run)}", changes=name in _STORE_CHANGES):
                return found(key, *rest, **named)

        return call


def _path(what: Any, folder: int | None) -> str:
    if isinstance(what, int):
        return _of(what)
    return f"{_of(folder)}/{os.fspath(what)}" if folder is not None else os.fspath(what)


def _of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
