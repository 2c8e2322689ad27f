"""The bell itself."""

from __future__ import annotations

import os

from mgpu.events import RunEnded
from mgpu.sinks.base import Heard, Sink
from mgpu_bell.options import BellOptions


class BellSink(Sink):
    """Rings once for each stroke, when a run is over, and cares for nothing else."""

    def __init__(self, options: BellOptions, heard: Heard) -> None:
        self._options, self._tower = options, heard.folder / options.tower

    def run_ended(self, event: RunEnded) -> None:
        who = f" by {os.environ[ringer]}" if (ringer := self._options.ringer) else ""
        self._tower.write_text(f"ding {event.run_id} {event.state}{who}\n" * self._options.strokes)
