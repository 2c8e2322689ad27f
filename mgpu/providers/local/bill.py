"""What provider `local` charges, judged by what is really alive: `bill.jsonl` under the provider's root.

Two kinds of line, described in docs/formats.md. A `start` line is a node process's own first act, before it gives the
node anything that could run; the `stop` line is written when everything of the node has ended, by the node process, or
by whoever finds a node process dead and has ended its remains. Neither is believed about the present: `read` asks the
system whether the node process, or any process that carries the instance's mark, is alive. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu.providers.local.procs import Process, marked

FILE = "bill.jsonl"


@dataclass(frozen=True)
class Start:
    """The start line of one instance; `at` is UNIX seconds, the price one node's."""

    at: float
    instance: str
    fleet: str
    generation: int
    owner: str
    pid: int
    start_ticks: int
    boot_id: str
    price_usd_per_hour: float
    market: str


@dataclass(frozen=True)
class BilledNode:
    """One instance on the bill. `alive` says what runs now; `end_at` is UNIX seconds: now, while it is alive.

    `reason` is why it ended, by its first stop line; empty while it is alive, or where nobody has looked since.
    """

    start: Start
    alive: bool
    end_at: float
    reason: str = ""

    @property
    def cost_usd(self) -> float:
        """Dollars from its start to its end, or until now."""
        return self.start.price_usd_per_hour * max(0.0, self.end_at - self.start.at) / 3600


@dataclass(frozen=True)
class Bill:
    """All instances that were ever started under one root, oldest first."""

    nodes: tuple[BilledNode, ...]

    @property
    def alive(self) -> tuple[BilledNode, ...]:
        """Those that cost money now."""
        return tuple(node for node in self.nodes if node.alive)

    @property
    def usd_per_hour(self) -> float:
        """What the living ones cost together."""
        return sum(node.start.price_usd_per_hour for node in self.alive)

    @property
    def cost_usd(self) -> float:
        """Dollars that all of them have cost so far."""
        return sum(node.cost_usd for node in self.nodes)

    def of(self, fleet: str) -> Bill:
        """That of one fleet, all generations."""
        return Bill(tuple(node for node in self.nodes if node.start.fleet == fleet))


def write_start(root: Path, start: Start) -> None:
    """Appends a start line; it is on disk when this returns."""
    _append(root, {"kind": "start", **asdict(start)})


def write_stop(root: Path, instance: str, reason: str, at: float | None = None) -> None:
    """Appends a stop line (`at`: UNIX seconds, default now). Of several for one instance the first counts."""
    _append(root, {"kind": "stop", "at": round(at or time.time(), 3), "instance": instance, "reason": reason})


def read(root: Path) -> Bill:
    """The bill of the provider whose folder is `root`; no file is an empty bill."""
    starts: dict[str, Start] = {}
    stops: dict[str, tuple[float, str]] = {}
    for line in _lines(root / FILE):
        kind = line.pop("kind", None)
        if kind == "start":
            starts.setdefault(line["instance"], Start(**line))
        elif kind == "stop":
            stops.setdefault(line["instance"], (line["at"], line["reason"]))
    running = marked() if starts else {}
    return Bill(tuple(_judge(root, start, stops.get(name), name in running) for name, start in starts.items()))


def _judge(root: Path, start: Start, stop: tuple[float, str] | None, is_marked: bool) -> BilledNode:
    if is_marked or Process(start.pid, start.start_ticks, start.boot_id).alive:
        return BilledNode(start, True, time.time())
    return BilledNode(start, False, *(stop or (_last_sign_of_life(root, start), "")))


def heartbeat(root: Path, instance: str) -> Path:
    """The file whose modification time a node process renews every second."""
    return root / "instances" / instance / "heartbeat"


def _last_sign_of_life(root: Path, start: Start) -> float:
    # the node process was killed, or the machine lost power, and nobody has looked at the node since
    try:
        return max(start.at, heartbeat(root, start.instance).stat().st_mtime)
    except OSError:
        return start.at


def _append(root: Path, line: dict[str, Any]) -> None:
    # one write of one line, appended by the kernel: lines of two processes never mix
    fd = os.open(root / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""  # a full disk cut the last one off
        data = torn + json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, "the line was cut off", str(root / FILE))
        os.fsync(fd)
    finally:
        os.close(fd)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue  # torn by a full disk
