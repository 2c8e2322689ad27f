"""The sinks that are installed: entries of the group `mgpu.sinks`, ours and anybody's.

[project.entry-points."mgpu.sinks"]
jsonl = "mgpu.sinks.jsonl:ENTRY"
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mgpu_train import entries
from mgpu_train.entries import Entries

from mgpu.spec.block import Block

GROUP = "mgpu.sinks"


@dataclass(frozen=True)
class SinkEntry:
    """What an entry of the group names. The entry's own name is the sink's, and that of its block in `sinks:`."""

    sink: str  # "package.module:Class", a `mgpu.sinks.base.Sink`; imported when a run has the first event for it
    options: type[Block]  # the sink's block


@functools.cache
def installed() -> Entries[SinkEntry]:
    """The sinks of this environment."""
    return entries.read(GROUP, SinkEntry)
