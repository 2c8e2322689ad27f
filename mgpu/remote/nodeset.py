"""All nodes of a fleet: connected together, asked in parallel, with every failure reported."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from mgpu_train.agent.machine import procs
from mgpu_train.timeouts import Timeouts

from mgpu.errors import ConnectionFailed, MgpuError
from mgpu.remote.connection import load_key
from mgpu.remote.library import paramiko
from mgpu.remote.node import Node
from mgpu.remote.snapshot import Snapshot, scan
from mgpu.remote.targets import SyncReport, Target

THREADS = 32
S = TypeVar("S")
T = TypeVar("T")


class NodeSet:
    """The nodes of a fleet, in the order of their targets."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)

    @classmethod
    def connect(cls, targets: Sequence[Target], key_file: Path, timeouts: Timeouts) -> NodeSet:
        """Connects to all in parallel, again and again until each answers or `connect_s` is over.

        Raises the first node's error, with the others' in `why`; no connection stays open then.

        Raises:
            InputError: the key cannot be used.
            HostKeyMismatch: at once; the other nodes are not waited for.
            ConnectionFailed: no answer in time; `ranks` says of whom.
        """
        attempts = _Attempts(load_key(key_file), timeouts)
        _make_room()
        try:
            return cls(_each(attempts.connect, targets))
        except BaseException as error:
            attempts.give_up()
            if isinstance(error, ConnectionFailed):
                error.ranks = attempts.without(targets)
            raise

    @classmethod
    def reach(cls, targets: Sequence[Target], key_file: Path, timeouts: Timeouts) -> NodeSet:
        """Connects to all in parallel, once; a node that does not answer stays closed, for `Node.reconnect` later.

        Raises:
            InputError: the key cannot be used.
            HostKeyMismatch: a node shows another key than the pinned one.
        """
        key = load_key(key_file)
        _make_room()
        made = cls(Node(target, key, timeouts, connect=False) for target in targets)

        def reach(node: Node) -> None:
            with contextlib.suppress(ConnectionFailed):
                node.reconnect()

        try:
            made.each(reach)
        except BaseException:
            made.close()
            raise
        return made

    def each(self, fn: Callable[[Node], T]) -> list[T]:
        """Calls `fn` with every node, up to 32 at once, and returns the answers in order.

        All are called whatever happens to one. Raises the first node's error, with the others' in `why`.
        """
        return _each(fn, self.nodes)

    def sync(
        self,
        folder: Path | Snapshot,
        dest: str,
        *,
        python: str | None = None,
        like: str = "",
        apart: bool = False,
    ) -> list[SyncReport]:
        """`Node.sync` for all nodes; the folder is read once."""
        snapshot = folder if isinstance(folder, Snapshot) else scan(folder)
        return self.each(lambda node: node.sync(snapshot, dest, python=python, like=like, apart=apart))

    def close(self) -> None:
        """Ends all connections."""
        self.each(lambda node: node.close())

    def __enter__(self) -> NodeSet:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class _Attempts:
    """The connections of one `NodeSet.connect`, so that one failure can end and close all."""

    def __init__(self, key: paramiko.PKey, timeouts: Timeouts) -> None:
        self._key = key
        self._timeouts = timeouts
        self._over = threading.Event()
        self._deadline = time.monotonic() + timeouts.connect_s
        self._open: list[Node] = []

    def connect(self, target: Target) -> Node:
        """Tries until it stands. A machine that boots refuses connections first, then keys."""
        while True:
            try:
                node = Node(target, self._key, self._timeouts)
                node.greet()
            except ConnectionFailed:
                if time.monotonic() + self._timeouts.poll_s > self._deadline or self._over.wait(self._timeouts.poll_s):
                    raise
            except BaseException:
                self._over.set()  # another host key, say: waiting for the others would only cost money
                raise
            else:
                self._open.append(node)
                return node

    def without(self, targets: Sequence[Target]) -> tuple[int, ...]:
        """Ranks of the nodes to which no connection stood."""
        there = {node.target.rank for node in self._open}
        return tuple(target.rank for target in targets if target.rank not in there)

    def give_up(self) -> None:
        """Ends what still tries, and closes what stands."""
        self._over.set()
        for node in self._open:
            node.close()


def _make_room() -> None:
    """Each connection is a file of this process, or two: a node for which there is none left would seem lost."""
    with contextlib.suppress(OSError, ValueError):  # a system that allows fewer than it says
        procs.open_many_files()


def _each(fn: Callable[[S], T], items: Sequence[S]) -> list[T]:
    pool = ThreadPoolExecutor(max(1, min(THREADS, len(items))), thread_name_prefix="mgpu-node")
    try:
        futures = [pool.submit(fn, item) for item in items]
        errors = [error for future in futures if (error := future.exception())]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for the nodes' deadlines
    if errors:
        raise _together(errors)
    return [future.result() for future in futures]


def _together(errors: Sequence[BaseException]) -> BaseException:
    """The first error, with the others in its `why`; lost connections come after all that no retry would mend."""
    first = next((error for error in errors if not isinstance(error, ConnectionFailed)), errors[0])
    others = [error for error in errors if error is not first]
    if others and isinstance(first, MgpuError):
        first.why = "\n".join(line for line in (first.why, f"And {len(others)} more:", *map(_line, others)) if line)
    elif others:
        first.add_note(f"and {len(others)} more: " + "; ".join(repr(error) for error in others))
    return first


def _line(error: BaseException) -> str:
    if not isinstance(error, MgpuError):
        return repr(error)
    return f"{error.what} ({error.why})" if error.why else error.what
