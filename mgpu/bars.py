"""Bytes on their way, for people: a bar on a terminal, a line in a while elsewhere. It prints through the console."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress

EVERY_S = 10.0  # between two lines where there is no terminal


def amount(size: float) -> str:
    """`size` bytes in the unit that fits: `512 B`, `1.5 MiB`."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:  # 1024.0 KiB is 1.0 MiB
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


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
    """A bar with bytes, speed and the time that is left. `add` may be called from any thread."""

    def __init__(self, what: str, total: int, console: RichConsole) -> None:
        self._progress = _progress(console)
        self._task = self._progress.add_task(what, total=max(total, 1))
        self._progress.start()

    def add(self, size: int) -> None:
        """So many bytes more are through."""
        self._progress.advance(self._task, size)

    def stop(self) -> None:
        """Takes the bar away."""
        self._progress.stop()


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


def _progress(console: RichConsole) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Speed(ProgressColumn):  # rich's own counts in powers of ten
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{amount(speed)}/s" if speed else "")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(binary_units=True),
        Speed(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
