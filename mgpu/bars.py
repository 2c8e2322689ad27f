"""Bytes on their way, for people: a bar on a terminal, a line in a while elsewhere. It prints through the console."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mgpu.words import amount

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

EVERY_S = 10.0  # between two lines where there is no terminal


class Lines:
    """A line every `EVERY_S` seconds. `add` may be called from any thread; `clock` gives seconds."""

    def __init__(
        self, what: str, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._say, self._clock = what, total, say, clock
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._said = clock()

    def add(self, size: int) -> None:
        """So many bytes more are through."""
        with self._lock:
            self._done += size
            now = self._clock()
            if now - self._said < EVERY_S:
                return
            self._said = now
            # a part that is sent again counts again: never more than all of it
            done = min(self._done, self._total)
            speed = amount(self._done / (now - self._began))
        self._say(f"  {self._what}: {amount(done)} of {amount(self._total)}, {speed}/s")

    def stop(self) -> None:
        """Nothing stays on the screen."""


class Bar:
    """A bar with the time that is left, and bytes and speed unless `sizes` says otherwise. `add` may be called from any
    thread."""

    def __init__(self, what: str, total: int, console: RichConsole, *, sizes: bool = True) -> None:
        self._progress = _progress(console, sizes=sizes)
        self._task = self._progress.add_task(what, total=max(total, 1))
        self._progress.start()

    def add(self, size: int) -> None:
        """So many bytes more are through."""
        self._progress.advance(self._task, size)

    def reach(self, done: int, total: int) -> None:
        """So many bytes are through, of as many as are known of by now."""
        self._progress.update(self._task, completed=done, total=max(total, 1))

    def stop(self) -> None:
        """Takes the bar away."""
        self._progress.stop()


class Layers:
    """An image on its way: one bar on a terminal, elsewhere a line for each layer. `console`: the terminal's.

    No sizes: an engine tells those before compression alone, and all others that are shown are compressed.
    """

    def __init__(self, say: Callable[[str], None], console: RichConsole | None) -> None:
        self._say, self._bar = say, Bar("pushing", 0, console, sizes=False) if console else None
        self._known: dict[str, tuple[int, int]] = {}

    def take(self, layer: str, state: str, done: int, total: int) -> None:
        """How far a layer is, in bytes before compression; `there`: the registry had it."""
        if state == "there":
            return
        total = max(total, self._known.get(layer, (0, 0))[1])
        self._known[layer] = (total if state == "pushed" else done, total)
        if self._bar is not None:
            self._bar.reach(*map(sum, zip(*self._known.values(), strict=True)))
        elif state == "pushed":
            self._say(f"  layer {layer} pushed")

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def interrupting(stop: Callable[[], None]) -> Iterator[None]:
    """While the block runs, Ctrl-C calls `stop` before it does what it does otherwise."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def told(number: int, frame: FrameType | None) -> None:
        stop()
        before(number, frame)

    signal.signal(signal.SIGINT, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _progress(console: RichConsole, *, sizes: bool) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):  # rich's own counts in powers of ten
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{amount(speed)}/s" if speed else "")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        *([DownloadColumn(binary_units=True), Speed()] if sizes else [TaskProgressColumn()]),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
