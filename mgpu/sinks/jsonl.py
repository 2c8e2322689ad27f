"""Sink `jsonl`: a file with an event a line, for programs to follow or to read afterwards."""

from __future__ import annotations

import json

from pydantic import Field

from mgpu.events import RunEvent
from mgpu.sinks.base import Heard, Sink
from mgpu.spec.block import Block, File
from mgpu.spec.sink import SinkEntry


class JsonlOptions(Block):
    """`sinks.jsonl:` a file with an event a line."""

    path: File | None = Field(
        None, description="the file, relative to the run file (default: mgpu-runs/<run>/events.jsonl)"
    )


class JsonlSink(Sink):
    """Appends each event as one JSON object and a newline, flushed at once."""

    def __init__(self, options: JsonlOptions, heard: Heard) -> None:
        """Raises OSError: the file cannot be opened."""
        path = heard.folder / (options.path or f"mgpu-runs/{heard.run_id}/events.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def event(self, event: RunEvent) -> None:
        """Writes a line. Raises OSError."""
        self._file.write(json.dumps(event.to_json()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


ENTRY = SinkEntry(sink="mgpu.sinks.jsonl:JsonlSink", options=JsonlOptions)
