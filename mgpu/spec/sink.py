"""The sinks that are installed: entries of the group `mgpu.sinks`, ours and anybody's.

[project.entry-points."mgpu.sinks"]
jsonl = "mgpu.sinks.jsonl:ENTRY"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mgpu_train import entries
from mgpu_train.entries import Entries

from mgpu.errors import InputError
from mgpu.spec.block import Block

GROUP = "mgpu.sinks"


@dataclass(frozen=True)
class SinkEntry:
    """What an entry of the group names. The entry's own name is the sink's, and that of its block in `sinks:`."""

    sink: str  # "package.module:Class", a `mgpu.sinks.base.Sink`; imported when a run has the first event for it
    options: type[Block]  # the sink's block
    # Why it cannot serve a run with this code, git+URL@REF, empty: a folder's; empty: it can. Asked before anything is
    # rented.
    refuse: Callable[[str], str] = lambda _code: ""
    # What is wrong in its block beside the types of its keys, each with its key. A run that has begun is not asked.
    mistakes: Callable[[Any], Iterable[tuple[str, str]]] = lambda _block: ()


@functools.cache
def installed() -> Entries[SinkEntry]:
    """The sinks of this environment."""
    return entries.read(GROUP, SinkEntry)


def require(sinks: Block, code: str) -> None:
    """Raises InputError for one of `sinks:` that cannot serve runs with this code, git+URL@REF; empty: a folder's."""
    for name, entry in installed().found.items():
        if getattr(sinks, name) is not None and (why := entry.refuse(code)):
            cure = "`mgpu schedule add --code-from git+https://host/you/llm@main` has runs with a commit's code."
            raise InputError(f"sinks.{name} cannot be used: {why}", "", f"Leave it out; {cure}")
