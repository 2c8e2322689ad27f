"""What this user's machines are, as the providers say, and what stands for each: a stack, or nothing."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgpu_train.timeouts import Timeouts

from mgpu import acquire, paths
from mgpu.events import Emit
from mgpu.iac import schema
from mgpu.iac.environment import backend_dir
from mgpu.iac.naming import fleet_name
from mgpu.providers import registry
from mgpu.providers.base import Handle, NodePhase
from mgpu.run.record import every, supervised


@dataclass(frozen=True)
class Fleet:
    """Machines of one fleet that are not terminated. `used_by` is empty when nothing stands for them."""

    name: str
    provider: str
    ids: tuple[str, ...]
    usd_per_hour: float
    used_by: str
    handle: Handle

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {k: v for k, v in asdict(self).items() if k != "handle"}


def alive() -> list[Fleet]:
    """All machines of this user at every provider, by fleet."""
    owner, found = paths.owner(), []
    for name in registry.names():
        provider = registry.get(name)
        for handle in provider.list_owned(owner):
            nodes = [n for n in provider.describe(handle).nodes if n.phase is not NodePhase.TERMINATED]
            if nodes:
                price = sum(n.price_usd_per_hour for n in nodes)
                found.append(Fleet(handle.fleet, name, tuple(n.id for n in nodes), price, _user(handle), handle))
    return found


def _user(handle: Handle) -> str:
    for record in reversed(every()):
        names = (record.fleet_name, (record.fleet or {}).get("fleet"))
        if not record.state.final and handle.fleet in names and supervised(record.run_id):
            return f"run {record.run_id}"
    # a stack that the engine still has a state for: `pulumi destroy` or `mgpu down` is its way out
    for state in backend_dir().glob(".pulumi/stacks/*/*.json*"):
        stack = state.name.partition(".json")[0]
        if handle.fleet in (fleet_name(state.parent.name, stack), *_named_in(state)):
            return f"stack {stack}"
    return ""


def _named_in(state: Path) -> set[str]:
    """The fleets of a stack's state: a program of the user's may name them as it likes, and make several."""
    try:
        data = state.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        resources = json.loads(data)["checkpoint"]["latest"]["resources"]
        found = [each["inputs"] for each in resources if each["type"] in (schema.FLEET, schema.FLEET_GUARD)]
        return {str(inputs.get("fleet") or inputs.get("name")) for inputs in found}
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
        return set()  # nothing is in it yet, or it is being written


def end(fleet: Fleet, timeouts: Timeouts, emit: Emit) -> None:
    """Ends a fleet's machines, and believes it only when the provider says so."""
    acquire.destroy(registry.get(fleet.provider), fleet.handle, timeouts=timeouts, emit=emit)
