"""Several clients in turn at the same work against the same server, and the files that they work on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.gateway import Server
from bench.measure import Cost, median, run
from bench.report import Report
from bench.sink import pattern
from bench.tools import ROOT, store_tool

ROUNDS = 3
Client = Callable[[int], Cost]  # takes the number of the round


def race(
    report: Report,
    what: str,
    clients: Mapping[str, Client],
    *,
    rounds: int = ROUNDS,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> dict[str, Cost]:
    """The medians of some rounds, in each of which every client has its turn; `after` tidies up behind each.

    `before` is called ahead of each.
    """
    found: dict[str, list[Cost]] = {name: [] for name in clients}
    for number in range(rounds):
        for name, client in clients.items():
            if before:
                before()
            found[name].append(client(number))
            print(f"  {what}: {name} {found[name][-1].wall_s:.1f} s", file=sys.stderr)
            if after:
                after()
    costs = {name: median(each) for name, each in found.items()}
    report.table(f"{what}, {f'medians of {rounds}' if rounds > 1 else 'once'}", costs)
    return costs


def s5cmd(server: Server, *args: str, may_fail: bool = False) -> Cost:
    """Runs s5cmd, as it is shipped. Raises SystemExit when it fails and may not."""
    argv = [str(store_tool("s5cmd")), "--endpoint-url", server.endpoint, "--log", "error", *args]
    return _run(argv, server, {}, may_fail=may_fail)


def client(
    server: Server, name: str, url: str, folder: Path, *settings: tuple[str, str], may_fail: bool = False
) -> Cost:
    """Runs one of bench/clients.py; `settings` go into its environment. Raises SystemExit like `s5cmd`."""
    argv = [sys.executable, "-m", "bench.clients", name, url, str(folder)]
    return _run(argv, server, dict(settings), may_fail=may_fail)


def _run(argv: list[str], server: Server, settings: dict[str, str], *, may_fail: bool) -> Cost:
    cost = run(argv, environment(server) | settings, server=server.pid)
    if cost.error and not may_fail:
        raise SystemExit(f"{' '.join(argv)[:300]}: {cost.error}")
    return cost


def environment(server: Server) -> dict[str, str]:
    """This process's, with the server's settings for AWS and no others."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return mine | dict(server.env) | {"PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def files(count: int, size: int, *, sparse: bool = False) -> Iterator[Path]:
    """A folder with so many files of `size` bytes each: the sink's own content, or nothing but holes."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as name:
        piece = pattern(min(size, 16 << 20))
        for number in range(count):
            with Path(name, f"file-{number:05d}").open("wb") as file:
                if sparse:
                    file.truncate(size)
                    continue
                for _ in range(0, size, len(piece)):
                    file.write(piece)
        yield Path(name)


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder."""
    with tempfile.TemporaryDirectory(prefix="mgpu-bench-") as name:
        yield Path(name)


def empty(folder: Path) -> None:
    """Removes all that is in a folder, so that the disk does not fill."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
        else:
            each.unlink(missing_ok=True)
