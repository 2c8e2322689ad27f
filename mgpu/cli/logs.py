"""`mgpu logs`: the nodes' logs as they were received, also after the machines are gone."""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import click

from mgpu.cli.common import closing, parameters, wiring
from mgpu.console import Console, LogLines
from mgpu.errors import InputError
from mgpu.run.record import files
from mgpu.run.record.folder import Folder
from mgpu.run.record.logs import NodeLog
from mgpu.run.record.record import load, supervised

FOLLOW_EVERY_S = 0.5


@click.command()
@parameters.run_argument
@click.option("--node", type=int, help="Only this node_rank.")
@click.option("--times", "-t", "with_times", is_flag=True, help="Begin every line with its time.")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run is over.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as JSON.")
def logs(run: str, node: int | None, with_times: bool, follow: bool, as_json: bool) -> None:
    """Print the logs of RUN (default: the newest), the nodes' lines in the order of their times.

    To a file or a pipe with --node, without --times: byte for byte.
    """
    console = Console(as_json=as_json)
    with wiring.as_known(console) as stale_s:
        _print(console, run, node, with_times=with_times, follow=follow, known=stale_s is None)


def _print(console: Console, run: str, node: int | None, *, with_times: bool, follow: bool, known: bool) -> None:
    """`known`: whether it is supervised is."""
    record = load(run)
    folder, as_json = Folder(record.run_id), console.as_json
    if node is not None and not 0 <= node < record.nodes:
        raise InputError(f"--node {node}: the run has nodes 0 to {record.nodes - 1}")
    ranks = [node] if node is not None else list(range(record.nodes))
    raw = node is not None and not with_times and not as_json and not sys.stdout.isatty()
    readers = [_Reader(folder, rank) for rank in ranks]
    seen = False
    while True:
        watched = supervised(record.run_id)
        over = load(record.run_id).state.final
        ends = over or not follow or not watched
        if known:
            files.follow(record.run_id, last=ends)
        for data in readers[0].bytes() if raw else ():
            console.raw(data)
            seen = True
        new = () if raw else (reader.lines(last=ends) for reader in readers)
        for line in heapq.merge(*new, key=lambda line: line.at):
            console.text(line.as_json if as_json else line.dated if with_times else line.text)
            seen = True
        console.flush()
        if ends:
            break
        time.sleep(FOLLOW_EVERY_S)
    if not seen:
        console.say("no log was received from the nodes")
    if known and not over and not watched and (follow or not seen):
        console.say("nobody receives its logs: no process supervises it", "yellow")
        console.next(f"mgpu attach {record.run_id}    receive them, and look after it")


class _Line(NamedTuple):
    at: float
    node_rank: int
    text: str

    @property
    def dated(self) -> str:
        """As it is shown with its time."""
        return f"{closing.when(self.at)} {self.text}"

    @property
    def as_json(self) -> str:
        """Without its node's mark."""
        return json.dumps({**self._asdict(), "text": self.text.removeprefix(f"[{self.node_rank}] ")})


class _Reader:
    """One node's log by lines."""

    def __init__(self, folder: Folder, rank: int) -> None:
        self._rank, self._log = rank, NodeLog(folder, rank)
        self._lines = LogLines(rank)
        self._at = 0.0

    def bytes(self) -> Iterator[bytes]:
        """What is new."""
        return (data for _, _, data in self._log.new())

    def lines(self, *, last: bool) -> Iterator[_Line]:
        """What is new; `last`: with a last line that has no line end."""
        for at, offset, data in self._log.new():
            yield from self._dated(self._lines.cut(offset))  # as old as what came before it, not as what comes now
            self._at = max(self._at, at)  # clocks are set back, and a machine that is replaced had another
            yield from self._dated(self._lines.feed(data, offset))
        if last:
            yield from self._dated(self._lines.flush())

    def _dated(self, texts: Iterable[str]) -> Iterator[_Line]:
        return (_Line(self._at, self._rank, text) for text in texts)
