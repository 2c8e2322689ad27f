"""What earlier processes have written into a fleet's journal: tries without an end, and tokens that are used up."""

from __future__ import annotations

from dataclasses import dataclass

from mgpu import journal as journals
from mgpu.journal import Journal
from mgpu.providers.base import FleetRequest, Intent


@dataclass(frozen=True)
class Begun:
    """An intent that was journalled `at` (UNIX seconds) for machines with this hard cap."""

    intent: Intent
    at: float
    hard_cap_s: float


def history(journal: Journal, request: FleetRequest) -> tuple[list[Begun], set[str]]:
    """Intents of this generation without an end, which a process that died may have carried out; tokens undone. Those
    of another provider, where the fleet was to be before, are that one's: its sweep ends what came of them. Those of
    another owner are of a fleet that has only the name in common."""
    provider = request.requirements.provider
    begun: dict[str, Begun] = {}
    spent: set[str] = set()
    for entry in journals.read(journal.path):
        if entry["kind"] == "intent" and (entry["fleet"], entry["generation"]) == (request.fleet, request.generation):
            intent = Intent.model_validate({name: entry[name] for name in Intent.model_fields})
            if intent.offer.provider != provider or intent.owner != request.owner:
                continue
            begun[intent.token] = Begun(intent, entry["at"], entry.get("hard_cap_s", request.hard_cap_s))
        elif entry["kind"] == "undone":
            begun.pop(entry["token"], None)
            spent.add(entry["token"])
    return list(begun.values()), spent
