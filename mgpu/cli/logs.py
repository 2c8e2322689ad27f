"""`mgpu logs`: the nodes' logs as they were received, also after the machines are gone."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from mgpu.cli import common
from mgpu.console import Console, LogLines
from mgpu.errors import InputError
from mgpu.run.record import Folder, load, supervised

FOLLOW_EVERY_S = 0.5


@click.command()
@common.run_argument
@click.option("--node", type=int, help="Only this node_rank.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run is over.")
def logs(run: str, node: int | None, follow: bool) -> None:
    """Print the logs of RUN (default: the newest). To a file or a pipe with --node: byte for byte."""
    record = load(run)
    folder = Folder(record.run_id)
    console = Console()
    if node is not None and not 0 <= node < record.nodes:
        raise InputError(f"--node {node}: the run has nodes 0 to {record.nodes - 1}")
    ranks = [node] if node is not None else list(range(record.nodes))
    raw = node is not None and not sys.stdout.isatty()
    readers = [_Reader(console, folder, rank, raw) for rank in ranks]
    while True:
        watched = supervised(record.run_id)
        over = load(record.run_id).state.final
        for reader in readers:
            reader.read()
        console.flush()
        if over or not follow:
            break
        if not watched:
            console.say("nobody receives its logs: its supervisor is gone", "yellow")
            console.next(f"mgpu attach {record.run_id}    take it over")
            break
        time.sleep(FOLLOW_EVERY_S)
    for reader in readers:
        reader.end()
    if not any(reader.seen for reader in readers):
        console.say("no log was received from the nodes")


class _Reader:
    def __init__(self, console: Console, folder: Folder, rank: int, raw: bool) -> None:
        self.seen = False
        self._console, self._folder, self._rank, self._raw = console, folder, rank, raw
        self._offsets: dict[Path, int] = {}
        self._lines = LogLines(rank)

    def read(self) -> None:
        """Prints what is new."""
        for path in self._folder.logs(self._rank):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                while data := file.read(1 << 20):
                    self._show(data)
                self._offsets[path] = file.tell()

    def _show(self, data: bytes) -> None:
        self.seen = True
        if self._raw:
            self._console.raw(data)
            return
        for line in self._lines.feed(data):
            self._console.text(line)

    def end(self) -> None:
        """Prints a last line that has no line end."""
        for line in self._lines.flush():
            self._console.text(line)
