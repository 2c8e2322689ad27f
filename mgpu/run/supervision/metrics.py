"""Metrics of every rank, kept for each machine that had the rank, and put together: a lost machine leaves no hole.

<record>/metrics/rank-<rank>.jsonl                            all attempts in their order
<record>/metrics/instances/rank-<rank>.<n>.<instance>.jsonl   byte for byte what that instance had
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mgpu_train.agent.host.layout import RunLayout

from mgpu.errors import RemoteError
from mgpu.events import Warned
from mgpu.providers.base import Handle
from mgpu.remote.node import Node
from mgpu.remote.nodeset import NodeSet
from mgpu.run.record.folder import of_instance
from mgpu.run.record.session import Session
from mgpu.run.supervision.remote_tail import RemoteTail, untold

PARTS = "instances"
_BLOCK = 64 << 10


def copy_of(session: Session, rank: int, instance: str, warn: Callable[[str], None]) -> RemoteTail:
    """The copy of one rank's metrics, as one instance writes them."""
    parts = session.folder.root / "metrics" / PARTS
    parts.mkdir(parents=True, exist_ok=True, mode=0o700)
    remote = str(RunLayout(session.record.run_id).metrics / f"rank-{rank}.jsonl")
    local = of_instance(parts, f"rank-{rank}", ".jsonl", instance)
    return RemoteTail(remote, local, tell=untold, warn=warn, hidden=session.hidden)


def collect(
    session: Session, nodes: NodeSet, handle: Handle, processes_per_node: int, lost: tuple[int, ...] = ()
) -> None:
    """Takes what is left of every rank's metrics, except from nodes that are lost, and puts each rank's together.

    What cannot be read, or not within `sync_s`, is left out, with a warning.
    """

    until = time.monotonic() + session.timeouts.sync_s  # the machines are paid meanwhile

    def warn(text: str) -> None:
        session.emit(Warned(text))

    def take(node: Node) -> None:
        if node.target.rank in lost:
            return
        instance, first = handle.ids[node.target.rank], node.target.rank * processes_per_node
        try:
            if node.closed:
                node.reconnect()
            for rank in range(first, first + processes_per_node):
                if not copy_of(session, rank, instance, warn).follow(node, lambda: time.monotonic() < until):
                    raise RemoteError(f"they took more than {session.timeouts.sync_s:g} s (sync_s)")
        except RemoteError as error:
            session.emit(Warned(f"metrics of node {node.target.rank} could not be read: {error.what}"))

    try:
        nodes.each(take)
        _join(session.folder.root / "metrics")
    except OSError as error:  # this machine's disk
        session.emit(Warned(f"metrics could not be kept: {error.strerror}"))


def _join(folder: Path) -> None:
    for rank in {path.name.split(".")[0] for path in (folder / PARTS).glob("rank-*.jsonl")}:
        aside = folder / f".{rank}.jsonl"
        with aside.open("w+b") as out:
            for part in sorted((folder / PARTS).glob(f"{rank}.*.jsonl")):
                _end_at_line(out)
                with part.open("rb") as lines:
                    shutil.copyfileobj(lines, out)
        aside.replace(folder / f"{rank}.jsonl")


def _end_at_line(out: BinaryIO) -> None:
    """Drops the line that a lost machine left without its end: nothing may be glued to it."""
    end = out.seek(0, os.SEEK_END)
    while end:
        start = out.seek(max(0, end - _BLOCK))
        found = out.read(end - start).rfind(b"\n") + 1
        end = start + found if found else start
        if found:
            break
    out.truncate(out.seek(end))
