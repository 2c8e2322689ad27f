"""In which phase a rank is and how far, said every few seconds for as long as its process lives.

That it lives is no progress: a rank that hangs says it, too. So each `alive` line carries what was done so far, and its
agent counts only one whose number has grown. Each phase has a deadline of its own there.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal

from mgpu_train.metrics.lines import MetricLines

Phase = Literal["building", "first_step", "training", "validation", "saving", "finishing"]
EVERY_S = 10.0  # between two lines


class Pulse:
    """Of one rank. `with` it a thread says every `every_s` seconds where it is; without, only changes are said."""

    def __init__(self, metrics: MetricLines, every_s: float = EVERY_S) -> None:
        self.metrics = metrics
        self._every_s = every_s
        self.phase: Phase = "building"
        self._step, self._done = 0, 0
        self._over = threading.Event()

    def __enter__(self) -> Pulse:
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def enter(self, phase: Phase) -> None:
        """A phase begins; its time does, too."""
        self.phase = phase
        self._done += 1
        self.metrics.write("phase", phase=phase)

    def did(self) -> None:
        """A piece of the phase's work is done: a micro-batch, most often."""
        self._done += 1

    def stepped(self, step: int) -> None:
        """An optimizer step is made: everything before it is."""
        self._step, self._done = step, 0

    def beat(self) -> None:
        """Says where this rank is."""
        self.metrics.write("alive", phase=self.phase, step=self._step, done=self._done)

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            self.beat()
