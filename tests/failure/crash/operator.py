"""`mgpu` that numbers every journal write and every external call of its own process, and dies at the one it is told.

    python operator.py --points FILE -- launch --yes     writes down each point it passes, one JSON line each
    python operator.py --die-at POINT -- launch --yes    SIGKILL to itself when it comes to POINT for the first time
    python operator.py --stop-at POINT -- launch --yes   writes the file MGPU_STOPPED there, and waits until it is gone

A point lies before a call, after it, or, for the engine, in its middle: its process runs, it has touched machines. It
is named by the newest journal entry, the call and the side, so that what a watch repeats counts once.

Points between which nothing outside this process has changed are one moment: it cannot matter at which of them the
process dies. So the end of a call is one with the beginning of the next, and the end of a call that only looks (LOOKS)
with its own beginning; with MGPU_CRASH_LOOKS=1 in the environment those count, too.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mgpu_train.store import base
from mgpu_train.store.file import FileStore

from mgpu import journal, paths
from mgpu.backend import location
from mgpu.iac.engine.process import CliProcess
from mgpu.providers.base import Provider
from mgpu.providers.local.provider import LocalProvider
from mgpu.remote.node import Node
from mgpu.run.record import record

LOOKS = re.compile(
    r"(LocalProvider\.(check|offers|find|describe|list_owned)|FileStore\.(get|list|stat|checksum)"
    r"|S#Store\.(get|get_file|read|list|stat|checksum)"
    r"|Node\.(read|read_from|exists|fetch|greet|close)|Node\.run .*(have|free-ports|status)"
    r"|pulumi stack (output|export))\b"
)
LOCK_RENEWAL = "mgpu-lock-renewal"  # the thread that keeps a run's lock in a bucket: what it passes when is chance
_WORD = re.compile(r"\w[\w-]*")
# what differs from run to run: ids, tokens, numbers; so `S3Store` is `S#Store`
_VARIES = re.compile(r"(?<=journal/)[^/]+|[a-z]+-\d{4}-[a-z2-9]{5}|[0-9a-f]{12,}|\d+")


class Points:
    """What this process passes, in order; `meet` is told every beginning and end of a call."""

    def __init__(self, write: Path | None, die_at: str | None = None, stop_at: str | None = None) -> None:
        self._write, self._die_at, self._stop_at = write, die_at, stop_at
        self._mark = "nothing"  # the newest journal entry
        self._seen: set[str] = set()
        self._moment = 0
        self._lock = threading.RLock()

    def mark(self, entry: str) -> None:
        with self._lock:
            self._mark = entry

    def meet(self, side: str, call: str, *, changed: bool) -> None:
        """`changed`: something outside may have happened since the point before this one."""
        with self._lock:
            name = f"{self._mark} > {side} {call}"
            if name == self._die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == self._stop_at:
                self._stop_at = None
                _wait()
            self._moment += changed
            if self._write is None or name in self._seen:
                return
            self._seen.add(name)
            with self._write.open("a") as out:
                out.write(json.dumps({"moment": self._moment, "name": name}) + "\n")


def _wait() -> None:
    stopped = Path(os.environ["MGPU_STOPPED"])
    stopped.touch()
    while stopped.exists():
        time.sleep(0.01)


class Seams:
    """Wraps calls, so that their beginnings and ends are points. Calls within calls are seen for what they are."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._inner = threading.local()

    def wrap(self, function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == LOCK_RENEWAL:
                return function(*args, **kwargs)
            named = _VARIES.sub("#", name(*args, **kwargs))
            self._points.meet("before", named, changed=False)
            self._inner.calls = 0
            try:
                result = function(*args, **kwargs)
                return iter(list(result)) if isinstance(result, Iterator) else result
            finally:
                # a call made of others has done nothing since the last of them ended
                self._points.meet("after", named, changed=self._inner.calls == 0 and not _looks(named))
                self._inner.calls = 1

        return call

    def all_of(self, cls: type, names: Iterator[str], name: Callable[..., str]) -> None:
        """Wraps these methods of a class."""
        for method in names:
            naming = functools.partial(name, f"{cls.__name__}.{method}")
            setattr(cls, method, self.wrap(getattr(cls, method), naming))

    def engine(self, run: Callable[..., int]) -> Callable[..., int]:
        """The engine's calls have a middle: its process runs; the provider's bill was written to."""

        @functools.wraps(run)
        def call(cli: CliProcess, argv: list[str], **options: Any) -> int:
            look, bill = options.pop("look", lambda: None), paths.state_dir() / "local" / "bill.jsonl"
            began, verb, looks = _size(bill), _verb(argv), 0

            def at_each_look() -> None:
                nonlocal looks
                looks += 1
                self._points.meet("while it runs:", verb, changed=not _looks(verb))
                if _size(bill) != began:
                    self._points.meet("machines touched by", verb, changed=True)
                look()

            status = run(cli, argv, **options, look=at_each_look)
            if not looks:  # it was quicker than the first look: then the operator dies before it hears of that
                at_each_look()
            return status

        return self.wrap(call, lambda _cli, argv, **_options: _verb(argv))


def install(points: Points) -> None:
    """Every seam between this process and what outlives it."""
    seams = Seams(points)
    append = seams.wrap(journal.Journal.append, lambda _self, kind, **fields: f"journal {_entry(kind, fields)}")

    def journalled(self: journal.Journal, kind: str, **fields: Any) -> int:
        number = append(self, kind, **fields)
        points.mark(_VARIES.sub("#", _entry(kind, fields)))
        return number

    journal.Journal.append = journalled
    save, watched = record.save, seams.wrap(record.save, lambda *_, **__: "record.save")
    for module in list(sys.modules.values()):  # the server that has forked this has imported those who save
        if vars(module).get("save") is save:
            vars(module)["save"] = watched
    CliProcess.run = seams.engine(CliProcess.run)
    seams.all_of(LocalProvider, _public(Provider), lambda name, *_, **__: name)
    stores: list[type] = [FileStore]
    if location.current().folder is None:
        from mgpu_train.store.s3 import S3Store

        stores.append(S3Store)
    for store in stores:
        seams.all_of(store, _public(base.Store), lambda name, _self, key="", *_, **__: f"{name} {key}")
    seams.all_of(Node, _public(Node), _on_a_node)


def _looks(call: str) -> bool:
    return not os.environ.get("MGPU_CRASH_LOOKS") and LOOKS.match(call) is not None


def _public(cls: type) -> Iterator[str]:
    return (name for name, value in vars(cls).items() if callable(value) and not name.startswith("_"))


def _on_a_node(name: str, _node: Node, what: Any = "", to: Any = "", *_: Any, **__: Any) -> str:
    if name == "Node.run":  # the words of a command; paths, options and programs in the text are left out
        return " ".join([name, *(word for word in what if _WORD.fullmatch(word))])
    return f"{name} {Path(str(to if name == 'Node.sync' else what)).name}".strip()


def _verb(argv: list[str]) -> str:
    words = [word for word in argv[1:3] if not word.startswith("-")]
    return " ".join(["pulumi", *words])


def _entry(kind: str, fields: dict[str, Any]) -> str:
    return " ".join([kind, *(str(fields[key]) for key in ("name", "state", "by") if key in fields)])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    option, value, _, *command = sys.argv[1:]
    wanted = {"--points": {"write": Path(value)}, "--die-at": {"die_at": value}, "--stop-at": {"stop_at": value}}
    install(Points(**{"write": None, **wanted[option]}))
    from mgpu.cli import main

    main(command)
