"""`mgpu logs`: the nodes' logs as they were received, also after the machines are gone."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from mgpu.cli import common
from mgpu.console import Console, LogLines
from mgpu.run.record import Folder, load

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
    ranks = [node] if node is not None else list(range(record.nodes))
    raw = node is not None and not sys.stdout.isatty()
    readers = [_Reader(console, folder.log(rank), rank, raw) for rank in ranks]
    while True:
        over = load(record.run_id).state.final
        for reader in readers:
            reader.read()
        if over or not follow:
            break
        time.sleep(FOLLOW_EVERY_S)
    for reader in readers:
        reader.end()
    if not any(reader.offset for reader in readers):
        console.say("no log was received from the nodes")


class _Reader:
    def __init__(self, console: Console, path: Path, rank: int, raw: bool) -> None:
        self.offset = 0
        self._console, self._path, self._raw = console, path, raw
        self._lines = LogLines(rank)

    def read(self) -> None:
        """Prints what is new in the file."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self.offset)
            while data := file.read(1 << 20):
                self.offset += len(data)
                self._show(data)

    def _show(self, data: bytes) -> None:
        if self._raw:
            self._console.raw(data)
            return
        for line in self._lines.feed(data):
            self._console.text(line)

    def end(self) -> None:
        """Prints a last line that has no line end."""
        for line in self._lines.flush():
            self._console.text(line)
