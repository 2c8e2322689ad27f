"""Which generation a fleet's next `create` has, read from the journal of this machine.

A create that was cut off must come again with the same generation: its token finds what it may have made. One that
follows a fleet that has ended must not: its token would name machines that are gone. So the end of a fleet is written
down, and a fleet begins one generation above the last that ended. The journal is the fleet's own file in the state
folder: Pulumi's lock on the stack admits one writer at a time.
"""

from __future__ import annotations

from pathlib import Path

from mgpu import journal
from mgpu.journal import Journal

_ENDED = "fleet_ended"


def open_journal(state_dir: Path, fleet: str) -> Journal:
    """The fleet's journal, for writing."""
    return Journal(_path(state_dir, fleet))


def first(state_dir: Path, fleet: str) -> int:
    """The generation that a new fleet of this name begins with."""
    entries = journal.read(_path(state_dir, fleet))
    return 1 + max((entry["generation"] for entry in entries if entry["kind"] == _ENDED), default=0)


def ended(state_dir: Path, fleet: str, generation: int) -> None:
    """Notes that the fleet has ended, with all its machines, in this generation."""
    if generation < first(state_dir, fleet):
        return
    with open_journal(state_dir, fleet) as entries:
        entries.append(_ENDED, generation=generation)


def _path(state_dir: Path, fleet: str) -> Path:
    return state_dir / "journal" / f"fleet-{fleet}.jsonl"
