"""What is known of the bell before it is imported: its block of the run file."""

from __future__ import annotations

from mgpu_train.config import EnvName
from pydantic import Field

from mgpu.spec.block import Block, File
from mgpu.spec.sink import SinkEntry


class BellOptions(Block):
    """`sinks.bell:` a bell."""

    tower: File = Field(description="the file that it is rung in, relative to the run file")
    strokes: int = Field(1, ge=1, description="how often it is rung")
    ringer: EnvName | None = Field(None, description="name of the environment variable that says who rings it")


ENTRY = SinkEntry(sink="mgpu_bell.sink:BellSink", options=BellOptions)
