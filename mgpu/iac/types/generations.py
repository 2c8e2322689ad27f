"""Which generation a fleet's next `create` or `repair` has, read from the journal of this machine.

One that was cut off must come again with the same generation: its token finds what it may have made. One that follows
machines that have ended must not: its token would name those. So a generation whose machines are gone is written down
as used up. The journal is the fleet's own file in the state folder, the one in which `mgpu.acquire` finds what an
earlier process began: Pulumi's lock on the stack admits one writer at a time. Another backend's stack may have the same
name, and has another owner: its machines are not this one's, nor is its journal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu import journal
from mgpu.iac.naming import file_name
from mgpu.journal import Journal

_USED = "generation_used"


def open_journal(state_dir: Path, owner: str, fleet: str) -> Journal:
    """The fleet's journal, for writing. It begins with what it had when owners shared a file."""
    path, shared = _paths(state_dir, owner, fleet)
    if shared.exists() and not path.exists():
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with shared.open("rb") as before, aside.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            shutil.copyfileobj(before, file)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        aside.rename(path)
    return Journal(path)


def next_one(state_dir: Path, owner: str, fleet: str, current: int = 0) -> int:
    """The generation above `current` (0: a new fleet) and above all that are used up."""
    used = (entry["generation"] for entry in _entries(state_dir, owner, fleet) if entry["kind"] == _USED)
    return 1 + max((current, *used))


def used(state_dir: Path, owner: str, fleet: str, generation: int) -> None:
    """Notes that nothing of this generation, and of those below it, is to be found again."""
    if generation < next_one(state_dir, owner, fleet):
        return
    with open_journal(state_dir, owner, fleet) as entries:
        entries.append(_USED, generation=generation)


@dataclass(frozen=True)
class Begun:
    """Machines that were asked for by a token and may not be listed yet; `at` is UNIX seconds."""

    token: str
    at: float  # of the answer; without one, of the intent: they may have been asked for at any time since
    answered: bool
    provider: str  # that was asked; empty: not known
    region: str = ""  # that it was asked for in; empty: not known


def begun(state_dir: Path, owner: str, fleet: str) -> tuple[Begun, ...]:
    """What was asked for and has neither been seen to run nor been undone."""
    found: dict[str, Begun] = {}
    for entry in _entries(state_dir, owner, fleet):
        if entry["kind"] in ("intent", "created"):
            known = found.get(entry["token"])
            offer = entry.get("offer") or {}
            whose = offer.get("provider") or (known.provider if known else "")
            where = offer.get("region") or (known.region if known else "")
            found[entry["token"]] = Begun(entry["token"], entry["at"], entry["kind"] == "created", whose, where)
        elif "token" in entry:
            found.pop(entry["token"], None)
    return tuple(found.values())


def swept(state_dir: Path, owner: str, fleet: str, ended: Iterable[Begun]) -> None:
    """Notes that nothing is left of what was begun."""
    with open_journal(state_dir, owner, fleet) as entries:
        for each in ended:
            entries.append("undone", token=each.token, why="a sweep finds nothing more of it")


def _entries(state_dir: Path, owner: str, fleet: str) -> Iterator[dict[str, Any]]:
    path, shared = _paths(state_dir, owner, fleet)
    others = set[str]()
    for entry in journal.read(path if path.exists() else shared):
        if entry.get("owner", owner) != owner:
            others.add(entry["token"])
        elif entry.get("token") not in others:
            yield entry


def _paths(state_dir: Path, owner: str, fleet: str) -> tuple[Path, Path]:
    """The fleet's journal; the one that all owners' fleets of this name shared before."""
    folder = state_dir / "journal"
    return folder / f"fleet-{file_name(owner, fleet)}.jsonl", folder / f"fleet-{fleet}.jsonl"
